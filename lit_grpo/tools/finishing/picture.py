"""The curves of a run as a picture for its model card."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np

from lit_grpo.process.terminal import picture_text
from lit_grpo.tools.dashboard.report.folder import RunRecords

PANELS = (
    ("reward", {"reward": "training batches", "val/reward": "held out"}),
    ("pass@k, held out", {"val/pass@": "k = {}"}),
    ("loss of examples", {"ce/loss": "training batches", "val/sft/loss": "held out"}),
    ("tokens per completion", {"completions/mean_length": "training batches", "val/completion_length": "held out"}),
)
"""The panels: the name of the vertical axis, and a label for each metric, or for each that begins so."""


def draw_curves(run: RunRecords, path: Path, version: int) -> bool:
    """Draw the curves of a run, those panels of which it has metrics, with a line at the update ``version``.

    Returns:
        Whether it was drawn: not without matplotlib, and not if the run has none of the metrics.
    """
    if find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure

    panels: list[tuple[str, dict[str, str]]] = []
    for title, wanted in PANELS:
        lines: dict[str, str] = {}
        for name, label in wanted.items():
            found = [
                column for column in sorted(run.columns) if column == name or name[-1] == "@" in column[: len(name)]
            ]
            lines |= {column: label.format(column[len(name) :]) for column in found if column.startswith(name)}
        if lines:
            panels.append((title, lines))
    if not panels:
        return False
    figure = Figure(figsize=(4.2 * len(panels), 3.2), layout="constrained")
    for place, (title, lines) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), place + 1)
        for number, (name, label) in enumerate(lines.items()):
            there = np.isfinite(run.columns[name])
            steps, values = run.steps[there], run.columns[name][there]
            marker = "." if len(steps) <= 40 else ""
            axes.plot(steps, values, f"C{number}", marker=marker, label=picture_text(label))
        axes.axvline(version, color="0.7", linewidth=0.8, zorder=0)
        axes.set_xlabel("update")
        axes.set_ylabel(title)
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    return True
