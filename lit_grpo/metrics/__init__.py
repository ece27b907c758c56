"""Metrics of rollouts, and of validation."""

from lit_grpo.metrics.means import Means, pass_at_k
from lit_grpo.metrics.rollouts import STALENESS, dataset_metrics, rollout_metrics, staleness_shares

__all__ = ["STALENESS", "Means", "dataset_metrics", "pass_at_k", "rollout_metrics", "staleness_shares"]
