"""Configs of other trainers, and our names of their fields."""

from lit_grpo.tools.migration.script import Script, plain_fields, read_script
from lit_grpo.tools.migration.table import SFT, TRAINER, TRL, VERL, Counterpart
from lit_grpo.tools.migration.trl import Converted, convert_trl
from lit_grpo.tools.migration.trl_sft import convert_trl_sft

__all__ = [
    "SFT",
    "TRAINER",
    "TRL",
    "VERL",
    "Converted",
    "Counterpart",
    "Script",
    "convert_trl",
    "convert_trl_sft",
    "plain_fields",
    "read_script",
]
