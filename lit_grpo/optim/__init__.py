"""An optimizer and a learning-rate schedule that torch does not have."""

from lit_grpo.optim.muon import MuonAdamW
from lit_grpo.optim.schedule import WarmupDecayLR

__all__ = ["MuonAdamW", "WarmupDecayLR"]
