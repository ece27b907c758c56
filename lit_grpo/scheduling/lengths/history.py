"""What completions of one prompt say of its others: those of earlier visits, and those under way."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from lit_grpo.scheduling.lengths.model import FORGETTING

LAST_VISIT = 0.5  # the weight of all earlier visits, at each new one
MEAN_COUNT, VARIANCE_COUNT = 1, 4  # completions as which all prompts count in what is said of one
FORETOLD_COUNT = 0.3  # completions as which what was foretold of a new prompt counts, beside its siblings
SMALLEST_SCALE, LARGEST_SCALE = 0.25, 2.0


class PromptHistory:
    """Mean and variance of the log lengths of each prompt's completions, the latest visit weighing most.

    Args:
        capacity: How many prompts are remembered; the one not seen for the longest time goes first.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._prompts: OrderedDict[str, tuple[float, float, float]] = (
            OrderedDict()
        )  # number, mean, variance; forgetting
        # of all prompts, forgetting: number and sum of log lengths, squares within groups and their degrees of freedom
        self._all = np.zeros(4)

    @property
    def within(self) -> float:
        """The variance of log lengths within a group, of all prompts."""
        return float(self._all[2] / self._all[3]) if self._all[3] else 1.0

    def columns(self, prompt_ids: Sequence[str]) -> np.ndarray:
        """Return what is known of each prompt, shape (n, 3).

        Returns:
            The mean of its log lengths, drawn to that of all prompts, NaN as long as nothing has been learnt; the
            weight that its own past has in this, 0 where it has none; and the error to be expected, rounded to half
            powers of 2, or 1 where it has no past.
        """
        known = np.array([self._prompts.get(prompt_id, (0.0, 0.0, 0.0)) for prompt_id in prompt_ids]).reshape(-1, 3)
        number, mean, variance = known.T
        weight = number / (number + MEAN_COUNT)
        overall = self._all[1] / self._all[0] if self._all[0] else np.nan
        scale = np.sqrt((number * variance + VARIANCE_COUNT * self.within) / (number + VARIANCE_COUNT))
        scale = np.exp2(np.round(2 * np.log2(np.clip(scale, SMALLEST_SCALE, LARGEST_SCALE))) / 2)
        return np.column_stack([overall + weight * (mean - overall), weight, np.where(number > 0, scale, 1.0)])

    def learn(self, prompt_ids: Sequence[str], logs: np.ndarray, groups: np.ndarray) -> None:
        """Take the log lengths, shape (n,), of a rollout; ``groups`` says which of ``prompt_ids`` each is of."""
        count, total, squares = (np.bincount(groups, logs**power, minlength=len(prompt_ids)) for power in range(3))
        there = np.maximum(count, 1)
        mean, variance = total / there, np.maximum(squares / there - (total / there) ** 2, 0.0)
        sums = count.sum(), total.sum(), (count * variance).sum(), count.sum() - (count > 0).sum()
        self._all = FORGETTING * self._all + sums
        for prompt_id, *new in zip(prompt_ids, count.tolist(), mean.tolist(), variance.tolist(), strict=True):
            if new[0]:
                number, *old = self._prompts.pop(prompt_id, (0.0, 0.0, 0.0))
                share = new[0] / (LAST_VISIT * number + new[0])
                mixed = [share * now + (1 - share) * before for now, before in zip(new[1:], old, strict=True)]
                self._prompts[prompt_id] = (LAST_VISIT * number + new[0], mixed[0], mixed[1])
        while len(self._prompts) > self.capacity:
            self._prompts.popitem(last=False)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain lists."""
        return {"prompts": [[name, *known] for name, known in self._prompts.items()], "all": self._all.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what ``state_dict`` returned."""
        kept = state["prompts"][-self.capacity :] if self.capacity else []
        self._prompts = OrderedDict((name, (number, mean, variance)) for name, number, mean, variance in kept)
        self._all = np.array(state["all"])


def sibling_shifts(jobs: np.ndarray, within: float) -> np.ndarray:
    """Return how much longer, in log, each job that waits is to be than ``before`` says, by what its group has done.

    Those that finish first are the short ones, so their mean would mislead. The ratio of a length to its prediction is
    taken to be Weibull, of a shape such that its log has the variance that lies ``within`` groups. A power of it is
    then exponential, and its mean has a maximum likelihood estimate under censoring: all exposure, that of completions
    still running or cut off at their limit included, over the number of those that ended by themselves (Lawless 2003,
    section 4.1). Added to both are completions that did as foretold, the more the more is known of the prompt's past.
    A job that is being decoded is corrected by what it has itself lasted, and not by this.

    Args:
        jobs: The jobs of a :class:`JobTable`.
        within: The variance of log lengths within a group.
    """
    shape = float(np.clip(np.pi / np.sqrt(6 * max(within, 1e-6)), 0.5, 5.0))
    lasted = np.where(jobs["total"] > 0, jobs["total"], jobs["decoded"])
    with np.errstate(divide="ignore"):
        ratio = np.clip(np.log(lasted) - jobs["before"], -20, 5)
    exposure = np.nan_to_num(np.exp(shape * ratio - np.euler_gamma))  # the log of an exponential variable is -gamma
    ended = (jobs["total"] > 0) & (jobs["total"] < jobs["limit"])
    exposures, endings = (np.bincount(jobs["group"], each)[jobs["group"]] for each in (exposure, ended))
    prior = FORETOLD_COUNT / (1 - jobs["weight"])
    return np.where(jobs["decoded"] == 0, np.log((prior + exposures) / (prior + endings)) / shape, 0.0)
