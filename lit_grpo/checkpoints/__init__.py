"""How a run's checkpoints are on the disk: one file, or a folder to which each rank writes its shards."""

from lit_grpo.checkpoints.background import BackgroundIO
from lit_grpo.checkpoints.disk import CheckpointError, put_in_place, settled
from lit_grpo.checkpoints.files import FolderIO, WholeFileIO, read, read_state
from lit_grpo.checkpoints.folder import STATE, check_folder

__all__ = [
    "STATE",
    "BackgroundIO",
    "CheckpointError",
    "FolderIO",
    "WholeFileIO",
    "check_folder",
    "put_in_place",
    "read",
    "read_state",
    "settled",
]
