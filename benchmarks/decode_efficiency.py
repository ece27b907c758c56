"""Decoding efficiency: tokens per second divided by those of bare forward passes.

A rollout is decoded, and rows and mean length of every step are noted. Bare forward passes are the policy's own
(transformers, sdpa, a dynamic cache that already holds so many tokens a row, one new token a row), with nothing around
them: no sampling, no refill, no prompt, no bookkeeping. They are timed at a sample of the noted steps, interleaved with
the rollouts, and the others take what the nearest of the sample takes.

What a step consists of is counted in a rollout of its own: torch's operations that compute, those that only make views,
and how often who reads which keys and values was laid out again; beside it the operations of a bare forward pass.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.random_policies import QWEN3_31M, random_qwen3
from benchmarks.report import Claim, Options, Row, finish, note, parse_options
from benchmarks.rollouts import roll_out, slots
from benchmarks.workloads import arithmetic_prompts, load, long_tailed
from lit_grpo.rollout.slots.kv.cache import SlotCache
from lit_grpo.types import SamplingParams

CASES = ((8, 16, 32), (8, 32, 64))  # prompts, group size, slots


def main(options: Options) -> int:
    """Measure both policies in each case, and report medians of paired ratios."""
    torch.set_num_threads(1)
    repeats, cases, limit, sample = (1, ((1, 4, 2),), 12, 3) if options.quick else (3, CASES, 128, 24)
    tiny, tokenizer = load("tiny", options.device)
    policies: dict[str, Any] = {"tiny": tiny}
    least = {"tiny": 0.85}
    if not options.quick:
        policies["random Qwen3, 31 M"] = random_qwen3(QWEN3_31M, options.device)
    rows: list[Row] = []
    claims = []
    for name, policy in policies.items():
        for num_prompts, group_size, num_slots in cases:
            prompts = arithmetic_prompts(tokenizer, num_prompts)
            lengths = long_tailed(prompts, group_size, limit)
            generator = slots(policy, tokenizer, num_slots, lengths)
            rollouts, passes, steps = [], [], []
            for repeat in range(repeats + 1):
                seconds, steps = timed_rollout(generator, prompts, group_size, limit)
                bare = bare_seconds(policy, steps, sample)
                note(f"{name}, {num_slots} slots: {repeat or 'warm-up'}: {bare / seconds:.3f}")
                if repeat:
                    rollouts.append(seconds)
                    passes.append(bare)
            share = statistics.median(bare / ours for bare, ours in zip(passes, rollouts, strict=True))
            rows.append(
                {
                    "policy": name,
                    "slots": num_slots,
                    "completions": len(lengths),
                    "steps": len(steps),
                    "tokens_per_s": sum(lengths.values()) / statistics.median(rollouts),
                    "bare_tokens_per_s": sum(lengths.values()) / statistics.median(passes),
                    "share": share,
                    **_counts(generator, policy, prompts, group_size, limit),
                }
            )
            text = f"{name}, {num_slots} slots: tokens/s over bare forward passes"
            claims.append(Claim(text, share, ">=", least.get(name, 0.9)))
    return finish("decode_efficiency", options, {"threads": torch.get_num_threads(), "repeats": repeats}, rows, claims)


def timed_rollout(generator: Any, prompts: Any, group_size: int, limit: int) -> tuple[float, list[tuple[int, int]]]:
    """Decode everything; return the seconds, and rows and mean tokens a row (prompt included) of each step."""
    steps = []

    def on_step(num_tokens: int) -> None:
        rows = generator._rows
        if rows.requests:
            prompt_tokens = [len(request.prompt.token_ids) for request in rows.requests]
            steps.append((num_tokens, int((rows.counts_B + prompt_tokens).mean())))

    begin = time.perf_counter()
    roll_out(generator, prompts, group_size, SamplingParams(max_tokens=limit), on_step=on_step)
    return time.perf_counter() - begin, steps


class Operations(TorchDispatchMode):
    """Counts what torch is asked for: what computes, and what only looks at the same memory otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.count = Counter[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count["view" if function.is_view else "operation"] += 1
        return function(*args, **kwargs or {})


@contextmanager
def _layouts(count: Counter[str]) -> Iterator[None]:
    """Count how often readers of keys and values are laid out again."""
    lay_out = SlotCache._lay_out

    def counted(self: SlotCache, *args: Any) -> dict[str, torch.Tensor]:
        count["layout"] += 1
        return lay_out(self, *args)

    with mock.patch.object(SlotCache, "_lay_out", counted):
        yield


def _counts(generator: Any, policy: Any, prompts: Any, group_size: int, limit: int) -> Row:
    """Return how many operations, views and layouts a step of a rollout has on average, and a bare pass."""
    with Operations() as rollout, _layouts(rollout.count):
        _, steps = timed_rollout(generator, prompts, group_size, limit)
    ids = torch.zeros((2, 1), dtype=torch.int64, device=policy.device)
    with torch.inference_mode():
        cache = policy(ids, use_cache=True).past_key_values
        with Operations() as bare:
            policy(ids, past_key_values=cache, use_cache=True)
    counts: Row = {
        f"{name}s_a_step": round(rollout.count[name] / len(steps), 2) for name in ("operation", "view", "layout")
    }
    return counts | {f"{name}s_of_a_bare_pass": bare.count[name] for name in ("operation", "view")}


@torch.inference_mode()
def bare_seconds(policy: Any, steps: list[tuple[int, int]], sample: int) -> float:
    """Return the seconds that bare forward passes of these rows and lengths take."""
    chosen = np.unique(np.linspace(0, len(steps) - 1, sample).astype(int))
    seconds = {}
    for number in chosen.tolist():
        rows, length = steps[number]
        cache = policy(
            torch.zeros((rows, length), dtype=torch.int64, device=policy.device), use_cache=True
        ).past_key_values
        token = torch.zeros((rows, 1), dtype=torch.int64, device=policy.device)
        times = []
        for _ in range(4):
            begin = time.perf_counter()
            policy(token, past_key_values=cache, use_cache=True)
            times.append(time.perf_counter() - begin)
        seconds[number] = min(times[1:])
    nearest = chosen[np.abs(chosen[:, None] - np.arange(len(steps))).argmin(0)]
    return float(sum(seconds[number] for number in nearest.tolist()))


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(main(parse_options(__doc__)))
