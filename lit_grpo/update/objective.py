"""The objective: one configurable object, composed of a surrogate, a normalisation, masks, KL, entropy, correction."""

from __future__ import annotations

from dataclasses import dataclass, field

from lit_grpo.update.controllers import EntropyBonus
from lit_grpo.update.corrections import Correction
from lit_grpo.update.kl import KLTerm
from lit_grpo.update.losses import Normalization
from lit_grpo.update.objective_checks import PARAMETERS, check_objective
from lit_grpo.update.ratios import RatioLevel
from lit_grpo.update.recipes import RECIPES, Recipe


@dataclass(frozen=True)
class Objective:
    """What an optimizer step minimises. Fields left out are those of the recipe that ``loss`` names.

    Args:
        loss: ``dapo`` (each token of the step alike), ``grpo`` (each completion alike), ``dr_grpo``, ``bnpo``,
            ``dual_clip``, ``gspo``, ``luspo``, ``cispo``, ``sapo``, ``gppo``, ``dcpo`` or ``vespo``; docs/objectives.md
            has each one's formula, source and defaults.
        ratio: What a probability ratio is taken over, ``token`` or ``sequence``.
        normalization: What a token counts: ``token`` (each token alike), ``sequence`` (each completion alike),
            ``constant`` (by the limit on completion length) or ``sequence_sum`` (a completion by its length).
        epsilon: How far the probability ratio may fall below 1 before it is clipped.
        epsilon_high: How far it may rise above 1; ``epsilon`` where that is set alone. For ``cispo`` the largest
            weight itself.
        delta: Dual clip: the most that a ratio counts for a completion with a negative advantage.
        temperature_positive: SAPO's temperature for positive advantages.
        temperature_negative: SAPO's temperature for all others.
        k_positive: VESPO's power of the weight for advantages of 0 and above.
        lambda_positive: VESPO's decay of the weight for advantages of 0 and above.
        k_negative: VESPO's power of the weight for negative advantages.
        lambda_negative: VESPO's decay of the weight for negative advantages.
        kl: The KL term to the first policy.
        entropy: The entropy bonus.
        correction: How the generator's log-probs are reconciled with the trainer's.
        mask_truncated: Leave completions out that ended at the limit on their length; their advantages count in
            their group, and they count as completions in the denominator.
        top_entropy_quantile: Learn only from this share of a step's tokens, those with the highest entropy.
        off_policy_threshold: Leave a completion with a negative advantage out where the policy's log-probs have fallen
            by more than this, in nats per token, below those that it was sampled with.
    """

    loss: str = "dapo"
    ratio: RatioLevel | None = None
    normalization: Normalization | None = None
    epsilon: float | None = None
    epsilon_high: float | None = None
    delta: float | None = None
    temperature_positive: float | None = None
    temperature_negative: float | None = None
    k_positive: float | None = None
    lambda_positive: float | None = None
    k_negative: float | None = None
    lambda_negative: float | None = None
    kl: KLTerm = field(default_factory=KLTerm)
    entropy: EntropyBonus = field(default_factory=EntropyBonus)
    correction: Correction = field(default_factory=Correction)
    mask_truncated: bool = False
    top_entropy_quantile: float = 1.0
    off_policy_threshold: float | None = None

    def __post_init__(self) -> None:
        check_objective(self)

    @property
    def recipe(self) -> Recipe:
        """The named recipe."""
        return RECIPES[self.loss]

    @property
    def ratio_level(self) -> RatioLevel:
        """What the ratio is taken over."""
        return self.ratio or self.recipe.ratio

    @property
    def normalized_by(self) -> Normalization:
        """What a token counts."""
        return self.normalization or self.recipe.normalization

    @property
    def parameters(self) -> dict[str, float | None]:
        """The surrogate's parameters: the recipe's, and those set here."""
        given = {name: getattr(self, name) for name in PARAMETERS if getattr(self, name) is not None}
        if "epsilon" in given and "epsilon_high" not in given:
            given["epsilon_high"] = given["epsilon"]
        return {**self.recipe.parameters, **given}

    @property
    def kl_in_loss(self) -> bool:
        """Whether every token's loss has a KL term."""
        return self.kl.beta > 0 and self.kl.place == "loss"

    @property
    def uses_every_completion(self) -> bool:
        """Whether a completion with advantage 0 changes the gradient."""
        return self.kl_in_loss or self.entropy.active or self.top_entropy_quantile < 1
