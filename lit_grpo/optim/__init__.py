"""Learning-rate schedules that torch does not have."""

from lit_grpo.optim.schedule import WarmupDecayLR

__all__ = ["WarmupDecayLR"]
