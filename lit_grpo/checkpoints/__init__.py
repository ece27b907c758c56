"""Checkpoints on the disk: one file, or a folder to which each rank writes its shards."""

from lit_grpo.checkpoints.background import BackgroundIO
from lit_grpo.checkpoints.disk import CheckpointError, put_in_place, settled
from lit_grpo.checkpoints.files import FolderIO, WholeFileIO, read
from lit_grpo.checkpoints.folder import STATE, check_folder, read_state
from lit_grpo.checkpoints.form import check_form
from lit_grpo.checkpoints.whole import DamagedError, check_whole, checked, fault_of, refuse

__all__ = [
    "STATE",
    "BackgroundIO",
    "CheckpointError",
    "DamagedError",
    "FolderIO",
    "WholeFileIO",
    "check_folder",
    "check_form",
    "check_whole",
    "checked",
    "fault_of",
    "put_in_place",
    "read",
    "read_state",
    "refuse",
    "settled",
]
