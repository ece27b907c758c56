"""The policy's forward pass over a micro-batch, and log-probs of any head without a full logits tensor."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.utils.checkpoint import checkpoint

from lit_grpo.policy.architecture.decoder import attention_name, hidden_states, token_logits
from lit_grpo.policy.architecture.vision import image_features, vision_of
from lit_grpo.update.logprobs.linear_head import linear_head, linear_logprobs
from lit_grpo.update.prefix.sequence_parallel import SINGLE_RANK, SequenceParallel
from lit_grpo.update.prefix.sharing import ATTENTION_NAME, SharedPrefix, shared_prefixes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lit_grpo.update.batches.layout import PackedRow


def micro_batch_logprobs(
    model: PreTrainedModel,
    micro_batch: PackedRow,
    temperature: float,
    entropy_gradient: bool = False,
    ranks: SequenceParallel = SINGLE_RANK,
    owner: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-prob and entropy of the tokens of a micro-batch under ``model``: the N axis, then the M axis.

    If the row has candidates, log-probs have the shape (N + M, K + 2): the token's own, those of its candidates, and
    the log of the probability of all other tokens than these; on the M axis the one candidate is the token itself.

    Args:
        model: A causal language model.
        micro_batch: On the model's device.
        temperature: Divides the logits, as it did when the tokens were sampled.
        entropy_gradient: Whether the entropy carries a gradient.
        ranks: Those that share the micro-batch; each of them calls this, and gets all of it.
        owner: Whose gradient of what is returned counts.

    Raises:
        RuntimeError: The micro-batch is packed and gradient checkpointing would run the layers again where the model's
            attention has been switched back; call it, and ``backward``, inside ``shared_prefixes(model)``.
    """
    if micro_batch.stretches and attention_name(model) != ATTENTION_NAME:
        if torch.is_grad_enabled() and model.training and model.is_gradient_checkpointing:
            raise RuntimeError(
                "Gradient checkpointing runs the layers again in backward; put both passes into `with "
                "shared_prefixes(model):`."
            )
        with shared_prefixes(model):
            return micro_batch_logprobs(model, micro_batch, temperature, entropy_gradient, ranks, owner)
    hidden_uD = predecessors(model, micro_batch, ranks)
    target_ids_U = micro_batch.unique("target_id")
    target_ids_u = target_ids_U if ranks.size == 1 else ranks.own_part(target_ids_U)
    logprobs_U, entropy_U = head_logprobs(model, hidden_uD, target_ids_u, temperature, entropy_gradient)
    if ranks.size > 1:
        of_token = logprobs_U.shape[1:]
        columns = logprobs_U.view(len(entropy_U), of_token.numel()), entropy_U[:, None]
        both_UX = ranks.join(owner, torch.cat(columns, 1), len(target_ids_U))
        logprobs_U, entropy_U = both_UX[:, :-1].view(len(target_ids_U), *of_token), both_UX[:, -1]
    return micro_batch.spread(logprobs_U), micro_batch.spread(entropy_U)


def predecessors(model: PreTrainedModel, micro_batch: PackedRow, ranks: SequenceParallel = SINGLE_RANK) -> torch.Tensor:
    """Return the last hidden states (u, D) that predict the unique completion tokens, of several ranks each a part.

    Inside ``shared_prefixes(model)``.
    """
    row, source_U = micro_batch, micro_batch.unique("source")
    if row.stretches:
        layout = SharedPrefix(row.stretches, row.carried, row.in_row, ranks, row.columns)
        layout.compute_carried(model)
        hidden_TD = layout.hidden_states(model, row.input_ids_BT, row.position_ids_BT, row.pictures)
    else:
        seen = None
        if row.pictures:
            seen = image_features(model, row.pictures) | vision_of(model).token_types(row.input_ids_BT)
        hidden_TD = hidden_states(model, row.input_ids_BT, seen, position_ids=row.position_ids_BT).flatten(0, 1)
    return hidden_TD.index_select(0, source_U if ranks.size == 1 else ranks.own_part(source_U))


def head_logprobs(
    model: PreTrainedModel,
    hidden_ND: torch.Tensor,
    target_ids_N: torch.Tensor,
    temperature: float = 1.0,
    entropy_gradient: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-prob and entropy, shape N, of targets under the model's head, without a full logits tensor."""
    linear = linear_head(model)
    if linear is not None:
        return linear_logprobs(hidden_ND, target_ids_N, linear, temperature, entropy_gradient)
    return token_logprobs(
        hidden_ND,
        target_ids_N,
        head=lambda hidden: token_logits(model, hidden),
        vocab_size=model.config.get_text_config().vocab_size,
        temperature=temperature,
        entropy_gradient=entropy_gradient,
    )


LOGITS_PER_CHUNK = 2**24


def token_logprobs(
    hidden_ND: torch.Tensor,
    target_ids_N: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    vocab_size: int,
    temperature: float = 1.0,
    entropy_gradient: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-prob of each target token and the entropy of its distribution, both of shape N.

    Works through the tokens in chunks of ``2**24`` logits (64 MiB in float32) and computes each chunk again
    in the backward pass, so that memory does not grow with N x V. For a plain linear head
    :func:`~lit_grpo.update.logprobs.linear_head.linear_logprobs` does the same at a third of the time.

    Args:
        hidden_ND: Hidden states that predict the targets.
        target_ids_N: Token ids. Or a token and K candidates for each place, shape (N, 1 + K): then log-probs have the
            shape (N, K + 2), and the last is the log of the probability of all tokens that are no candidates.
        head: Maps hidden states (n, D) to float32 logits (n, V).
        vocab_size: Number of logits per token, V, which decides the size of a chunk.
        temperature: Divides the logits, as it did when the tokens were sampled.
        entropy_gradient: Whether the entropy carries a gradient.
    """

    def chunk_logprobs(hidden_nD: torch.Tensor, target_ids_n: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs_nV = torch.log_softmax(head(hidden_nD) / temperature, dim=-1)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropy_n = -(logprobs_nV.exp() * logprobs_nV).sum(-1)
        if target_ids_n.dim() == 1:
            return logprobs_nV.gather(-1, target_ids_n[:, None]).squeeze(-1), entropy_n
        rest_n1 = log_rest(logprobs_nV, target_ids_n[:, 1:])
        return torch.cat([logprobs_nV.gather(-1, target_ids_n), rest_n1], -1), entropy_n

    size = max(1, LOGITS_PER_CHUNK // vocab_size)
    logprobs, entropies = [], []
    # An empty micro-batch still goes through the head once, so that every rank has a gradient to share.
    for start in range(0, max(1, len(target_ids_N)), size):
        chunk = hidden_ND[start : start + size], target_ids_N[start : start + size]
        if torch.is_grad_enabled():
            logprobs_n, entropy_n = checkpoint(chunk_logprobs, *chunk, use_reentrant=False)
        else:
            logprobs_n, entropy_n = chunk_logprobs(*chunk)
        logprobs.append(logprobs_n)
        entropies.append(entropy_n)
    return torch.cat(logprobs), torch.cat(entropies)


def log_rest(logprobs_NV: torch.Tensor, ids_NK: torch.Tensor) -> torch.Tensor:
    """Return the log of the probability of all tokens but some, shape (N, 1); a least one where these are all tokens.

    The sum is of the others: 1 less the sum of these would be rounding errors where they have almost all probability.
    """
    least = math.log(torch.finfo(logprobs_NV.dtype).tiny)
    return logprobs_NV.scatter(-1, ids_NK, least).logsumexp(-1, keepdim=True)
