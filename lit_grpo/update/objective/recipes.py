"""The objectives by name: which pieces each is made of, with its source's defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lit_grpo.update.normalization import Normalization
from lit_grpo.update.objective import surrogates
from lit_grpo.update.objective.surrogates import Surrogate
from lit_grpo.update.objective.tokens import RatioLevel

Parameters = Mapping[str, float | None]


@dataclass(frozen=True)
class Recipe:
    """One objective: a surrogate with its parameters, what its ratio is taken over, and what a token counts.

    ``parameters`` are all that the surrogate takes, with their defaults. ``only_ratio`` is the ratio level that alone
    has a meaning for it, and ``why_only`` the reason. ``takes_correction`` hands rollout corrections to the surrogate
    instead of multiplying its loss by them. A new objective is one more entry in :data:`RECIPES`.
    """

    surrogate: Callable[..., Surrogate]
    normalization: Normalization
    parameters: Parameters
    source: str
    ratio: RatioLevel = "token"
    only_ratio: RatioLevel | None = None
    why_only: str = ""
    takes_correction: bool = False


CLIP: Parameters = {"epsilon": 0.2, "epsilon_high": 0.2, "delta": None}

RECIPES: dict[str, Recipe] = {
    "grpo": Recipe(surrogates.clipped, "sequence", CLIP, "DeepSeekMath, arXiv 2402.03300, eq. 3"),
    "dr_grpo": Recipe(surrogates.clipped, "constant", CLIP, "Dr. GRPO, arXiv 2503.20783"),
    "dapo": Recipe(surrogates.clipped, "token", CLIP, "DAPO, arXiv 2503.14476, eq. 12"),
    "bnpo": Recipe(surrogates.clipped, "token", CLIP, "TRL 1.16, loss_type bnpo"),
    "dual_clip": Recipe(surrogates.clipped, "token", {**CLIP, "delta": 3.0}, "dual-clip PPO, arXiv 1912.09729, eq. 5"),
    "gspo": Recipe(
        surrogates.clipped,
        "sequence",
        {"epsilon": 3e-4, "epsilon_high": 4e-4, "delta": None},
        "GSPO, arXiv 2507.18071, eq. 5",
        ratio="sequence",
    ),
    "luspo": Recipe(
        surrogates.clipped,
        "sequence_sum",
        {"epsilon": 2e-3, "epsilon_high": 2.5e-3, "delta": None},
        "LUSPO, arXiv 2602.05261",
        ratio="sequence",
        only_ratio="sequence",
        why_only="GSPO with each sequence's loss times its length",
    ),
    "cispo": Recipe(surrogates.clipped_weight, "token", {"epsilon_high": 5.0}, "CISPO, arXiv 2506.13585, eq. 4"),
    "sapo": Recipe(
        surrogates.soft_gate,
        "sequence",
        {"temperature_positive": 1.0, "temperature_negative": 1.05},
        "SAPO, arXiv 2511.20347",
    ),
    "gppo": Recipe(
        surrogates.gradient_preserving,
        "token",
        {"epsilon": 0.2, "epsilon_high": 0.2, "delta": 3.0},
        "GPPO, arXiv 2508.07629",
    ),
    "dcpo": Recipe(
        surrogates.dynamically_clipped,
        "sequence",
        {"epsilon": 0.16, "epsilon_high": 0.2, "delta": 10.0},
        "DCPO, arXiv 2509.02333",
        only_ratio="token",
        why_only="clipped by the probability of each token",
    ),
    "vespo": Recipe(
        surrogates.gamma_weighted,
        "token",
        {"k_positive": 2.0, "lambda_positive": 3.0, "k_negative": 3.0, "lambda_negative": 2.0},
        "VESPO, as in TRL 1.16",
        only_ratio="token",
        why_only="weighted by the sequence already",
        takes_correction=True,
    ),
}
