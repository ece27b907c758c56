"""Peak memory of a rollout against the group size, with 8 slots, beside full-group decoding.

Every case runs one rollout of one prompt in a process of its own, on a random Qwen3 whose keys and values are those of
Qwen3-0.6B in float32 (28 layers, 224 KiB a token). Memory is the peak of the resident set above the idle process (model
loaded); on a GPU, of the allocator. Where all completions come to the limit, the most that they can take, keys and
values are compared with the least that any system holds which keeps the prompt once and every slot's completion whole.
Where they are long-tailed, memory for keys and values at its peak is compared with the tokens in it at theirs: what is
allocated for more than there is. Each row tells the bytes at the peak by part: the keys and values of prompts, of
completions in slots, of completions that wait, and everything besides.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Literal

import torch

from benchmarks.processes import LEAN, LEAN_TEXT, Figures, is_case, measured, read_case, tell
from benchmarks.random_policies import QWEN3_WIDE, kv_bytes, random_qwen3
from benchmarks.report import Claim, Options, Row, finish, note, parse_options
from benchmarks.rollouts import kv_parts, kv_tokens, roll_out, slots
from benchmarks.workloads import long_tailed
from lit_grpo.memory import PeakMemory
from lit_grpo.types import Prompt, SamplingParams
from scripts.make_tiny import make_tokenizer

SLOTS = 8
CASES = {16: 32, 1024: 8}  # prompt tokens: completion tokens
SIZES, FULL_GROUPS = (8, 32, 128, 512, 1024), (32,)
TAIL_PROMPT, TAIL_LIMIT, TAIL_SIZES = 128, 1024, (8, 32)


System = Literal["lit_grpo", "full group"]


@dataclass(frozen=True)
class Case:
    """The case of one process. All completions have ``max_tokens`` tokens, or ``tailed`` lengths up to that."""

    system: System
    device: str
    layers: int
    prompt_tokens: int
    group_size: int
    num_slots: int
    max_tokens: int
    tailed: bool = False


def main(options: Options) -> int:
    """Measure all cases."""
    layers, lengths = (2, {16: 8}) if options.quick else (28, CASES)
    sizes, full_groups = ((16,), (16,)) if options.quick else (SIZES, FULL_GROUPS)
    tail_prompt, tail_limit, tail_sizes = (16, 64, (16,)) if options.quick else (TAIL_PROMPT, TAIL_LIMIT, TAIL_SIZES)
    systems: list[tuple[System, tuple[int, ...]]] = [("lit_grpo", sizes), ("full group", full_groups)]
    equal = [
        Case(system, options.device, layers, prompt_tokens, size, SLOTS, max_tokens)
        for prompt_tokens, max_tokens in lengths.items()
        for system, its_sizes in systems
        for size in its_sizes
    ]
    tailed = [
        Case("lit_grpo", options.device, layers, tail_prompt, size, SLOTS, tail_limit, tailed=True)
        for size in tail_sizes
    ]
    figures = _measure([*equal, *tailed], 1 if options.device == "cuda" else min(os.cpu_count() or 1, 4))
    claims = []
    for prompt_tokens in lengths:
        of_prompt = [case for case in equal if case.system == "lit_grpo" and case.prompt_tokens == prompt_tokens]
        claims += _equal_claims(prompt_tokens, {case.group_size: figures[case] for case in of_prompt})
    claims.append(_tail_claim(tail_limit, {case.group_size: figures[case] for case in tailed}))
    settings: Row = {"slots": SLOTS, "layers": layers, "threads": 1, "environment": LEAN_TEXT}
    return finish("kv_memory", options, settings, [_row(case, figures[case]) for case in figures], claims)


def _measure(cases: Sequence[Case], num_processes: int) -> dict[Case, Figures]:
    """Run all cases, some at a time, the longest first, so that none is last."""
    order = sorted(cases, key=lambda case: -case.group_size * case.max_tokens)
    with ThreadPoolExecutor(num_processes) as pool:
        figures = dict(zip(order, pool.map(_figures, order), strict=True))
    return {case: figures[case] for case in cases}


def _figures(case: Case) -> Figures:
    figures = measured("benchmarks.kv_memory", case, LEAN)
    note(f"{case}: {figures['rollout_mib']:.1f} MiB")
    return figures


def _equal_claims(prompt_tokens: int, by_size: dict[int, Figures]) -> list[Claim]:
    """Claims on one prompt with completions of equal length, by the size of the group."""
    peaks = [figures["rollout_mib"] for figures in by_size.values()]
    spread = max(abs(peak / statistics.median(peaks) - 1) for peak in peaks)
    over = max(figures["kv_mib"] / figures["prompt_and_slots_mib"] for figures in by_size.values())
    where = f"prompt of {prompt_tokens} tokens, G = {', '.join(map(str, by_size))}"
    return [
        Claim(f"{where}: peak memory of the rollout, furthest from the median", spread, "<=", 0.03),
        Claim(f"{where}: keys and values over prompt once + slots x completion", over, "<=", 1.1),
    ]


def _tail_claim(limit: int, by_size: dict[int, Figures]) -> Claim:
    """Claim on the largest ratio of allocated to used memory."""
    over = max(figures["allocated_tokens"] / figures["used_tokens"] for figures in by_size.values())
    sizes = ", ".join(map(str, by_size))
    return Claim(f"long-tailed up to {limit} tokens, G = {sizes}: KV tokens allocated over used", over, "<=", 1.3)


def _row(case: Case, figures: Figures) -> Row:
    row: Row = {
        "system": case.system,
        "lengths": "long-tailed" if case.tailed else "equal",
        "prompt": case.prompt_tokens,
        "G": case.group_size,
        "limit": case.max_tokens,
    }
    over = round(figures["allocated_tokens"] / figures["used_tokens"], 3)
    return row | {name: round(value, 1) for name, value in figures.items()} | {"allocated/used": over}


def run_case() -> None:
    """Measure the case that this process is told: the most memory of one rollout."""
    case = Case(**read_case())
    torch.set_num_threads(1)
    policy = random_qwen3(replace(QWEN3_WIDE, layers=case.layers), case.device)
    prompt = Prompt("train/0", tuple(2 + i % 10 for i in range(case.prompt_tokens)), "")
    lengths = long_tailed([prompt], case.group_size, case.max_tokens)
    if not case.tailed:
        lengths = dict.fromkeys(lengths, case.max_tokens)
    num_slots = case.num_slots if case.system == "lit_grpo" else case.group_size
    generator = slots(policy, make_tokenizer(), num_slots, lengths)
    held = [(0, 0)]
    parts: list[dict[str, int]] = [{"prompts": 0, "slots": 0, "waiting": 0}]
    gc.collect()
    memory = PeakMemory(policy.device)
    idle_gib = memory.current_gib()
    memory.reset()
    sampling = SamplingParams(max_tokens=case.max_tokens)

    def on_step(num_tokens: int) -> None:
        held.append(kv_tokens(generator))
        parts.append(kv_parts(generator))

    roll_out(generator, [prompt], case.group_size, sampling, on_step=on_step)
    peak_mib = (memory.peak_gib() - idle_gib) * 1024
    token_mib = kv_bytes(policy) / 2**20
    allocated, used = (max(tokens) for tokens in zip(*held, strict=True))
    largest = max(parts, key=lambda part: sum(part.values()))
    least = case.prompt_tokens + num_slots * case.max_tokens
    tell(
        {
            "rollout_mib": peak_mib,
            "kv_mib": allocated * token_mib,
            **{f"kv_{part}_mib": tokens * token_mib for part, tokens in largest.items()},
            "besides_mib": peak_mib - allocated * token_mib,
            "prompt_and_slots_mib": least * token_mib,
            "used_mib": used * token_mib,
            "allocated_tokens": allocated,
            "used_tokens": used,
        }
    )


if __name__ == "__main__":
    if is_case():
        run_case()
    else:
        sys.exit(main(parse_options(__doc__ or "")))
