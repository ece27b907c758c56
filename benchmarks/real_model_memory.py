"""Peak memory of a step against the group size, on a pretrained chat model, beside TRL 1.16.

SmolLM2-135M-Instruct answers one word problem G times, in float32, in a process a case. Ours decodes in 8 slots, with
the micro-batch of its configuration; TRL decodes with ``generate``, and its micro-batches have 4 rows at any G. Memory
is the peak of the resident set above the idle process (model and optimizer loaded, before the first step), by phase;
the update's holds gradients and AdamW's moments, which are the same on both sides. Random rewards make every
completion count.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.lines import distinct
from benchmarks.memory_case import Case
from benchmarks.processes import LEAN, LEAN_TEXT, measured
from benchmarks.report import ROOT, Claim, Options, Row, finish, note, parse_options
from benchmarks.shipped_tasks import ShippedTask

CONFIG = "word_problems"
FULL = {"lit_grpo": (8, 32, 128, 512), "TRL": (8, 32, 128, 512)}
QUICK = {"lit_grpo": (2,), "TRL": (4,)}
PICTURE = ROOT / "docs" / "pictures" / "group_size_memory.svg"


def main(options: Options) -> int:
    """Measure all cases, one after the other."""
    task = ShippedTask(CONFIG)
    rows: list[Row] = []
    for system, group_sizes in (QUICK if options.quick else FULL).items():
        for group_size in group_sizes:
            note(f"{system}, G = {group_size}")
            case = Case(
                system=system,  # pyright: ignore[reportArgumentType]
                policy=options.policy or task.policy,
                device=options.device,
                num_prompts=1,
                group_size=group_size,
                num_slots=8,
                max_tokens=4 if options.quick else task.model["sampling"]["max_tokens"],
                max_tokens_per_micro_batch=512,
                config=CONFIG,
            )
            figures = measured("benchmarks.memory_case", case, LEAN)
            rows.append({"system": system, "G": group_size} | {name: round(each, 1) for name, each in figures.items()})
    if options.output is not None or not options.quick:  # a quick run leaves the docs' picture as it is
        draw(rows, PICTURE if options.output is None else options.output.with_suffix(".svg"))
    claims = [
        Claim(f"lit_grpo: peak of the {phase}, largest over smallest", _growth(rows, phase), "<=", 1.05)
        for phase in ("rollout", "update")
    ]
    settings: Row = {"slots": 8, "micro-batch": "512 tokens, TRL's 4 rows", "environment": LEAN_TEXT}
    return finish("real_model_memory", options, settings, rows, claims)


def _growth(rows: list[Row], phase: str) -> float:
    peaks = [float(row[f"{phase}_mib"]) for row in rows if row["system"] == "lit_grpo"]
    return max(peaks) / min(peaks)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the peak of each phase against the group size."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    for phase, axes in zip(("rollout", "update"), figure.subplots(1, 2), strict=True):
        distinct(axes)
        for system in FULL:
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
    assert __doc__ is not None
    sys.exit(main(parse_options(__doc__)))
