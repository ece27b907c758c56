"""What a rollout tells of lengths, in portions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from lit_grpo.rollout.generator import Observation
from lit_grpo.scheduling.jobs import Job, LearntLengths
from lit_grpo.types import GroupKey, Key, SamplePath

_PORTIONS = 4  # a rollout; each costs a millisecond or so, whatever it holds


class LengthReports:
    """Collects observations and ends of completions, and passes them on some at a time.

    Within a portion what was observed comes before what ended, so nothing is told of a completion after its end.

    Args:
        lengths: Who is told.
    """

    def __init__(self, lengths: LearntLengths) -> None:
        self._lengths = lengths
        self._num_jobs = 0
        self._samples: dict[GroupKey, list[SamplePath]] = {}  # by group
        self._observations: dict[int, list[Observation]] = {}
        self._finished: list[tuple[Job, int]] = []

    def add(self, jobs: Sequence[Job]) -> None:
        """Take further completions of the rollout."""
        self._num_jobs += len(jobs)
        for job in jobs:
            self._samples.setdefault(job.group, []).append(job.key[2])

    def observe(self, observation: Observation) -> None:
        """Note what the policy shows of some completions; what it shows of prompts is passed on for all of theirs.

        What it shows at other numbers of tokens than the lengths want to see is left out.
        """
        if observation.num_tokens not in self._lengths.points:
            return
        if not observation.num_tokens:
            samples = {key[:2]: self._samples[key[:2]] for key in observation.keys}
            features = np.repeat(observation.features, [len(ids) for ids in samples.values()], axis=0)
            self._lengths.observe([(*group, n) for group, ids in samples.items() for n in ids], 0, features)
            return
        self._observations.setdefault(observation.num_tokens, []).append(observation)

    def finish(self, job: Job, num_tokens: int, waiting: bool) -> None:
        """Note that a completion has ended; as long as others are ``waiting``, it will be asked how long they take."""
        self._finished.append((job, num_tokens))
        if waiting and len(self._finished) >= max(self._num_jobs // _PORTIONS, 1):
            self.pass_on()

    def pass_on(self) -> None:
        """Tell what has been noted."""
        for num_tokens, observations in sorted(self._observations.items()):
            keys = [cast(Key, key) for observation in observations for key in observation.keys]
            self._lengths.observe(keys, num_tokens, np.concatenate([each.features for each in observations]))
        for job, num_tokens in self._finished:
            self._lengths.finish(job, num_tokens)
        self._observations.clear()
        self._finished.clear()
