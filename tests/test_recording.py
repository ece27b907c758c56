"""What is kept of a rollout to draw it later."""

from __future__ import annotations

import json
from array import array

from lit_grpo.scheduling.recording import MAX_POINTS, MAX_SPANS, timeline_row
from lit_grpo.scheduling.timeline import Phase, draw_timeline, recorded_timeline
from lit_grpo.types import Clock, Completion, Prompt, PromptBatch, Request, Rollout, RolloutGroup, SamplingParams, Span

SECONDS = {"rollout": 3.0, "reward_wait": 0.5, "update": 1.0, "weight_sync": 0.25}


def batch_of(num_samples: int, num_slots: int, tokens: int = 4, num_calls: int = 8) -> PromptBatch:
    """Completions of one prompt, dealt onto the slots one after the other, in a rollout of 2.5 seconds."""
    prompt = Prompt("p", (1, 2), "p")
    batch = PromptBatch([prompt])
    requests = [Request(prompt, (sample,), SamplingParams(), 0) for sample in range(num_samples)]
    made = [Completion(each, [0] * tokens, [0.0] * tokens, [0] * tokens, "stop") for each in requests]
    batch.groups = [RolloutGroup(prompt, [Rollout(prompt, each) for each in made])]
    batch.predicted = {request.key: 4.26 for request in requests}
    starts = [tokens * (sample // num_slots) for sample in range(num_samples)]
    batch.spans = [
        (request.key, Span(sample % num_slots, start, start + tokens, 0))
        for sample, (request, start) in enumerate(zip(requests, starts, strict=True))
    ]
    calls = range(num_calls)
    batch.clock = Clock(
        slots=num_slots,
        kv_limit=100,
        steps=array("q", (call + 1 for call in calls)),
        began=array("d", (2.5 * call / num_calls for call in calls)),
        ended=array("d", (2.5 * call / num_calls + 2.5 / num_calls for call in calls)),
        kv_tokens=array("q", (10 + call for call in calls)),
        prefilled=array("q", (7 if call in (0, 4) else 0 for call in calls)),
    )
    return batch


def test_a_row_says_who_decoded_what_when_in_plain_values() -> None:
    row = json.loads(json.dumps(timeline_row(3, batch_of(num_samples=4, num_slots=2), SECONDS)))
    assert row["prompts"] == ["p"] and row["completions"][3] == [0, "3", 4, 4.3, "stop"]
    assert row["spans"] == [[0, 0, 0, 4], [1, 1, 0, 4], [2, 0, 4, 8], [3, 1, 4, 8]]
    assert row["clock"][0] == [0, 0, 0] and row["clock"][-1] == [8, 2.5, 17]
    assert row["prefills"] == [[0, 0.3125, 7], [1.25, 1.5625, 7]]
    assert (row["step"], row["slots"], row["kv_limit"], row["seconds"]) == (3, 2, 100, SECONDS)


def test_a_row_of_a_huge_rollout_stays_small_and_keeps_whole_slots_and_the_peak() -> None:
    batch = batch_of(num_samples=3 * MAX_SPANS, num_slots=100, num_calls=50_000)
    batch.clock.kv_tokens[31_234] = 1_000_000
    row = timeline_row(1, batch, SECONDS)
    assert len(row["spans"]) <= MAX_SPANS and len(row["clock"]) <= MAX_POINTS
    assert row["slots_kept"] == 33 and row["slots"] == 100
    assert max(tokens for _, _, tokens in row["clock"]) == 1_000_000
    assert len(json.dumps(row)) < 300_000


def test_what_has_not_ended_is_kept_without_a_length() -> None:
    batch = batch_of(2, 2)
    del batch.groups[0].rollouts[1]
    assert timeline_row(1, batch, SECONDS)["completions"][1] == [0, "1", None, None, None]


def test_a_recorded_timeline_is_in_seconds_with_what_came_after_the_rollout() -> None:
    timeline = recorded_timeline("update 1", timeline_row(1, batch_of(4, 2), SECONDS))
    assert [(span.slot, span.start, span.end) for span in timeline.spans[1:3]] == [(1, 0, 1.25), (0, 1.25, 2.5)]
    assert timeline.phases == [
        Phase("reward wait", 2.5, 3.0),
        Phase("update", 3.0, 4.0),
        Phase("weight sync", 4.0, 4.25),
    ]
    figure = draw_timeline([timeline], "seconds", 2)
    legend = figure.axes[0].get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == [
        "a completion; color: prompt",
        "prompts prefilled",
        "reward wait, 0.5 s",
        "update, 1 s",
        "weight sync, 0.25 s",
    ]
    assert figure.axes[-1].texts[0].get_text() == "memory for 100, above the picture"
    assert figure.axes[-1].get_xlim() == (0, 4.25)
