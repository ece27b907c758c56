"""Optimizers and schedules that torch does not have."""

from lit_grpo.optim.galore import GaLoreAdamW
from lit_grpo.optim.schedule import WarmupDecayLR

__all__ = ["GaLoreAdamW", "WarmupDecayLR"]
