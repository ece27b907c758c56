"""Peak memory of one training step against the group size, beside full-group ``generate`` and a one-batch update.

Every case runs one step of a real fit in a process of its own, with 8 slots. Memory is the peak of the process's
resident set above the idle process (model and optimizer loaded, before the first step); on a GPU, of the allocator.
Random rewards make every rollout count in the update, and a case without one fails. The policy is a random one: what a
completion needs on the host, about 1 KB and 8 bytes a token, would show beside the demo's policy (``--policy tiny``),
whose 8 slots take no more than 5 MiB.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from benchmarks.memory_case import Case
from benchmarks.processes import LEAN, LEAN_TEXT, Figures, measured
from benchmarks.random_policies import QWEN3_7M, save_random_policy
from benchmarks.report import Claim, Options, Row, finish, note, parse_options

System = Literal["lit_grpo", "generate"]
PHASES = ("rollout", "update")


def main(options: Options) -> int:
    """Measure all cases and report medians."""
    repeats, group_sizes, peer_sizes = (1, (2, 4), (4,)) if options.quick else (3, (8, 64, 512), (8, 32, 128))
    settings: Row = {"slots": 8, "prompts": 1, "max_tokens": 16 if options.quick else 128, "repeats": repeats}
    settings |= {"max_tokens_per_micro_batch": 160, "policy": options.policy or "random Qwen3, 7 M parameters"}
    plan: list[tuple[System, int]] = [("lit_grpo", size) for size in group_sizes]
    peers: list[tuple[System, int]] = [("generate", size) for size in peer_sizes]
    plan += peers
    with tempfile.TemporaryDirectory() as folder:
        policy = options.policy
        if policy is None:
            policy = folder
            save_random_policy(Path(folder), QWEN3_7M)
        cases = [_case(system, size, policy, options.device, settings) for system, size in plan * repeats]
        workers = 1 if options.device == "cuda" else min(os.cpu_count() or 1, 4)  # each has one thread
        with ThreadPoolExecutor(workers) as pool:
            figures = list(pool.map(_measure, cases))
    if options.policy is not None and Path(options.policy).exists():
        settings["policy"] = "a folder"
    rows = [_row(system, size, figures[number :: len(plan)]) for number, (system, size) in enumerate(plan)]
    claims = [
        Claim(
            f"peak memory of the {phase}, largest over smallest for G = {', '.join(map(str, group_sizes))}",
            _spread([float(row[f"{phase}_mib"]) for row in rows if row["system"] == "lit_grpo"]),
            "<=",
            1.05,
        )
        for phase in PHASES
    ]
    settings["environment"] = LEAN_TEXT
    return finish("group_size_memory", options, settings, rows, claims)


def _case(system: System, group_size: int, policy: str, device: str, settings: Row) -> Case:
    return Case(
        system=system,
        policy=policy,
        device=device,
        num_prompts=int(settings["prompts"]),
        group_size=group_size,
        num_slots=int(settings["slots"]),
        max_tokens=int(settings["max_tokens"]),
        max_tokens_per_micro_batch=int(settings["max_tokens_per_micro_batch"]),
    )


def _measure(case: Case) -> Figures:
    note(f"{case.system}, G = {case.group_size}")
    return measured("benchmarks.memory_case", case, LEAN)


def _row(system: System, group_size: int, repeats: list[Figures]) -> Row:
    row: Row = {"system": system, "G": group_size}
    for name in ("tokens", "idle_mib", *(f"{phase}_mib" for phase in PHASES)):
        row[name] = round(statistics.median(figures[name] for figures in repeats), 1)
    for phase in PHASES:
        row[f"{phase}_spread_mib"] = round(_range([figures[f"{phase}_mib"] for figures in repeats]), 1)
    return row


def _spread(values: list[float]) -> float:
    return max(values) / min(values)


def _range(values: list[float]) -> float:
    return max(values) - min(values)


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(main(parse_options(__doc__)))
