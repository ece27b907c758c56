"""From rewards to advantages."""

from lit_grpo.update.advantages.estimator import Advantages, GroupRewards

__all__ = ["Advantages", "GroupRewards"]
