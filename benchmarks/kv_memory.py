"""Peak memory of a rollout against the group size, with 8 slots, beside full-group decoding.

Every case runs one rollout of one prompt in a process of its own, on a random Qwen3 whose keys and values are those of
Qwen3-0.6B in float32 (28 layers, 224 KiB a token). All completions come to the limit, the most that they can take.
Memory is the peak of the resident set above the idle process (model loaded); on a GPU, of the allocator. Keys and
values are compared with the least that any system holds which keeps the prompt once and every slot's completion whole.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from benchmarks.group_size_memory import ENVIRONMENT
from benchmarks.kv_memory_case import Case, System, to_argument
from benchmarks.report import ROOT, Claim, Options, Row, finish, note, parse_options

Figures = dict[str, float]
SLOTS = 8
CASES = {16: 32, 1024: 8}  # prompt tokens: completion tokens
SIZES, FULL_GROUPS = (8, 32, 128, 512, 1024), (32,)


def main(options: Options) -> int:
    """Measure all cases."""
    layers, lengths = (2, {16: 8}) if options.quick else (28, CASES)
    sizes, full_groups = ((8, 16), (16,)) if options.quick else (SIZES, FULL_GROUPS)
    systems: list[tuple[System, tuple[int, ...]]] = [("lit_grpo", sizes), ("full group", full_groups)]
    cases = [
        Case(system, options.device, layers, prompt_tokens, size, SLOTS, max_tokens)
        for prompt_tokens, max_tokens in lengths.items()
        for system, its_sizes in systems
        for size in its_sizes
    ]
    order = sorted(
        cases, key=lambda case: -case.group_size * case.max_tokens
    )  # the longest first, so that none is last
    with ThreadPoolExecutor(1 if options.device == "cuda" else min(os.cpu_count() or 1, 4)) as pool:
        figures = dict(zip(order, pool.map(_measure, order), strict=True))
    rows = [_row(case, figures[case]) for case in cases]
    claims = []
    for prompt_tokens in lengths:
        ours = [figures[c] for c in cases if c.system == "lit_grpo" and c.prompt_tokens == prompt_tokens]
        peaks = [each["rollout_mib"] for each in ours]
        spread = max(abs(peak / statistics.median(peaks) - 1) for peak in peaks)
        over = max(each["kv_mib"] / each["prompt_and_slots_mib"] for each in ours)
        where = f"prompt of {prompt_tokens} tokens, G = {', '.join(map(str, sizes))}"
        claims += [
            Claim(f"{where}: peak memory of the rollout, furthest from the median", spread, "<=", 0.03),
            Claim(f"{where}: keys and values over prompt once + slots x completion", over, "<=", 1.1),
        ]
    settings: Row = {"slots": SLOTS, "layers": layers}
    settings |= {f"completion tokens after a prompt of {p}": n for p, n in lengths.items()}
    settings["environment"] = " ".join(f"{name}={value}" for name, value in ENVIRONMENT.items())
    return finish("kv_memory", options, settings, rows, claims)


def _measure(case: Case) -> Figures:
    """Run one case in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.kv_memory_case", to_argument(case)]
    run = subprocess.run(command, cwd=ROOT, env=os.environ | ENVIRONMENT, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"The case {case} failed:\n{run.stderr[-2000:]}")
    figures: Figures = json.loads(run.stdout.splitlines()[-1])
    note(
        f"{case.system}, prompt of {case.prompt_tokens} tokens, G = {case.group_size}: {figures['rollout_mib']:.1f} MiB"
    )
    return figures


def _row(case: Case, figures: Figures) -> Row:
    row: Row = {"system": case.system, "prompt": case.prompt_tokens, "G": case.group_size, "limit": case.max_tokens}
    return row | {name: round(value, 1) for name, value in figures.items()}


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(main(parse_options(__doc__)))
