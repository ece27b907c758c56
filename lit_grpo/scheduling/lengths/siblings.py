"""What completions of a prompt that are under way say of its others."""

from __future__ import annotations

from typing import Any

import numpy as np

from lit_grpo.scheduling.lengths.history import Spread
from lit_grpo.scheduling.lengths.table import JobTable


class Siblings:
    """Corrects predicted lengths by what the group has done so far in the rollout.

    Those that finish first are the short ones, so their mean would mislead. The ratio of a length to its prediction is
    taken to be Weibull with a known shape. A power of it is then exponential, and its mean has a maximum likelihood
    estimate under censoring: all exposure, that of completions still running or cut off at their limit included,
    over the number of those that ended by themselves (Lawless 2003, section 4.1). Completions that did as foretold
    are added to both, as many as the variance within groups is larger than that between them.

    Args:
        forgetting: The weight of older rollouts in these variances.
    """

    def __init__(self, forgetting: float) -> None:
        self.spread = Spread(forgetting)
        self._powers = np.zeros(2)  # of ratio to prediction: sum and number

    def learn(self, residuals: np.ndarray, groups: np.ndarray) -> None:
        """Take logs of length over predicted length, shape (n,), and the number of the group of each."""
        self.spread.add(residuals, groups)
        counts = np.bincount(groups)[groups]
        within = residuals - (np.bincount(groups, residuals) / np.maximum(np.bincount(groups), 1))[groups]
        within = (within * np.sqrt(counts / np.maximum(counts - 1, 1)))[counts > 1]
        self._powers = self.spread.forgetting * self._powers + (np.exp(self._shape * within).sum(), len(within))

    def shifts(self, table: JobTable) -> np.ndarray:
        """Return how much longer, in log, each job of the table is to be than ``mu_before`` says."""
        shape = self._shape
        mean_power = self._powers[0] / self._powers[1] if self._powers[1] else np.exp(np.euler_gamma)
        lasted = np.where(table.total > 0, table.total, table.decoded)
        with np.errstate(divide="ignore"):
            ratio = np.clip(np.log(lasted) - table.mu_before, -20, 5)
        exposure = np.nan_to_num(np.exp(shape * ratio)) / mean_power
        ended = ((table.total > 0) & (table.total < table.limit)).astype(np.float64)
        exposures = np.bincount(table.group, exposure, minlength=table.num_groups)[table.group]
        endings = np.bincount(table.group, ended, minlength=table.num_groups)[table.group]
        prior = self.spread.pseudo_count
        # what a job itself has lasted is left out: it is conditioned on anyway
        return np.log((prior + exposures - exposure) / (prior + endings - ended)) / shape

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain lists."""
        return {"spread": self.spread.sums.tolist(), "powers": self._powers.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what ``state_dict`` returned."""
        self.spread.sums, self._powers = np.array(state["spread"]), np.array(state["powers"])

    @property
    def _shape(self) -> float:
        """Shape of the Weibull distribution whose log has the variance that lies within groups."""
        return float(np.clip(np.pi / np.sqrt(6 * max(self.spread.within, 1e-6)), 0.5, 5.0))
