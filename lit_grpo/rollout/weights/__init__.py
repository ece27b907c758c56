"""How weights reach a generator, and the proof that they arrived."""

from lit_grpo.rollout.weights.tensors import SyncReport, WeightSyncError

__all__ = ["SyncReport", "WeightSyncError"]
