"""What can be measured of completion tokens without a gradient of the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from lit_grpo.policy.sharding import compute
from lit_grpo.update.logprobs.forward import head_logprobs, micro_batch_logprobs, predecessors
from lit_grpo.update.logprobs.linear_head import linear_head, linear_logprobs
from lit_grpo.update.prefix.sequence_parallel import ALONE, SequenceParallel
from lit_grpo.update.prefix.sharing import shared_prefixes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lit_grpo.update.batches.layout import MicroBatch


def logprobs_and_scores(
    model: PreTrainedModel, micro_batch: MicroBatch, temperature: float, ranks: SequenceParallel = ALONE
) -> torch.Tensor:
    """Return for each completion token its log-prob, and ``|d log pi(token) / d h|^2``, shape (N, 2).

    ``h`` is the last hidden state that predicts the token, so the gradient is ``head^T (1[v = token] - p_v)``; the
    backward pass is the head's alone. No ``.grad`` changes.
    """
    with shared_prefixes(model) if micro_batch.groups else nullcontext(), torch.no_grad():
        hidden_ND = predecessors(model, micro_batch, ranks)
    target_ids_N = ranks.own_part(micro_batch.target_ids_N)
    with torch.enable_grad():
        hidden_ND.requires_grad_()
        head = linear_head(model)
        if head is None:
            logprobs_N, _ = head_logprobs(model, hidden_ND, target_ids_N, temperature)
        else:
            still = replace(head, weight_VD=head.weight_VD.detach(), keeps_gradient=False)
            logprobs_N, _ = linear_logprobs(hidden_ND, target_ids_N, still, temperature)
        (gradient_ND,) = torch.autograd.grad(logprobs_N.sum(), hidden_ND)
    both_N2 = torch.stack([logprobs_N.detach(), gradient_ND.to(logprobs_N.dtype).square().sum(-1)], 1)
    return ranks.join(0, both_N2, len(micro_batch.target_ids_N))


_MEASUREMENTS: Mapping[str, Callable[..., torch.Tensor]] = {
    "logprobs": lambda *of, ranks: micro_batch_logprobs(*of, ranks=ranks)[0],
    "entropy": lambda *of, ranks: micro_batch_logprobs(*of, ranks=ranks)[1],
    "scores": logprobs_and_scores,
}


def measured(
    what: str, model: PreTrainedModel, temperature: float, ranks: SequenceParallel, micro_batch: MicroBatch
) -> torch.Tensor:
    """Return ``logprobs``, ``entropy`` or ``scores`` of completion tokens at a temperature, shape N or (N, 2)."""
    return compute(model, lambda: _MEASUREMENTS[what](model, micro_batch, temperature, ranks=ranks))
