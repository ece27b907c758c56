"""A run as a whole: its folder, its loggers, its callbacks in their order, and :func:`train` for Python."""

from lit_grpo.training.defaults import TRAINER_DEFAULTS, default_callbacks
from lit_grpo.training.run import Run, train

__all__ = ["TRAINER_DEFAULTS", "Run", "default_callbacks", "train"]
