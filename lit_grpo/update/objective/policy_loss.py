"""A micro-batch's share of an optimizer step's loss, as an :class:`Objective` says."""

from __future__ import annotations

from typing import Any

import torch

from lit_grpo.update.normalization import StepTotals, TokenShare, token_weights
from lit_grpo.update.objective.corrections import correction_metrics, correction_weights
from lit_grpo.update.objective.kl import KL_ESTIMATORS
from lit_grpo.update.objective.objective import Objective
from lit_grpo.update.objective.tokens import (
    LARGEST_LOG_RATIO,
    Tokens,
    log_ratios,
    near_completions,
    on_policy_completions,
    spread,
)

Metrics = dict[str, torch.Tensor]


def policy_loss(
    objective: Objective,
    tokens: Tokens,
    totals: StepTotals,
    beta: float | None = None,
    entropy_coefficient: float | None = None,
    kept_N: torch.Tensor | None = None,
    part: TokenShare | None = None,
) -> tuple[torch.Tensor, Metrics]:
    """Return a micro-batch's share of the step's loss, a scalar, and metrics of shape N.

    ``sum_t weight_t (mask_t correction_t surrogate_t + beta kl_t) - coefficient mean(entropy)``, in TRL 1.16's order:
    masks and corrections act on the surrogate alone.

    Args:
        objective: What to minimise.
        tokens: Of whole completions, or those of a ``part`` that go through the policy.
        totals: Of the whole step, on all ranks.
        beta: Weight of the KL term now; ``kl.beta`` by default.
        entropy_coefficient: Weight of the entropy bonus now; ``entropy.coefficient`` by default.
        kept_N: Which tokens are learnt from, where the step leaves some out.
        part: Of what the tokens are a part; its weights multiply all that a token adds to the loss.

    Raises:
        ValueError: The objective has a KL term, and the tokens have no reference log-probs.
    """
    loss_N, metrics = _corrected_surrogate(objective, tokens)
    if objective.off_policy_threshold is not None:
        on_policy_C = on_policy_completions(tokens, objective.off_policy_threshold)
        on_policy_N = spread(on_policy_C, tokens.lengths_C, len(loss_N))
        loss_N = loss_N * on_policy_N
        metrics["off_policy_masked"] = (~on_policy_N).float()
    if objective.off_policy_kl is not None:
        near_N = spread(near_completions(tokens, objective.off_policy_kl), tokens.lengths_C, len(loss_N))
        loss_N = loss_N * near_N
        metrics["off_policy_filtered"] = (~near_N).float()
    if kept_N is not None:
        loss_N = loss_N * kept_N
    if objective.kl_in_loss:
        kl_N, term_N = _kl(objective, tokens)
        loss_N = loss_N + (objective.kl.beta if beta is None else beta) * term_N
        metrics["kl"] = kl_N.detach()
    lengths_C = tokens.lengths_C if part is None else part.lengths_C
    weights_C = token_weights(lengths_C, totals, objective.normalized_by, loss_N.dtype)
    weights_N = spread(weights_C, tokens.lengths_C, len(loss_N))
    loss = (loss_N * (weights_N if part is None else weights_N * part.weights_N)).sum()
    if objective.entropy.active:
        coefficient = objective.entropy.coefficient if entropy_coefficient is None else entropy_coefficient
        entropy_N = counted(tokens.entropy_N, kept_N, part)
        loss = loss - coefficient * entropy_N.sum() / max(totals.num_entropy_tokens, 1)
    return loss, metrics


def counted(values_N: torch.Tensor, kept_N: torch.Tensor | None, part: TokenShare | None) -> torch.Tensor:
    """Return values with those of tokens that are left out as 0, and each as often as its token counts."""
    values_N = values_N if kept_N is None else values_N * kept_N
    return values_N if part is None else values_N * part.weights_N


def _corrected_surrogate(objective: Objective, tokens: Tokens) -> tuple[torch.Tensor, Metrics]:
    """The surrogate of each token, corrected for the gap between generator and trainer."""
    recipe, log_ratio_N = objective.recipe, log_ratios(tokens, objective.ratio_level)
    correction, parameters = objective.correction, dict[str, Any](objective.surrogate_parameters)
    weights_N = None
    if correction.active:
        weights_N = correction_weights(tokens.old_logprobs_N, tokens.sampled_logprobs_N, tokens.lengths_C, correction)
        if recipe.takes_correction:
            parameters["log_correction_N"] = weights_N.log()
    loss_N, metrics = recipe.surrogate(log_ratio_N, tokens, **parameters)
    metrics["ratio/clamped"] = (log_ratio_N.detach().abs() >= LARGEST_LOG_RATIO).float()
    if weights_N is None:
        return loss_N, metrics
    if not recipe.takes_correction:
        loss_N = loss_N * weights_N
    return loss_N, metrics | correction_metrics(weights_N, correction)


def _kl(objective: Objective, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
    """The KL estimate of each token, and what of it is added to the loss."""
    if tokens.reference_logprobs_N is None:
        raise ValueError(
            f"kl.beta is {objective.kl.beta}, but there are no reference log-probs; give them, or set kl.beta to 0."
        )
    kl_N = KL_ESTIMATORS[objective.kl.estimator](tokens.logprobs_N, tokens.reference_logprobs_N)
    if not objective.kl.importance_weighted:
        return kl_N, kl_N
    return kl_N, kl_N * log_ratios(tokens, objective.ratio_level).exp()
