"""TreePO (arXiv 2508.17445): paths divide in two after every segment, and leaves are compared with their relatives.

``model.num_generations`` paths of a prompt begin (the paper's first division, into 2 to 8). After every ``segment``
sampled tokens a path divides in two, until its group has ``width`` members. A path has a share of the width, and gives
half of it away as it divides; what a path has left when it ends is filled by fresh paths. So what is sampled does not
depend on which path is decoded first.

The advantage of a leaf is the mean, over the depths d of the tree, of its reward less the mean reward of the leaves
that have its first d segments in common, itself among them. Depth 0 is the whole group; deeper, where no other leaf has
them, a depth is left out. Then the advantages of the whole batch are whitened over its tokens.

With segments that no completion fills there is depth 0 alone: the advantages of Dr. GRPO, whitened.

It deviates from the paper: a path divides in two and never into more, by shares, and what is left is filled by fresh
paths, where the paper falls back to a random segment of a path that has ended. Prompts without a difference are not
left out; the clip is ``objective.epsilon 0.2`` and ``epsilon_high 0.28``.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import ClassVar

import numpy as np
import torch

from lit_grpo.limits import Count
from lit_grpo.methods.shared.branches import Widening
from lit_grpo.plugins import Answer, RunFacts
from lit_grpo.rollout.generator import StepEvents
from lit_grpo.scheduling.ledger import RequestLedger
from lit_grpo.trajectory import OBSERVED
from lit_grpo.types import Completion, GroupKey, Key, Request, SamplePath
from lit_grpo.update.plugin import Batch


@dataclass
class TreePO(Widening):
    """Divide paths after every segment, and compare each leaf with those that share its beginning.

    ``model.num_generations`` is how many paths begin at the prompt. For example, 4 of them become 16 members::

        model: {num_generations: 4}
        rollout:
          plugins: [{treepo: {width: 16, segment: 512}}]

    An environment has to have ``state`` and ``restore``: a branch begins with the state of its turn's beginning.
    """

    writes: ClassVar[frozenset[str]] = frozenset({"token_advantage"})
    needs: ClassVar[frozenset[str]] = Widening.needs | {"all_ranks"}
    traits: ClassVar[frozenset[str]] = Widening.traits | {"by_progress"}

    segment: Count = 512
    """Number of sampled tokens after which a path divides."""

    def check(self, run: RunFacts) -> None:
        super().check(run)
        if self.segment >= run.max_tokens:
            raise ValueError(
                f"segment is {self.segment}, and sampling.max_tokens is {run.max_tokens}, so that no path would "
                "divide; give less, such as a sixteenth of it."
            )

    def on_batch(self, batch: Batch) -> None:
        """Give all tokens of each leaf its advantage, whitened over the batch."""
        credited: list[torch.Tensor | None] = []
        for group in batch.groups:
            completions = [rollout.completion for rollout in group.rollouts]
            rewards = [rollout.reward for rollout in group.rollouts]
            pairs = zip(completions, relative_advantages(completions, rewards, self.segment), strict=True)
            credited += [torch.full((completion.num_trained,), advantage) for completion, advantage in pairs]
        for rollout, advantages_N in zip(batch.rollouts, batch.whitened(credited), strict=True):
            if advantages_N is not None:
                batch.set("token_advantage", rollout, advantages_N)

    def on_rollout_start(self, ledger: RequestLedger) -> None:
        super().on_rollout_start(ledger)
        self._shares: dict[Key, int] = {}  # of the width, its own place among it
        self._depths: dict[Key, int] = {}  # segments after which a path has had its chance to divide

    def on_requests(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Divide the width among the paths that begin; none is away first."""
        beginning: dict[GroupKey, list[Key]] = defaultdict(list)
        for request in requests:
            if request.key not in self._shares:
                beginning[request.group].append(request.key)
        for keys in beginning.values():
            whole, rest = divmod(self.width, len(keys))
            self._shares |= {key: whole + (number < rest) for number, key in enumerate(keys)}
        return ()

    def on_step(self, events: StepEvents) -> Answer | None:
        """Divide the paths that have come to the end of a segment, and have a share to give away."""
        ended = {completion.request.key for completion in events.finished}
        forks: dict[Key, list[SamplePath]] = {}
        for key, num_tokens in self._ledger.progress().items():
            depth = num_tokens // self.segment
            if key in ended or self._shares[key] < 2 or depth <= self._depths.get(key, 0):
                continue
            path = self.next_path(key, num_tokens)
            given = self._shares[key] // 2
            self._shares[key] -= given
            self._shares[(*key[:2], path)] = given
            self._depths[key] = self._depths[(*key[:2], path)] = depth
            forks[key] = [path]
        return Answer(fork=forks) if forks else None

    def on_completion(self, completion: Completion) -> Answer | None:
        """Fill what is left of a path's share with fresh ones."""
        left = self._shares.get(completion.request.key, 1) - 1
        fresh = [self.branch(completion.request) for _ in range(left)]
        self._shares |= {request.key: 1 for request in fresh}
        return Answer(submit=fresh) if fresh else None


def relative_advantages(completions: Sequence[Completion], rewards: Sequence[float], segment: int) -> list[float]:
    """Return the advantage of each leaf before it is whitened; 0 for one whose reward is NaN, which counts nowhere."""
    beginnings = [_beginnings(completion, segment) for completion in completions]
    relatives: dict[bytes, list[float]] = defaultdict(list)
    for its, reward in zip(beginnings, rewards, strict=True):
        for beginning in its:
            if not math.isnan(reward):
                relatives[beginning].append(reward)
    return [
        0.0
        if math.isnan(reward)
        else fmean(
            reward - fmean(relatives[beginning])
            for depth, beginning in enumerate(its)
            if not depth or len(relatives[beginning]) > 1
        )
        for its, reward in zip(beginnings, rewards, strict=True)
    ]


def _beginnings(completion: Completion, segment: int) -> list[bytes]:
    """Return the tokens of the first d segments, for d from 0, what is observed within them among it."""
    token_ids, sampled = completion.token_ids_T.numpy(), completion.versions_T.numpy() != OBSERVED
    ends = np.flatnonzero(sampled)[segment - 1 :: segment] + 1
    return [token_ids[:end].tobytes() for end in (0, *ends.tolist())]


PLUGINS = {"treepo": TreePO()}
