"""A whole run: its folder, its callbacks in their order, and :func:`train` for Python."""

from lit_grpo.training.run import Run, train

__all__ = ["Run", "train"]
