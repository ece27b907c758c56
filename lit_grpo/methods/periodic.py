"""Periodic asynchrony: an update learns from whole groups while others of its batch are still decoded; on-policy."""

from lit_grpo.rollout.rules import RolloutMode

PLUGINS = {
    "periodic": RolloutMode(overlap="within"),
}
