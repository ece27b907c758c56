"""Changes of the reward and of each reward function over a run, and warnings if they diverge."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lit_grpo.types import PassRule

MOST_BLOCKS = 64
"""Rows after the first ones are kept as at most so many means, each over as many rows as it takes."""
CERTAIN = 5.0
"""A change counts if it is at least so many of its standard errors.

A standard error is that of a difference of means, from the spread of the batches themselves. The first mean is of eight
batches only, batches that follow one another are alike, and a long run is looked at some twenty times. So two standard
errors, which are usual for one test, would give false alarms; ``tests/test_findings.py`` counts those of noise.
"""
DOUBTFUL = 2.0
"""A change of fewer standard errors may be noise."""
LEAST_SHARE = 0.2
"""The function that decides pass@1 has no part in a rise if it contributes less than this fraction, noise included."""
NAMED_SHARE = 0.25
"""Functions that give at least this share of a rise are named."""
CEILING = 0.9
"""Above this share of the threshold of passing there is little left to gain."""
LOOKS = 1.25
"""Curves are looked at again when they have this many times the rows of the last look."""
ROUNDING = 1e-6
"""A smaller change is no change."""


class Place(NamedTuple):
    """The source of curves: the number of first rows that count as the beginning, the unit of a row, and its name."""

    num_first: int
    rows: str
    where: str
    label: str


TRAINING = Place(num_first=8, rows="updates", where="", label="")
HELD_OUT = Place(num_first=3, rows="validations", where=" on held-out prompts", label=", held out")


class Change(NamedTuple):
    """Difference of a curve's mean between the first rows and the last."""

    first: float
    last: float
    error: float

    @property
    def size(self) -> float:
        """The difference."""
        return self.last - self.first

    def is_certain(self, sign: float) -> bool:
        """Whether the curve has moved in the direction of ``sign`` by more than noise."""
        return math.copysign(1.0, sign) * self.size > max(CERTAIN * self.error, ROUNDING)

    def __str__(self) -> str:
        return f"from {self.first:.3g} to {self.last:.3g}"


class Finding(NamedTuple):
    """Something that is wrong: its name, in a word or two what is concerned, and a sentence."""

    name: str
    about: str
    sentence: str


class RewardCurves:
    """The means of the reward and of each reward function, a row for each update or validation, in bounded memory.

    The first rows are kept, later ones in blocks, the last quarter of which is compared with the first rows. The
    standard error of a difference comes from the spread of rows, or blocks, around their mean (Welch's test).

    Args:
        weights: The weights of all reward functions by name.
        passes: The reward function that decides whether a completion is correct, and its threshold.
        place: Whether rows are of updates or of validations.

    Attributes:
        latest: The latest row: the mean of each function by name; empty before the first.
    """

    def __init__(self, weights: Mapping[str, float], passes: PassRule, place: Place = TRAINING) -> None:
        self.weights, self.passes, self._place = dict(weights), passes, place
        self.latest: dict[str, float] = {}
        self._first: list[list[float]] = []
        self._blocks: list[list[float]] = []
        self._open: list[list[float]] = []  # of the next block
        self._width = 1  # rows of a block
        self._next_look = 2 * place.num_first
        self._told: list[str] = []

    @property
    def num_rows(self) -> int:
        """The rows that have been added."""
        return len(self._first) + self._width * len(self._blocks) + len(self._open)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        rows = {"first": self._first, "blocks": self._blocks, "open": self._open}
        counts = {"width": self._width, "next_look": self._next_look, "told": self._told}
        return {"weights": self.weights, "latest": self.latest, **rows, **counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; with other functions or weights start again, because their sum is another."""
        if state["weights"] != self.weights:
            return
        self.latest, self._told = dict(state["latest"]), list(state["told"])
        self._first, self._blocks, self._open = (list(state[name]) for name in ("first", "blocks", "open"))
        self._width, self._next_look = state["width"], state["next_look"]

    def add(self, logs: Mapping[str, float]) -> None:
        """Add a row.

        Args:
            logs: Metrics with ``reward`` and ``rewards/NAME/mean`` of every function. A row without a finite reward is
                left out; a function that applies to no completion is NaN.
        """
        self.latest = {name: logs[f"rewards/{name}/mean"] for name in self.weights}
        if not math.isfinite(logs["reward"]):
            return
        row = [logs["reward"], *self.latest.values()]
        if len(self._first) < self._place.num_first:
            self._first.append(row)
            return
        self._open.append(row)
        if len(self._open) == self._width:
            self._blocks.append(_means(self._open))
            self._open = []
        if len(self._blocks) == MOST_BLOCKS:
            self._blocks = [_means(self._blocks[place : place + 2]) for place in range(0, MOST_BLOCKS, 2)]
            self._width *= 2

    def news(self) -> list[Finding]:
        """Return the findings to tell after this row: none twice, and none between two looks."""
        if self.num_rows < self._next_look:
            return []
        self._next_look = math.ceil(LOOKS * self.num_rows)
        found = [finding for finding in self.findings() if finding.name not in self._told]
        self._told += [finding.name for finding in found]
        return found

    def findings(self) -> list[Finding]:
        """Return what the curves show by now."""
        num_last = max(self._place.num_first, len(self._blocks) // 4)
        if len(self._blocks) < num_last or len(self.weights) < 2:
            return []
        first, last = np.array(self._first), np.array(self._blocks[-num_last:])
        changes = list(map(_change, first.T, last.T))
        reward, functions = changes[0], dict(zip(self.weights, changes[1:], strict=True))
        return [*self._hacked(reward, functions), *self._fallen(functions)]

    def _hacked(self, reward: Change, functions: Mapping[str, Change]) -> Iterator[Finding]:
        """Find that the reward has risen, and the function that decides who passes has no part in it."""
        parts = {name: self.weights[name] * change.size for name, change in functions.items()}
        others = {name: part for name, part in parts.items() if name != self.passes.reward and part > 0}
        if not others or not reward.is_certain(+1) or not self._has_no_part(functions[self.passes.reward], reward):
            return
        named = [name for name in others if others[name] >= NAMED_SHARE * reward.size]
        named = named or [max(others, key=lambda name: others[name])]
        gave = _listed([f"`{name}` ({functions[name]})" for name in named])
        yield Finding(
            f"reward hacking{self._place.label}",
            " and ".join(named),
            f"The reward{self._place.where} rose {reward} in {self.num_rows} {self._place.rows} by {gave}, and not by "
            f"`{self.passes.reward}`, which decides pass@1: it {_course(functions[self.passes.reward])}. Weigh "
            f"{_listed([f'`{name}`' for name in named])} less, or let it pay only where `{self.passes.reward}` does.",
        )

    def _has_no_part(self, decides: Change, reward: Change) -> bool:
        """Whether the function that decides who passes has not risen, as far as noise lets it be seen, and could have.

        One with weight 0 is taken as if it weighed as much as the heaviest.
        """
        weight = abs(self.weights[self.passes.reward]) or max(map(abs, self.weights.values()))
        most = decides.size + DOUBTFUL * decides.error
        may_have_risen = decides.size > DOUBTFUL * decides.error or weight * most >= LEAST_SHARE * reward.size
        return not (may_have_risen or self._is_at_ceiling(decides) or math.isnan(most))

    def _is_at_ceiling(self, decides: Change) -> bool:
        threshold = self.passes.threshold
        return decides.last >= threshold - (1 - CEILING) * abs(threshold)

    def _fallen(self, functions: Mapping[str, Change]) -> Iterator[Finding]:
        """Find that one function has fallen while another rose."""
        signs = {name: math.copysign(1.0, self.weights[name]) for name in functions}
        counts = [name for name, weight in self.weights.items() if weight or name == self.passes.reward]
        rose = [name for name in counts if functions[name].is_certain(signs[name])]
        fell = [name for name in counts if functions[name].is_certain(-signs[name])]
        if rose and fell:
            down, up = ([self._moved(name, functions[name]) for name in names] for names in (fell, rose))
            yield Finding(
                f"rewards part{self._place.label}",
                " and ".join(fell),
                f"{_listed(down)}{self._place.where} in {self.num_rows} {self._place.rows}, while {_listed(up)}. If "
                f"{_listed([f'`{name}`' for name in fell])} matters, weigh it more.",
            )

    def _moved(self, name: str, change: Change) -> str:
        weight = self.weights[name]
        weighed = "" if weight >= 0 else f", whose weight is {weight:g},"
        return f"`{name}`{weighed} {'rose' if change.size > 0 else 'fell'} {change}"


def _change(first: np.ndarray, last: np.ndarray) -> Change:
    """Compare the means of two stretches of a curve; NaN where either has fewer than half of its values."""
    means, variances = [], []
    for values in (first, last):
        there = values[np.isfinite(values)]
        enough = len(there) >= max(len(values) / 2, 2)
        means.append(float(there.mean()) if enough else math.nan)
        variances.append(float(there.var(ddof=1)) / len(there) if enough else math.nan)
    return Change(means[0], means[1], math.sqrt(sum(variances)))


def _means(rows: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean of each column, over the values that are there."""
    columns = [[value for value in column if math.isfinite(value)] for column in zip(*rows, strict=True)]
    return [sum(column) / len(column) if column else math.nan for column in columns]


def _course(change: Change) -> str:
    """Say how a function went that has not risen."""
    if change.is_certain(-1):
        return f"fell {change}"
    if f"{change.first:.3g}" == f"{change.last:.3g}":
        return f"stayed at {change.last:.3g}"
    return f"went {change}, which may be noise"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
