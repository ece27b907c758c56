"""Styles of the lines of pictures: colors, marks and dashes, distinguishable in gray and by the color-blind."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = ("#000000", "#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#f0e442")
"""Those of Okabe and Ito, which the color-blind tell apart (https://jfly.uni-koeln.de/color/)."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", "--", ":", "-.", "-", "--", ":", "-.")


def distinct(axes: Axes) -> None:
    """Give each line that is drawn from here on a look of its own."""
    from cycler import cycler

    axes.set_prop_cycle(cycler(color=COLORS) + cycler(marker=MARKERS) + cycler(linestyle=DASHES))
