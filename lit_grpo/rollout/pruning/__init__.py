"""Pruned rollouts: completions that add nothing to their group are stopped early."""

from lit_grpo.rollout.pruning.head import QualityHead
from lit_grpo.rollout.pruning.pruner import Pruner

__all__ = ["Pruner", "QualityHead"]
