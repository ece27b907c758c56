"""The seam for down-sampling: which rollouts of a batch are learnt from, after all were rewarded, and which tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal, Protocol

import torch

from lit_grpo.plugins import Plugin
from lit_grpo.types import Key, Rollout
from lit_grpo.update.advantages.estimator import GroupRewards
from lit_grpo.update.logprobs.measurements import OfHidden

Statistics = Literal["group", "kept"]
Entropies = Callable[[Sequence[Rollout]], Mapping[Key, torch.Tensor]]
"""Sends rollouts through the policy; returns the entropy in nats of each token that is learnt from, by completion. All
ranks call it together."""
Measure = Callable[[Sequence[Rollout], OfHidden], Mapping[Key, torch.Tensor]]
"""Likewise, with what a function makes of the last hidden state that predicts each token."""


class TakesSteps(Protocol):
    """What takes a run's optimizer steps, as far as a selection may know it."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer."""
        ...


class Selection(Plugin):
    """Which rollouts are learnt from: here, all that have a reward.

    The others were sampled and rewarded, and count in statistics alone, or not even there (:attr:`counts`). A rule of
    your own is a dataclass that derives from it. It chooses within groups (:meth:`choose`), then, where it needs
    ``all_ranks``, from the advantages of the whole batch (:meth:`choose_from_batch`). At each optimizer step it chooses
    a share of the tokens (:meth:`token_share`, :meth:`token_scores`), those that a mask leaves (:meth:`token_mask`), or
    a random part of each completion (:meth:`token_weights`). ``progress`` is the share of the run's updates that has
    been made, from 0 to 1.
    """

    role: ClassVar[str] = "which rollouts are learnt from"
    by_entropies: ClassVar[bool] = False
    """Whether it goes by what the generator tells of entropies, which are measured where that tells none."""

    @property
    def counts(self) -> Statistics:
        """What an advantage's mean and deviation are of: all members of the ``group``, or those ``kept``."""
        return "group"

    @property
    def begins_with(self) -> Mapping[str, float]:
        """Fields whose values move over the run, with the values that they begin with: ``{"first_keep": 4}``."""
        return {}

    def choose(
        self, rewards: GroupRewards, rollouts: Sequence[Rollout], entropies: Entropies, progress: float
    ) -> torch.Tensor:
        """Return which rollouts are learnt from, by comparison within their groups: booleans, shape R.

        Args:
            rewards: Of their groups.
            rollouts: In the same order.
            entropies: Measures tokens, for a rule that needs ``entropies``.
            progress: See above.
        """
        return ~rewards.rewards_R.isnan()

    def choose_from_batch(self, advantages_R: torch.Tensor, num_groups: int, progress: float) -> torch.Tensor:
        """Return which of those rollouts are learnt from, by comparison within the batch: booleans, shape R.

        Args:
            advantages_R: Of the rollouts of all ranks; NaN for those that are not learnt from.
            num_groups: Groups of all ranks.
            progress: See above.
        """
        return ~advantages_R.isnan()

    def token_share(self, progress: float) -> float:
        """Return the share of a step's tokens, on all ranks, that is learnt from: those with the highest scores."""
        return 1.0

    def token_scores(self, learnt: Sequence[tuple[Rollout, float]], entropies: Entropies) -> dict[Key, torch.Tensor]:
        """Return the score of each token that may be learnt from, by completion; asked where the share is below 1.

        Args:
            learnt: The rollouts of a step on this rank, and their advantages.
            entropies: Measures tokens.
        """
        raise NotImplementedError

    def token_mask(
        self, learnt: Sequence[tuple[Rollout, float]], measure: Measure, optimization: TakesSteps
    ) -> Mapping[Key, torch.Tensor] | None:
        """Return which tokens are learnt from, bool by completion; None for all. Asked before each optimizer step.

        Args:
            learnt: The rollouts of a step on this rank, and their advantages.
            measure: Sends rollouts through the policy, and measures each token that may be learnt from.
            optimization: Takes the step.
        """
        return None

    def token_weights(self, rollouts: Sequence[Rollout], version: int) -> Mapping[Key, torch.Tensor] | None:
        """Return what each token counts that would be learnt from, by completion; None where each counts 1.

        Asked once for each part of an optimizer step, and again where the part is taken again: the same rollouts and
        version have the same weights. A token of weight 0 is not learnt from, and those after the last token with a
        weight do not go through the policy: the row is shorter. The step's denominator is still of all tokens, so the
        gradient is that of all in expectation where each weight is 1 on average. A rule that has weights changes
        ``whole_completions``.

        Args:
            rollouts: Of a step on this rank, each with a token that would be learnt from.
            version: Of the policy that takes the step.

        Returns:
            Float32, shape ``num_trained`` of each completion.
        """
        return None


def candidates(rewards: GroupRewards, rollouts: Sequence[Rollout]) -> torch.Tensor:
    """Return which rollouts may be chosen: booleans, shape R.

    A rollout without a reward may not, nor one that an earlier batch has learnt from.
    """
    return ~rewards.rewards_R.isnan() & torch.tensor([rollout.kept for rollout in rollouts], dtype=torch.bool)
