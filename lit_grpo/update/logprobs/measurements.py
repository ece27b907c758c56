"""Measurements of completion tokens without a gradient of the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch

from lit_grpo.memory import in_one_read
from lit_grpo.policy.sharding import compute
from lit_grpo.update.logprobs.forward import head_logprobs, micro_batch_logprobs, predecessors
from lit_grpo.update.logprobs.linear_head import linear_head, linear_logprobs
from lit_grpo.update.prefix.sequence_parallel import SINGLE_RANK, SequenceParallel
from lit_grpo.update.prefix.sharing import shared_prefixes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lit_grpo.update.batches.layout import PackedRow

OfHidden = Callable[["PreTrainedModel", torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Measures tokens, shape (n, ...), of the model, the last hidden states (n, D) that predict them, their ids (n,), and
their advantages (n,)."""
Measurement = Literal["logprobs", "entropy", "scores"] | OfHidden


def logprobs_and_scores(
    model: PreTrainedModel, micro_batch: PackedRow, temperature: float, ranks: SequenceParallel = SINGLE_RANK
) -> torch.Tensor:
    """Return for each completion token its log-prob, and ``|d log pi(token) / d h|^2``, shape (N, 2).

    ``h`` is the last hidden state that predicts the token, so the gradient is ``head^T (1[v = token] - p_v)``; the
    backward pass is the head's alone. No ``.grad`` changes.
    """
    with shared_prefixes(model) if micro_batch.stretches else nullcontext(), torch.no_grad():
        hidden_uD = predecessors(model, micro_batch, ranks)
    target_ids_U = micro_batch.unique("target_id")
    target_ids_u = target_ids_U if ranks.size == 1 else ranks.own_part(target_ids_U)
    with torch.enable_grad():
        hidden_uD.requires_grad_()
        head = linear_head(model)
        if head is None:
            logprobs_u, _ = head_logprobs(model, hidden_uD, target_ids_u, temperature)
        else:
            still = replace(head, weight_VD=head.weight_VD.detach(), keeps_gradient=False)
            logprobs_u, _ = linear_logprobs(hidden_uD, target_ids_u, still, temperature)
        (gradient_uD,) = torch.autograd.grad(logprobs_u.sum(), hidden_uD)
    both_u2 = torch.stack([logprobs_u.detach(), gradient_uD.to(logprobs_u.dtype).square().sum(-1)], 1)
    return micro_batch.spread(both_u2 if ranks.size == 1 else ranks.join(0, both_u2, len(target_ids_U)))


@torch.no_grad()
def measure(
    what: Measurement,
    micro_batches: Sequence[PackedRow],
    model: PreTrainedModel,
    temperature: float,
    device: torch.device,
    ranks: SequenceParallel = SINGLE_RANK,
) -> list[torch.Tensor]:
    """Measure every token that is trained on, without gradient; return the values of each rollout, on the CPU.

    Args:
        what: ``logprobs`` or ``entropy`` of each token, shape T, both of :func:`logprobs_and_scores`, shape (T, 2), or
            a function of the last hidden states.
        micro_batches: The rollouts, laid out.
        model: What to measure them under.
        temperature: Temperature that the logits are divided by, as in sampling.
        device: Where the model computes.
        ranks: Ranks that share each micro-batch, and have equally many.
    """
    measured: list[torch.Tensor] = []
    own: list[PackedRow] = []
    for owner, micro_batch in ranks.in_turn(micro_batches):
        values_N = _measured(what, model, micro_batch.to(device), temperature, ranks)
        if owner == ranks.rank:
            measured.append(values_N)
            own.append(micro_batch)
    parts: dict[int, torch.Tensor] = {}
    for read, micro_batch in zip(in_one_read(measured), own, strict=True):
        parts |= zip(micro_batch.rows, read.split(micro_batch.lengths_C.tolist()), strict=True)
    return [parts[row] for row in sorted(parts)]


def _measured(
    what: Measurement, model: PreTrainedModel, micro_batch: PackedRow, temperature: float, ranks: SequenceParallel
) -> torch.Tensor:
    def forward() -> torch.Tensor:
        if what == "scores":
            return logprobs_and_scores(model, micro_batch, temperature, ranks)
        if callable(what):
            return _of_hidden(what, model, micro_batch, ranks)
        logprobs_N, entropy_N = micro_batch_logprobs(model, micro_batch, temperature, ranks=ranks)
        return logprobs_N if what == "logprobs" else entropy_N

    return compute(model, forward)


def _of_hidden(what: OfHidden, model: PreTrainedModel, micro_batch: PackedRow, ranks: SequenceParallel) -> torch.Tensor:
    """Measure each token by itself: completions that begin alike share hidden states, but not advantages."""
    with shared_prefixes(model) if micro_batch.stretches else nullcontext():
        hidden_uD = predecessors(model, micro_batch, ranks)
    target_ids_N = micro_batch.columns["target_id"]
    if ranks.size == 1:
        return what(model, micro_batch.spread(hidden_uD), target_ids_N, micro_batch.advantages_N)
    hidden_ND = micro_batch.spread(ranks.join(0, hidden_uD, len(micro_batch.unique("target_id"))))
    own = [ranks.own_part(each) for each in (hidden_ND, target_ids_N, micro_batch.advantages_N)]
    return ranks.join(0, what(model, *own), len(target_ids_N))
