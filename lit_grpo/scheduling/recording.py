"""Record of a rollout to draw it later: a line of ``timeline.jsonl``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from lit_grpo.types import Clock, Key, PromptBatch, Span

MAX_SPANS = 4000  # of a line; of a rollout with more, the first slots are kept, and all of theirs
MAX_POINTS = 300  # of the clock, and of the calls that prefilled


def timeline_row(step: int, batch: PromptBatch, seconds: Mapping[str, float]) -> dict[str, Any]:
    """Return what is to be drawn of an update: plain values, at most some 200 kB as JSON.

    ``spans`` are ``[completion, slot, start, end]`` in decode steps, and ``completions`` ``[prompt, sample, tokens,
    predicted, finish]``, both naming the row of a list; of what was not finished the last three are null, and
    ``predicted`` also where nothing was known before the first token. ``clock`` is ``[steps, seconds, KV tokens]`` at
    some moments of the rollout, the first at its beginning; ``prefills`` are ``[start, end, prompt tokens]`` in
    seconds.

    Args:
        step: Number of the update that the batch was trained on in.
        batch: Batch of prompts with its rollouts.
        seconds: What its phases took, by name.
    """
    shown = _shown(batch.spans, batch.clock.slots)
    known = {rollout.completion.request.key: rollout.completion for rollout in batch.rollouts}
    prompts: dict[str, int] = {}
    rows: dict[Key, int] = {}
    completions: list[list[Any]] = []
    for key, _ in shown:
        if key in rows:
            continue
        rows[key] = len(completions)
        prompt, completion = prompts.setdefault(key[0], len(prompts)), known.get(key)
        ended = [None] * 3
        if completion is not None:
            predicted = batch.predicted.get(key)
            said = None if predicted is None else round(predicted, 1)
            ended = [completion.num_sampled, said, completion.finish_reason]
        completions.append([prompt, ".".join(map(str, key[2])), *ended])
    return {
        "step": step,
        "slots": batch.clock.slots,
        "slots_kept": 1 + max((span.slot for _, span in shown), default=-1),
        "kv_limit": batch.clock.kv_limit,
        "seconds": {name: round(value, 4) for name, value in seconds.items()},
        "prompts": list(prompts),
        "completions": completions,
        "spans": [[rows[key], span.slot, int(span.start), int(span.end)] for key, span in shown],
        "clock": _moments(batch.clock),
        "prefills": _prefills(batch.clock),
    }


def seconds_at(moments: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Return when steps were reached, from the ``clock`` of a row, shape (moments, 3); 0 if there was no step."""
    if not len(moments):
        return np.zeros(len(steps))
    return np.interp(steps, moments[:, 0], moments[:, 1])


def _shown(spans: Any, num_slots: int) -> list[tuple[Key, Span]]:
    """All spans, or those of as many slots as come to at most ``MAX_SPANS``."""
    spans = list(spans)
    if len(spans) <= MAX_SPANS:
        return spans
    counts = np.bincount([span.slot for _, span in spans], minlength=num_slots)
    kept = max(1, int(np.searchsorted(np.cumsum(counts), MAX_SPANS, side="right")))
    return [(key, span) for key, span in spans if span.slot < kept][:MAX_SPANS]


def _moments(clock: Clock) -> list[list[float]]:
    """At most ``MAX_POINTS`` rows, each with the most KV tokens since the one before."""
    if not clock.steps:
        return []
    num_calls = len(clock.steps)
    last = np.unique(np.linspace(0, num_calls - 1, min(num_calls, MAX_POINTS - 1)).astype(np.int64))
    first = np.concatenate([[0], last[:-1] + 1])
    held = np.maximum.reduceat(np.array(clock.kv_tokens), first)
    columns = zip(last.tolist(), held.tolist(), strict=True)
    return [
        [0, round(clock.began[0], 4), 0],
        *([clock.steps[call], round(clock.ended[call], 4), tokens] for call, tokens in columns),
    ]


def _prefills(clock: Clock) -> list[list[float]]:
    """The calls that prefilled prompts; of more than ``MAX_POINTS`` those with the most tokens."""
    calls = [call for call, tokens in enumerate(clock.prefilled) if tokens]
    most = sorted(sorted(calls, key=lambda call: -clock.prefilled[call])[:MAX_POINTS])
    return [[round(clock.began[call], 4), round(clock.ended[call], 4), clock.prefilled[call]] for call in most]
