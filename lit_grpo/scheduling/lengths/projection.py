"""Hidden states of thousands of dimensions, brought down to a few."""

from __future__ import annotations

from typing import Any

import numpy as np


class FeatureProjection:
    """A fixed random projection (Johnson-Lindenstrauss, with the signs of Achlioptas 2003) of all but the last columns.

    The first rows seen set the scale of each column once and for all: its root mean square, or the median of those of
    all columns where that is larger. So a few outlying dimensions do not drown the others.

    Args:
        num_columns: How many columns are left at most, the scalars among them. What has no more is not projected.
        num_scalars: The last so many columns are passed on as they are.
        seed: Decides the projection.
    """

    def __init__(self, num_columns: int, num_scalars: int, seed: int) -> None:
        self.num_columns, self.num_scalars, self.seed = num_columns, num_scalars, seed
        self._scale = np.empty(0)
        self._matrix = np.empty((0, 0), dtype=np.float32)

    def __call__(self, features: np.ndarray) -> np.ndarray:
        """Project finite ``features``, shape (n, D); return float32, shape (n, at most ``num_columns``)."""
        if not len(self._scale):
            sizes = np.sqrt(np.square(features, dtype=np.float64).mean(0))
            self._prepare(np.maximum(np.maximum(sizes, np.median(sizes)), 1e-30))
        if features.shape[1] != len(self._scale):
            raise ValueError(
                f"features has {features.shape[1]} columns, but those before had {len(self._scale)}; "
                "one predictor takes the features of one policy."
            )
        if len(self._scale) <= self.num_columns:
            return features.astype(np.float32)
        hidden = features.shape[1] - self.num_scalars
        projected = (features[:, :hidden] / self._scale[:hidden]).astype(np.float32) @ self._matrix
        return np.concatenate([projected, features[:, hidden:]], axis=1, dtype=np.float32)

    def state_dict(self) -> dict[str, Any]:
        """Return the scales as a list; the projection follows from the seed."""
        return {"scale": self._scale.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what ``state_dict`` returned."""
        self._prepare(np.array(state["scale"], dtype=np.float64))

    def _prepare(self, scale: np.ndarray) -> None:
        self._scale = scale
        if len(scale) > self.num_columns:
            shape = len(scale) - self.num_scalars, self.num_columns - self.num_scalars
            signs = np.random.RandomState(self.seed).randint(0, 2, shape)  # its stream is the same in every numpy
            self._matrix = ((2 * signs - 1) / np.sqrt(shape[0])).astype(np.float32)
