"""Learning from groups as they become whole: one gradient that adds up while others still decode."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from lit_grpo.types import Rollout, RolloutGroup
from lit_grpo.update.batches.microbatch import MicroBatches, make_micro_batches
from lit_grpo.update.batches.step import Before, Step, missing_logprob, taking_part_and_learnt
from lit_grpo.update.metrics import TokenMetrics
from lit_grpo.update.normalization import StepTotals
from lit_grpo.update.settings import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lit_grpo.ranks import Ranks

_PROVISIONAL = 2**12
"""What sums are divided by until it is known what by; a power of two, which rounds nothing."""


class Gradients(Protocol):
    """What a learner does for a step whose groups are not all there."""

    policy: PreTrainedModel
    settings: Settings

    @property
    def ranks(self) -> Ranks:
        """Reductions over the ranks of the run."""
        ...

    def prepare(self, groups: Sequence[RolloutGroup], metrics: TokenMetrics) -> tuple[torch.Tensor, Before]:
        """Give each rollout its advantage; return them, and what the updates on the rollouts compare with."""
        ...

    def accumulate(
        self, micro_batches: MicroBatches, step: Step, metrics: TokenMetrics, first: bool = True, last: bool = True
    ) -> bool:
        """Gather the step's gradient; return whether the memory of all ranks sufficed, where the budget is open."""
        ...

    def halve_budget(self, rollouts: Sequence[Rollout]) -> None:
        """Go on with half of the budget."""
        ...

    def max_tokens(self, rollouts: Sequence[Rollout]) -> int:
        """The token budget of micro-batches."""
        ...


class Arriving:
    """The gradient of one optimizer step, of groups that come one after another.

    They go through the policy as soon as it is free: what it would wait for goes on being decoded meanwhile.

    Args:
        learner: Whose policy it is.
        metrics: Told of every micro-batch.
    """

    def __init__(self, learner: Gradients, metrics: TokenMetrics) -> None:
        self._learner, self.metrics = learner, metrics
        self._before = copy.deepcopy(vars(metrics))
        self._parts: list[Step] = []
        self._advantages: list[torch.Tensor] = []
        self._num_tokens = self._num_sequences = 0
        learner.policy.zero_grad()

    def sum(self, arriving: Iterable[Sequence[RolloutGroup]]) -> tuple[Step, torch.Tensor]:
        """Return the step that all groups make, its gradient being there, and the advantages of the rollouts."""
        for groups in arriving:
            self._learn(groups)
        return self._step(), torch.cat([torch.empty(0), *self._advantages])

    def _step(self) -> Step:
        """Divide the gradient by the true denominator."""
        learner = self._learner
        if learner.ranks.size > 1:  # none knew which of its micro-batches was the last
            empty = MicroBatches(learner.settings.shares_prefix, [()])
            learner.accumulate(empty, self._part([], []), self.metrics, first=False)
        totals = StepTotals(
            int(learner.ranks.sum(self._num_tokens)),
            int(learner.ranks.sum(self._num_sequences)),
            learner.settings.max_tokens,
            int(learner.ranks.sum(self._num_tokens)),
        )
        by_token = learner.settings.objective.normalized_by == "token"
        scale = _PROVISIONAL / max(totals.num_tokens if by_token else totals.num_sequences, 1)
        for parameter in learner.policy.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
        self.metrics.scale_loss(scale)
        return Step(
            [rollout for part in self._parts for rollout in part.rollouts],
            [advantage for part in self._parts for advantage in part.advantages],
            totals,
            Before(),
            entropy_sum=sum(part.entropy_sum for part in self._parts),
            loss_sum=sum(part.loss_sum for part in self._parts) * scale,
            log_weights=[log_weight for part in self._parts for log_weight in part.log_weights],
        )

    def _learn(self, groups: Sequence[RolloutGroup]) -> None:
        """Add their gradient."""
        learner = self._learner
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        if problem := missing_logprob(rollouts):
            raise ValueError(problem)
        if not rollouts:
            return
        advantages_R, before = learner.prepare(groups, self.metrics)
        self._advantages.append(advantages_R)
        objective = learner.settings.objective
        taking_part, learnt = taking_part_and_learnt(rollouts, advantages_R.tolist(), objective.mask_truncated)
        self._num_sequences += len(taking_part)
        self._num_tokens += sum(rollout.completion.num_trained for rollout, _ in learnt)
        if not objective.uses_every_completion:
            learnt = [(rollout, advantage) for rollout, advantage in learnt if advantage != 0]
        self._parts.append(self._part(*zip(*learnt, strict=True), before=before) if learnt else self._part([], []))
        if not self._accumulate(self._parts[-1]):
            self._begin_anew()

    def _part(self, rollouts: Sequence[Rollout], advantages: Sequence[float], before: Before | None = None) -> Step:
        totals = StepTotals(_PROVISIONAL, _PROVISIONAL, self._learner.settings.max_tokens, _PROVISIONAL)
        return Step(rollouts, advantages, totals, before or Before())

    def _accumulate(self, part: Step) -> bool:
        learner = self._learner
        max_tokens = learner.max_tokens(part.rollouts)
        batches = make_micro_batches(part.rollouts, part.advantages, max_tokens, learner.settings.shares_prefix)
        return learner.accumulate(batches, part, self.metrics, first=False, last=False)

    def _begin_anew(self) -> None:
        """Take all parts again, in smaller micro-batches, for memory has run out."""
        while True:
            self._learner.halve_budget([rollout for part in self._parts for rollout in part.rollouts])
            vars(self.metrics).update(copy.deepcopy(self._before) | {"_kl": vars(self.metrics)["_kl"]})
            self._learner.policy.zero_grad()
            for part in self._parts:
                part.forget()
            if all(self._accumulate(part) for part in self._parts):
                return


def check_arriving(settings: Settings, num_ranks: int, has_shards: bool = False) -> None:
    """Check that one batch's gradient can be summed up group by group.

    Raises:
        ValueError: Something asks for all of its groups beforehand.
    """
    objective, estimator, selection = settings.objective, settings.advantages, settings.selection
    needs = {
        "policy is sharded over ranks (trainer.strategy fsdp2), which then go through each layer together": has_shards,
        f"sequence_parallel_size {settings.sequence_parallel_size} has ranks go through each layer together": (
            settings.sequence_parallel_size > 1
        ),
        f"advantages.estimator {estimator.estimator} compares rewards of the whole batch": estimator.needs_all_ranks,
        f"selection.rule {selection.rule} compares rollouts of the whole batch": selection.needs_all_ranks,
        f"selection.tokens {selection.tokens} and first_tokens {selection.first_tokens} compare tokens of the whole "
        "batch": selection.takes_tokens,
        f"objective.top_entropy_quantile {objective.top_entropy_quantile} compares tokens of the whole batch": (
            objective.top_entropy_quantile < 1
        ),
        f"objective.entropy counts by tokens, and objective.normalization {objective.normalized_by} does not": (
            objective.entropy.active and objective.normalized_by != "token"
        ),
        "max_tokens_per_micro_batch auto has several ranks agree on each micro-batch": (
            settings.max_tokens_per_micro_batch == "auto" and num_ranks > 1
        ),
    }
    for need, is_there in needs.items():
        if is_there:
            raise ValueError(
                f"rollout.plugins learns from groups while others of their batch decode, and model.{need}; "
                "change that, or take a mode with overlap none."
            )
