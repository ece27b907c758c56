"""Configs of other trainers, and what their fields are called here."""

from lit_grpo.tools.migration.table import TRL, VERL, Counterpart
from lit_grpo.tools.migration.trl import Converted, convert_trl

__all__ = ["TRL", "VERL", "Converted", "Counterpart", "convert_trl"]
