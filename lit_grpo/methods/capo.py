"""CAPO (arXiv 2510.00819): tokens that would make an optimizer step unstable are left out, by a model of the head.

For each token, of advantage A, with the last hidden state h and the head's distribution p at temperature 1, the step
``D`` is simulated that the optimizer would make of the head's weight with the gradient ``g = A (1[y] - p) h'`` of this
token alone. With Adam the moments are those after that step::

    m = (b1 m_t + (1 - b1) g) / (1 - b1^(t + 1))    v = (b2 v_t + (1 - b2) g^2) / (1 - b2^(t + 1))
    D = lr m / (sqrt(v) + eps)

With SGD ``D = lr g``. With ``u = D h``, how far D moves the logits, and ``s = u_y - E_p u``, how far it moves the log-
prob of the token, the quadratic models of the surrogate ``A pi / pi_old`` and of the distribution are::

    m_H = A s + A (s^2 - Var_p u) / 2    the change of the surrogate; its Hessian is A times what is in brackets
    m_F = s^2 / 2                        the Fisher term of the sampled token, in nats

A token is trained on where ``|m_H| < hessian`` and ``m_F < fisher``. A weight moves by at most about ``lr (1 - b1) /
sqrt(1 - b2)`` for one token, however small the moments are: they divide a gradient of one token, not the batch's mean.

It costs a forward pass and, for each token, products of ``top`` rows of the head. The paper's code
(luckeciano/stable-pg-llm, 933fe01) is what it was compared with; ``top``, the bounds and their strict sides are of it.
Four things deviate. The moments are the optimizer's own, with clipped gradients and those of tied embeddings among
them; the code keeps moments of its own, of the mean gradient of each row of the head. A sampled token that is not among
the ``top`` likeliest takes the place of the last of them; the code's sampling is limited to them. Tokens that are left
out stay in the denominator; the code's ``grpo`` loss divides by those that are left, its ``dr_grpo`` loss as here. And
before Adam's first step, when there are no moments, all tokens are trained on; the code takes ``lr g`` there, with the
learning rate of 0 that its warm-up begins with, so that all are trained on as well.

Evidence: both models beside autograd's Hessian and Fisher matrix in float64, in ``tests/test_capo.py``, and gradient
norms beside GRPO's at the paper's learning rate, ``python -m benchmarks.learning capo_norms``. It has not been shown
to help (docs/methods.md): those tasks are learned at rates of 2e-5 and more, and on the demo's 1e-4 it was 8 points
lower.

The bounds belong to the paper's learning rate of 1.5e-5, and m_F grows with its square: look at ``update/kept_share``
at another one, and raise them.

Example:
    ``rollout.plugins: [{capo: {fisher: 1.0e-4, hessian: 0.01}}]``
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch

from lit_grpo.limits import Limit
from lit_grpo.plugins import Plugin, RunFacts
from lit_grpo.update.step import Step

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VALUES_PER_BLOCK = 2**22
SCALES = ("logit_scale", "logits_scaling", "final_logit_softcapping")


@dataclass
class Capo(Plugin):
    """Leaves out tokens whose own step would change the head's distribution too much.

    Before the first step of Adam, which has no moments yet, none is left out. ``update/kept_share`` is logged.
    """

    writes: ClassVar[frozenset[str]] = frozenset({"mask"})
    needs: ClassVar[frozenset[str]] = frozenset({"unsharded_weights", "all_ranks"})  # masks a whole step
    changes: ClassVar[Mapping[str, str]] = {"all_tokens": "leaves tokens out by a model of curvature"}

    fisher: Annotated[float, Limit(gt=0, infinite=True)] = 1e-4
    """Upper bound of ``m_F``, in nats."""
    hessian: Annotated[float, Limit(gt=0, infinite=True)] = 0.01
    """Upper bound of ``|m_H|``."""
    top: Annotated[int, Limit(ge=2)] = 50
    """Number of tokens of the vocabulary that a distribution is cut to: the likeliest, including the sampled one."""

    def check(self, run: RunFacts) -> None:
        if run.policy is not None and run.optimizer is not None:
            HeadStep.of(run.optimizer, _head_weight(run.policy))

    def on_minibatch(self, step: Step) -> None:
        def of_hidden(
            model: PreTrainedModel, hidden_nD: torch.Tensor, target_ids_n: torch.Tensor, advantages_n: torch.Tensor
        ) -> torch.Tensor:
            weight = _head_weight(model)
            simulated = HeadStep.of(step.optimizer, weight)
            if simulated is None:
                return hidden_nD.new_zeros((len(hidden_nD), 2))
            return curvature_models(weight, hidden_nD, target_ids_n, advantages_n, simulated, self.top)

        values = step.measure(step.rollouts, of_hidden)
        for rollout in step.rollouts:
            its = values[rollout.completion.request.key]
            step.set("mask", rollout, (its[:, 0].abs() < self.hessian) & (its[:, 1] < self.fisher))


def _head_weight(model: PreTrainedModel) -> torch.Tensor:
    """Return the weight of the head, which has to be a plain linear layer that is trained."""
    head: Any = model.get_output_embeddings()
    scaled = [name for name in SCALES if getattr(model.config.get_text_config(), name, None) not in (None, 1)]
    if type(head) is not torch.nn.Linear or head.bias is not None or not head.weight.requires_grad or scaled:
        raise ValueError("it needs a plain linear head that is trained; leave capo out.")
    return head.weight


@dataclass(frozen=True)
class HeadStep:
    """The step that an optimizer would make of the head's weight.

    Args:
        lr: Learning rate of the step.
        moments: Adam's means of gradients and of their squares, each of the weight's shape; None with SGD.
        betas: Decay rates of Adam's two means.
        eps: Epsilon in Adam's denominator.
        number: Steps that Adam has made.
    """

    lr: float
    moments: tuple[torch.Tensor, torch.Tensor] | None = None
    betas: tuple[float, float] = (0.0, 0.0)
    eps: float = 0.0
    number: int = 0

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, weight: torch.Tensor) -> HeadStep | None:
        """Return the next step of an optimizer, which has to be Adam or SGD; None before the first one of Adam."""
        group = next(each for each in optimizer.param_groups if any(one is weight for one in each["params"]))
        lr = float(group["lr"])
        if isinstance(optimizer, torch.optim.SGD):
            return cls(lr)
        if not isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
            raise ValueError(
                "it simulates steps of Adam, AdamW and SGD, and model.optimizer is "
                f"{type(optimizer).__name__}; take one of these, or leave capo out."
            )
        state, (beta1, beta2) = optimizer.state.get(weight), group["betas"]
        if not state:
            return None
        moments = state["exp_avg"], state["exp_avg_sq"]
        return cls(lr, moments, (float(beta1), float(beta2)), group["eps"], int(state["step"]))

    def moved(self, gradients_nkD: torch.Tensor, ids_nk: torch.Tensor) -> torch.Tensor:
        """Return by how much rows ``ids_nk`` of the weight move up a gradient of what is to grow, shape (n, k, D)."""
        if self.moments is None:
            return self.lr * gradients_nkD
        (first, second), (beta1, beta2), number = self.moments, self.betas, self.number + 1
        mean = torch.lerp(gradients_nkD, -first[ids_nk].to(gradients_nkD), beta1)  # the moments are of a loss
        square = torch.lerp(gradients_nkD.square(), second[ids_nk].to(gradients_nkD), beta2)
        return self.lr / (1 - beta1**number) * mean / ((square / (1 - beta2**number)).sqrt_() + self.eps)


@torch.no_grad()
def curvature_models(
    weight_VD: torch.Tensor,
    hidden_ND: torch.Tensor,
    target_ids_N: torch.Tensor,
    advantages_N: torch.Tensor,
    step: HeadStep,
    top: int,
) -> torch.Tensor:
    """Return ``m_H`` and ``m_F`` of each token, shape (N, 2), float32 or of the hidden states' precision.

    Args:
        weight_VD: The head's, without a bias.
        hidden_ND: What it is applied to.
        target_ids_N: Ids of the tokens that were sampled, shape N.
        advantages_N: Advantage of each token, shape N.
        step: What the optimizer would do.
        top: Number of likeliest tokens whose rows of the head are simulated, :attr:`Capo.top`.
    """
    top = min(top, len(weight_VD))
    size = max(1, VALUES_PER_BLOCK // max(len(weight_VD), top * weight_VD.shape[1]))
    precision = torch.promote_types(hidden_ND.dtype, torch.float32)
    parts = [hidden_ND.new_zeros((0, 2), dtype=precision)]
    blocks = (each.split(size) for each in (hidden_ND, target_ids_N, advantages_N.to(precision)))
    for hidden_nD, ids_n, advantages_n in zip(*blocks, strict=True):
        logits_nV = (hidden_nD @ weight_VD.T).to(precision)
        ids_nk = logits_nV.topk(top).indices
        ids_nk[:, -1] = torch.where((ids_nk == ids_n[:, None]).any(1), ids_nk[:, -1], ids_n)
        probs_nk = logits_nV.gather(1, ids_nk).softmax(1)
        scores_nk = (ids_nk == ids_n[:, None]).to(precision) - probs_nk
        hidden_n1D = hidden_nD[:, None].to(precision)
        moved_nkD = step.moved((advantages_n[:, None] * scores_nk)[:, :, None] * hidden_n1D, ids_nk)
        moved_nk = (moved_nkD * hidden_n1D).sum(-1)
        slope_n = (scores_nk * moved_nk).sum(1)
        variance_n = (probs_nk * (moved_nk - (probs_nk * moved_nk).sum(1, True)).square()).sum(1)
        squares_n = slope_n.square()
        parts.append(torch.stack([advantages_n * (slope_n + (squares_n - variance_n) / 2), squares_n / 2], 1))
    return torch.cat(parts)


PLUGINS = {"capo": Capo()}
