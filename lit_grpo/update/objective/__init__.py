"""The objective of an optimizer step."""

from lit_grpo.update.objective.objective import Objective

__all__ = ["Objective"]
