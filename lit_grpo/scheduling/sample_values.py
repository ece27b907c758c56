"""A number for each completion of a rollout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from lit_grpo.scheduling.jobs import Key


class SampleValues(Mapping[Key, float]):
    """Numbers by completion, 8 bytes each; those of a group's first sample, its second and so on.

    Args:
        groups: ``(prompt_id, visit)`` of each group.
        values_PG: Float64, a row a group and a column a sample.
    """

    def __init__(self, groups: Sequence[tuple[str, int]], values_PG: np.ndarray) -> None:
        self._rows = {group: row for row, group in enumerate(groups)}
        self._values_PG = values_PG

    def __getitem__(self, key: Key) -> float:
        row = self._rows[key[:2]]
        if not 0 <= key[2] < self._values_PG.shape[1]:
            raise KeyError(key)
        return float(self._values_PG[row, key[2]])

    def __len__(self) -> int:
        return self._values_PG.size

    def __iter__(self) -> Iterator[Key]:
        num_samples = self._values_PG.shape[1]
        return ((*group, sample_id) for group in self._rows for sample_id in range(num_samples))
