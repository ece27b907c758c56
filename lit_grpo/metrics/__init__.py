"""Metrics of rollouts, and of validation."""

from lit_grpo.metrics.means import Means, pass_at_k
from lit_grpo.metrics.rollouts import STALENESS, rollout_metrics, staleness_shares

__all__ = ["STALENESS", "Means", "pass_at_k", "rollout_metrics", "staleness_shares"]
