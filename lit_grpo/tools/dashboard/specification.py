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
    """A metric, or a family of them.

    Args:
        name: As it is logged; a ``*`` stands for a name or a number.
        means: What is measured.
        normal: What a healthy run shows.
        otherwise: What to do about another value.
        best: Which way is better, where one is.
        when: What has to be set for it to be logged.
        limit: Whether others of its panel must stay below it.
    """

    name: str
    means: str
    normal: str
    otherwise: str
    best: Literal["max", "min"] | None = None
    when: str | None = None
    limit: bool = False

    def covers(self, name: str) -> bool:
        """Whether ``name`` is this metric, or of this family."""
        return fnmatchcase(name, self.name)


@dataclass(frozen=True)
class Panel:
    """A drawing of some metrics, by update.

    Args:
        title: Over the drawing.
        metrics: Names, or patterns with a ``*``; those that a run has not logged are left out.
        stacked: Whether they add up to a whole.
    """

    title: str
    metrics: tuple[str, ...]
    stacked: bool = False

    def of(self, logged: Iterable[str]) -> list[str]:
        """Return those names that the panel shows, in its order."""
        names = list(logged)
        return [name for pattern in self.metrics for name in sorted(filter_names(names, pattern), key=_by_number)]


@dataclass(frozen=True)
class Section:
    """Panels that answer one question, and all metrics that do."""

    title: str
    about: str
    panels: tuple[Panel, ...]
    metrics: tuple[Metric, ...]


def filter_names(names: Iterable[str], pattern: str) -> list[str]:
    """Return the names that a pattern with ``*`` stands for."""
    return [name for name in names if fnmatchcase(name, pattern)]


@cache
def sections() -> tuple[Section, ...]:
    """Return all sections, in the order in which they are shown."""
    text = resources.files("lit_grpo.tools.dashboard").joinpath("metrics.yaml").read_text(encoding="utf-8")
    return tuple(map(_section, yaml.safe_load(text)))


def explain(name: str) -> tuple[Section, Metric] | None:
    """Return what is known of a metric that a run has logged; None of a user's own."""
    for section in sections():
        for metric in section.metrics:
            if metric.covers(name):
                return section, metric
    return None


def _by_number(name: str) -> list[tuple[int, str]]:
    """Sort what differs in a number by it: 8 before 64."""
    return [(int(part) if part.isdigit() else -1, part) for part in re.split(r"(\d+)", name)]


def _section(row: Mapping[str, object]) -> Section:
    panels, metrics = row["panels"], row["metrics"]
    assert isinstance(panels, list) and isinstance(metrics, dict)
    return Section(
        title=str(row["title"]),
        about=str(row["about"]),
        panels=tuple(Panel(**{**panel, "metrics": tuple(panel["metrics"])}) for panel in panels),
        metrics=tuple(Metric(name, **fields) for name, fields in metrics.items()),
    )
