"""Spans and estimates of a rollout, kept as columns."""

from __future__ import annotations

import numpy as np
import pytest

from lit_grpo.scheduling.flight import SpanLog
from lit_grpo.scheduling.jobs import SampleValues
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


def test_sample_values_are_a_mapping_by_key() -> None:
    values = SampleValues([("a", 0), ("a", 1)], np.array([[1.0, 2.0], [3.0, 4.0]]))
    assert dict(values) == {("a", 0, (0,)): 1.0, ("a", 0, (1,)): 2.0, ("a", 1, (0,)): 3.0, ("a", 1, (1,)): 4.0}
    assert len(values) == 4
    for key in [("a", 0, (2,)), ("a", 0, (-1,)), ("b", 0, (0,))]:
        with pytest.raises(KeyError):
            values[key]
