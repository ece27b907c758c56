"""CAPO (arXiv 2510.00819): tokens that would make an optimizer step unstable are left out, by a model of the head.

For each token, of advantage A, with the last hidden state h and the head's distribution p, the step that its own
gradient g would make of the head's weight is simulated: ``D = P g``, with ``P = lr / (sqrt(v) + eps)`` of Adam's second
moments as they are before the step (momentum left out), or ``lr`` for an optimizer without. Of the quadratic model of
the token's objective ``A log pi`` and of its Fisher information::

    m_H = g'D + D'HD / 2        how much the objective would change
    m_F = D'FD / 2              how far the distribution would move, a KL divergence in nats

A token is learnt from where ``|m_H| <= hessian`` and ``m_F <= fisher``. Others stay in the denominator. No matrix of
second derivatives exists: D changes the logits by ``d_v = A (1[v = y] - p_v) q_v`` with ``q = P h^2``, and then ``g'D
= A (d_y - E_p d)``, ``D'FD = Var_p d`` and ``D'HD = -A Var_p d``. It costs a forward pass and two products with the
head. The distribution is that at temperature 1.

Known from the abstract and a summary alone: which quantities, that the head's are taken with a simulated step, and the
bounds 1e-4 and 0.01. Unknown, and our reading: a step for each token by itself, and a bound on both sides of ``m_H``.

``m_F`` grows with the square of the learning rate, and the bounds belong to the paper's 1.5e-5. At the demo's 1e-3 they
leave out 15% of the tokens and nearly all of the gradient, whose norm fell from 0.6 to 0.0002 in the second update:
look at ``grad_norm``, and raise them.

Example:
    ``rollout.plugins: [{capo: {fisher: 1.0e-4, hessian: 0.01}}]``
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lit_grpo.limits import Positive
from lit_grpo.types import Key, Rollout
from lit_grpo.update.selection import Measure, Selection, TakesSteps

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOGITS_PER_BLOCK = 2**22
SCALES = ("logit_scale", "logits_scaling", "final_logit_softcapping")


@dataclass(frozen=True)
class Capo(Selection):
    """Leaves out tokens whose own step would change the head's distribution too much.

    The first step with Adam, which has no moments yet, learns from all. ``update/kept_share`` is logged.

    Args:
        fisher: The largest ``m_F`` of a token that is learnt from, in nats.
        hessian: The largest ``|m_H|``.
    """

    fisher: Positive = 1e-4
    hessian: Positive = 0.01

    @property
    def needs(self) -> frozenset[str]:
        """The head's weight and its moments, and what the whole step is made of before its gradient."""
        return super().needs | {"unsharded_weights"}

    @property
    def changes(self) -> Mapping[str, str]:
        """It chooses tokens, at each step of a batch."""
        return {**super().changes, "all_tokens": "leaves tokens out by a model of curvature"}

    def token_mask(
        self, learnt: Sequence[tuple[Rollout, float]], measure: Measure, optimization: TakesSteps
    ) -> Mapping[Key, torch.Tensor] | None:
        """Return which tokens are within both bounds."""

        def of_hidden(model: PreTrainedModel, hidden_nD: torch.Tensor, target_ids_n: torch.Tensor) -> torch.Tensor:
            head: Any = model.get_output_embeddings()
            scaled = [name for name in SCALES if getattr(model.config.get_text_config(), name, None) not in (None, 1)]
            if type(head) is not torch.nn.Linear or head.bias is not None or not head.weight.requires_grad or scaled:
                raise ValueError("rollout.plugins: capo needs a plain linear head that is trained; leave it out.")
            factors = preconditioner(optimization.optimizer, head.weight)
            if factors is None:
                return hidden_nD.new_zeros((len(hidden_nD), 2))
            return slopes_and_variances(head.weight, hidden_nD, target_ids_n, factors)

        values = measure([rollout for rollout, _ in learnt], of_hidden)
        mask: dict[Key, torch.Tensor] = {}
        for rollout, advantage in learnt:
            completion = rollout.completion
            slope_T, variance_T = values[completion.request.key].double().unbind(1)
            own = rollout.token_advantages
            advantage_T = torch.full_like(slope_T, advantage) if own is None else own.double()
            change_T, moved_T = models(slope_T, variance_T, advantage_T)
            mask[completion.request.key] = (change_T.abs() <= self.hessian) & (moved_T <= self.fisher)
        return mask


def models(
    slope_T: torch.Tensor, variance_T: torch.Tensor, advantage_T: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``m_H`` and ``m_F``, shape T, of what :func:`slopes_and_variances` tells for an advantage of 1."""
    squares_T = advantage_T.square()
    return squares_T * slope_T - squares_T * advantage_T * variance_T / 2, squares_T * variance_T / 2


@torch.no_grad()
def slopes_and_variances(
    weight_VD: torch.Tensor, hidden_ND: torch.Tensor, target_ids_N: torch.Tensor, factors: torch.Tensor | float
) -> torch.Tensor:
    """Return ``d_y - E_p d`` and ``Var_p d`` of each token for an advantage of 1, shape (N, 2).

    Args:
        weight_VD: The head's, without a bias.
        hidden_ND: What it is applied to.
        target_ids_N: Tokens.
        factors: What each entry of a gradient of the weight is multiplied by in a step, shape (V, D), or one number.
    """
    parts = [hidden_ND.new_zeros((0, 2))]
    size = max(1, LOGITS_PER_BLOCK // len(weight_VD))
    for hidden_nD, ids_n in zip(hidden_ND.split(size), target_ids_N.split(size), strict=True):
        probs_nV = (hidden_nD @ weight_VD.T).softmax(-1)
        squares_nD = hidden_nD.square()
        reach_nV = _reach(squares_nD, factors)
        moved_nV = (torch.zeros_like(probs_nV).scatter_(1, ids_n[:, None], 1.0) - probs_nV) * reach_nV
        mean_n1 = (probs_nV * moved_nV).sum(-1, True)
        slope_n = (moved_nV.gather(1, ids_n[:, None]) - mean_n1).squeeze(1)
        parts.append(torch.stack([slope_n, (probs_nV * (moved_nV - mean_n1).square()).sum(-1)], 1))
    return torch.cat(parts)


def _reach(squares_nD: torch.Tensor, factors: torch.Tensor | float) -> torch.Tensor:
    """How far a logit moves for each unit of its gradient: shape (n, V), or (n, 1) where it is the same for all."""
    if isinstance(factors, torch.Tensor):
        return squares_nD @ factors.T
    return squares_nD.sum(-1, True) * factors


def preconditioner(optimizer: torch.optim.Optimizer, weight: torch.Tensor) -> torch.Tensor | float | None:
    """Return what an optimizer multiplies a gradient by, of the weight's shape or a number; None if not known yet."""
    group = next(each for each in optimizer.param_groups if any(one is weight for one in each["params"]))
    if "betas" not in group:
        return float(group["lr"])
    state = optimizer.state.get(weight)
    if not state:
        return None
    unbiased = 1 - group["betas"][1] ** float(state["step"])
    return group["lr"] / (state["exp_avg_sq"].sqrt() / math.sqrt(unbiased) + group["eps"])


PLUGINS = {"capo": Capo()}
