"""What completions of one prompt say of its others: those of earlier visits, and those under way."""

from __future__ import annotations

import numpy as np

VARIANCE_COUNT = 4  # completions as which all prompts count in what is said of the variance of one
FORETOLD_COUNT = 0.3  # completions as which what was foretold of a new prompt counts, beside its siblings


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
