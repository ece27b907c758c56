"""The rollouts of one optimizer step, and their columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from lit_grpo.types import Completion, GroupKey, Rollout
from lit_grpo.update.objective.tokens import StepTotals
from lit_grpo.update.plugin import Chunk, Term

PROVISIONAL = 2**12
"""What the gradient is divided by while groups of its step are still to come; a power of two, which rounds nothing."""


@dataclass(frozen=True)
class Step:
    """One optimizer step on this rank: all that is known before its first backward pass.

    Args:
        rollouts: Those that go through the policy, with their advantages.
        own: What the rollouts of this rank count, those that do not go through the policy among them.
        totals: What the loss is divided by, of all ranks.
        policy_version: Of the policy that takes the step.
        beta: Weight of the KL term.
        entropy_coefficient: Weight of the entropy bonus; 0 if there is none.
        chunks: Those of each rollout that goes through the policy in chunks, by its place.
        columns: Names of the rollouts' :attr:`~lit_grpo.types.Rollout.columns` that the loss needs.
        lengths: Number of trained tokens of the whole completion of each rollout; None if the rollouts' own are whole.
        term: What is added to the loss, if anything is.
    """

    rollouts: Sequence[Rollout]
    own: StepTotals
    totals: StepTotals
    policy_version: int
    beta: float
    entropy_coefficient: float
    chunks: Mapping[int, Sequence[Chunk]] = field(default_factory=dict)
    columns: tuple[str, ...] = ()
    lengths: Sequence[int] | None = None
    term: Term | None = None

    def of_prompts(self, prompts: Collection[GroupKey]) -> Step:
        """Return the part of the step that has the rollouts of some prompts; it is divided by what all of it is."""
        places = [n for n, rollout in enumerate(self.rollouts) if rollout.completion.request.group in prompts]
        return replace(
            self,
            rollouts=[self.rollouts[place] for place in places],
            lengths=None if self.lengths is None else [self.lengths[place] for place in places],
            chunks={row: self.chunks[place] for row, place in enumerate(places) if place in self.chunks},
        )


def problem_of(rollouts: Sequence[Rollout]) -> str | None:
    """Say why rollouts cannot be trained on; None where they can.

    A token that is to be trained on has no log-prob of the generator's, or two completions have the same key, by which
    their values are looked up.
    """
    for rollout in rollouts:
        logprobs_T, (prompt_id, visit, path) = rollout.completion.logprobs_T, rollout.completion.request.key
        missing_T = logprobs_T.isnan()
        if missing_T.any() and (missing_T := missing_T & rollout.completion.trained_T).any():
            return (
                f"Sample {path} of prompt {prompt_id!r}, visit {visit}, has no sampled log-prob (NaN) for token "
                f"{int(missing_T.int().argmax())}; the generator must give one for every token that it samples."
            )
    counts = Counter(rollout.completion.request.key for rollout in rollouts)
    for (prompt_id, visit, path), count in counts.items():
        if count > 1:
            return (
                f"{count} completions are sample {path} of prompt {prompt_id!r}, visit {visit}, and would be taken for "
                "one another; give each request a path of its own, such as (sample, segment)."
            )
    return None


def counted_and_trained(rollouts: Sequence[Rollout], mask_truncated: bool) -> tuple[list[Rollout], list[Rollout]]:
    """Return the rollouts that count as completions of a step, and those that are trained on.

    Those without an advantage (NaN) or a token to learn from, and those that are not kept, count in nothing. Those that
    ended at the limit on their length count as completions, but their tokens do not, where ``mask_truncated`` (DAPO's
    overlong filtering; as in TRL). Those trained on are rows, of which a completion may have several.
    """
    valid = [
        each for each in rollouts if each.advantage == each.advantage and each.kept and each.completion.num_trained
    ]
    trained = [each for each in valid if not mask_truncated or each.completion.finish_reason != "length"]
    return valid, [row for each in trained for row in each.rows]


def with_advantage(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Return the rollouts whose advantage, or that of one of their tokens, is not 0, or that have candidates."""
    found: list[Rollout] = []
    for rollout in rollouts:
        of_tokens, candidates = rollout.token_advantages, rollout.columns.get("candidate_values")
        has_candidates = candidates is not None and not candidates.isnan().all()
        if rollout.advantage != 0 or (of_tokens is not None and of_tokens.any()) or has_candidates:
            found.append(rollout)
    return found


def thinned(rollout: Rollout, kept: torch.Tensor) -> Rollout:
    """Return a rollout that ends with the last token that it has a part in the loss with.

    Args:
        rollout: A whole one.
        kept: Which of the tokens that are trained on stay so, bool, shape (completion.num_trained,).
    """
    whole, advantages, trained_T = rollout.completion, rollout.token_advantages, rollout.completion.trained_T
    trained_T[trained_T.clone()] = kept
    used_T = trained_T if rollout.ce_weights is None else trained_T | (rollout.ce_weights != 0)
    end = max(used_T.nonzero().flatten().tolist(), default=-1) + 1
    part = Completion(
        whole.request,
        whole.token_ids_T[:end],
        whole.logprobs_T[:end],
        whole.versions_T[:end],
        whole.finish_reason,
        whole.text,
        whole.entropy,
        trained_T[:end],
    )
    part.engines = whole.engines
    return replace(
        rollout,
        completion=part,
        token_advantages=None if advantages is None else advantages[kept],
        columns={name: values[kept] for name, values in rollout.columns.items()},
    )


def with_ce(rollouts: Sequence[Rollout], trained: Sequence[Rollout]) -> list[Rollout]:
    """Return the rows of a step, with those that have weights in the channel ``ce`` alone.

    Args:
        rollouts: All of the step.
        trained: Rows that are trained on by their advantages.
    """
    by_key = {row.completion.request.key: row for row in trained}
    rows: list[Rollout] = []
    for row in (row for rollout in rollouts for row in rollout.rows):
        if (own := by_key.get(row.completion.request.key)) is not None:
            rows.append(own)
        elif row.ce_weights is not None and row.ce_weights.any():
            nothing = torch.zeros(row.completion.num_trained, dtype=torch.bool)
            rows.append(replace(thinned(row, nothing), advantage=0.0))
    return rows


def log_baseline_weights(rollouts: Sequence[Rollout], scores: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the log of ``w^2 |grad log pi|^2`` of each rollout, for a baseline of least variance.

    ``w`` is policy / sampler of the whole completion. The square of the gradient's norm is approximated by the sum of
    its tokens', each with respect to the last hidden state: a token's score has mean 0 given those before, so that
    products of two tokens' are 0 on average, and layers below are taken to stretch all tokens' gradients alike.

    Args:
        rollouts: Of whole groups; without a token to learn from a rollout counts nothing.
        scores: Log-prob and squared norm of each rollout's tokens that are trained on, shape (T, 2).
    """
    weights = []
    for rollout, scores_T2 in zip(rollouts, scores, strict=True):
        completion = rollout.completion
        if not completion.num_trained:
            weights.append(-torch.inf)
            continue
        logprobs_T, squares_T = scores_T2.unbind(1)
        log_ratio = float((logprobs_T - completion.logprobs_T[completion.trained_T]).sum())
        weights.append(2 * log_ratio + float(squares_T.sum().log()))
    return torch.tensor(weights, dtype=torch.float64)
