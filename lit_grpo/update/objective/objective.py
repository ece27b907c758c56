"""The objective that a run is configured with; one that means something else than it says is refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Literal

from lit_grpo.compatibility import DENOMINATOR, ENTROPY_COEFFICIENT, Clash, Requirement, check_clashes
from lit_grpo.limits import Limit, NotNegative, check_fields, check_value
from lit_grpo.settings import find_row
from lit_grpo.update.objective.corrections import Correction
from lit_grpo.update.objective.kl import KLTerm
from lit_grpo.update.objective.recipes import RECIPES, Recipe
from lit_grpo.update.objective.tokens import Normalization, RatioLevel

Proximal = Literal["sampled", "recomputed"]
BOUNDS = ("epsilon", "epsilon_high", "delta")
"""Parameters of surrogates that are fields of their own; all others are in ``parameters``."""


def _check_parameters(objective: Objective) -> None:
    recipe = objective.recipe
    for name, value in objective.given.items():
        place = f"model.objective.{name}" if name in BOUNDS else f"model.objective.parameters.{name}"
        if name not in recipe.parameters:
            raise ValueError(
                f"{place} has no meaning for loss {objective.loss}; leave it out, or set what it takes: "
                f"{', '.join(recipe.parameters)}."
            )
        is_above_zero = name in recipe.above_zero
        limit = Limit(gt=0, finite=True) if is_above_zero else Limit(ge=0, finite=True)
        check_value(place, value, Annotated[float, limit])
    for name in objective.parameters or {}:
        if name in BOUNDS:
            raise ValueError(
                f"model.objective.parameters has {name}, which is a field of its own; set model.objective.{name}."
            )


def _check_bounds(objective: Objective) -> None:
    parameters = objective.surrogate_parameters
    high, delta = parameters.get("epsilon_high"), parameters.get("delta")
    if objective.loss == "cispo" and high is not None and high < 1:
        raise ValueError(
            f"objective.epsilon_high is {high}, but for cispo it is the largest weight itself, and would cut even a "
            f"token that has not moved; what verl calls {high} is {1 + high} here."
        )
    if delta is not None and high is not None and delta <= 1 + high:
        raise ValueError(
            f"model.objective.delta is {delta}, inside the clip range, which ends at {1 + high}; set it "
            "above, such as 3."
        )


@dataclass(frozen=True)
class EntropyBonus:
    """A reward for undecided distributions: ``-coefficient x`` the mean entropy of a token is added to the loss."""

    coefficient: Annotated[float, Limit(finite=True)] = 0.0
    """Weight of the entropy bonus; 0 computes no gradient of the entropy."""

    def __post_init__(self) -> None:
        check_fields(self, "model.objective.entropy.")


@dataclass(frozen=True)
class Objective:
    """The loss that an optimizer step minimizes. Fields left out are those of the recipe that ``loss`` names."""

    loss: str = "dapo"
    """Loss function: ``dapo`` (every token of the step has the same weight; clips at 0.2 on both sides; for DAPO's
    higher upper clip set ``epsilon`` 0.2 and ``epsilon_high`` 0.28), ``grpo`` (every completion has the same weight),
    ``dr_grpo``, ``gspo``, ``luspo``, ``cispo``, ``sapo``, ``gppo``, ``dcpo`` or ``vespo``; docs/objectives.md has each
    one's formula, source and defaults. An objective of your own is the import path of a
    :class:`lit_grpo.update.objective.recipes.Recipe`, as in ``my_file.ROW``.
    """
    ratio: RatioLevel | None = None
    """Unit over which the probability ratio is computed: ``token``, ``turn`` (all tokens between two answers of an
    environment; Turn-PPO) or ``sequence``.
    """
    normalization: Normalization | None = None
    """Weight of each token in the loss: ``token`` (equal for all tokens), ``sequence`` (equal for all completions),
    ``constant`` (one over the limit on completion length) or ``sequence_sum`` (each completion weighs as much as it has
    tokens).
    """
    epsilon: float | None = None
    """Distance that the probability ratio may fall below 1 before it is clipped."""
    epsilon_high: float | None = None
    """Distance that the probability ratio may rise above 1 before it is clipped. If only ``epsilon`` is set, its value
    is used. For ``cispo``, the largest weight itself.
    """
    delta: float | None = None
    """Dual clip: max probability ratio for a completion with a negative advantage."""
    parameters: dict[str, float] | None = None
    """Further parameters of the loss by name, as in ``{temperature_positive: 1.5}`` for ``sapo``; docs/objectives.md
    lists the parameters of each loss.
    """
    kl: KLTerm = field(default_factory=KLTerm)
    """The KL term, which keeps the policy near the reference."""
    entropy: EntropyBonus = field(default_factory=EntropyBonus)
    """The entropy bonus."""
    correction: Correction = field(default_factory=Correction)
    """Importance-sampling correction for the difference between the generator's and the trainer's log-probs."""
    proximal: Proximal | None = None
    """Log-probs in the denominator of the probability ratio: ``sampled`` (those that tokens were sampled with) or
    ``recomputed`` (the trainer's own before the first update on the batch). By default ``recomputed`` with a
    correction, and ``sampled`` without.
    """
    mask_truncated: bool = False
    """Leave completions that ended at the length limit out of the loss. Their rewards still count in their group's
    advantages, and they still count as completions in the loss's denominator.
    """
    top_entropy_quantile: Annotated[float, Limit(gt=0, le=1, remedy="1 keeps all tokens")] = 1.0
    """Fraction of a step's tokens to train on, those with the highest entropy."""
    off_policy_threshold: NotNegative | None = None
    """Leave out a completion with a negative advantage if the policy's log-probs are on average more than this, in nats
    per token, below those that it was sampled with.
    """
    off_policy_kl: Annotated[float | None, Limit(gt=0, remedy="F-TIS takes 50")] = None
    """Leave out a completion without a positive advantage if its estimated KL divergence of the behavior policy from
    the policy, summed over its tokens, in nats, is not below this (F-TIS; 50 there).
    """

    def __post_init__(self) -> None:
        check_fields(self, "model.objective.")
        _check_parameters(self)
        _check_bounds(self)
        check_clashes(self._clashes)

    @cached_property
    def recipe(self) -> Recipe:
        return RECIPES.get(self.loss) or find_row("objective.loss", self.loss, RECIPES, Recipe)

    @cached_property
    def ratio_level(self) -> RatioLevel:
        return self.ratio or self.recipe.ratio

    @cached_property
    def normalized_by(self) -> Normalization:
        return self.normalization or self.recipe.normalization

    @cached_property
    def given(self) -> dict[str, float]:
        """Those of the surrogate's parameters that are set here."""
        bounds = {name: getattr(self, name) for name in BOUNDS}
        return {name: value for name, value in {**(self.parameters or {}), **bounds}.items() if value is not None}

    @cached_property
    def surrogate_parameters(self) -> dict[str, float | None]:
        given, taken = dict(self.given), self.recipe.parameters
        if "epsilon" in given and "epsilon_high" in taken and "epsilon_high" not in given:
            given["epsilon_high"] = given["epsilon"]
        return {**taken, **given}

    @cached_property
    def proximal_policy(self) -> Proximal:
        return self.proximal or ("recomputed" if self.correction.mode != "none" else "sampled")

    @cached_property
    def kl_in_loss(self) -> bool:
        return self.kl.beta > 0 and self.kl.place == "loss"

    @property
    def parts(self) -> list[Requirement]:
        """Needs of each setting, and its effects on others."""
        parts = [
            Requirement(f"model.objective.loss {self.loss}", needs=self.recipe.needs),
            Requirement(f"model.objective.correction.mode {self.correction.mode}", needs=self.correction.needs),
            Requirement(
                "model.objective.ratio turn",
                frozenset({"turns"}),
                remedy="take ratio sequence",
                chosen=self.ratio == "turn",
            ),
            self._proximal_part,
            Requirement(
                f"model.objective.proximal {self.proximal}",
                decides=frozenset({DENOMINATOR}),
                chosen=self.proximal is not None,
            ),
            *self._together_parts,
            *self.kl.parts,
        ]
        if self.top_entropy_quantile < 1:
            name = f"model.objective.top_entropy_quantile {self.top_entropy_quantile}"
            parts.append(Requirement(name, needs=frozenset({"all_ranks", "all_tokens"})))
        if self.entropy.coefficient:
            name = f"model.objective.entropy.coefficient {self.entropy.coefficient}"
            parts.append(Requirement(name, decides=frozenset({ENTROPY_COEFFICIENT})))
            if self.normalized_by != "token":  # the bonus is an average over tokens
                name = f"model.objective.entropy with normalization {self.normalized_by}"
                parts.append(Requirement(name, needs=frozenset({"all_ranks"})))
        return parts

    @property
    def _together_parts(self) -> list[Requirement]:
        """Return the parts that take all tokens of a completion, or of a turn, together."""
        chosen = {
            f"ratio {self.ratio_level}": self.ratio_level == "sequence",
            f"off_policy_threshold {self.off_policy_threshold}": self.off_policy_threshold is not None,
            f"off_policy_kl {self.off_policy_kl}": self.off_policy_kl is not None,
        }
        needs = frozenset({"one_row", "whole_completions"})
        parts = [Requirement(f"model.objective.{name}", needs, chosen=is_chosen) for name, is_chosen in chosen.items()]
        of_turn, by_sequence = self.ratio_level == "turn", self.normalized_by == "sequence"
        parts.append(Requirement("model.objective.ratio turn", frozenset({"whole_completions"}), chosen=of_turn))
        name = "model.objective.normalization sequence"
        return [*parts, Requirement(name, frozenset({"one_row"}), chosen=by_sequence)]

    @property
    def _clashes(self) -> list[Clash]:
        loss, level = f"model.objective.loss {self.loss}", f"model.objective.ratio {self.ratio_level}"
        normalization = f"model.objective.normalization {self.normalized_by}"
        correction = f"model.objective.correction.mode {self.correction.mode}"
        proximal, only = f"model.objective.proximal {self.proximal_policy}", self.recipe.only_ratio
        each = {
            "token": "one for each token",
            "turn": "one for all tokens of a turn",
            "sequence": "one for all tokens of a completion",
        }
        return [
            Clash(
                f"{loss} needs a ratio of its own kind, {each.get(only or '', '')}",
                f"{level} takes {each[self.ratio_level]}",
                found=only not in (None, self.ratio_level),
                remedy=f"set model.objective.ratio to {only}",
            ),
            Clash(
                f"{level} needs a completion to count by itself, whatever its length",
                f"{normalization} adds up tokens",
                found=self.ratio_level == "sequence" and self.normalized_by in ("token", "constant"),
                remedy="set model.objective.normalization to sequence, or model.objective.loss to gspo or luspo",
            ),
            Clash(
                f"{normalization} needs one ratio for all tokens of a completion",
                f"{level} takes {each[self.ratio_level]}",
                found=self.normalized_by == "sequence_sum" and self.ratio_level != "sequence",
                remedy="take constant, which weighs all tokens alike too, or set model.objective.loss to luspo",
            ),
            Clash(
                f"{loss} needs corrections of single tokens",
                f"{correction} makes one of all tokens of a completion",
                found=self.recipe.takes_correction and self.correction.of_sequence,
                remedy="take token_truncate or token_mask",
            ),
            Clash(
                f"{correction} needs ratios to another policy than the sampler",
                f"{proximal} takes them to the sampler, so that every weight is 1",
                found=self.correction.mode != "none" and self.proximal_policy == "sampled",
                remedy="set model.objective.proximal to recomputed",
            ),
        ]

    @property
    def _proximal_part(self) -> Requirement:
        name = f"model.objective.proximal {self.proximal_policy}"
        if self.proximal_policy == "sampled" or self.correction.mode != "none":
            return Requirement(name)
        said = "takes probability ratios to another policy and does not correct them"
        remedy = "set model.objective.correction.mode to token_truncate"
        return Requirement(name, changes={"ratios_to_sampler": said}, remedy=remedy)

    @cached_property
    def uses_every_completion(self) -> bool:
        """True if a completion with advantage 0 changes the gradient."""
        return self.kl_in_loss or self.entropy.coefficient != 0 or self.top_entropy_quantile < 1
