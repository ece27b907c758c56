"""Drafts in the simulator, by hand and beside the slots."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import random_policy, table_rows

from lit_grpo.methods.plans import find_plan
from lit_grpo.policy import PolicySpec, load_tokenizer
from lit_grpo.rollout.loop import RolloutLoop
from lit_grpo.rollout.slots import SlotGenerator
from lit_grpo.rollout.slots.drafts.price import PricedDrafter, StepCost
from lit_grpo.rollout.slots.drafts.suffix import SuffixDrafter
from lit_grpo.scheduling.jobs import Job, NoLengths
from lit_grpo.tools.commands.simulate import main
from lit_grpo.tools.simulation.drafts import DraftingReplay
from lit_grpo.tools.simulation.known import lengths_of
from lit_grpo.tools.simulation.simulator import Engine, Schedule, simulate
from lit_grpo.tools.simulation.traces import Trace, load_trace
from lit_grpo.types import Prompt, SamplingParams

PROMPT = [90, 91, 92]


def write(path: Path, *texts: list[int]) -> Path:
    rows = [
        {"prompt_id": "a", "sample_id": number, "prompt_tokens": len(PROMPT), "tokens": len(text), "token_ids": text}
        for number, text in enumerate(texts)
    ]
    rows[0]["prompt_token_ids"] = PROMPT
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def drafted(trace: Trace, slots: int, drafter: SuffixDrafter, plan: str = "fcfs") -> Schedule:
    engine = Engine(slots)
    return simulate(trace, plan, engine, lengths_of(trace, 0.0), (), DraftingReplay(engine, trace, drafter))


def test_a_completion_that_follows_another_skips_what_it_has_in_common(tmp_path: Path) -> None:
    """One slot: the first takes 8 steps, for nothing in it comes again; the second has 6 of its tokens in common.

    Its first step has no draft, as in the slots, where that token comes from the prompt. 92 and 1 have come before 2,
    so the second step tries 2, 3, 4 and gets them, with 5 after them; the third tries 6, and 7 and 8, which are wrong,
    and gets 6 and 20; the fourth gets 21.
    """
    trace = load_trace(str(write(tmp_path / "t.jsonl", [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 20, 21])))
    schedule = drafted(trace, 1, SuffixDrafter(3))
    assert schedule.ends.tolist() == [8, 8 + 4]
    assert schedule.work.tolist() == [
        [1, 4, 0, 0],
        *([1, 3 + token, 0, 1] for token in range(2, 8)),
        [1, 11, 0, 0],
        [1, 4, 0, 0],
        [4, 5 + 6 + 7 + 8, 3, 1],
        [3, 9 + 10 + 11, 2, 1],
        [1, 11, 0, 0],
    ]
    assert simulate(trace, "fcfs", Engine(1)).steps == 16


def test_seconds_of_a_hand_made_case(tmp_path: Path) -> None:
    trace = load_trace(str(write(tmp_path / "t.jsonl", [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 20, 21])))
    schedule = drafted(trace, 1, SuffixDrafter(3))
    cost = StepCost(1.0, 0.1, 0.01, wait_s=0.5, wait_row_s=0.2)
    rows, tokens = 8 + 1 + 4 + 3 + 1, sum(range(4, 12)) + 4 + 26 + 30 + 11
    assert schedule.seconds(cost) == pytest.approx(12 + 0.1 * rows + 0.01 * tokens + 8 * 0.7)
    slow_host = StepCost(0.1, 0.0, 0.0, wait_s=3.0)
    assert schedule.seconds(slow_host) == pytest.approx(4 * 3.0 + 8 * 3.1)


def test_prices_decide_and_samples_stay(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    stem = rng.integers(0, 50, 60).tolist()
    texts = [stem[: rng.integers(10, 60)] + rng.integers(0, 50, 3).tolist() for _ in range(12)]
    trace = load_trace(str(write(tmp_path / "t.jsonl", *texts)))
    plain = simulate(trace, "lpt", Engine(4), lengths_of(trace, 0.0))
    cheap, dear = StepCost(4e-3, 2e-5), StepCost(1e-6, 4e-3)
    assert drafted(trace, 4, PricedDrafter(4, dear), "lpt").steps == plain.steps
    schedule = drafted(trace, 4, PricedDrafter(4, cheap), "lpt")
    assert schedule.steps < 0.6 * plain.steps and schedule.seconds(cheap) < 0.7 * plain.seconds(cheap)
    tokens = schedule.work[:, 0] - schedule.work[:, 2]
    assert tokens.sum() < sum(map(len, texts)) == plain.work[:, 0].sum()


@pytest.mark.parametrize("plan", table_rows(["fcfs", "lpt"], ["lpt"]))
@pytest.mark.parametrize("points", [(), (5, 11)])
@pytest.mark.parametrize("by_price", [False, True])
def test_steps_are_those_of_the_slots(policy_folder: Path, plan: str, points: tuple[int, ...], by_price: bool) -> None:
    policy: Any = random_policy()
    generator = SlotGenerator(3, drafts=3)
    generator.start(PolicySpec(policy, load_tokenizer(str(policy_folder))))
    generator.load_weights(policy.named_parameters(), 0)
    cost = StepCost(4e-3, 5e-4, 1e-6, 1e-4)
    generator._drafter = PricedDrafter(3, cost, 3) if by_price else generator._drafter
    drafter = PricedDrafter(3, cost, 3) if by_price else SuffixDrafter(3)
    prompts = [Prompt(str(number), (5 + number, 9, 5 + number), "") for number in range(3)]
    num_accepted = 0
    for visit in range(2):  # the second drafts from the first
        trace_lengths = KnownTotals()
        visited = [replace(prompt, visit=visit) for prompt in prompts]
        loop = RolloutLoop(generator, plan=find_plan(plan), lengths=trace_lengths, points=points)
        groups, stats = loop.collect(visited, 4, SamplingParams(max_tokens=40, temperature=0.4), seed=0)
        completions = [rollout.completion for group in groups for rollout in group.rollouts]
        trace = Trace(
            "run",
            [each.request.key for each in completions],
            np.repeat(np.arange(3), 4),
            np.full(12, 3),
            np.array([each.num_tokens for each in completions]),
            np.full(12, 40),
            texts=[(each.request.prompt.token_ids, each.token_ids_T.tolist()) for each in completions],
        )
        engine = Engine(3)
        schedule = simulate(trace, plan, engine, trace_lengths, points, DraftingReplay(engine, trace, drafter))
        assert list(schedule.spans) == list(stats.spans) and schedule.steps == stats.num_steps
        assert schedule.work[:, 2].sum() == stats.num_drafted > 0
        num_accepted += stats.accepted.total()
        assert trace.lengths.sum() == stats.active_slot_steps + stats.accepted.total()
    assert num_accepted > 5


class KnownTotals(NoLengths):
    """The first completions of a prompt are taken for long."""

    informative = True

    def estimate(self, jobs: Sequence[Job]) -> np.ndarray:
        return np.array([40.0 - 7 * job.key[2][0] for job in jobs])


def test_a_table_has_steps_and_seconds_with_drafts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write(tmp_path / "t.jsonl", [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 20, 21])
    main(["--trace", str(trace), "--slots", "1", "--plans", "fcfs", "--drafts", "3", "--step_cost", "1000,0,0"])
    lines = [line for line in capsys.readouterr().out.splitlines() if "fcfs" in line]
    cells = [cell.strip() for cell in lines[0].strip("│ ").split("│")]
    assert cells[-4:] == ["16.000", "12", "1.333", "12.000"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--drafts", "0"], "argument --drafts: '0' is no number of drafts: give auto or 1 to 32."),
        (["--drafts", "auto"], "--drafts auto chooses by the price of a step: give --device or --step_cost with it."),
        (["--device", "h100", "--step_cost", "1,0,0"], "--step_cost and --device both say what a step costs"),
        (["--drafts", "3"], "lognormal_heavy has completions without token_ids, which drafts are compared with"),
    ],
)
def test_what_cannot_be_simulated_is_told_in_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        main(["--plans", "fcfs", *arguments])
    assert error.value.code == 2 and sentence in capsys.readouterr().err
