"""What an optimizer step minimises."""

from lit_grpo.update.objective.objective import Objective

__all__ = ["Objective"]
