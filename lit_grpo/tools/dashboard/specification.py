"""The specification of all boards, read from ``metrics.yaml``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib import resources
from typing import Literal

import yaml


@dataclass(frozen=True)
class Metric:
    """A metric, or a family of metrics.

    Args:
        name: The name in the logs; a ``*`` stands for a name or a number.
        means: Meaning of the metric.
        normal: The values of a healthy run.
        otherwise: Remedy for other values.
        best: Whether larger or smaller values are better; None if neither.
        when: The settings with which it is logged.
        limit: Whether the other metrics of its panel must stay below it.
    """

    name: str
    means: str
    normal: str
    otherwise: str
    best: Literal["max", "min"] | None = None
    when: str | None = None
    limit: bool = False

    def covers(self, name: str) -> bool:
        """Return whether ``name`` is this metric, or of this family."""
        return fnmatchcase(name, self.name)


@dataclass(frozen=True)
class Panel:
    """A chart of some metrics by update.

    Args:
        title: Title of the chart.
        metrics: Names, or patterns with a ``*``; metrics that a run has not logged are left out.
        stacked: Whether the metrics are parts of a sum.
    """

    title: str
    metrics: tuple[str, ...]
    stacked: bool = False

    def of(self, logged: Iterable[str]) -> list[str]:
        """Return the names that the panel shows, in its order."""
        names = list(logged)
        return [name for pattern in self.metrics for name in sorted(filter_names(names, pattern), key=_by_number)]


@dataclass(frozen=True)
class Section:
    """The panels and metrics that answer one question."""

    title: str
    about: str
    panels: tuple[Panel, ...]
    metrics: tuple[Metric, ...]


def filter_names(names: Iterable[str], pattern: str) -> list[str]:
    """Return the names that match a pattern with ``*``."""
    return [name for name in names if fnmatchcase(name, pattern)]


@cache
def sections() -> tuple[Section, ...]:
    text = resources.files("lit_grpo.tools.dashboard").joinpath("metrics.yaml").read_text(encoding="utf-8")
    return tuple(map(_section, yaml.safe_load(text)))


def explain(name: str) -> tuple[Section, Metric] | None:
    """Return the section and the meaning of a logged metric; None for a user's own metric.

    One of a plug-in that acts on some data sets may stand under their names, as in ``datasets/sums/copo/local``.
    """
    for section in sections():
        for metric in section.metrics:
            if metric.covers(name):
                return section, metric
    beginning, *parts = name.split("/")
    return explain("/".join(parts[1:])) if beginning == "datasets" and len(parts) > 2 else None


def _by_number(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts names by the numbers in them: 8 before 64."""
    return [(int(part) if part.isdigit() else -1, part) for part in re.split(r"(\d+)", name)]


def _section(row: Mapping[str, object]) -> Section:
    panels, metrics = row["panels"], row["metrics"]
    assert isinstance(panels, list) and isinstance(metrics, dict)
    return Section(
        title=str(row["title"]),
        about=str(row["about"]),
        panels=tuple(Panel(**(panel | {"metrics": tuple(panel["metrics"])})) for panel in panels),
        metrics=tuple(Metric(name, **fields) for name, fields in metrics.items()),
    )
