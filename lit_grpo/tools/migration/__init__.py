"""Configs of other trainers, and our names of their fields."""

from lit_grpo.tools.migration.table import SFT, TRL, VERL, Counterpart
from lit_grpo.tools.migration.trl import Converted, convert_trl
from lit_grpo.tools.migration.trl_sft import convert_trl_sft

__all__ = ["SFT", "TRL", "VERL", "Converted", "Counterpart", "convert_trl", "convert_trl_sft"]
