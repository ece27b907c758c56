"""Asynchronous rollouts: the next batches are decoded while the policy is updated.

Tokens are at most ``max_staleness`` updates old; an update waits before a completion would be older.
"""

from lit_grpo.rollout.rules import RolloutMode

PLUGINS = {
    "asynchronous": RolloutMode(leftovers="keep", max_staleness=2, max_restarts=0, overlap="across"),
}
