"""The jobs of one rollout, as columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from lit_grpo.scheduling.jobs import Job
from lit_grpo.types import Key

BEFORE = -1  # the point of a prediction from the prompt's history alone

_FILLS = {
    ("decoded", "total", "start", "shift", "history"): 0,
    ("point", "seen"): BEFORE,
    ("mu", "mu_before", "said"): np.nan,
}


class JobTable:
    """What is known of each job of a rollout; one row a job, in the order in which they were added.

    ``mu`` is the predicted log of the tokens after the first ``start``, made at the ``point`` with that number
    (``BEFORE``, or an index into the predictor's points); NaN where nothing could be predicted. ``mu_before`` is the
    latest made before the first token, and ``shift`` what siblings have added to it. ``total`` is 0 until the job has
    finished. ``history``, shape (jobs, 3), is that of :meth:`PromptHistory.columns`; ``said``, shape (jobs,
    num_said), holds the totals that were foretold, to be judged later.
    """

    def __init__(self, num_said: int) -> None:
        self.prompt_ids: list[str] = []  # one a group
        self._rows: dict[Key, int] = {}
        self._groups: dict[tuple[str, int], int] = {}
        self.group, self.rank, self.limit, self.decoded, self.total, self.start = np.zeros((6, 0), dtype=np.int64)
        self.point, self.seen = np.zeros((2, 0), dtype=np.int64)
        self.mu, self.mu_before, self.shift = np.zeros((3, 0))
        self.history, self.said = np.zeros((0, 3)), np.zeros((0, num_said))

    def __len__(self) -> int:
        """Return the number of jobs."""
        return len(self._rows)

    @property
    def num_groups(self) -> int:
        """How many groups the jobs are of."""
        return len(self._groups)

    def add(self, jobs: Iterable[Job]) -> np.ndarray:
        """Take jobs that are not yet there; return their rows."""
        new = list({job.key: job for job in jobs if job.key not in self._rows}.values())
        rows = np.arange(len(self), len(self) + len(new))
        groups = np.array([self._group(job) for job in new], dtype=np.int64)
        self._rows.update(zip([job.key for job in new], rows.tolist(), strict=True))
        self.group = np.concatenate([self.group, groups])
        self.rank = _ranks(self.group)
        self.limit = np.concatenate([self.limit, [job.max_tokens for job in new]]).astype(np.int64)
        for names, fill in _FILLS.items():
            for name in names:
                setattr(self, name, _longer(getattr(self, name), len(new), fill))
        return rows

    def rows(self, keys: Sequence[Key]) -> np.ndarray:
        """Return the rows of jobs by their keys.

        Raises:
            ValueError: A job has not been added.
        """
        try:
            return np.fromiter(map(self._rows.__getitem__, keys), dtype=np.int64, count=len(keys))
        except KeyError as error:
            raise ValueError(
                f"The predictor does not know the job {error.args[0]!r}; give it to begin() first."
            ) from None

    def predict(self, rows: np.ndarray, point: int, start: int, mu: np.ndarray) -> None:
        """Note the predicted logs of the tokens after the first ``start``."""
        self.point[rows], self.start[rows], self.mu[rows] = point, start, mu
        if start == 0:
            self.mu_before[rows] = mu

    def _group(self, job: Job) -> int:
        number = self._groups.setdefault(job.group, len(self._groups))
        if number == len(self.prompt_ids):
            self.prompt_ids.append(job.group[0])
        return number


def _longer(values: np.ndarray, count: int, fill: float) -> np.ndarray:
    return np.concatenate([values, np.full((count, *values.shape[1:]), fill, dtype=values.dtype)])


def _ranks(groups: np.ndarray) -> np.ndarray:
    """Return how many rows of the same group come before each row."""
    order = np.argsort(groups, kind="stable")
    starts = np.searchsorted(groups[order], groups[order])
    ranks = np.empty(len(groups), dtype=np.int64)
    ranks[order] = np.arange(len(groups)) - starts
    return ranks
