"""Tokens per second of SlotGenerator beside Hugging Face ``generate``, at equal batch, on the demo's policy.

Both sample the same number of completions of the same prompts at temperature 1. ``generate`` gets its best settings:
inference mode, sdpa, prompts sorted by length so that hardly any padding is decoded, and the better of its caches.
It decodes a batch until the longest completion has ended; a slot takes the next completion at once. The second
workload takes that advantage away: the end token is a token like any other, and everything runs to the limit.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.report import Claim, Options, Row, finish, note, parse_options
from benchmarks.rollouts import roll_out, slots
from benchmarks.workloads import arithmetic_prompts, load
from lit_grpo.types import Prompt, SamplingParams

Run = Callable[[], int]
CACHES = ("dynamic", "static")


@dataclass(frozen=True)
class Workload:
    """A workload: ``group_size`` completions of each prompt, in batches or slots of ``batch``."""

    name: str
    prompts: Sequence[Prompt]
    group_size: int
    max_tokens: int
    batch: int
    ends: bool


class Endless:
    """A tokenizer that names no end token which a policy could sample."""

    eos_token_id = -1

    def __init__(self, tokenizer: Any) -> None:
        self.decode = tokenizer.decode


def main(options: Options) -> int:
    """Measure both workloads at each batch, interleaved, and report medians of rates and of paired ratios."""
    torch.set_num_threads(1)  # matrices this small gain nothing from more
    model, tokenizer = load(options.policy or "tiny", options.device)
    endless = copy.copy(model)  # the same weights under another generation config
    endless.generation_config = copy.deepcopy(model.generation_config)
    endless.generation_config.eos_token_id = None
    repeats, bounds = (1, {4: 2.0}) if options.quick else (3, {32: 2.5, 64: 4.0})
    prompts = arithmetic_prompts(tokenizer, 2 if options.quick else 32)
    group_size, max_tokens = (4, 8) if options.quick else (16, 160)
    rows: list[Row] = []
    claims = []
    for batch, bound in bounds.items():
        own = Workload("the task's own lengths", prompts, group_size, max_tokens, batch, True)
        equal = Workload("equal lengths", prompts[:8], batch // 4, 4 if options.quick else 64, batch, False)
        for workload in (own, equal):
            policy, its_tokenizer = (model, tokenizer) if workload.ends else (endless, Endless(tokenizer))
            runs = {"slots": _slots(policy, its_tokenizer, workload)}
            runs |= {f"generate, {cache} cache": _generate(policy, workload, cache) for cache in CACHES}
            measured, ratio = _compare(runs, repeats, options.device)
            for row in measured:
                rows.append({"workload": workload.name, "batch": batch} | row)
            if workload.ends:
                claims.append(Claim(f"tokens/s over the best generate, {batch} slots or rows", ratio, ">=", bound))
    settings: Row = {
        "threads": torch.get_num_threads(),
        "prompts": len(prompts),
        "completions": len(prompts) * group_size,
        "max_tokens": max_tokens,
        "repeats": repeats,
        "temperature": 1.0,
    }
    return finish("slots_vs_generate", options, settings, rows, claims)


def _slots(policy: Any, tokenizer: Any, workload: Workload) -> Run:
    """Decode in slots; returns the number of tokens."""
    generator = slots(policy, tokenizer, workload.batch)
    sampling = SamplingParams(max_tokens=workload.max_tokens)

    def run() -> int:
        return roll_out(generator, workload.prompts, workload.group_size, sampling)[1].num_tokens

    return run


def _generate(policy: Any, workload: Workload, cache: str) -> Run:
    """Decode batch after batch with ``generate``; returns the number of tokens up to and with the end token."""
    by_length = sorted(workload.prompts, key=lambda prompt: len(prompt.token_ids))
    rows = [prompt.token_ids for prompt in by_length for _ in range(workload.group_size)]
    batches = [_left_padded(rows[i : i + workload.batch], policy.device) for i in range(0, len(rows), workload.batch)]
    end = policy.generation_config.eos_token_id

    @torch.inference_mode()
    def run() -> int:
        num_tokens = 0
        for input_ids_BT, mask_BT in batches:
            output_BT = policy.generate(
                input_ids=input_ids_BT,
                attention_mask=mask_BT,
                max_new_tokens=workload.max_tokens,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                pad_token_id=0,
                cache_implementation=None if cache == "dynamic" else cache,
            )
            ends_BT = output_BT[:, input_ids_BT.shape[1] :] == (-1 if end is None else end)
            num_tokens += int((ends_BT.cumsum(-1) - ends_BT.long() == 0).sum())
        return num_tokens

    return run


def _left_padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(map(len, rows))
    input_ids_BT = torch.tensor([[0] * (longest - len(row)) + list(row) for row in rows], device=device)
    mask_BT = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device)
    return input_ids_BT, mask_BT


def _compare(runs: dict[str, Run], repeats: int, device: str) -> tuple[list[Row], float]:
    """Time all runs in turn; return a row each, and the median ratio of the first to the best of the others."""
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            torch.manual_seed(repeat)
            start = time.perf_counter()
            num_tokens = run()
            _synchronize(device)
            elapsed = time.perf_counter() - start
            note(f"{'warm-up' if repeat == 0 else f'repeat {repeat}'}: {name}: {num_tokens / elapsed:.0f} tokens/s")
            if repeat:
                rates[name].append(num_tokens / elapsed)
    first, *others = runs
    best = max(others, key=lambda name: statistics.median(rates[name]))
    ratios = {name: statistics.median(a / b for a, b in zip(rates[first], rates[name], strict=True)) for name in runs}
    rows: list[Row] = [
        {"system": name, "tokens_per_s": statistics.median(rates[name]), "slots_over_it": ratios[name]} for name in runs
    ]
    return rows, ratios[best]


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(main(parse_options(__doc__)))
