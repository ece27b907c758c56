"""Pictures of who decoded when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lit_grpo.types import Span

if TYPE_CHECKING:
    from matplotlib.figure import Figure


GOLDEN = 0.618034  # hues this far apart stay distinct for any number of groups


@dataclass(frozen=True)
class Timeline:
    """What one plan did.

    Args:
        title: Stands above it.
        name: Stands in the legend of the curves.
        spans: Who decoded when.
        kv: Times and the KV tokens held at each, both of shape (times,), where they are known.
    """

    title: str
    name: str
    spans: Sequence[Span]
    kv: tuple[np.ndarray, np.ndarray] | None = None


def draw_timeline(timelines: Sequence[Timeline], unit: str = "decode steps", slot_limit: int | None = None) -> Figure:
    """Return a figure with a panel for each plan, and under them the active slots and the KV tokens of all over time.

    In a panel a row is a slot, a bar is a completion, its colour the group that it belongs to; white is a slot that
    idles. All panels have the same time axis.

    Args:
        timelines: What each plan did, 1 or more.
        unit: What the time axis counts.
        slot_limit: Slots that there are; by default as many as decode at any time.
    """
    from matplotlib.figure import Figure

    if not timelines:
        raise ValueError("There are 0 timelines to draw: give 1 or more.")
    num_slots = slot_limit or max(max((span.slot for span in each.spans), default=0) + 1 for each in timelines)
    with_kv = any(each.kv is not None for each in timelines)
    heights = [1.0] * len(timelines) + [0.8] * (1 + with_kv)
    figure = Figure(figsize=(11, 1.5 * sum(heights) + 0.8), dpi=110, layout="constrained")
    axes = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    for axis, each in zip(axes, timelines, strict=False):
        _draw_slots(axis, each, num_slots)
    curves = axes[len(timelines) :]
    for each in timelines:
        curves[0].step(*active_slots(each.spans), where="post", label=each.name, linewidth=1.2)
        if each.kv is not None:
            curves[-1].plot(*each.kv, label=each.name, linewidth=1.2)
    curves[0].set(ylabel="active slots", ylim=(0, num_slots * 1.05))
    curves[0].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    if with_kv:
        curves[-1].set(ylabel="KV tokens", ylim=(0, None))
    axes[-1].set(xlabel=unit, xlim=(0, max((span.end for each in timelines for span in each.spans), default=1)))
    return figure


def active_slots(spans: Sequence[Span]) -> tuple[np.ndarray, np.ndarray]:
    """Return the times at which the number of active slots changes, and that number from each on."""
    changes: dict[float, int] = {}
    for span in spans:
        changes[span.start] = changes.get(span.start, 0) + 1
        changes[span.end] = changes.get(span.end, 0) - 1
    times = sorted(changes)
    return np.array(times), np.cumsum([changes[time] for time in times])


def _draw_slots(axis: Any, timeline: Timeline, num_slots: int) -> None:
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import hsv_to_rgb

    bars = np.array([[span.slot, span.start, span.end, span.group] for span in timeline.spans]).reshape(-1, 4)
    slot, start, end, group = bars.T
    corners = [np.stack(point, axis=1) for point in ((start, slot), (end, slot), (end, slot + 1), (start, slot + 1))]
    hues = (group * GOLDEN) % 1.0
    # Neighbours in a row differ a little, so that completions of one group are told apart.
    values = 0.8 + 0.12 * (np.arange(len(bars)) % 3 - 1)
    colors = hsv_to_rgb(np.stack([hues, np.full(len(bars), 0.55), values], axis=1))
    axis.add_collection(PolyCollection(list(np.stack(corners, axis=1)), facecolors=colors, antialiased=False))
    axis.set(ylim=(num_slots, 0), ylabel="slot")
    axis.set_title(timeline.title, loc="left", fontsize=9)
