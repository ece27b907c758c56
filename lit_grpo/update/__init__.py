"""How groups become one optimizer step after another."""

from lit_grpo.update.learner import Learner
from lit_grpo.update.settings import Optimization, Settings

__all__ = ["Learner", "Optimization", "Settings"]
