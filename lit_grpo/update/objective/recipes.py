"""The objectives by name, and the surrogates they are made of: the loss of each token from its ratio and advantage.

A surrogate takes the log-ratio of shape N (with gradient, see ``tokens.py``) and the :class:`Tokens`, and returns
losses of shape N and metrics of shape N, whose mean over tokens is what they mean. ``r`` is the ratio, ``A`` the
advantage, ``sg`` stops the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from lit_grpo.update.objective.tokens import Normalization, RatioLevel, Tokens, completion_sums, spread

Surrogate = tuple[torch.Tensor, dict[str, torch.Tensor]]


def clipped(
    log_ratio_N: torch.Tensor, tokens: Tokens, *, epsilon: float, epsilon_high: float, delta: float | None = None
) -> Surrogate:
    """Return ``-min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A)``, where A < 0 at most ``-delta A``.

    PPO, arXiv 1707.06347, eq. 7; the asymmetric upper bound is DAPO's clip-higher, arXiv 2503.14476. ``delta`` is dual
    clip's c (arXiv 1912.09729, eq. 5; TRL's ``delta``): a bad token that has become likelier counts at most delta-fold.
    The column ``epsilon`` of a token takes the place of both epsilons, where it is not NaN.
    """
    ratio_N, advantages_N = log_ratio_N.exp(), tokens.advantages_N
    low, high = 1 - epsilon, 1 + epsilon_high
    if (own_N := tokens.columns.get("epsilon")) is not None:
        low, high = torch.where(own_N.isnan(), low, 1 - own_N), torch.where(own_N.isnan(), high, 1 + own_N)
    bounded_N = ratio_N.clamp(low, high)
    free_N = ratio_N if delta is None else ratio_N.clamp(max=delta)
    loss_N = -torch.minimum(free_N * advantages_N, bounded_N * advantages_N)
    return loss_N, clip_metrics(ratio_N, advantages_N, low, high)


def gradient_preserving(
    log_ratio_N: torch.Tensor, tokens: Tokens, *, epsilon: float, epsilon_high: float, delta: float
) -> Surrogate:
    """Return the value of :func:`clipped`, with a gradient where it is clipped: ``(1 +- epsilon) A grad(log pi)``.

    The bound that clips is ``(1 +- epsilon) r / sg(r)`` instead of a constant (GPPO, arXiv 2508.07629; the code in
    suu990901/KlearReasoner at 5d2d0b8). Beyond ``delta`` (dual clip) there is no gradient, as there.
    """
    ratio_N, advantages_N = log_ratio_N.exp(), tokens.advantages_N
    one_N = 1 + log_ratio_N - log_ratio_N.detach()  # r / sg(r): value 1, gradient that of log r
    bounded_N = ratio_N.detach().clamp(1 - epsilon, 1 + epsilon_high) * one_N
    loss_N = -torch.minimum(ratio_N * advantages_N, bounded_N * advantages_N)
    loss_N = torch.where(advantages_N < 0, torch.minimum(loss_N, -delta * advantages_N), loss_N)
    return loss_N, clip_metrics(ratio_N, advantages_N, 1 - epsilon, 1 + epsilon_high)


def dynamically_clipped(
    log_ratio_N: torch.Tensor, tokens: Tokens, *, epsilon: float, epsilon_high: float, delta: float
) -> Surrogate:
    """Return :func:`clipped` with bounds that widen as the token's old probability ``q`` falls, and dual clip.

    ``0.5 + sqrt(max(1 - 4 epsilon / q, 0)) / 2 <= r <= 0.5 + sqrt(1 + 4 epsilon_high / q) / 2``, the upper bound at
    most ``max(delta, 10)`` (DCPO, arXiv 2509.02333; the code in lime-RL/DCPO at 01787b0).
    """
    ratio_N, advantages_N = log_ratio_N.exp(), tokens.advantages_N
    # 4 epsilon / q overflows for the least likely tokens, to the same bounds as infinity.
    low_N = 0.5 + 0.5 * (1 - 4 * epsilon * (-tokens.old_logprobs_N).exp()).clamp(min=0).sqrt()
    high_N = 0.5 + 0.5 * (1 + 4 * epsilon_high * (-tokens.old_logprobs_N).exp()).sqrt()
    high_N = high_N.clamp(max=max(delta, 10.0))
    loss_N = -torch.minimum(ratio_N * advantages_N, ratio_N.clamp(low_N, high_N) * advantages_N)
    loss_N = torch.where(advantages_N < 0, torch.minimum(loss_N, -delta * advantages_N), loss_N)
    return loss_N, clip_metrics(ratio_N, advantages_N, low_N, high_N)


def clipped_weight(log_ratio_N: torch.Tensor, tokens: Tokens, *, epsilon_high: float) -> Surrogate:
    """Return ``-sg(min(r, epsilon_high)) A log pi``: every token keeps a gradient, however far it has moved.

    CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4) without a lower bound; ``epsilon_high`` is the largest weight itself, as
    in ScaleRL (arXiv 2510.13786) and TRL, where verl and slime write ``1 + epsilon_high``.
    """
    ratio_N, advantages_N = log_ratio_N.exp(), tokens.advantages_N
    loss_N = -ratio_N.clamp(max=epsilon_high).detach() * advantages_N * tokens.logprobs_N
    return loss_N, clip_metrics(ratio_N, advantages_N, -math.inf, epsilon_high)


def soft_gate(
    log_ratio_N: torch.Tensor, tokens: Tokens, *, temperature_positive: float, temperature_negative: float
) -> Surrogate:
    """Return ``-(4 / t) sigmoid(t (r - 1)) A``, a gate that closes smoothly on both sides of r = 1.

    The temperature ``t`` is ``temperature_positive`` where A > 0 and else ``temperature_negative`` (SAPO, arXiv
    2511.20347).
    """
    ratio_N, advantages_N = log_ratio_N.exp(), tokens.advantages_N
    temperature_N = _by_sign(advantages_N > 0, temperature_positive, temperature_negative, ratio_N.dtype)
    gate_N = torch.sigmoid(temperature_N * (ratio_N - 1)) * 4 / temperature_N
    return -gate_N * advantages_N, {"ratio/mean": ratio_N.detach(), "sapo/gate": gate_N.detach()}


LOWEST_LOG_WEIGHT, HIGHEST_LOG_WEIGHT = math.log(1e-8), 20.0


def gamma_weighted(
    log_ratio_N: torch.Tensor,
    tokens: Tokens,
    *,
    k_positive: float,
    lambda_positive: float,
    k_negative: float,
    lambda_negative: float,
    log_correction_N: torch.Tensor | None = None,
) -> Surrogate:
    """Return ``-sg(phi(w)) A log pi`` with ``phi(w) = exp(l) w**k exp(-l w)`` of the completion's whole ratio ``w``.

    ``w`` is the product of the token ratios (not their geometric mean), each with its log in [-20, 20] and the whole in
    [log 1e-8, 20]; k and l are the positive ones where A >= 0 (VESPO; TRL 1.16, ``get_gamma_weights``, which
    cites the paper). ``log_correction_N``, the log of the weights of a token-wise rollout correction, is part of w.
    """
    with torch.no_grad():
        log_weight_C = completion_sums(log_ratio_N.clamp(-20.0, 20.0), tokens.lengths_C)
        if log_correction_N is not None:
            bounded_N = log_correction_N.clamp(LOWEST_LOG_WEIGHT, HIGHEST_LOG_WEIGHT)
            log_weight_C = log_weight_C + completion_sums(bounded_N, tokens.lengths_C)
        log_weight_C = log_weight_C.clamp(LOWEST_LOG_WEIGHT, HIGHEST_LOG_WEIGHT)
        good_C = tokens.advantages_C >= 0
        k_C = _by_sign(good_C, k_positive, k_negative, log_weight_C.dtype)
        lambda_C = _by_sign(good_C, lambda_positive, lambda_negative, log_weight_C.dtype)
        phi_C = (lambda_C + k_C * log_weight_C - lambda_C * log_weight_C.exp()).exp()
        phi_N = spread(phi_C, tokens.lengths_C, len(tokens.logprobs_N))
    loss_N = -phi_N * tokens.advantages_N * tokens.logprobs_N
    return loss_N, {"ratio/mean": log_ratio_N.detach().exp(), "vespo/weight": phi_N}


def _by_sign(good: torch.Tensor, positive: float, negative: float, dtype: torch.dtype) -> torch.Tensor:
    """One number where an advantage is good and another elsewhere; of two floats torch would make float32."""
    return torch.full_like(good, negative, dtype=dtype).masked_fill(good, positive)


@torch.no_grad()
def clip_metrics(
    ratio_N: torch.Tensor, advantages_N: torch.Tensor, low: torch.Tensor | float, high: torch.Tensor | float
) -> dict[str, torch.Tensor]:
    """Say how far each token's ratio has moved, and whether a bound took its gradient."""
    return {
        "ratio/mean": ratio_N.detach(),
        "clip_ratio/low": ((ratio_N < low) & (advantages_N < 0)).float(),
        "clip_ratio/high": ((ratio_N > high) & (advantages_N > 0)).float(),
    }


Parameters = Mapping[str, float | None]


@dataclass(frozen=True)
class Recipe:
    """One objective: a surrogate with its parameters, what its ratio is taken over, and what a token counts.

    ``parameters`` are all that the surrogate takes, with their defaults; ``above_zero`` those that may not be 0.
    ``only_ratio`` is the ratio level that alone has a meaning for it. ``takes_correction`` hands rollout corrections to
    the surrogate instead of multiplying its loss by them. ``needs`` are words of
    :data:`lit_grpo.compatibility.REQUIREMENTS`. A new objective is one more entry in :data:`RECIPES`, or a row in a
    file of your own, which ``objective.loss`` names.
    """

    surrogate: Callable[..., Surrogate]
    normalization: Normalization
    parameters: Parameters
    source: str
    ratio: RatioLevel = "token"
    only_ratio: RatioLevel | None = None
    takes_correction: bool = False
    above_zero: frozenset[str] = frozenset()
    needs: frozenset[str] = frozenset()


CLIP: Parameters = {"epsilon": 0.2, "epsilon_high": 0.2, "delta": None}

RECIPES: dict[str, Recipe] = {
    "grpo": Recipe(clipped, "sequence", CLIP, "DeepSeekMath, arXiv 2402.03300, eq. 3"),
    "dr_grpo": Recipe(clipped, "constant", CLIP, "Dr. GRPO, arXiv 2503.20783"),
    "dapo": Recipe(clipped, "token", CLIP, "DAPO, arXiv 2503.14476, eq. 12"),
    "gspo": Recipe(
        clipped,
        "sequence",
        {"epsilon": 3e-4, "epsilon_high": 4e-4, "delta": None},
        "GSPO, arXiv 2507.18071, eq. 5",
        ratio="sequence",
    ),
    "luspo": Recipe(
        clipped,
        "sequence_sum",
        {"epsilon": 2e-3, "epsilon_high": 2.5e-3, "delta": None},
        "LUSPO, arXiv 2602.05261",
        ratio="sequence",
        only_ratio="sequence",
    ),
    "cispo": Recipe(clipped_weight, "token", {"epsilon_high": 5.0}, "CISPO, arXiv 2506.13585, eq. 4"),
    "sapo": Recipe(
        soft_gate,
        "sequence",
        {"temperature_positive": 1.0, "temperature_negative": 1.05},
        "SAPO, arXiv 2511.20347",
        above_zero=frozenset({"temperature_positive", "temperature_negative"}),
    ),
    "gppo": Recipe(
        gradient_preserving,
        "token",
        {"epsilon": 0.2, "epsilon_high": 0.2, "delta": 3.0},
        "GPPO, arXiv 2508.07629",
    ),
    "dcpo": Recipe(
        dynamically_clipped,
        "sequence",
        {"epsilon": 0.16, "epsilon_high": 0.2, "delta": 10.0},
        "DCPO, arXiv 2509.02333",
        only_ratio="token",
    ),
    "vespo": Recipe(
        gamma_weighted,
        "token",
        {"k_positive": 2.0, "lambda_positive": 3.0, "k_negative": 3.0, "lambda_negative": 2.0},
        "VESPO, as in TRL 1.16",
        only_ratio="token",
        takes_correction=True,
        above_zero=frozenset({"lambda_positive", "lambda_negative"}),
        needs=frozenset({"whole_completions"}),
    ),
}
