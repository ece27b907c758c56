"""Peak memory of one training step against the group size: ``python -m benchmarks.group_size_memory [STUDY]``.

Every case runs one step in a process of its own, with 8 slots. Memory is the peak of the process's resident set above
the idle process (model and optimizer loaded, before the first step), by phase; on a GPU, of the allocator. Random
rewards make every rollout count in the update, and a case without one fails.

``group_size_memory``: exercises of the demo, beside full-group ``generate`` and an update in one batch. The policy is a
random one: what a completion needs on the host, about 1 KB and 8 bytes a token, would show beside the demo's policy
(``--policy tiny``), whose 8 slots take no more than 5 MiB.

``hybrid_memory``: the same with a random Qwen3.5, whose slots hold states of gated DeltaNet layers beside keys and
values.

``real_model_memory``: SmolLM2-135M-Instruct on one word problem, in float32, beside TRL 1.16, which decodes with
``generate``, and whose micro-batches have 4 rows at any G. The update holds gradients and AdamW's moments, which are
the same on both sides.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lines import distinct
from benchmarks.memory_case import Case, System
from benchmarks.processes import LEAN, LEAN_TEXT, Figures, measured
from benchmarks.random_policies import QWEN3_7M, TO_UPDATE, Sizes, save_random_policy
from benchmarks.report import ROOT, Claim, Options, Row, finish, note, options_parser
from benchmarks.shipped_tasks import ShippedTask

PHASES = ("rollout", "update")


@dataclass(frozen=True)
class Study:
    """Group sizes of each system, how often, and the tokens of a micro-batch; ``config`` has policy and prompts."""

    sizes: Mapping[System, tuple[int, ...]]
    quick: Mapping[System, tuple[int, ...]]
    repeats: int
    budget: int
    config: str | None = None
    random: Sizes = QWEN3_7M
    picture: bool = False


STUDIES = {
    "group_size_memory": Study(
        {"lit_grpo": (8, 64, 512), "generate": (8, 32, 128)}, {"lit_grpo": (2, 4), "generate": (4,)}, 3, 160
    ),
    "hybrid_memory": Study(
        {"lit_grpo": (8, 64, 512), "generate": (8, 32, 128)}, {"lit_grpo": (2,)}, 1, 160, random=TO_UPDATE["hybrid, 7M"]
    ),
    "real_model_memory": Study(
        {"lit_grpo": (8, 32, 128, 512), "TRL": (8, 32, 128, 512)}, {"lit_grpo": (2,), "TRL": (4,)}, 1, 512,
        config="word_problems", picture=True,
    ),
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all cases of a study, and report medians."""
    parser = options_parser(__doc__ or "")
    parser.add_argument("study", nargs="?", choices=STUDIES, default="group_size_memory")
    asked = parser.parse_args(arguments)
    options, study = Options(asked.quick, asked.device, asked.policy, asked.output), STUDIES[asked.study]
    repeats = 1 if options.quick else study.repeats
    sizes = study.quick if options.quick else study.sizes
    plan: list[tuple[System, int]] = [(system, size) for system, of in sizes.items() for size in of]
    limit = 128 if study.config is None else ShippedTask(study.config).model["sampling"]["max_tokens"]
    limit = (16 if study.config is None else 4) if options.quick else limit
    with tempfile.TemporaryDirectory() as folder:
        policy, name = options.policy or folder, options.policy or ""
        if options.policy is None and study.config is not None:
            policy, name = ShippedTask(study.config).policy, study.config
        elif options.policy is None:
            save_random_policy(Path(folder), study.random)
            name = f"random {'Qwen3.5' if study.random.hybrid else 'Qwen3'}, 7 M parameters"
        cases = [
            Case(system, policy, options.device, 1, size, 8, limit, study.budget, study.config)
            for system, size in plan * repeats
        ]
        workers = 1 if options.device == "cuda" or study.config else min(os.cpu_count() or 1, 4)  # each has one thread
        with ThreadPoolExecutor(workers) as pool:
            figures = list(pool.map(_measure, cases))
    rows = [_row(system, size, figures[number :: len(plan)]) for number, (system, size) in enumerate(plan)]
    if study.picture and (options.output is not None or not options.quick):  # a quick run leaves the docs' as it is
        path = ROOT / "docs" / "pictures" / "group_size_memory.svg"
        draw(rows, path if options.output is None else options.output.with_suffix(".svg"))
    claims = [
        Claim(f"lit_grpo: peak memory of the {phase}, largest over smallest", _growth(rows, phase), "<=", 1.05)
        for phase in PHASES
    ]
    settings: Row = {"slots": 8, "prompts": 1, "max_tokens": limit, "repeats": repeats, "micro-batch": study.budget}
    settings |= {"policy": "a folder" if Path(name).exists() else name, "environment": LEAN_TEXT}
    program = None if asked.study == "group_size_memory" else f"group_size_memory {asked.study}"
    return finish(asked.study, options, settings, rows, claims, program)


def _measure(case: Case) -> Figures:
    note(f"{case.system}, G = {case.group_size}")
    return measured("benchmarks.memory_case", case, LEAN)


def _row(system: System, group_size: int, repeats: list[Figures]) -> Row:
    row: Row = {"system": system, "G": group_size}
    for name in ("tokens", "idle_mib", *(f"{phase}_mib" for phase in PHASES)):
        row[name] = round(statistics.median(figures[name] for figures in repeats), 1)
    for phase in PHASES:
        peaks = [figures[f"{phase}_mib"] for figures in repeats]
        row[f"{phase}_spread_mib"] = round(max(peaks) - min(peaks), 1)
    return row


def _growth(rows: list[Row], phase: str) -> float:
    peaks = [float(row[f"{phase}_mib"]) for row in rows if row["system"] == "lit_grpo"]
    return max(peaks) / min(peaks)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the peak of each phase against the group size."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    for phase, axes in zip(PHASES, figure.subplots(1, 2), strict=True):
        distinct(axes)
        for system in dict.fromkeys(str(row["system"]) for row in rows):
            mine = [row for row in rows if row["system"] == system]
            peaks = [float(row[f"{phase}_mib"]) / 1024 for row in mine]
            axes.plot([int(row["G"]) for row in mine], peaks, label=system)
        highest = max(float(row[f"{phase}_mib"]) for row in rows) / 1024
        axes.set(title=f"Peak of the {phase}", xlabel="completions of a prompt", xscale="log")
        axes.set_ylim(-0.04 * highest, 1.08 * highest)  # with room for the marks of the lowest and the highest point
        axes.set_ylabel("GiB above the idle process")
        groups = sorted({int(row["G"]) for row in rows})
        axes.set_xticks(groups, [str(group) for group in groups], minor=False)
        axes.minorticks_off()
        axes.legend()
    with rc_context({"svg.hashsalt": "lit_grpo"}):  # the same rows make the same file
        figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    sys.exit(main())
