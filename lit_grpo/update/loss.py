"""A micro-batch through the policy: its share of the step's loss, and what it adds to the metrics."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from lit_grpo.policy.sharding import compute
from lit_grpo.update.batches.layout import PackedRow
from lit_grpo.update.batches.step import Gathered, Step
from lit_grpo.update.learner_settings import LearnerSettings
from lit_grpo.update.logprobs.checkpointing import check_mode
from lit_grpo.update.logprobs.forward import micro_batch_logprobs
from lit_grpo.update.metrics import Gap, MicroBatchSums
from lit_grpo.update.objective.objective import Objective
from lit_grpo.update.objective.policy_loss import counted, policy_loss
from lit_grpo.update.objective.proximal import interpolated_logprobs
from lit_grpo.update.objective.snapshots import factor_metrics
from lit_grpo.update.objective.tokens import Tokens, completion_sums, spread
from lit_grpo.update.prefix.sequence_parallel import SequenceParallel

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class MicroBatchLoss:
    """Computes micro-batches of a step.

    Args:
        policy: Learns.
        settings: What to learn, and how.
        rows: The ranks that share a micro-batch.
    """

    policy: PreTrainedModel
    settings: LearnerSettings
    rows: SequenceParallel

    def __call__(self, micro_batch: PackedRow, owner: int, step: Step, gathered: Gathered) -> torch.Tensor:
        """Return the share of the step's loss, with its gradient; of another rank's micro-batch 0, with its gradient.

        Args:
            micro_batch: On the policy's device.
            owner: Which of the ranks that share it has it.
            step: What it is part of.
            gathered: Told of the loss, and of what the metrics are made of.
        """
        objective = self.settings.objective
        check_mode(self.policy, bool(self.settings.gradient_checkpointing))
        forward = partial(
            micro_batch_logprobs,
            self.policy,
            micro_batch,
            self.settings.temperature,
            entropy_gradient=objective.entropy.active,
            ranks=self.rows,
            owner=owner,
        )
        with nullcontext() if step.term is None else step.term.watching():
            logprobs_N, entropy_N = compute(self.policy, forward)
        if owner != self.rows.rank:
            return logprobs_N.sum() * 0.0
        tokens = tokens_of(objective, logprobs_N, entropy_N, micro_batch, step)
        kept_N = None if step.kept is None else step.values_of(step.kept, micro_batch)
        part = step.part_of(micro_batch)
        loss, token_metrics = policy_loss(
            objective, tokens, step.totals, step.beta, step.entropy_coefficient, kept_N, part
        )
        if objective.proximal_policy == "snapshots":
            token_metrics |= factor_metrics(tokens)
        entropy = counted(tokens.entropy_N.detach(), kept_N, part).sum()
        _gather(gathered, micro_batch, step, tokens, loss.detach(), token_metrics, entropy)
        return loss if step.term is None else step.term.added_to(loss, micro_batch.weight)


def tokens_of(
    objective: Objective, logprobs_N: torch.Tensor, entropy_N: torch.Tensor, micro_batch: PackedRow, step: Step
) -> Tokens:
    """Return what the objective sees of a micro-batch that has gone through the policy."""
    old_logprobs_N, sampled_logprobs_N = logprobs_N.detach(), micro_batch.sampled_logprobs_N
    if objective.proximal_policy == "sampled":
        old_logprobs_N = sampled_logprobs_N
    elif objective.proximal_policy == "interpolated":
        old_logprobs_N = interpolated_logprobs(
            logprobs_N, sampled_logprobs_N, micro_batch.versions_N, step.policy_version
        )
    elif step.fixed.old is not None:  # else this is the only update on these rollouts
        measured_N = step.values_of(step.fixed.old, micro_batch)
        from_this_pass_N = measured_N.isnan() & (micro_batch.versions_N == step.policy_version)
        old_logprobs_N = torch.where(from_this_pass_N, old_logprobs_N, measured_N.to(old_logprobs_N.dtype))
    reference = step.fixed.reference if objective.kl_in_loss else None
    return Tokens(
        logprobs_N=logprobs_N,
        sampled_logprobs_N=sampled_logprobs_N,
        old_logprobs_N=old_logprobs_N,
        entropy_N=entropy_N,
        advantages_N=micro_batch.advantages_N,
        lengths_C=micro_batch.lengths_C,
        reference_logprobs_N=None if reference is None else step.values_of(reference, micro_batch),
        versions_N=micro_batch.versions_N,
        turn_lengths_S=micro_batch.turn_lengths_S,
    )


@torch.no_grad()
def _gather(
    gathered: Gathered,
    micro_batch: PackedRow,
    step: Step,
    tokens: Tokens,
    loss: torch.Tensor,
    token_metrics: dict[str, torch.Tensor],
    entropy: torch.Tensor,
) -> None:
    """Add a micro-batch to what its step gathers."""
    entropy_N, gap_N = tokens.entropy_N.detach(), tokens.logprobs_N.detach() - tokens.sampled_logprobs_N
    gathered.loss = gathered.loss + loss
    gathered.entropy = gathered.entropy + entropy
    gathered.log_weights.append(completion_sums(gap_N, tokens.lengths_C))
    gap = None
    if step.token_gap_limit is not None:
        is_fresh_N = micro_batch.versions_N == step.policy_version
        stale_C = completion_sums((~is_fresh_N).to(gap_N.dtype), tokens.lengths_C)  # keys may be of old weights
        fresh_N = spread(stale_C, tokens.lengths_C, len(gap_N)) == 0
        gap = Gap.of(gap_N, tokens.lengths_C, fresh_N, step.token_gap_limit)
    gathered.micro_batches.append(MicroBatchSums.of(loss, {"entropy": entropy_N, **token_metrics}, gap))
