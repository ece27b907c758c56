"""Checkpoints as Lightning's strategies write and read them: whole files, or folders of shards."""

from __future__ import annotations

import io
import os
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from torch import distributed

from lit_grpo.checkpoints.disk import CheckpointError, aside_of, not_readable, put_in_place, settled
from lit_grpo.checkpoints.folder import apart, check_folder, fill, read_state, replaced, write_folder
from lit_grpo.checkpoints.form import sealed
from lit_grpo.checkpoints.whole import check_whole
from lit_grpo.process.values import UNWRITABLE, from_written, to_written


class WholeFileIO(TorchCheckpointIO):
    """Writes a checkpoint to a temporary file in the same folder, and renames it when it is on the disk.

    Lightning writes below ``$TMPDIR`` first. If that is another file system, the checkpoint is copied piece by piece
    over the old one.
    """

    def prepare(self) -> None:
        """Do the part of saving that only the training thread may do."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write ``path``, which holds the old checkpoint or the new one at any time.

        The new one takes the old one's place once the reader of checkpoints has read it back.

        Raises:
            CheckpointError: The disk is full or not writable, or a value could not be read back.
        """
        path, checkpoint = Path(path), to_written(checkpoint)
        aside = aside_of(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            aside.unlink(missing_ok=True)  # it may be a link to a file of the user
            with aside.open("xb") as file:
                torch.save(sealed(checkpoint), file)
                file.flush()
                os.fsync(file.fileno())
            read_state(aside)
            put_in_place(aside, path)
        except (OSError, *UNWRITABLE) as error:
            raise not_readable(path, checkpoint, error) from error
        finally:
            with suppress(OSError):
                aside.unlink()

    def load_checkpoint(self, path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read a file, or join the shards of a folder; a damaged one raises DamagedError."""
        path = settled(Path(path))
        check_whole(path)
        return read(path) if path.is_dir() else from_written(super().load_checkpoint(path, *args, **kwargs))


class FolderIO(WholeFileIO):
    """Writes folders, to which each rank writes its shards. All ranks call it, and either all of them save or none."""

    def __init__(self) -> None:
        super().__init__()
        self._group: distributed.ProcessGroup | None = None

    def prepare(self) -> None:
        """Make a process group on CPUs, so that ranks can save while they exchange other things."""
        if self._group is None and distributed.is_initialized():
            self._group = cast("distributed.ProcessGroup", distributed.new_group(backend="gloo"))

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write ``path`` together with the other ranks; if one of them fails, all raise a CheckpointError."""
        self.prepare()
        state, tensors = apart(to_written(checkpoint))
        state["save"] = uuid.uuid4().hex  # so that two saves of equal states have two ids
        write_folder(_written(state, Path(path)), tensors, Path(path), self._group)


def _written(state: dict[str, Any], path: Path) -> bytes | CheckpointError:
    file = io.BytesIO()
    try:
        torch.save(sealed(state), file)
        file.seek(0)
        torch.load(file, map_location="cpu", weights_only=True)
    except UNWRITABLE as error:
        return not_readable(path, state, error)
    return file.getvalue()


def read(path: Path, only: tuple[str, ...] = ("state_dict", "optimizer_states")) -> dict[str, Any]:
    """Read a checkpoint onto the host, in the form in which one device writes it."""
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
    """Return an optimizer's state with numbers in place of the weights' names, as torch saves it."""
    names = [name for group in saved["param_groups"] for name in group["params"]]
    numbers = {name: number for number, name in enumerate(names)}
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in saved["param_groups"]]
    return {"state": {numbers[name]: state for name, state in saved["state"].items()}, "param_groups": groups}
