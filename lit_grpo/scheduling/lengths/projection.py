"""Hidden states brought down to a few columns."""

from __future__ import annotations

from functools import lru_cache

import numpy as np


class Projection:
    """A fixed random projection (Johnson-Lindenstrauss, with the signs of Achlioptas 2003) of all but the last columns.

    The first rows seen set the scale of each column once and for all: its root mean square, or the median of those of
    all columns where that is larger. So a few outlying dimensions do not drown the others.

    Args:
        num_columns: How many columns are left at most, the scalars among them. What has no more is not projected.
        num_scalars: The last so many columns are passed on as they are.
    """

    def __init__(self, num_columns: int, num_scalars: int) -> None:
        self.num_columns, self.num_scalars = num_columns, num_scalars
        self.scale = np.empty(0)

    def __call__(self, features: np.ndarray) -> np.ndarray:
        """Project finite ``features``, shape (n, D); return float32, shape (n, at most ``num_columns``)."""
        if not len(self.scale):
            sizes = np.sqrt(np.square(features, dtype=np.float64).mean(0))
            self.scale = np.maximum(np.maximum(sizes, np.median(sizes)), 1e-30)
        if features.shape[1] != len(self.scale):
            raise ValueError(
                f"features has {features.shape[1]} columns, but those before had {len(self.scale)}; "
                "one predictor takes the features of one policy."
            )
        if features.shape[1] <= self.num_columns:
            return features.astype(np.float32)
        hidden = features.shape[1] - self.num_scalars
        matrix = _signs(hidden, self.num_columns - self.num_scalars) / np.float32(np.sqrt(hidden))
        projected = (features[:, :hidden] / self.scale[:hidden]).astype(np.float32) @ matrix
        return np.concatenate([projected, features[:, hidden:]], axis=1, dtype=np.float32)


@lru_cache(maxsize=1)
def _signs(*shape: int) -> np.ndarray:
    """-1 and 1 at random, float32; the stream is the same in every numpy."""
    return (2 * np.random.RandomState(0).randint(0, 2, shape) - 1).astype(np.float32)
