"""Training on several data sets at once: where the rows come from, and how often each data set is drawn."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np

from lit_grpo.data.sources import HubRows, Row, RowSource, make_source
from lit_grpo.limits import LARGEST, Count, Limit, check_fields

DATASET = "dataset"
"""Column that names the data set of a row."""


class Mixture(RowSource):
    """Rows of several sources, one source after another, each row with the name of its data set in column ``dataset``.

    Example:
        Two files, whose columns have other names, as the data sets ``sums`` and ``puzzles``::

            data:
              train:
                class_path: lit_grpo.data.Mixture
                init_args:
                  sources: {sums: sums.jsonl, puzzles: puzzles.jsonl}
                  columns: {puzzles: {prompt: question, answer: solution}}

    Args:
        sources: By the name of the data set, a source as for ``data.train``, or the arguments of
            :class:`lit_grpo.data.HubRows` (``path``, ``name``, ``split``, ``revision``).
        columns: By the name of the data set, new names of its columns, as for ``data.columns``, but for prompts too.

    Raises:
        ValueError: There is no source, one cannot be read, or ``columns`` names another data set.
    """

    names_datasets = True

    def __init__(
        self,
        sources: dict[str, RowSource | dict[str, Any] | str],
        columns: dict[str, dict[str, str]] | None = None,
    ) -> None:
        if not sources:
            raise ValueError("Mixture has no sources; give each data set a name and a source.")
        self._columns = columns or {}
        if unknown := self._columns.keys() - sources.keys():
            raise ValueError(
                f"columns of the Mixture names {min(unknown)!r}, which is none of its data sets {', '.join(sources)}."
            )
        self._sources: dict[str, RowSource] = {}
        for name, given in sources.items():
            try:
                self._sources[name] = HubRows(**given) if isinstance(given, Mapping) else make_source(given)
            except (TypeError, ValueError) as error:
                raise ValueError(f"data set {name!r} of the Mixture: {error}") from error

    def rows(self) -> Iterator[Row]:
        for name, source in self._sources.items():
            columns = self._columns.get(name, {})
            for number, row in enumerate(source.rows()):
                place = f"row {number} of {source.describe()} (data set {name!r})"
                if lacking := [column for column in columns.values() if column not in row]:
                    raise ValueError(
                        f"{place} lacks the column {lacking[0]!r}, which columns renames; it has "
                        f"{', '.join(map(repr, row)) or 'none'}."
                    )
                if row.get(DATASET, name) != name:
                    raise ValueError(
                        f"{place} has {row[DATASET]!r} in column {DATASET!r}, where the Mixture writes the name of the "
                        "data set; rename that column."
                    )
                kept = {column: value for column, value in row.items() if column not in columns.values()}
                yield kept | {new: row[old] for new, old in columns.items()} | {DATASET: name}

    def describe(self) -> str:
        return f"the Mixture of {', '.join(self._sources)}"


Weight = Annotated[float, Limit(ge=0, finite=True)]


@dataclass(frozen=True)
class MixtureWeights:
    """Frequencies of data sets. Every row of ``data`` names its data set in the column ``dataset``."""

    weights: dict[str, Weight] = field(default_factory=dict)
    """Weight of each data set: among n drawn prompts, n times the weight divided by the sum of the weights are of that
    data set, to within one prompt per data set. With 0 the data set is never sampled, only imitated by ``sft``. By
    default each data set has as many prompts per epoch as it has rows.
    """
    final_weights: dict[str, Weight] = field(default_factory=dict)
    """Weights after ``ramp_prompts``, if the mixture changes. The weights change linearly from ``weights`` to these."""
    ramp_prompts: Count | None = None
    """Number of drawn prompts, over all ranks, during which the weights change to ``final_weights``."""

    def __post_init__(self) -> None:
        check_fields(self, "data.mixture.")
        if bool(self.final_weights) != (self.ramp_prompts is not None):
            names = ("final_weights", "ramp_prompts")
            given, missing = names if self.final_weights else names[::-1]
            raise ValueError(f"data.mixture.{given} is set, but {missing} is not; set both, or leave both out.")
        if self.final_weights and self.final_weights.keys() != self.weights.keys():
            raise ValueError(
                f"data.mixture.weights names {', '.join(self.weights) or 'no data set'}, but final_weights names "
                f"{', '.join(self.final_weights)}; give both for the same data sets."
            )
        for name in ("weights", "final_weights"):
            weights = getattr(self, name)
            for dataset, weight in weights.items():
                if not isinstance(weight, int | float) or isinstance(weight, bool) or not 0 <= weight <= LARGEST:
                    raise ValueError(
                        f"data.mixture.{name} of {dataset!r} is {weight!r}; give a number from 0 to {LARGEST:,}."
                    )
            object.__setattr__(self, name, {dataset: float(weight) for dataset, weight in weights.items()})
            if weights and not sum(weights.values()):
                raise ValueError(f"data.mixture.{name} are all 0, so that no prompt would be drawn; give one above 0.")

    def check(self, datasets: Sequence[str]) -> None:
        """Check that each of the training prompts' data sets has a weight, and each weight a data set."""
        there = list(dict.fromkeys(datasets))
        if self.weights and set(there) != self.weights.keys():
            without = [name for name in there if name not in self.weights]
            unknown = [name for name in self.weights if name not in there]
            wrong = f"has no weight for {without[0]!r}" if without else f"names {unknown[0]!r}"
            raise ValueError(
                f"data.mixture.weights {wrong}; the data sets of data.train are {', '.join(map(repr, there))}, and "
                "each needs a weight (0 draws none of its prompts)."
            )

    @property
    def all(self) -> list[dict[str, float]]:
        return [self.weights, self.final_weights]

    def at(self, index: int) -> Mapping[str, float]:
        """Return the weights that hold for a prompt of the stream, by its index from 0."""
        if self.ramp_prompts is None:
            return self.weights
        part = min(index / self.ramp_prompts, 1.0)
        return {name: (1 - part) * first + part * self.final_weights[name] for name, first in self.weights.items()}


class MixtureOrder:
    """Order in which the prompts of weighted data sets are drawn; it depends on seed and weights alone.

    Which data set comes next is not random: each data set earns its share of every draw, and that with the most unspent
    share is drawn (smooth weighted round robin). So every stretch of the stream, such as a batch, has the wanted shares
    to within one prompt per data set. The rows of a data set come in epochs of their own, each in another order.

    Args:
        datasets: Data set of each prompt.
        weights: How often each data set is drawn.
        seed: Seed of the shuffling.
        shuffle: Whether each epoch of a data set is shuffled; otherwise it has the order of the prompts.
    """

    def __init__(self, datasets: Sequence[str], weights: MixtureWeights, seed: int, shuffle: bool) -> None:
        self._weights, self._seed, self._shuffle = weights, seed, shuffle
        self._names = list(weights.weights)
        self._rows = [np.flatnonzero(np.array(datasets, dtype=object) == name) for name in self._names]
        self._unspent = np.zeros(len(self._names))
        self._counts = [0] * len(self._names)
        self._drawn: tuple[array[int], array[int]] = (
            array("H"),
            array("Q"),
        )  # its data set, earlier draws of it
        self._orders: dict[int, tuple[int, np.ndarray]] = {}  # epoch of each data set that was asked for last

    def place(self, index: int) -> tuple[int, int]:
        """Return the prompt at an index of the stream: its row, and how often its data set has been gone through."""
        which, numbers = self._drawn
        while len(which) <= index:
            weights = np.array([*self._weights.at(len(which)).values()])
            self._unspent += weights / weights.sum()
            chosen = int(np.where(weights > 0, self._unspent, -np.inf).argmax())
            self._unspent[chosen] -= 1
            which.append(chosen)
            numbers.append(self._counts[chosen])
            self._counts[chosen] += 1
        dataset, rows = which[index], self._rows[which[index]]
        epoch, place = divmod(numbers[index], len(rows))
        if self._shuffle:
            if self._orders.get(dataset, (-1, rows))[0] != epoch:
                order = np.random.default_rng((self._seed, dataset, epoch)).permutation(len(rows))
                self._orders[dataset] = epoch, order
            place = self._orders[dataset][1][place]
        return int(rows[place]), epoch
