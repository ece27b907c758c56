"""The loss of an optimizer step: one function of what is known of a micro-batch's tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from lit_grpo.update.objective.corrections import correction_metrics, correction_weights
from lit_grpo.update.objective.kl import KL_ESTIMATORS
from lit_grpo.update.objective.objective import Objective
from lit_grpo.update.objective.tokens import (
    LARGEST_LOG_RATIO,
    StepTotals,
    Tokens,
    log_ratios,
    near_completions,
    on_policy_completions,
    spread,
    token_weights,
)


class LossOutputs(NamedTuple):
    """The loss of a micro-batch.

    Attributes:
        loss: The micro-batch's share of the step's loss, a scalar with gradient.
        metrics: Values of each token, shape N, by name; their means over all tokens are logged.
        entropy: Sum of the entropies of the tokens that are trained on, in nats, without gradient.
        ce_loss: The part of the loss that the channel ``ce`` adds, without gradient; None if the step has none.
    """

    loss: torch.Tensor
    metrics: dict[str, torch.Tensor]
    entropy: torch.Tensor
    ce_loss: torch.Tensor | None = None


def policy_loss(
    tokens: Tokens,
    objective: Objective,
    totals: StepTotals,
    beta: float | None = None,
    entropy_coefficient: float | None = None,
) -> LossOutputs:
    """Return a micro-batch's share of the loss of an optimizer step.

    Two channels add to it. ``rl``, of the tokens that have an advantage::

        sum_t w_t (mask_t correction_t surrogate_t + beta kl_t + added_t)
            - coefficient sum_t entropy_t / num_entropy_tokens

    and ``ce``, of the tokens that have a weight ``c_t`` of their negative log-likelihood::

        - sum_t c_t logprob_t / n_t

    with ``n_t`` the number of the step's tokens whose weight comes from the same source as that of token ``t``, so that
    each source of weights adds a mean of its own.
    ``w_t`` is :func:`~lit_grpo.update.objective.tokens.token_weights` of the token, and the surrogate is that of the
    objective's :class:`~lit_grpo.update.objective.recipes.Recipe`. As in TRL 1.16, masks and corrections multiply the
    surrogate alone. If a token stands for several (the column ``weight``), all of its terms are multiplied by their
    number.

    Args:
        tokens: Tokens of a micro-batch with their columns, such as log-probs and advantages.
        objective: The loss to minimize.
        totals: Denominators of the whole step, on all ranks.
        beta: Weight of the KL term in this step; ``kl.beta`` by default.
        entropy_coefficient: Weight of the entropy bonus in this step; ``entropy.coefficient`` by default.

    Raises:
        ValueError: The objective has a KL term, and the tokens have no reference log-probs.
    """
    loss_N, metrics = _corrected_surrogate(tokens, objective)
    lengths_C, num_tokens, columns = tokens.lengths_C, len(tokens.logprobs_N), tokens.columns
    if objective.off_policy_threshold is not None:
        on_policy_C = on_policy_completions(tokens, objective.off_policy_threshold)
        on_policy_N = spread(on_policy_C, lengths_C, num_tokens)
        loss_N = loss_N * on_policy_N
        metrics["off_policy_masked"] = (~on_policy_N).float()
    if objective.off_policy_kl is not None:
        near_N = spread(near_completions(tokens, objective.off_policy_kl), lengths_C, num_tokens)
        loss_N = loss_N * near_N
        metrics["off_policy_filtered"] = (~near_N).float()
    entropy_N = tokens.entropy_N
    if (mask_N := columns.get("mask")) is not None:
        loss_N, entropy_N = loss_N * mask_N, entropy_N * mask_N
    if objective.kl_in_loss:
        if tokens.reference_logprobs_N is None:
            raise ValueError(
                f"kl.beta is {objective.kl.beta}, but there are no reference log-probs; give them, or set kl.beta to 0."
            )
        term_N = kl_N = KL_ESTIMATORS[objective.kl.estimator](tokens.logprobs_N, tokens.reference_logprobs_N)
        if objective.kl.importance_weighted:
            term_N = kl_N * log_ratios(tokens, objective.ratio_level).exp()
        loss_N = loss_N + (objective.kl.beta if beta is None else beta) * term_N
        metrics["kl"] = kl_N.detach()
    if (added_N := columns.get("added_loss")) is not None:
        loss_N, metrics["token_loss"] = loss_N + added_N, added_N.detach()
    weights_C = token_weights(columns.get("whole_length", lengths_C), totals, objective.normalized_by, loss_N.dtype)
    weights_N = spread(weights_C, lengths_C, num_tokens)
    if (own_N := columns.get("weight")) is not None:
        weights_N, entropy_N = weights_N * own_N, entropy_N * own_N
    loss = (loss_N * weights_N).sum()
    coefficient = objective.entropy.coefficient if entropy_coefficient is None else entropy_coefficient
    if coefficient:
        loss = loss - coefficient * entropy_N.sum() / max(totals.num_entropy_tokens, 1)
    ce_loss = None
    if "ce_weight" in columns:
        ce_loss = -(columns["ce_weight"] * columns["ce_logprob"] / columns["ce_count"]).sum()
        loss, ce_loss = loss + ce_loss, ce_loss.detach()
    return LossOutputs(loss, metrics, entropy_N.detach().sum(), ce_loss)


def _corrected_surrogate(tokens: Tokens, objective: Objective) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The surrogate of each token, corrected for the gap between generator and trainer."""
    recipe, log_ratio_N = objective.recipe, log_ratios(tokens, objective.ratio_level)
    correction, parameters = objective.correction, dict[str, Any](objective.surrogate_parameters)
    weights_N = None
    if correction.mode != "none":
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
