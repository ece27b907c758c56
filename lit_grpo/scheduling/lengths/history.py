"""What completions of one prompt say of its others: those of earlier visits, and those under way."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

LAST_VISIT = 0.5  # the weight of all earlier visits, at each new one
VARIANCE_COUNT = 4  # completions as which all prompts count in what is said of the variance of one
FORETOLD_COUNT = 0.3  # completions as which what was foretold of a new prompt counts, beside its siblings


class PromptHistory:
    """Number, mean and variance of the log lengths of each prompt's completions, the latest visit weighing most.

    Args:
        capacity: How many prompts are remembered; the one not seen for the longest time goes first.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.prompts: dict[str, list[float]] = {}

    def known(self, prompt_ids: Sequence[str]) -> np.ndarray:
        """Return number, mean and variance of each prompt, shape (n, 3); zeros where it is new."""
        return np.array([self.prompts.get(prompt_id, (0.0, 0.0, 0.0)) for prompt_id in prompt_ids]).reshape(-1, 3)

    def learn(self, prompt_ids: Sequence[str], visit: np.ndarray) -> None:
        """Take number, mean and variance of a visit, shape (prompts, 3); those that had no completion are left out."""
        earlier = self.known(prompt_ids)
        counts = visit[:, :1] + LAST_VISIT * earlier[:, :1]
        mixed = earlier + (visit - earlier) * visit[:, :1] / np.maximum(counts, 1)
        mixed[:, :1] = counts
        for prompt_id, row, new in zip(prompt_ids, mixed.tolist(), visit[:, 0].tolist(), strict=True):
            if new:
                self.prompts.pop(prompt_id, None)
                self.prompts[prompt_id] = row
        self.forget()

    def forget(self) -> None:
        """Forget prompts beyond the capacity."""
        for prompt_id in list(self.prompts)[: max(len(self.prompts) - self.capacity, 0)]:
            del self.prompts[prompt_id]


def scales(number: np.ndarray, variance: np.ndarray, within: float) -> np.ndarray:
    """Return the errors to be expected of prompts, in half powers of 2 from 1/4 to 2; 1 of those that are new."""
    mixed = (number * variance + VARIANCE_COUNT * within) / (number + VARIANCE_COUNT)
    return np.where(number > 0, np.exp2(np.round(np.log2(np.clip(mixed, 1 / 16, 4))) / 2), 1.0)


def sibling_shifts(jobs: np.ndarray, within: float) -> np.ndarray:
    """Return how much longer, in log, each job that waits is to be than ``before`` says, by what its group has done.

    Those that finish first are the short ones, so their mean would mislead. The ratio of a length to its prediction is
    taken to be Weibull, its log of the variance ``within`` groups: a power of it is exponential, with the censored
    maximum likelihood mean of all exposure over the number of those that ended by themselves (Lawless 2003, section
    4.1). Completions that did as foretold are added to both, the more the more is known of the prompt's past.
    """
    shape = float(np.clip(np.pi / np.sqrt(6 * max(within, 1e-6)), 0.5, 5.0))
    with np.errstate(divide="ignore"):
        ratio = np.clip(np.log(jobs["decoded"]) - jobs["before"], -20, 5)
    exposure = np.nan_to_num(np.exp(shape * ratio - np.euler_gamma))  # the log of an exponential variable is -gamma
    ended = (jobs["total"] > 0) & (jobs["total"] < jobs["limit"])
    exposures, endings = (np.bincount(jobs["group"], each)[jobs["group"]] for each in (exposure, ended))
    prior = FORETOLD_COUNT * (1 + jobs["number"])
    return np.where(jobs["decoded"] == 0, np.log((prior + exposures) / (prior + endings)) / shape, 0.0)
