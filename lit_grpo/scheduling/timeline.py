"""Pictures of which slot decoded which completion when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lit_grpo.process.terminal import picture_text
from lit_grpo.scheduling.recording import seconds_at
from lit_grpo.types import Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


GROUP_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#7A6FAC", "#8C8C3F")
"""Okabe and Ito's colors for all eyes, without black and the yellow that white swallows; two more between them."""
SHADES = (1.0, 0.86, 1.12)  # of neighbors in a row, so that completions of one group are told apart
PHASE_COLORS = {"reward wait": "#e4e0d4", "update": "#c9ced6", "weight sync": "#9aa3b0"}
CURVE_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.2, 1.5, 1.2)))
"""With 7 colors, 28 curves that differ, neighbors in gray too: the two lengths have no common divisor."""


class Phase(NamedTuple):
    """Phase of a run from ``start`` to ``end`` in which nothing was decoded."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Timeline of one plan.

    Args:
        title: Title above the timeline.
        name: Name in the legend of the curves.
        spans: Spans in which slots decode a completion.
        kv: Times and the KV tokens held at each, both of shape (times,), where they are known.
        kv_limit: KV tokens that there is memory for, where there is a limit.
        phases: Phases other than decoding.
        prefills: Times of the prefills of prompts.
    """

    title: str
    name: str
    spans: Sequence[Span]
    kv: tuple[np.ndarray, np.ndarray] | None = None
    kv_limit: int | None = None
    phases: Sequence[Phase] = ()
    prefills: Sequence[tuple[float, float]] = ()

    @property
    def end(self) -> float:
        return max([span.end for span in self.spans] + [phase.end for phase in self.phases], default=1) or 1


def recorded_timeline(title: str, row: dict[str, Any]) -> Timeline:
    """Return the timeline, in seconds, of what :func:`lit_grpo.scheduling.recording.timeline_row` has kept."""
    moments = np.array(row["clock"]).reshape(-1, 3)
    spans = np.array(row["spans"]).reshape(-1, 4)
    starts, ends = (seconds_at(moments, spans[:, column]).tolist() for column in (2, 3))
    groups = [row["completions"][completion][0] for completion in spans[:, 0]]
    bars = [Span(*bar) for bar in zip(spans[:, 1].tolist(), starts, ends, groups, strict=True)]
    seconds = row["seconds"]
    began = seconds["rollout"] - seconds["reward_wait"]
    phases = []
    for name in PHASE_COLORS:
        ended = began + seconds.get(name.replace(" ", "_"), 0.0)
        if ended > began:
            phases.append(Phase(name, began, ended))
        began = ended
    prefills = [(start, end) for start, end, _ in row["prefills"]]
    return Timeline(title, "", bars, (moments[:, 1], moments[:, 2]), row["kv_limit"], phases, prefills)


def draw_timeline(timelines: Sequence[Timeline], unit: str = "decode steps", slot_limit: int | None = None) -> Figure:
    """Return a figure with a panel for each plan, and under them the active slots and the KV tokens of all over time.

    In a panel a row is a slot, a bar is a completion, its color the group that it belongs to; white is a slot that
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
    heights = [1.0 if len(timelines) > 1 else 1.6] * len(timelines) + [0.8] * (1 + with_kv)
    width, height = 11.0, 1.5 * sum(heights) + 0.8
    figure = Figure(figsize=(width, height), dpi=110)
    axes = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    has_legend = any(each.name or each.phases or each.prefills for each in timelines)
    edges = {"left": 0.75 / width, "right": 1 - (2.0 if has_legend else 0.2) / width}
    # by hand, for a layout that is found by drawing draws twice
    figure.subplots_adjust(**edges, bottom=0.5 / height, top=1 - 0.3 / height, hspace=0.25)
    for axis, each in zip(axes, timelines, strict=False):
        _draw_slots(axis, each, num_slots)
    curves = axes[len(timelines) :]
    for number, each in enumerate(timelines):
        look: dict[str, Any] = {
            "label": picture_text(each.name) if each.name else None,
            "color": CURVE_COLORS[number % len(CURVE_COLORS)],
            "linestyle": DASHES[number % len(DASHES)],
            "linewidth": 1.2,
        }
        times, active = active_slots(each.spans)
        curves[0].step(times, active, where="post", **look)
        if each.kv is not None:
            kv_times, kv_tokens = each.kv
            curves[-1].plot(kv_times, kv_tokens, **look)
    curves[0].set(ylabel="active slots", ylim=(0, num_slots * 1.05))
    if any(each.name for each in timelines):
        curves[0].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    if with_kv:
        _draw_limit(curves[-1], timelines)
    axes[-1].set(xlabel=unit, xlim=(0, max(each.end for each in timelines)))
    return figure


def active_slots(spans: Sequence[Span]) -> tuple[np.ndarray, np.ndarray]:
    """Return the times at which the number of active slots changes, and that number from each on."""
    changes: dict[float, int] = {}
    for span in spans:
        changes[span.start] = changes.get(span.start, 0) + 1
        changes[span.end] = changes.get(span.end, 0) - 1
    times = sorted(changes)
    return np.array(times), np.cumsum([changes[time] for time in times])


def _draw_slots(axis: Axes, timeline: Timeline, num_slots: int) -> None:
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Patch

    bars = np.array([[span.slot, span.start, span.end, span.group] for span in timeline.spans]).reshape(-1, 4)
    slot, start, end, group = bars.T
    corners = [np.stack(point, axis=1) for point in ((start, slot), (end, slot), (end, slot + 1), (start, slot + 1))]
    palette = np.array([to_rgb(color) for color in GROUP_COLORS])
    shades = np.array(SHADES)[np.arange(len(bars)) % len(SHADES)]
    colors = np.clip(palette[group.astype(np.int64) % len(palette)] * shades[:, None], 0, 1)
    axis.add_collection(PolyCollection(list(np.stack(corners, axis=1)), facecolors=colors, antialiased=False))
    axis.set(ylim=(num_slots, 0), ylabel="slot")
    axis.set_title(picture_text(timeline.title), loc="left", fontsize=9)
    handles = []
    if timeline.prefills:
        ticks = [(start, max(end - start, 0)) for start, end in timeline.prefills]
        axis.broken_barh(ticks, (0, num_slots), facecolors="none", edgecolors="black", hatch="....", linewidth=0.4)
        handles.append(
            Patch(facecolor="none", edgecolor="black", hatch="....", linewidth=0.4, label="prompts prefilled")
        )
    for phase in timeline.phases:
        axis.axvspan(phase.start, phase.end, color=PHASE_COLORS[phase.name], linewidth=0)
        label = f"{phase.name}, {phase.end - phase.start:.3g} s"
        handles.append(Patch(color=PHASE_COLORS[phase.name], linewidth=0, label=label))
    if handles:
        bar = Patch(color=GROUP_COLORS[0], linewidth=0, label="a completion; color: prompt")
        axis.legend(handles=[bar, *handles], fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _draw_limit(axis: Axes, timelines: Sequence[Timeline]) -> None:
    """Mark the limit in the picture, or say it in words where it is far above everything."""
    peak = max(float(each.kv[1].max(initial=0)) for each in timelines if each.kv is not None)
    peak = peak or 1.0  # nothing was decoded
    limits = {each.kv_limit for each in timelines if each.kv_limit is not None}
    for limit in limits:
        if limit <= 3 * peak:
            axis.axhline(limit, color="black", linewidth=1, linestyle=(0, (4, 2)))
        where = limit if limit <= 3 * peak else peak * 1.12
        text = f"memory for {limit:,}" + ("" if limit <= 3 * peak else ", above the picture")
        axis.annotate(text, (0.995, where), xycoords=("axes fraction", "data"), ha="right", va="top", fontsize=7)
    axis.set(
        ylabel="KV tokens", ylim=(0, None if not limits else 1.15 * max([peak, *(v for v in limits if v <= 3 * peak)]))
    )
