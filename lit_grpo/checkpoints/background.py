"""Checkpoints that are written while the run goes on."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO

from lit_grpo.checkpoints.disk import not_readable
from lit_grpo.checkpoints.files import WholeFileIO
from lit_grpo.checkpoints.folder import replaced
from lit_grpo.process.values import UNWRITABLE, to_written


class BackgroundIO(CheckpointIO):
    """Copies a checkpoint onto the host, and a thread writes the copy while the run goes on.

    There is one copy at a time: a save waits until the checkpoint before it is written.

    Args:
        writer: Writes and reads the checkpoints.
    """

    def __init__(self, writer: WholeFileIO) -> None:
        self._writer = writer
        self._thread: ThreadPoolExecutor | None = ThreadPoolExecutor(1, "lit_grpo-checkpoint")
        self._writing: Future[None] | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Start to write ``path``; :meth:`wait` raises the error, if any. After a run, write it before returning.

        Raises:
            CheckpointError: The checkpoint before this one could not be written, or a value of this one could not be
                copied; after a run, this one could not be written.
        """
        self.wait()
        if self._thread is None:
            self._writer.save_checkpoint(checkpoint, path)
            return
        self._writer.prepare()
        try:
            copied = copy_of(to_written(checkpoint))
        except UNWRITABLE as error:
            raise not_readable(Path(path), checkpoint, error) from error
        self._writing = self._thread.submit(self._writer.save_checkpoint, copied, path)

    @property
    def is_writing(self) -> bool:
        return self._writing is not None and not self._writing.done()

    def wait(self) -> None:
        """Wait until nothing is being written, and raise the error of the last save, once."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def load_checkpoint(self, path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self._writer.load_checkpoint(path, *args, **kwargs)

    def remove_checkpoint(self, path: str | Path) -> None:
        self._writer.remove_checkpoint(path)

    def teardown(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None


def copy_of(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return a copy with its tensors on the host; tensors that share memory become one tensor."""
    copies: dict[Any, torch.Tensor] = {}
    memo: dict[int, Any] = {}

    def note(_: str, tensor: torch.Tensor) -> torch.Tensor:
        place = _place(tensor)
        if place not in copies:
            copies[place] = tensor.detach().to("cpu", copy=True)
        memo[id(tensor)] = copies[place]
        return tensor

    replaced(checkpoint, "", note)
    return deepcopy(checkpoint, memo)


def _place(tensor: torch.Tensor) -> Any:
    """Return a key that tensors in the same memory share; a shard has a key of its own."""
    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided:
        return id(tensor)
    return tensor.device, tensor.dtype, tensor.data_ptr(), tuple(tensor.shape), tensor.stride()
