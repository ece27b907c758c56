"""Sending weights to a generator, and verifying them."""

from lit_grpo.rollout.weights.tensors import SyncReport, WeightSyncError

__all__ = ["SyncReport", "WeightSyncError"]
