"""The picture of an evaluation: fractions of correct completions with their intervals."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lit_grpo.process.terminal import picture_text

if TYPE_CHECKING:
    from lit_grpo.tools.evaluation.figures import Figure

COLORS = ("#576174", "#1a65ba", "#e74357", "#0b9884", "#ad1e91", "#6a7b06")
CORRECT = ("accuracy", "pass@", "majority@")


def draw(figures: Mapping[str, Mapping[str, Mapping[str, Figure]]]) -> str:
    """Return a picture as SVG: a row of points for each fraction, a point with its interval for each policy."""
    import matplotlib
    from matplotlib.figure import Figure as Drawing

    first = next(iter(figures.values()))
    rows = [(how, name) for how, named in first.items() for name in named if name.startswith(CORRECT)]
    plain: dict[Any, Any] = {
        "svg.hashsalt": "evaluation",
        "svg.fonttype": "none",
    }
    with matplotlib.rc_context(plain):
        drawing = Drawing(figsize=(7, 1.2 + 0.45 * len(rows) + 0.12 * len(rows) * len(figures)), layout="constrained")
        axes: Any = drawing.subplots()
        for place, (policy, by_way) in enumerate(figures.items()):
            shift = 0.18 * (place - (len(figures) - 1) / 2)
            values = [by_way[how][name] for how, name in rows]
            shown = [100 * one.value for one in values]
            errors = [
                [100 * (one.value - one.low) for one in values],
                [100 * (one.high - one.value) for one in values],
            ]
            heights = [number + shift for number in range(len(rows))]
            color = COLORS[place % len(COLORS)]
            axes.errorbar(
                shown, heights, xerr=errors, fmt="o", ms=5, capsize=3, color=color, label=picture_text(policy)
            )
        axes.set_yticks(range(len(rows)), [picture_text(f"{how} {name}") for how, name in rows])
        axes.invert_yaxis()
        axes.set_xlim(-2, 102)
        axes.set_xlabel("correct completions of held-out rows, %, with 95% intervals (higher is better)")
        axes.grid(axis="x", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        drawing.legend(loc="outside upper left", frameon=False, ncols=min(len(figures), 3))
        buffer = io.StringIO()
        drawing.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()
