"""The proof that a generator computes with the policy's weights: both sides score the same given tokens."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from lit_grpo.policy.architecture.decoder import context_length, hidden_states, never_sample, never_sampled
from lit_grpo.policy.sharding import class_of, compute
from lit_grpo.rollout.weights.tensors import WeightSyncError
from lit_grpo.update.logprobs.forward import head_logprobs

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from lit_grpo.rollout.generator import Scorer


_NUM_TOKENS, _MOST_TOKENS_EACH = 512, 256


class LogprobGap(NamedTuple):
    """Mean difference of an engine's and the policy's log-probs, in ``nats`` and ``relative`` to their spread.

    ``rounding`` is the relative error of the policy's embeddings that would move its log-probs as far. ``model``
    is the policy's class.
    """

    engine: str
    model: str
    nats: float
    relative: float
    rounding: float


class SyncProof:
    """Compares the log-probs that every engine of a generator gives to some given tokens with the policy's.

    The tokens are drawn from the whole vocabulary, once for all syncs. So they are unlikely tokens, and any error of a
    model shows in their log-probs; the log-probs of tokens that it has sampled itself are near 0 even with an error.
    The same tokens have about the same rounding errors at every sync, so earlier syncs tell how large a gap may be. How
    far rounding errors move the log-probs changes by a factor of ten and more as the policy learns. So a gap is
    measured by the relative change of the embeddings that would move the policy's log-probs as far at that moment.

    Args:
        tokenizer: The tokens are drawn from its vocabulary.
        max_gap: The largest relative gap at any sync.
        max_growth: The largest rounding as a multiple of the largest so far; twice that after all was sent again.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_gap: float, max_growth: float) -> None:
        self.tokenizer, self.max_gap, self.max_growth = tokenizer, max_gap, max_growth
        self._largest = math.inf  # rounding of the syncs that were good

    def measure(self, scorer: Scorer, policy: PreTrainedModel) -> LogprobGap:
        """Return the gap of the engine with the largest one."""
        sequences = given_tokens(self.tokenizer, min(scorer.longest_sequence, context_length(policy)))
        expected_N = given_logprobs(policy, sequences)
        spread = max(float(expected_N.std()), _LEAST_SPREAD)
        scores = scorer.score(sequences)
        gaps = {name: float((scored_N - expected_N).abs().mean()) for name, scored_N in scores.items()}
        worst = max(gaps, key=lambda name: gaps[name] if gaps[name] == gaps[name] else math.inf)
        moved = float((_shaken_logprobs(policy, sequences) - expected_N).abs().mean()) / _SHAKE
        nats, model = gaps[worst], class_of(policy).__name__
        return LogprobGap(worst, model, nats, nats / spread, nats / max(moved, _LEAST_SPREAD))

    def accepts(self, gap: LogprobGap) -> bool:
        """Return whether a sync is good; later syncs are then compared with it."""
        if not self._is_within(gap, self.max_growth * self._largest):
            return False
        known = max(gap.rounding, _ROUNDING)
        self._largest = known if math.isinf(self._largest) else max(self._largest, known)
        return True

    def check(self, gap: LogprobGap, version: int) -> None:
        """Raise a WeightSyncError if the gap is still too large after all weights were sent again."""
        limit = 2 * self.max_growth * self._largest
        if not self._is_within(gap, limit):
            raise WeightSyncError(
                f"After the sync of version {version} the log-probs that {gap.engine} gives to given tokens differ "
                f"from the policy's by {gap.nats:.3g} nats on average, {gap.relative:.3g} of their spread and as a "
                f"rounding error of {gap.rounding:.3g} makes them, where {self.max_gap:.3g} and {limit:.3g} are "
                f"allowed: its weights are not the policy's, or it computes {gap.model} in another way than "
                "transformers, which another generator or policy avoids. The limits are weight_sync.max_relative_gap "
                f"and twice max_gap_growth ({self.max_growth}) times the largest so far."
            )

    def _is_within(self, gap: LogprobGap, most_rounding: float) -> bool:
        return gap.nats <= _LEAST_NATS or (gap.relative <= self.max_gap and gap.rounding <= most_rounding)


_LEAST_NATS = 1e-6
"""Rounding of a log-prob of -10 in float32; a difference that is no larger counts as none."""
_LEAST_SPREAD = 0.01
"""In nats; for a policy to which all tokens are about equally likely, whose own spread is 0."""
_ROUNDING = 5e-7
"""Four times that of float32; the ratio of two smaller ones is noise."""
_SHAKE = 0.01
"""The relative change of the embeddings with which log-probs are moved; large enough for bfloat16."""


def given_tokens(tokenizer: PreTrainedTokenizerBase, longest: int) -> list[list[int]]:
    """Draw sequences of at most ``longest`` tokens, without special tokens; they are the same each time."""
    added: Mapping[str, int] = tokenizer.get_added_vocab()
    special = {*tokenizer.all_special_ids, *added.values()}
    ids = [number for number in range(len(tokenizer)) if number not in special]
    length = max(min(_MOST_TOKENS_EACH, longest), 2)
    draw = random.Random(0)
    return [draw.choices(ids, k=length) for _ in range(math.ceil(_NUM_TOKENS / length))]


def _shaken_logprobs(policy: PreTrainedModel, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the policy's log-probs with a little noise in its embeddings, which is the same each time."""
    generator = torch.Generator().manual_seed(0)

    def shake(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(output.shape, generator=generator).to(output)
        return output * (1 + _SHAKE * noise)

    hook = policy.get_input_embeddings().register_forward_hook(shake)
    try:
        return given_logprobs(policy, sequences)
    finally:
        hook.remove()


@torch.no_grad()
def given_logprobs(policy: PreTrainedModel, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the policy's log-probs of all tokens after the first of each of B sequences, shape B (T - 1).

    They are those of the whole vocabulary, as engines score given tokens, also if some are never sampled.
    """
    was_training, never = policy.training, never_sampled(policy)
    policy.eval()
    if never:
        never_sample(policy, ())
    ids_BT = torch.tensor(sequences, device=policy.device)

    def logprobs() -> torch.Tensor:
        hidden_BTD = hidden_states(policy, ids_BT)
        return head_logprobs(policy, hidden_BTD[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten())[0]

    try:
        logprobs_N = compute(policy, logprobs)
    finally:
        if never:
            never_sample(policy, never)
    policy.train(was_training)
    return logprobs_N.float().cpu()
