"""The jobs of one rollout, as columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from lit_grpo.scheduling.jobs import Job
from lit_grpo.types import GroupKey, Key


class JobTable:
    """What is known of each job of a rollout; one row a job, in the order in which they were added.

    ``jobs`` is a structured array. Its ``mu`` is the predicted log of the tokens after the first ``start``, made by
    the ``model`` of that number; NaN where nothing could be predicted. ``before`` and ``base`` are the latest ``mu``
    and ``model`` from before the first token, and ``shift`` what siblings add to that. ``seen`` is the latest stage at
    which the job was looked at, ``total`` 0 until it has finished. ``prior``, ``weight`` and ``scale`` are the columns
    of the prompt's history, and ``said``, one for each start, the totals foretold, to be judged later.
    """

    def __init__(self, num_said: int) -> None:
        self.prompt_ids: list[str] = []  # one a group
        self._rows: dict[Key, int] = {}
        self._groups: dict[GroupKey, int] = {}
        counts = [(name, np.int64) for name in ("group", "limit", "decoded", "total", "seen", "start", "model", "base")]
        logs = [(name, np.float64) for name in ("mu", "before", "shift", "prior", "weight", "scale")]
        self.jobs = np.zeros(0, dtype=[*counts, *logs, ("said", np.float64, (num_said,))])

    def __len__(self) -> int:
        """Return the number of jobs."""
        return len(self.jobs)

    def add(self, jobs: Iterable[Job]) -> np.ndarray:
        """Take jobs that are not yet there; return their rows."""
        new = list({job.key: job for job in jobs if job.key not in self._rows}.values())
        added = np.zeros(len(new), dtype=self.jobs.dtype)
        added["group"] = [self._group(job) for job in new]
        added["limit"] = [job.max_tokens for job in new]
        added["seen"] = -1
        for name in ("mu", "before", "said"):
            added[name] = np.nan
        rows = np.arange(len(self), len(self) + len(new))
        self._rows.update(zip([job.key for job in new], rows.tolist(), strict=True))
        self.jobs = np.concatenate([self.jobs, added])
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

    def ranks(self) -> np.ndarray:
        """Return how many rows of the same group come before each row."""
        groups = self.jobs["group"]
        order = np.argsort(groups, kind="stable")
        ranks = np.empty(len(self), dtype=np.int64)
        ranks[order] = np.arange(len(self)) - np.searchsorted(groups[order], groups[order])
        return ranks

    def _group(self, job: Job) -> int:
        number = self._groups.setdefault(job.group, len(self._groups))
        if number == len(self.prompt_ids):
            self.prompt_ids.append(job.group[0])
        return number
