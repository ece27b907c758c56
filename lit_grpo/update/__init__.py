"""How groups become one optimizer step after another."""

from lit_grpo.update.learner import Learner, Optimization, Settings

__all__ = ["Learner", "Optimization", "Settings"]
