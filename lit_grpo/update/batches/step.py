"""What one optimizer step learns from, and measurements of rollouts before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from lit_grpo.types import Key, Rollout, RolloutGroup
from lit_grpo.update.batches.layout import MicroBatch
from lit_grpo.update.batches.microbatch import make_micro_batches
from lit_grpo.update.normalization import StepTotals


@dataclass(frozen=True)
class Before:
    """Log-probs of a batch's completions before its first update, by completion; None where the objective does without.

    ``old`` are the trainer's own, ``reference`` those of the KL term's reference.
    """

    old: Mapping[Key, torch.Tensor] | None = None
    reference: Mapping[Key, torch.Tensor] | None = None


@dataclass
class Step:
    """The completions of one optimizer step on this rank.

    ``rollouts`` and ``advantages`` are those that go through the policy. ``totals`` are of all ranks.
    ``kept`` are the tokens of high entropy, by completion; None where all count. ``entropy_sum`` adds up while the step
    is computed.
    """

    rollouts: Sequence[Rollout]
    advantages: Sequence[float]
    totals: StepTotals
    before: Before
    kept: Mapping[Key, torch.Tensor] | None = None
    entropy_sum: torch.Tensor | float = 0.0

    def of(self, values: Mapping[Key, torch.Tensor], micro_batch: MicroBatch) -> torch.Tensor:
        """Return the values of a micro-batch's completions one after another, shape N, on its device."""
        rows = [values[self.rollouts[row].completion.request.key] for row in micro_batch.rows_C.tolist()]
        return torch.cat([*rows, next(iter(values.values()), torch.empty(0))[:0]]).to(micro_batch.lengths_C.device)


def minibatches(num_groups: int, num_iterations: int, num_minibatches: int) -> Iterator[list[int]]:
    """Yield the groups of each optimizer step: whole groups, every one once in each iteration."""
    for _ in range(num_iterations):
        for part in torch.arange(num_groups).tensor_split(num_minibatches):
            yield part.tolist()


Scored = list[tuple[Rollout, float]]


def taking_part_and_learnt(
    rollouts: Sequence[Rollout], advantages: Sequence[float], mask_truncated: bool
) -> tuple[Scored, Scored]:
    """Return the rollouts, with their advantages, that count as completions of a step, and those learnt from.

    Those without an advantage (NaN) or a token count in nothing. Those that ended at the limit on their length count as
    completions, but their tokens do not, where ``mask_truncated`` (DAPO's overlong filtering; as in TRL).
    """
    valid = [(r, a) for r, a in zip(rollouts, advantages, strict=True) if a == a and r.completion.num_tokens]
    if not mask_truncated:
        return valid, valid
    return valid, [(r, a) for r, a in valid if r.completion.finish_reason != "length"]


def sampled_kl(
    rollouts: Sequence[Rollout],
    reference_logprobs: Mapping[Key, torch.Tensor],
    estimator: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> dict[Key, torch.Tensor]:
    """Return the KL of every token from the reference, by completion, under the policy that it was sampled with."""
    completions = [rollout.completion for rollout in rollouts if rollout.completion.num_tokens]
    return {c.request.key: estimator(c.logprobs_T, reference_logprobs[c.request.key]) for c in completions}


def kl_sums(groups: Sequence[RolloutGroup], kl: Mapping[Key, torch.Tensor]) -> torch.Tensor:
    """Add up the KL of each completion's tokens, shape P x G; 0 for one without tokens."""
    none = torch.zeros(1)
    rows = [[float(kl.get(r.completion.request.key, none).sum()) for r in group.rollouts] for group in groups]
    return torch.tensor(rows)


@torch.no_grad()
def measure(
    rollouts: Sequence[Rollout],
    measurement: Callable[[MicroBatch], torch.Tensor],
    max_tokens: int,
    device: torch.device | str,
    shared_prefix: bool = True,
) -> dict[Key, torch.Tensor]:
    """Measure every token of rollouts that have tokens, without gradient; by completion, on the CPU.

    Args:
        rollouts: What to measure.
        measurement: Returns one number for each token of a micro-batch, shape N.
        max_tokens: Of one micro-batch.
        device: Where micro-batches are measured.
        shared_prefix: How they are laid out (see :class:`~lit_grpo.update.batches.microbatch.MicroBatch`).
    """
    values: dict[Key, torch.Tensor] = {}
    for micro_batch in make_micro_batches(rollouts, [0.0] * len(rollouts), max_tokens, shared_prefix):
        parts = measurement(micro_batch.to(device)).cpu().split(micro_batch.lengths_C.tolist())
        for row, part in zip(micro_batch.rows_C.tolist(), parts, strict=True):
            values[rollouts[row].completion.request.key] = part
    return values
