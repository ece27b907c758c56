"""A checkpoint that is a folder: torch writes the shards of each rank, and the first rank everything else."""

from __future__ import annotations

import importlib
import io
import os
import pickle
import warnings
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from lit_grpo.checkpoints.disk import STATE, CheckpointError, aside_of, not_written, put_in_place, remove
from lit_grpo.process.terminal import first_line
from lit_grpo.process.values import from_written

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed.checkpoint.planner import SavePlanner

METADATA = ".metadata"
"""Torch's list of the shards; everything else is in the file ``STATE``, a sharded tensor without its content."""
SHARDED = ("state_dict", "optimizer_states")
"""The parts of Lightning's checkpoint of which ranks have shards."""
PLAIN = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "TensorStorageMetadata", "ChunkStorageMetadata"),
        *("TensorProperties", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size", "float64", "float32", "bfloat16", "float16", "int64", "int32", "uint8", "int8", "bool"),
}
"""The only classes that torch's list may use. The list is a pickle, which could run code if other classes were allowed.
"""


def replaced(
    tree: Any, path: str, replace: Callable[[str, torch.Tensor], torch.Tensor], done: dict[int, Any] | None = None
) -> Any:
    """Return nested dicts and lists with each tensor replaced; one tensor in two places is replaced by one tensor.

    Args:
        tree: A part of a checkpoint.
        path: The name of the part; the tensors' names begin with it, as in ``state_dict.policy.lm_head.weight``.
        replace: Is called with a tensor's name, in its first place, and the tensor.
        done: The replacements so far, by the tensor's id.
    """
    done = {} if done is None else done
    if isinstance(tree, torch.Tensor):
        if id(tree) not in done:
            done[id(tree)] = replace(path, tree)
        return done[id(tree)]
    if isinstance(tree, Mapping):
        return {key: replaced(value, f"{path}.{key}", replace, done) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)([replaced(value, f"{path}.{index}", replace, done) for index, value in enumerate(tree)])
    return tree


def apart(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return a checkpoint whose sharded tensors have no content, and the shards by name."""
    tensors: dict[str, torch.Tensor] = {}

    def empty(name: str, tensor: torch.Tensor) -> torch.Tensor:
        tensors[name] = tensor
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    names = [name for name in SHARDED if name in checkpoint]
    return {**checkpoint, **{name: replaced(checkpoint[name], name, empty) for name in names}}, tensors


def write_folder(
    state: bytes | CheckpointError,
    tensors: dict[str, torch.Tensor],
    path: Path,
    group: distributed.ProcessGroup | None,
) -> None:
    """Write ``path`` on all ranks; it is moved to its place after every rank's shards are on the disk.

    Args:
        state: The content of the file ``STATE``, or why there is none; the first rank's is written. Its checksum is the
            id of the save, with which every shard begins, and which torch's list names for every shard.
        tensors: The shards by name; all ranks have the same names.
        path: The folder, on a file system that all ranks see.
        group: The process group of all ranks, on CPUs; None for a single process.

    Raises:
        CheckpointError: A rank could not write; all ranks raise it, and the unfinished folder is removed.
    """
    aside = aside_of(path)
    writer = _Writer(aside, path, state)
    try:
        with _alone(group is None):
            save(tensors, storage_writer=writer, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        if group is None or distributed.get_rank(group) == 0:
            remove(aside)
        rank, (cause, _) = next(iter(error.failures.items()))
        failure = not_written(path, cause)
        raise failure if group is None else type(failure)(f"Rank {rank}: {failure}") from error


def fill(tensors: dict[str, torch.Tensor], path: Path, alone: bool = False) -> None:
    """Read tensors from a folder in place, by name; a shard gets this rank's part, ``alone`` without the other ranks.

    Raises:
        ValueError: A shard cannot be read or is of another save, or the folder was replaced meanwhile.
    """
    before = _stamp(path)
    try:
        with _alone(alone):
            load(tensors, storage_reader=_Reader(str(path)), no_dist=alone)
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise ValueError(f"Rank {rank} cannot read checkpoint {str(path)!r}: {first_line(cause)}") from error
    if before != _stamp(path):
        raise ValueError(f"Checkpoint {str(path)!r} was replaced while it was read; do it again.")


def read_state(path: Path) -> dict[str, Any]:
    """Read a checkpoint without letting it run code; of a folder, all except the shards' content.

    The tensors of a file are read from the disk when they are used.
    """
    return from_written(read_written(path))


def read_written(path: Path) -> Any:
    """Read like :func:`read_state`, but return NumPy's values in the form in which they are written."""
    file = path / STATE if path.is_dir() else path
    return torch.load(file, map_location="cpu", weights_only=True, mmap=True)


def check_folder(path: Path) -> None:
    """Refuse a folder that is no checkpoint, or that lacks the files of a rank."""
    if not (path / STATE).is_file():
        raise ValueError(
            f"{str(path)!r} is a folder, but no checkpoint (it has no {STATE}); give a checkpoint, such as "
            "runs/NAME/checkpoints/last.ckpt."
        )
    try:
        metadata = _Reader(str(path)).read_metadata()
        needed: dict[str, int] = {}
        for place in metadata.storage_data.values():
            needed[place.relative_path] = max(needed.get(place.relative_path, 0), place.offset + place.length)
        foreign = any(not isinstance(of, TensorStorageMetadata) for of in metadata.state_dict_metadata.values())
    except (OSError, EOFError, pickle.UnpicklingError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"Checkpoint {str(path)!r} is damaged: its {METADATA} cannot be read ({type(error).__name__}); copy all of "
            "the folder again, or give another checkpoint."
        ) from error
    if foreign or any(Path(name).name != name for name in needed):
        raise ValueError(f"{str(path)!r} was not written by lit_grpo; give a checkpoint of one of its runs.")
    lacking = [name for name, size in sorted(needed.items()) if _size(path / name) < size]
    if lacking:
        raise ValueError(
            f"Checkpoint {str(path)!r} lacks {len(lacking)} of the {len(needed)} files that ranks have written, such "
            f"as {lacking[0]}; copy all of the folder again, or give another checkpoint."
        )


def check_one_save(path: Path) -> str | None:
    """Say why the files of a folder are not known to be of one save; None if they are.

    Only the beginning of each shard is read.
    """
    reader, save = _Reader(str(path)), _id_of((path / STATE).read_bytes())
    for place in reader.read_metadata().storage_data.values():
        stamps = reader.stamps(place.transform_descriptors or ())
        if not stamps:
            return (
                "was written by an earlier version of lit_grpo, whose files do not say of which save they are (resume "
                "or export it with that version)"
            )
        with (path / place.relative_path).open("rb") as file:
            file.seek(place.offset)
            is_as_listed = all(stamp.is_in(file) for stamp in stamps)
        others = [stamp for stamp in stamps if stamp.save != save]
        if others or not is_as_listed:
            one, other = (METADATA, STATE) if others else (place.relative_path, METADATA)
            return (
                f"is damaged, or mixes files of two saves, as after a copy that was interrupted (in it {one} does not "
                f"belong to {other}; copy all of the folder again)"
            )
    return None


def written_tensors(path: Path) -> Iterator[tuple[str, str, IO[bytes]]]:
    """Yield each shard in a folder: the tensor's name, the file's name, and the archive in the file."""
    reader = _Reader(str(path))
    for index, place in reader.read_metadata().storage_data.items():
        with (path / place.relative_path).open("rb") as file:
            file.seek(place.offset)
            archive: IO[bytes] = io.BytesIO(file.read(place.length))
        for stamp in reader.stamps(place.transform_descriptors or ()):
            archive = stamp.transform_from(archive)
        yield index.fqn, place.relative_path, archive


class _Stamp(StreamTransformExtension):
    """Writes the id of a save, and the rank, before each shard, and checks them when the shard is read.

    Files of two saves have the same names and sizes. A copy that was interrupted may mix whole files or, written in
    place, the shards in one file.

    Args:
        save: The id of the save.
        rank: The number of the rank that writes.
    """

    def __init__(self, save: str, rank: int) -> None:
        self.save, self._bytes = save, f"{save}-{rank:06}".encode()

    @staticmethod
    def registry_name() -> str:
        return "lit_grpo.save"

    @staticmethod
    def from_descriptor(version: str) -> _Stamp:
        save, _, rank = version.partition("-")
        return _Stamp(save, int(rank))

    def get_descriptor(self) -> str:
        return f"{self.registry_name()}/{self._bytes.decode()}"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        output.write(self._bytes)
        return output

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:
        if not self.is_in(input):
            raise ValueError("A shard of the checkpoint is of another save; copy all of its folder again.")
        return io.BytesIO(input.read())

    def is_in(self, file: IO[bytes]) -> bool:
        return file.read(len(self._bytes)) == self._bytes


@dataclass(frozen=True)
class _Place:
    """The place that a rank writes to, as the first rank tells it: the beginning of its file's name, and its stamp."""

    prefix: str
    stamp: _Stamp


class _Writer(FileSystemWriter):
    """Writes a temporary folder, which the first rank moves to its place in the last step."""

    def __init__(self, aside: Path, path: Path, state: bytes | CheckpointError) -> None:
        super().__init__(str(aside))
        self._aside, self._place, self._state = aside, path, state

    def storage_meta(self) -> None:
        """Store no path of this machine."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        if isinstance(self._state, CheckpointError):
            raise self._state
        remove(self._aside)  # a killed run may have left it
        self._aside.mkdir(parents=True)
        save = _id_of(self._state)
        places = [_Place(f"__{rank}_", _Stamp(save, rank)) for rank in range(len(plans))]
        return [replace(plan, storage_data=place) for plan, place in zip(plans, places, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        self.transforms.extensions = (plan.storage_data.stamp,)
        return super().write_data(plan, planner)

    def finish(self, metadata: Metadata, results: Any) -> None:
        super().finish(metadata, results)
        assert isinstance(self._state, bytes), "prepare_global_plan has raised"
        listed = self._aside / METADATA
        for path, mode, content in (
            (listed, "ab", sha256(listed.read_bytes()).digest()),  # torch's reader stops before it
            (self._aside / STATE, "wb", self._state),
        ):
            with path.open(mode) as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        put_in_place(self._aside, self._place)


class _Reader(FileSystemReader):
    """Reads torch's list without letting it run code."""

    def __init__(self, path: str) -> None:
        registry = ExtensionRegistry()
        registry.register(_Stamp)
        super().__init__(path, registry)
        self.stamps: Any = registry.from_descriptor_list

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        content = (Path(self.path) / METADATA).read_bytes()
        file = io.BytesIO(content)
        metadata = _Unpickler(file).load()
        listed, own = content[: file.tell()], content[file.tell() :]
        if own and own != sha256(listed).digest():  # an earlier version wrote none
            raise ValueError("its checksum does not match")
        return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in PLAIN.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a checkpoint")
        return getattr(importlib.import_module(module), name)


@contextmanager
def _alone(alone: bool) -> Iterator[None]:
    with warnings.catch_warnings():
        if alone:
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _id_of(state: bytes) -> str:
    return sha256(state).hexdigest()[:32]


def _stamp(path: Path) -> tuple[int, int]:
    there = (path / STATE).stat()
    return there.st_ino, there.st_mtime_ns


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1
