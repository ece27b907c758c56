"""Checkpoints that are written beside the run."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO

from lit_grpo.checkpoints.files import WholeFileIO
from lit_grpo.checkpoints.folder import replaced


class BackgroundIO(CheckpointIO):
    """Copies a checkpoint onto the host, and has a thread write it while the run goes on.

    There is one copy at a time: who saves while one is being written waits for it.

    Args:
        writer: What writes it, and reads.
    """

    def __init__(self, writer: WholeFileIO) -> None:
        self._writer = writer
        self._thread: ThreadPoolExecutor | None = ThreadPoolExecutor(1, "lit_grpo-checkpoint")
        self._writing: Future[None] | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Begin to write ``path``; :meth:`wait` tells how it went. After a run it is written when this returns.

        Raises:
            CheckpointError: The one before this could not be written, or after a run this one.
        """
        self.wait()
        if self._thread is None:
            self._writer.save_checkpoint(checkpoint, path)
            return
        self._writer.prepare()
        self._writing = self._thread.submit(self._writer.save_checkpoint, copy_of(checkpoint), path)

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is on its way to the disk."""
        return self._writing is not None and not self._writing.done()

    def wait(self) -> None:
        """Return once nothing is being written.

        Raises:
            CheckpointError: What was could not be written; it is told once.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def load_checkpoint(self, path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Read a checkpoint, as its writer does."""
        return self._writer.load_checkpoint(path, *args, **kwargs)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint, as its writer does."""
        self._writer.remove_checkpoint(path)

    def teardown(self) -> None:
        """End the thread, once it has written."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None


def copy_of(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return a copy that nothing changes any more, with its tensors on the host; of those with one content, one."""
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
    """What tensors have in common that are the same memory; a shard, which has none of its own, only with itself."""
    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided:
        return id(tensor)
    return tensor.device, tensor.dtype, tensor.data_ptr(), tuple(tensor.shape), tensor.stride()
