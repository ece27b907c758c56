"""Spans of a rollout, kept as columns."""

from __future__ import annotations

from lit_grpo.scheduling.ledger import SpanLog
from lit_grpo.types import Span


def test_a_span_log_gives_back_what_was_noted_in_that_order() -> None:
    log = SpanLog()
    assert log.group(("b", 1)) == 0
    log.add(("a", 0, (7,)), 3, 0, 12)
    log.add(("b", 1, (2,)), 0, 4, 5)
    log.add(("a", 0, (7,)), 1, 20, 30)
    expected = [
        (("a", 0, (7,)), Span(3, 0, 12, 1)),
        (("b", 1, (2,)), Span(0, 4, 5, 0)),
        (("a", 0, (7,)), Span(1, 20, 30, 1)),
    ]
    assert list(log) == expected
    assert log[1:] == expected[1:] and log[-1] == expected[-1] and len(log) == 3
