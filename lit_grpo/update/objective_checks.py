"""Refuses objectives that mean something else than they say, with the nearest valid choice."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, get_args

from lit_grpo.update.losses import Normalization
from lit_grpo.update.ratios import RatioLevel
from lit_grpo.update.recipes import RECIPES

if TYPE_CHECKING:
    from lit_grpo.update.objective import Objective

PARAMETERS = (
    "epsilon",
    "epsilon_high",
    "delta",
    "temperature_positive",
    "temperature_negative",
    "k_positive",
    "lambda_positive",
    "k_negative",
    "lambda_negative",
)


def check_objective(objective: Objective) -> None:
    """Check names, numbers and combinations.

    Raises:
        ValueError: One does not fit; the message names it, its value and what to set.
    """
    if objective.loss not in RECIPES:
        raise ValueError(f"objective.loss must be one of {', '.join(RECIPES)}, not {objective.loss!r}.")
    _check_choices(objective)
    _check_parameters(objective)
    _check_bounds(objective)
    _check_combinations(objective)


def _check_choices(objective: Objective) -> None:
    for name, kind in (("ratio", RatioLevel), ("normalization", Normalization)):
        value = getattr(objective, name)
        if value is not None and value not in get_args(kind):
            raise ValueError(f"objective.{name} must be one of {', '.join(get_args(kind))}, not {value!r}.")
    if not 0 < objective.top_entropy_quantile <= 1:
        share = objective.top_entropy_quantile
        raise ValueError(f"objective.top_entropy_quantile must be in (0, 1], not {share}; 1 keeps all tokens.")
    if objective.off_policy_threshold is not None and not objective.off_policy_threshold >= 0:
        raise ValueError(f"objective.off_policy_threshold must be a number >= 0, not {objective.off_policy_threshold}.")


def _check_parameters(objective: Objective) -> None:
    for name in PARAMETERS:
        value, taken = getattr(objective, name), objective.recipe.parameters
        if value is not None and name not in taken:
            raise ValueError(
                f"objective.{name} has no meaning for loss {objective.loss}; leave it out, or set what it takes: "
                f"{', '.join(taken)}."
            )
        if value is not None and not (value >= 0 and math.isfinite(value)):
            raise ValueError(f"objective.{name} must be a number >= 0, not {value}.")


def _check_bounds(objective: Objective) -> None:
    parameters = objective.parameters
    for name in ("temperature_positive", "temperature_negative", "lambda_positive", "lambda_negative"):
        if parameters.get(name) == 0:
            raise ValueError(f"objective.{name} must be above 0, not 0.")
    high, delta = parameters.get("epsilon_high"), parameters.get("delta")
    if objective.loss == "cispo" and high is not None and high < 1:
        raise ValueError(
            f"objective.epsilon_high is {high}, but for cispo it is the largest weight itself, and would cut even a "
            f"token that has not moved; what verl calls {high} is {1 + high} here."
        )
    if delta is not None and high is not None and delta <= 1 + high:
        raise ValueError(
            f"objective.delta is {delta}, inside the clip range, which ends at {1 + high}; set it above, such as 3."
        )


def _check_combinations(objective: Objective) -> None:
    level, normalization = objective.ratio_level, objective.normalized_by
    recipe = objective.recipe
    if recipe.only_ratio is not None and level != recipe.only_ratio:
        raise ValueError(
            f"objective.ratio is {level}, but loss {objective.loss} is {recipe.why_only}; "
            f"set ratio to {recipe.only_ratio}."
        )
    if level == "sequence" and normalization in ("token", "constant"):
        raise ValueError(
            f"objective.ratio is sequence, but normalization {normalization} adds up tokens, so that a sequence counts "
            "by its length and the objective is not the one of sequences (GSPO); set normalization to sequence, or "
            "loss to gspo or luspo."
        )
    if level == "token" and normalization == "sequence_sum":
        raise ValueError(
            "objective.normalization sequence_sum is that of sequence ratios (LUSPO); for token ratios take constant, "
            "which weighs all tokens alike too, or set loss to luspo."
        )
    if recipe.takes_correction and objective.correction.mode.startswith("sequence"):
        raise ValueError(
            f"objective.correction.mode is {objective.correction.mode}, but {objective.loss} makes one weight of its "
            "tokens' corrections; take token_truncate or token_mask."
        )
