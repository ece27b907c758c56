"""From groups of rollouts to one optimizer step after another."""

from lit_grpo.update.learner import Learner
from lit_grpo.update.learner_settings import LearnerSettings, Optimization

__all__ = ["Learner", "LearnerSettings", "Optimization"]
