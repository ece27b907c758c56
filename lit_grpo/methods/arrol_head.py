"""Prediction of a completion's success from the policy's hidden states midway, fitted online."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from lit_grpo.scheduling.lengths import FORGETTING, Projection, Ridge

NUM_COLUMNS, NUM_SCALARS = 256, 2  # of features, after their projection; mean log-prob and entropy among them
BETWEEN = 100.0  # rows as which what lies between groups counts: all of it, for a group's balance needs it
NUM_BINS = 20  # of scores from 0 to 1
PRIOR_COUNT = 2.0  # completions as which a bin's own place counts in what is said of it
WINDOW = 128  # groups that quality is taken from
MIN_AUC = 0.6  # from which on the head is followed


class QualityHead:
    """Predicts the chance of success of completions from features at one number of tokens.

    A ridge regression that forgets (that of predicted lengths, :class:`Ridge`) gives scores. Scores fall into
    bins, and a chance is the share of successes in the bin so far, of completions that were scored before they were
    learnt from, with a beta prior of the weight of two completions at the bin's middle; chances rise with the score
    (:func:`rising`). Completions that ended before they were observed have a bin of their own.

    ``proven`` is whether chances predicted for the last ``WINDOW`` groups that lost nobody have told successes from
    failures of one group: with an AUC of at least ``MIN_AUC``, and of two standard errors above chance.
    """

    def __init__(self) -> None:
        self.proven = False
        self._projection, self._model = Projection(NUM_COLUMNS, NUM_SCALARS), Ridge(BETWEEN)
        self._bins = np.zeros((NUM_BINS + 1, 2))  # number and successes, forgetting; the last is of early ends
        self._judged = np.empty((0, 3))  # rows of chance, success, number of the group
        self._num_groups = 0

    @property
    def has_learnt(self) -> bool:
        """Whether there has been anything to learn from."""
        return len(self._model.moments) > 0

    @property
    def early_chance(self) -> float:
        """The chance of a completion that ended before it could be observed."""
        return float(self._posterior[-1])

    @property
    def _posterior(self) -> np.ndarray:
        centres = np.append((np.arange(NUM_BINS) + 0.5) / NUM_BINS, 0.5)
        counts = self._bins[:, 0] + PRIOR_COUNT
        shares = (self._bins[:, 1] + PRIOR_COUNT * centres) / counts
        return np.append(rising(shares[:-1], counts[:-1]), shares[-1])

    def chances(self, features: np.ndarray) -> np.ndarray:
        """Return chances of success, shape (n,), for finite ``features``, shape (n, D); 0.5 before it has learnt."""
        if not (self.has_learnt and len(features)):
            return np.full(len(features), 0.5)
        return self._posterior[self._bins_of(self._projection(features))]

    def learn(
        self, features: np.ndarray, successes: np.ndarray, groups: np.ndarray, whole: np.ndarray, early: np.ndarray
    ) -> None:
        """Take what became of a rollout.

        Args:
            features: Of completions that were observed, finite, shape (n, D).
            successes: 1 where they succeeded, else 0, shape (n,).
            groups: A number of the group that each is in, from 0, shape (n,).
            whole: Whether the group lost nobody, shape (n,); only then does a row say how good the head is.
            early: Successes of completions that ended before they could be observed, shape (m,).
        """
        self._bins *= FORGETTING
        self._bins[-1] += len(early), early.sum()
        if not len(features):
            return
        x = self._projection(features)
        if self.has_learnt:
            bins = self._bins_of(x)
            said = np.column_stack([self._posterior[bins], successes, groups + self._num_groups])
            self._judge(said[whole.astype(bool)])
            np.add.at(self._bins, bins, np.column_stack([np.ones(len(bins)), successes]))
        self._model.learn(x.astype(np.float64), successes.astype(np.float64), groups)
        self._num_groups += int(groups.max()) + 1

    def metrics(self) -> dict[str, float]:
        """Return whether the head is followed, and how good it was on fresh groups of late, where there were any."""
        figures = {"pruning/active": float(self.proven)}
        said, came, groups = self._judged.T
        if len(said):
            figures["pruning/auc"] = within_auc(said, came, groups)[0]
            figures["pruning/calibration_error"] = calibration_error(said, came)
        return figures

    def state_dict(self) -> dict[str, Any]:
        """Return what has been learnt as plain values."""
        return {
            "scale": self._projection.scale.tolist(),
            "model": self._model.state_dict(),
            "bins": self._bins.tolist(),
            "judged": self._judged.tolist(),
            "num_groups": self._num_groups,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what ``state_dict`` returned."""
        self._projection.scale = np.array(state["scale"], dtype=np.float64)
        self._model.load_state_dict(state["model"])
        self._bins, self._num_groups = np.array(state["bins"]), state["num_groups"]
        self._judged = np.empty((0, 3))
        self._judge(np.array(state["judged"], dtype=np.float64).reshape(-1, 3))

    def _bins_of(self, x: np.ndarray) -> np.ndarray:
        scores = self._model.predict(x.astype(np.float64))
        return np.clip((scores * NUM_BINS).astype(np.int64), 0, NUM_BINS - 1)

    def _judge(self, rows: np.ndarray) -> None:
        """Add rows of fresh groups, and decide whether the head is followed."""
        judged = np.concatenate([self._judged, rows])
        groups = np.unique(judged[:, 2])
        self._judged = judged[np.isin(judged[:, 2], groups[-WINDOW:])]
        auc, error = within_auc(*self._judged.T)
        self.proven = auc >= max(MIN_AUC, 0.5 + 2 * error)


def rising(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the nearest values that nowhere fall, in weighted squares, all of shape (n,), by pooling neighbours."""
    pools: list[tuple[float, float, int]] = []  # value, weight, and how many it stands for
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        count = 1
        while pools and pools[-1][0] >= value:
            before, its_weight, its_count = pools.pop()
            value = (value * weight + before * its_weight) / (weight + its_weight)
            weight, count = weight + its_weight, count + its_count
        pools.append((value, weight, count))
    return np.repeat([value for value, _, _ in pools], [count for _, _, count in pools])


def within_auc(chances: np.ndarray, successes: np.ndarray, groups: np.ndarray) -> tuple[float, float]:
    """Return how often, of a success and a failure of one group, the success had the larger chance, ties half.

    All have the shape (n,). The second figure is the standard error by which it is off 0.5 by chance (Mann and Whitney
    1947, added up over groups). Without a pair it is 0.5, with an infinite error.
    """
    won = num_pairs = variance = 0.0
    for group in np.unique(groups):
        mine = groups == group
        gaps = chances[mine & (successes > 0)][:, None] - chances[mine & (successes <= 0)]
        won += (gaps > 0).sum() + (gaps == 0).sum() / 2
        num_pairs += gaps.size
        variance += gaps.size * (mine.sum() + 1) / 12
    return (float(won / num_pairs), math.sqrt(variance) / num_pairs) if num_pairs else (0.5, math.inf)


def calibration_error(chances: np.ndarray, successes: np.ndarray) -> float:
    """Return how far chances are off the share of successes, in the mean over chances, by bins of them.

    Both have the shape (n,). It is the expected calibration error (Naeini et al. 2015).
    """
    bins = np.clip((chances * NUM_BINS).astype(np.int64), 0, NUM_BINS - 1)
    return float(np.abs(np.bincount(bins, chances - successes)).sum() / len(chances))
