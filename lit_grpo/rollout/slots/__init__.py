"""The embedded generator: decodes on the policy itself, in a fixed number of slots."""

from lit_grpo.rollout.slots.generator import SlotGenerator

__all__ = ["SlotGenerator"]
