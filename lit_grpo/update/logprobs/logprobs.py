"""Token log-probs and entropy of any head, without a full logits tensor."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

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
        target_ids_N: Token ids.
        head: Maps hidden states (n, D) to float32 logits (n, V).
        vocab_size: V.
        temperature: Divides the logits, as it did when the tokens were sampled.
        entropy_gradient: Whether the entropy carries a gradient.
    """

    def chunk_logprobs(hidden_nD: torch.Tensor, target_ids_n: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs_nV = torch.log_softmax(head(hidden_nD) / temperature, dim=-1)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropy_n = -(logprobs_nV.exp() * logprobs_nV).sum(-1)
        return logprobs_nV.gather(-1, target_ids_n[:, None]).squeeze(-1), entropy_n

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
