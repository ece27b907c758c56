"""Checkpoints as Lightning's strategies write and read them: whole files, or folders of shards."""

from __future__ import annotations

import io
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from torch import distributed

from lit_grpo.checkpoints.disk import aside_of, not_written, put_in_place, settled
from lit_grpo.checkpoints.folder import apart, check_folder, fill, read_state, replaced, write_folder
from lit_grpo.checkpoints.whole import check_whole


class WholeFileIO(TorchCheckpointIO):
    """Writes a checkpoint aside, in the same folder, and renames it once it is on the disk.

    Lightning's own writes it below ``$TMPDIR`` first: from another file system it comes piece by piece, over the
    checkpoint that was there.
    """

    def prepare(self) -> None:
        """Do what only the thread may do that trains."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Write ``path``, which is the old checkpoint or the new one at any time.

        Raises:
            CheckpointError: There was no room for it, or it may not be written.
        """
        path = Path(path)
        aside = aside_of(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            aside.unlink(missing_ok=True)  # it may be a link to a file of the user's
            with aside.open("xb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            put_in_place(aside, path)
        except (OSError, RuntimeError) as error:  # torch makes a RuntimeError of what it fails to write
            raise not_written(path, error) from error
        finally:
            with suppress(OSError):
                aside.unlink()

    def load_checkpoint(self, path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Read a file, or put a folder's shards together.

        Raises:
            DamagedError: It is not what was written, or its weights are no numbers.
        """
        path = settled(Path(path))
        check_whole(path)
        return read(path) if path.is_dir() else super().load_checkpoint(path, *args, **kwargs)


class FolderIO(WholeFileIO):
    """Writes folders, to which each rank writes its shards; all ranks save, and all or none have saved."""

    def __init__(self) -> None:
        super().__init__()
        self._group: distributed.ProcessGroup | None = None

    def prepare(self) -> None:
        """Let ranks write together, on hosts, and beside whatever else they exchange."""
        if self._group is None and distributed.is_initialized():
            self._group = cast("distributed.ProcessGroup", distributed.new_group(backend="gloo"))

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write ``path`` together.

        Raises:
            CheckpointError: One of the ranks could not; all of them raise it.
        """
        self.prepare()
        state, tensors = apart(checkpoint)
        file = io.BytesIO()
        torch.save(state, file)
        write_folder(file.getvalue(), tensors, Path(path), self._group)


def read(path: Path, only: tuple[str, ...] = ("state_dict", "optimizer_states")) -> dict[str, Any]:
    """Read a checkpoint as one device writes it, whatever has written it, onto the host.

    Args:
        path: A file, or a folder of shards.
        only: What of the shards to read; the rest is left out.

    Raises:
        ValueError: It is a folder that is no checkpoint, or one that lacks files.
    """
    if not path.is_dir():
        return read_state(path)
    check_folder(path)
    state, tensors = read_state(path), dict[str, torch.Tensor]()

    def host(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensors.setdefault(name, torch.empty_like(tensor, device="cpu"))

    for name in ("state_dict", "optimizer_states"):
        if name not in only:
            state.pop(name, None)
        elif name in state:
            state[name] = replaced(state[name], name, host)
    fill(tensors, path, alone=True)
    if "optimizer_states" in state:
        state["optimizer_states"] = [_numbered(one) for one in state["optimizer_states"]]
    return state


def _numbered(saved: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state with its weights numbered, as torch's own has them, and not by name."""
    names = [name for group in saved["param_groups"] for name in group["params"]]
    numbers = {name: number for number, name in enumerate(names)}
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in saved["param_groups"]]
    return {"state": {numbers[name]: state for name, state in saved["state"].items()}, "param_groups": groups}
