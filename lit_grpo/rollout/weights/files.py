"""Weights in files of shared memory (safetensors), in folders that no other user can read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import safe_open
from safetensors.torch import save_file

from lit_grpo.process.files import PrivateFolder

if TYPE_CHECKING:
    from lit_grpo.rollout.weights.tensors import Named

_SHARED_MEMORY = Path("/dev/shm")
WEIGHTS_PREFIX = "lit_grpo_weights_"


def private_weights_folder(parent: str | None = None) -> PrivateFolder:
    """Make a folder for weights, in ``parent`` or else in shared memory where there is some."""
    return PrivateFolder(WEIGHTS_PREFIX, parent or (str(_SHARED_MEMORY) if _SHARED_MEMORY.is_dir() else None))


@contextmanager
def weights_folder(parent: str | None = None) -> Iterator[Path]:
    """Have such a folder while weights are on their way."""
    folder = private_weights_folder(parent)
    try:
        yield folder.path
    finally:
        folder.remove()


def write(tensors: Iterable[Named], path: Path) -> None:
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors}, path)


def read(path: str | Path) -> Iterator[Named]:
    with safe_open(path, framework="pt") as file:
        for name in list(file.keys()):
            yield name, file.get_tensor(name)
