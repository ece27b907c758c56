"""Checkpoints that are whole files or none."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO


class CheckpointError(ValueError):
    """A checkpoint could not be written; the one before it is still there."""


class WholeFileIO(TorchCheckpointIO):
    """Writes a checkpoint aside, in the same folder, and renames it once it is on the disk.

    Lightning's own writes it below ``$TMPDIR`` first: from another file system it comes piece by piece, over the
    checkpoint that was there.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Write ``path``, which is the old file or the new one at any time.

        Raises:
            CheckpointError: There was no room for it, or it may not be written.
        """
        path = Path(path)
        aside = path.with_name(f".{path.name}.writing")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with aside.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            aside.replace(path)
        except (OSError, RuntimeError) as error:  # torch makes a RuntimeError of what it fails to write
            cause = error if isinstance(error, OSError) else error.__context__
            reason = cause.strerror if isinstance(cause, OSError) else str(error).splitlines()[0]
            raise CheckpointError(
                f"The checkpoint {path} could not be written ({reason}), and what was there has been left as it was; "
                "make room or choose another run.dir."
            ) from error
        finally:
            with suppress(OSError):
                aside.unlink()
