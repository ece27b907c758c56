"""Configs of other trainers, and our names of their fields."""

from lit_grpo.tools.migration.table import TRL, VERL, Counterpart
from lit_grpo.tools.migration.trl import Converted, convert_trl

__all__ = ["TRL", "VERL", "Converted", "Counterpart", "convert_trl"]
