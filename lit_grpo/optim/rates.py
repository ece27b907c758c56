"""A learning rate of all weights that is used for LoRA adapters, or the other way round.

The best rate of LoRA is about ten times that of all weights, whatever the rank ("LoRA Without Regret", Thinking
Machines Lab, 2025, with alpha 32). TRL's page of the same name trains SmolLM3-3B with GRPO at 1e-6, and adapters of it
at 1e-5. Adapters that keep the rate of all weights hardly learn: huggingface/trl issue 2872 reports a reward that rises
if all weights are trained at 5e-7, and stays flat with adapters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from lit_grpo.policy.weights import active_adapters, lora_layers

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

LOWEST_OF_ADAPTERS = 5e-6
"""Recipes for LoRA begin here: Unsloth's guide to LoRA hyperparameters takes 5e-6 for GRPO."""
HIGHEST_OF_ALL_WEIGHTS = 1e-4
LEAST_TRAINED = 50_000_000
"""With fewer trained weights no rate is usual: the policies that come with the package train at 1e-3."""
USUAL_ALPHA = 32.0


class UnusualRate(NamedTuple):
    """An unusual learning rate, with the reason and the remedy."""

    figure: str
    remedy: str


def unusual_rate(policy: PreTrainedModel, optimizer: torch.optim.Optimizer) -> UnusualRate | None:
    """Compare the highest learning rate of a run with the usual ones; return None if nothing is known against it.

    Only optimizers like Adam are judged, whose steps are as long as the rate whatever the gradient.

    Args:
        policy: Policy to be trained, with its adapters if it has any.
        optimizer: The optimizer, before its first step.
    """
    if not any("adam" in kind.__name__.lower() for kind in type(optimizer).__mro__):
        return None
    rate = max(highest_rate(group) for group in optimizer.param_groups)
    trained = sum(weight.numel() for weight in policy.parameters() if weight.requires_grad)
    scales = [
        layer.scaling[name] * layer.r[name] for _, layer in lora_layers(policy) for name in active_adapters(layer)
    ]
    return judge(rate, trained, max(scales, default=None))


def judge(rate: float, trained: int, alpha: float | None) -> UnusualRate | None:
    """Judge a learning rate of an optimizer like Adam.

    Args:
        rate: Highest learning rate of the run.
        trained: Number of trained weights.
        alpha: The adapters' scale times their rank, which is ``model.lora.alpha``; None if all weights are trained. A
            step with a larger alpha changes the policy as much as one with a higher rate.
    """
    if alpha is not None and rate * max(1.0, alpha / USUAL_ALPHA) < LOWEST_OF_ADAPTERS:
        return UnusualRate(
            f"{rate:.3g} is low for LoRA adapters",
            "set model.optimizer.lr to about ten times the rate that suits all weights (1e-5 to 1e-4 for large models)",
        )
    if alpha is None and rate > HIGHEST_OF_ALL_WEIGHTS and trained >= LEAST_TRAINED:
        return UnusualRate(
            f"{rate:.3g} is high for training all weights",
            "set model.optimizer.lr to about a tenth of the rate that suits LoRA adapters (1e-6 to 1e-5 for large "
            "models), or train adapters (model.lora.r 16)",
        )
    return None


def highest_rate(group: Mapping[str, Any]) -> float:
    return float(group.get("max_lr", group.get("initial_lr", group["lr"])))
