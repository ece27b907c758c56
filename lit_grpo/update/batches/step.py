"""What one optimizer step learns from, and measurements of rollouts before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from lit_grpo.types import Key, Rollout, RolloutGroup
from lit_grpo.update.batches.layout import MicroBatch
from lit_grpo.update.batches.microbatch import MicroBatches
from lit_grpo.update.normalization import StepTotals
from lit_grpo.update.prefix.sequence_parallel import ALONE, SequenceParallel


@dataclass(frozen=True)
class Before:
    """Log-probs of a batch's tokens before its first update, by completion; None where the objective does without.

    Of tokens that are learnt from alone. ``old`` are the trainer's own, or under other weights of its; NaN where the
    pass that learns from a token computes it. ``reference`` are those of the KL term's reference.
    """

    old: Mapping[Key, torch.Tensor] | None = None
    reference: Mapping[Key, torch.Tensor] | None = None


@dataclass
class Step:
    """The completions of one optimizer step on this rank.

    ``rollouts`` and ``advantages`` are those that go through the policy. ``totals`` are of all ranks.
    ``kept`` are the tokens that are learnt from, by completion; None where all are. ``entropy_sum`` and ``loss_sum``
    add up while the step is computed, and ``log_weights`` gathers the log of policy / sampler of each completion.
    """

    rollouts: Sequence[Rollout]
    advantages: Sequence[float]
    totals: StepTotals
    before: Before
    kept: Mapping[Key, torch.Tensor] | None = None
    entropy_sum: torch.Tensor | float = 0.0
    loss_sum: torch.Tensor | float = 0.0
    log_weights: list[torch.Tensor] = field(default_factory=list)

    def forget(self) -> None:
        """Begin anew with what is gathered while the step is computed."""
        self.entropy_sum = self.loss_sum = 0.0
        self.log_weights.clear()

    def of(self, values: Mapping[Key, torch.Tensor], micro_batch: MicroBatch) -> torch.Tensor:
        """Return the values of a micro-batch's completions one after another, shape N, on its device."""
        rows = [values[self.rollouts[row].completion.request.key] for row in micro_batch.rows_C.tolist()]
        none = torch.empty(0, dtype=torch.float32)
        return torch.cat([*rows, next(iter(values.values()), none)[:0]]).to(micro_batch.lengths_C.device)


def missing_logprob(rollouts: Sequence[Rollout]) -> str | None:
    """Say which token is to be learnt from, but has no log-prob of the generator's; None where each has one."""
    for rollout in rollouts:
        logprobs_T, (prompt_id, visit, path) = rollout.completion.logprobs_T, rollout.completion.request.key
        missing_T = logprobs_T.isnan()
        if missing_T.any() and (missing_T := missing_T & rollout.completion.trained_T).any():
            return (
                f"Sample {path} of prompt {prompt_id!r}, visit {visit}, has no sampled log-prob (NaN) for token "
                f"{int(missing_T.int().argmax())}; the generator must give one for every token that it samples."
            )
    return None


def minibatches(
    groups: Sequence[RolloutGroup], num_iterations: int, num_minibatches: int
) -> Iterator[tuple[list[Rollout], torch.Tensor]]:
    """Yield the rollouts of each optimizer step: whole groups, every one once in each iteration.

    Yields:
        The rollouts, and their places among those of all groups.
    """
    numbered = [(number, rollout) for number, group in enumerate(groups) for rollout in group.rollouts]
    for _ in range(num_iterations):
        for part in torch.arange(len(groups)).tensor_split(num_minibatches):
            own = set(part.tolist())
            places = [place for place, (number, _) in enumerate(numbered) if number in own]
            yield [numbered[place][1] for place in places], torch.tensor(places, dtype=torch.int64)


def taking_part_and_learnt(
    rollouts: Sequence[Rollout], advantages: Sequence[float], mask_truncated: bool
) -> tuple[list[tuple[Rollout, float]], list[tuple[Rollout, float]]]:
    """Return the rollouts, with their advantages, that count as completions of a step, and those learnt from.

    Those without an advantage (NaN) or a token to learn from, and those that are not kept, count in nothing. Those that
    ended at the limit on their length count as completions, but their tokens do not, where ``mask_truncated`` (DAPO's
    overlong filtering; as in TRL).
    """
    pairs = zip(rollouts, advantages, strict=True)
    valid = [(r, a) for r, a in pairs if a == a and r.kept and r.completion.num_trained]
    if not mask_truncated:
        return valid, valid
    return valid, [(r, a) for r, a in valid if r.completion.finish_reason != "length"]


@torch.no_grad()
def measure(
    rollouts: Sequence[Rollout],
    micro_batches: MicroBatches,
    measurement: Callable[[MicroBatch], torch.Tensor],
    device: torch.device | str,
    ranks: SequenceParallel = ALONE,
) -> dict[Key, torch.Tensor]:
    """Measure every token that is learnt from, without gradient; by completion, on the CPU.

    Args:
        rollouts: What to measure; each has such tokens.
        micro_batches: What they have been cut into.
        measurement: Returns one number for each token of a micro-batch, shape N.
        device: Where micro-batches are measured.
        ranks: Those that share each micro-batch, and have equally many.
    """
    values: dict[Key, torch.Tensor] = {}
    for owner, micro_batch in ranks.in_turn(micro_batches):
        measured = measurement(micro_batch.to(device))
        if owner == ranks.own:
            parts = measured.cpu().split(micro_batch.lengths_C.tolist())
            for row, part in zip(micro_batch.rows_C.tolist(), parts, strict=True):
                values[rollouts[row].completion.request.key] = part
    return values


def log_baseline_weights(rollouts: Sequence[Rollout], scores: Mapping[Key, torch.Tensor]) -> torch.Tensor:
    """Return the log of ``w^2 |grad log pi|^2`` of each rollout, for a baseline of least variance.

    ``w`` is policy / sampler of the whole completion. The square of the gradient's norm is approximated by the sum of
    its tokens', each with respect to the last hidden state: a token's score has mean 0 given those before, so that
    products of two tokens' are 0 on average, and layers below are taken to stretch all tokens' gradients alike.

    Args:
        rollouts: Of whole groups; without a token to learn from a rollout counts nothing.
        scores: Log-prob and squared norm of each token that is learnt from, shape (T, 2), by completion.
    """
    weights = []
    for completion in (rollout.completion for rollout in rollouts):
        if not completion.num_trained:
            weights.append(-torch.inf)
            continue
        logprobs_T, squares_T = scores[completion.request.key].unbind(1)
        log_ratio = float((logprobs_T - completion.logprobs_T[completion.trained_T]).sum())
        weights.append(2 * log_ratio + float(squares_T.sum().log()))
    return torch.tensor(weights, dtype=torch.float64)
