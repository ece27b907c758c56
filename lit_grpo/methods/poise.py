"""POISE (arXiv 2605.07579): a baseline that is read from the policy's hidden states of *another* rollout of the prompt.

    A_i = r_i - V_i,   V_i = mean over the other rollouts j of the group of v(h_j)

``h_j`` is what the policy shows of rollout j after ``at`` tokens: its last hidden state, the mean log-prob so far and
the entropy of the next token. ``v`` is a ridge regression, trained on earlier batches. Neither depends on what rollout
i became, so the gradient ``sum A_i grad log pi`` stays unbiased, as it does not with ``v(h_i)``. Groups may have two
members, and one in which all earn the same is trained on too.

What deviates, from what the abstract says: ``v`` learns the mean reward of the *other* rollouts, which is what it is
used for, and not the rollout's own; several others are averaged; what is read is the generator's one look midway, not
the whole trajectory. A completion that ends before has the mean that such ones have had. Until the first batch has been
trained on, advantages are the estimator's.

Evidence: 10,000 draws against the exact gradient of a small policy, in ``tests/test_poise.py``. With groups of 4
it gave no more on the demo and on knights than groups of 4 do without it (docs/methods.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np

from lit_grpo.limits import Count
from lit_grpo.plugins import GroupBatch, ObservationPoint, Plugin, RunFacts
from lit_grpo.rollout.generator import StepEvents
from lit_grpo.scheduling.ledger import RequestLedger
from lit_grpo.scheduling.lengths import FORGETTING, Projection, Ridge
from lit_grpo.types import GroupKey, Key, Rollout, RolloutGroup
from lit_grpo.update.plugin import Batch

VALUE = "poise/value"
"""Under which name a rollout's ``extra`` has what is predicted from it; samples show it."""
NUM_COLUMNS, NUM_SCALARS = 256, 2  # of features, after their projection; mean log-prob and entropy among them
BETWEEN = 100.0  # rows as which what lies between groups counts: all of it, for that is what a baseline is about


class Row(NamedTuple):
    """Training row of one rollout: its features, None if it was not observed, and the rewards of the others."""

    features: np.ndarray | None
    others: float
    reward: float
    baseline: float
    group: GroupKey


@dataclass
class CrossRolloutBaseline(Plugin):
    """Compares each reward with what is predicted from the other rollouts of its prompt.

    For example, twice the prompts of groups of two in place of four::

        model: {num_generations: 2}
        data: {batch_size: 32}
        rollout: {plugins: [{poise: {at: 16}}]}
    """

    writes: ClassVar[frozenset[str]] = frozenset({"advantage"})
    needs: ClassVar[frozenset[str]] = frozenset({"whole_groups", "whole_rollouts", "fresh_members", "plain_rewards"})
    traits: ClassVar[frozenset[str]] = frozenset({"common"})

    at: Count = 64
    """Number of tokens after which a completion's features are taken; about half of the usual length."""

    def check(self, run: RunFacts) -> None:
        if run.num_generations < 2:
            raise ValueError(
                f"it needs another rollout of each prompt, and num_generations is {run.num_generations}; set 2 or more."
            )
        if self.at > run.max_tokens - 1:
            raise ValueError(
                f"at is {self.at}, and sampling.max_tokens is {run.max_tokens}: no completion goes on after it; give "
                f"at most {run.max_tokens - 1}, as in poise:at=8."
            )

    def setup(self) -> None:
        self._projection, self._ridge = Projection(NUM_COLUMNS, NUM_SCALARS), Ridge(BETWEEN)
        self._early = [0.0, 0.0]  # rollouts that were not looked at, and what others earned beside them; forgetting
        self._features: dict[Key, np.ndarray] = {}

    def on_rollout_start(self, ledger: RequestLedger) -> None:
        self._features = {}

    @property
    def observes(self) -> ObservationPoint:
        return ObservationPoint(self.at)

    def on_step(self, events: StepEvents) -> None:
        for each in events.observations:
            if each.num_tokens == self.at:
                rows = zip(cast("Sequence[Key]", each.keys), each.features, strict=True)
                self._features |= {key: row for key, row in rows if np.isfinite(row).all()}

    def add_members(self, batch: GroupBatch) -> None:
        """Predict from each rollout, once there has been something to learn from; nobody is added."""
        rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
        if not len(self._ridge.moments):
            return
        seen = [each for each in rollouts if each.completion.request.key in self._features]
        mean = float(self._ridge.moments[0, -1] / self._ridge.moments[0, 0])
        for rollout in rollouts:
            rollout.extra[VALUE] = self._early[1] / self._early[0] if self._early[0] else mean
        if seen:
            features = np.array([self._features[each.completion.request.key] for each in seen])
            predicted = self._ridge.predict(self._projection(features).astype(np.float64))
            for rollout, value in zip(seen, predicted.tolist(), strict=True):
                rollout.extra[VALUE] = value

    def on_update_end(self, batch: GroupBatch) -> dict[str, float]:
        """Learn from a batch, of all ranks; return how much of the spread of its rewards baselines explained."""
        own = [self._row(group, each) for group in batch.groups for each in group.rollouts]
        rows = [row for part in batch.all_gather(own) for row in part if not math.isnan(row.others)]
        early = [row.others for row in rows if row.features is None]
        self._early = [FORGETTING * self._early[0] + len(early), FORGETTING * self._early[1] + math.fsum(early)]
        seen = [row for row in rows if row.features is not None]
        if seen:
            x = self._projection(np.array([row.features for row in seen])).astype(np.float64)
            numbers = np.unique([str(row.group) for row in seen], return_inverse=True)[1]
            self._ridge.learn(x, np.array([row.others for row in seen]), numbers)
        return {
            "poise/explained": explained([(row.reward, row.baseline) for row in rows]),
            "poise/explained_by_others": explained([(row.reward, row.others) for row in rows]),
        }

    def _row(self, group: RolloutGroup, rollout: Rollout) -> Row:
        others = [each.reward for each in group.rollouts if each is not rollout and not math.isnan(each.reward)]
        features = self._features.get(rollout.completion.request.key)
        earned = fmean(others) if others else math.nan
        return Row(features, earned, rollout.reward, baseline=baseline(group, rollout), group=group.key)

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self._projection.scale.tolist(), "ridge": self._ridge.state_dict(), "early": self._early}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._projection.scale = np.array(state["scale"], dtype=np.float64)
        self._ridge.load_state_dict(state["ridge"])
        self._early = state["early"]

    def on_batch(self, batch: Batch) -> None:
        """Train each rollout on its reward less its baseline, where there is one."""
        for group in batch.groups:
            for rollout in group.rollouts:
                below = baseline(group, rollout)
                if not (math.isnan(rollout.advantage) or math.isnan(below)):
                    batch.set("advantage", rollout, rollout.reward - below)


def baseline(group: RolloutGroup, rollout: Rollout) -> float:
    """Return the mean of what is predicted from the other rollouts of a group; NaN where nothing is."""
    predicted = [each.extra[VALUE] for each in group.rollouts if each is not rollout and VALUE in each.extra]
    return fmean(predicted) if predicted else math.nan


def explained(pairs: Sequence[tuple[float, float]]) -> float:
    """Return ``1 - sum (reward - baseline)^2 / sum (reward - mean)^2``; NaN where that cannot be."""
    known = [(reward, below) for reward, below in pairs if math.isfinite(reward) and math.isfinite(below)]
    mean = fmean(reward for reward, _ in known) if known else math.nan
    spread = math.fsum((reward - mean) ** 2 for reward, _ in known)
    return 1 - math.fsum((reward - below) ** 2 for reward, below in known) / spread if spread else math.nan


PLUGINS = {"poise": CrossRolloutBaseline()}
