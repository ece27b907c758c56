"""Optimizers that torch does not have."""

from lit_grpo.optim.galore import GaLoreAdamW

__all__ = ["GaLoreAdamW"]
