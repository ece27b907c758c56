"""Pictures of who decoded when."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_grpo.scheduling.timeline import Timeline, draw_timeline
from lit_grpo.types import Span

SPANS = [Span(0, 0, 4, 0), Span(1, 0, 1, 0), Span(1, 1, 3, 7), Span(1, 3.5, 6, 7)]


def test_a_plan_has_a_panel_with_a_bar_for_each_span_and_curves_under_it(tmp_path: Path) -> None:
    curve = (np.array([0, 6]), np.array([3, 9]))
    figure = draw_timeline([Timeline("first", "a", SPANS, curve), Timeline("second", "b", SPANS[:2])], slot_limit=5)
    axes: list[Any] = figure.axes
    first, second, active, kv = axes
    assert [axis.get_title(loc="left") for axis in (first, second)] == ["first", "second"]
    bars = first.collections[0].get_paths()
    corners = [(path.vertices[:, 0].min(), path.vertices[:, 0].max(), path.vertices[:, 1].min()) for path in bars]
    assert corners == [(span.start, span.end, span.slot) for span in SPANS]
    assert first.get_ylim() == (5, 0) and first.get_xlim() == (0, 6)
    assert [line.get_label() for line in active.get_lines()] == ["a", "b"]
    assert kv.get_lines()[0].get_ydata().tolist() == [3, 9] and len(kv.get_lines()) == 1
    figure.savefig(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_a_plan_without_spans_can_be_drawn_and_nothing_at_all_cannot() -> None:
    assert len(draw_timeline([Timeline("idle", "idle", [])]).axes) == 2
    with pytest.raises(ValueError, match="0 timelines"):
        draw_timeline([])
