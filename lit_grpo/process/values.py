"""Values that a checkpoint can hold: those that its restricted reader returns, and NumPy's in a readable form."""

from __future__ import annotations

import io
import marshal
import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np

_SCALARS = frozenset({type(None), bool, int, float, complex, str, bytearray})
_TENSOR = ("torch", "Tensor")  # by its name: torch takes seconds to import
_MAPPINGS, _SEQUENCES = (dict, OrderedDict, Counter), (list, tuple, set)
_NUMPY = "lit_grpo.numpy"
"""The key of a dict that stands for an array or a scalar of NumPy: its dtype, its shape (None: a scalar), its bytes.

The text ``bytes`` in place of a dtype stands for ``b""``.
"""
UNWRITABLE = (pickle.PickleError, RuntimeError, AttributeError, TypeError, ValueError)
"""Errors that torch raises if it cannot write a value or read it back; also a RuntimeError if writing fails."""
PLAIN = "numbers, text, bytes, lists, tuples, sets, dicts, NumPy arrays and tensors"
"""The allowed types, as named in messages."""


class Foreign(NamedTuple):
    """A value that no checkpoint can hold.

    Args:
        place: Position of the value in the tree, as in ``['seen'][0]``.
        value: Object that the checkpoint cannot hold.
        why: The reason, such as ``is a datetime``.
    """

    place: str
    value: Any
    why: str

    def __str__(self) -> str:
        """Return why, and the value in short."""
        try:
            shown = f" ({self.value!r:.60})"
        except Exception:  # the user's own __repr__ runs here, and may fail in any way
            shown = ""
        return self.why + shown


def find_foreign(tree: Any) -> Foreign | None:
    """Return the first value in nested containers that the reader of checkpoints would not give back; None if none.

    Types count exactly: a subclass of ``str`` or ``dict`` would come back through its class, which no reader runs.
    """
    try:
        return _find(tree, "")
    except RecursionError:
        return Foreign("", tree, f"is a {_name(tree)} that contains itself or is nested too deeply")


def _find(tree: Any, place: str) -> Foreign | None:
    kind = type(tree)
    if kind in _SCALARS or kind is bytes or (kind.__module__, kind.__qualname__) == _TENSOR:
        return None
    if isinstance(tree, np.ndarray | np.generic):
        is_plain = not tree.dtype.hasobject and tree.dtype.names is None
        return None if is_plain else Foreign(place, tree, f"is a NumPy array of dtype {tree.dtype}")
    if kind in _MAPPINGS:
        if _SCALARS.issuperset(map(type, tree)) and _SCALARS.issuperset(map(type, tree.values())):
            return None
        for key, value in tree.items():
            found = _find(key, f"{place}[{key!r:.40}]") or _find(value, f"{place}[{key!r:.40}]")
            if found is not None:
                return found
        return None
    if kind in _SEQUENCES:
        if _SCALARS.issuperset(map(type, tree)):
            return None
        found = (_find(value, f"{place}[{number}]") for number, value in enumerate(tree))
        return next((each for each in found if each is not None), None)
    return None if _comes_back(tree) else Foreign(place, tree, f"is a {_name(tree)}")


def _comes_back(value: Any) -> bool:
    """Return whether the reader gives back a value that is written alone."""
    import torch

    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except RecursionError:
        raise
    except Exception:  # pickling runs code of the value's class, which may fail in any way
        return False
    return True


def _name(value: Any) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def to_written(tree: Any) -> Any:
    """Return a tree in which NumPy's arrays and scalars are in the form that a checkpoint holds.

    Containers without any are returned as they are.
    """
    if isinstance(tree, np.ndarray | np.generic):
        array, shape = np.asarray(tree), list(tree.shape) if isinstance(tree, np.ndarray) else None
        if array.dtype.hasobject or array.dtype.names is not None:
            return tree
        return {_NUMPY: array.dtype.str, "shape": shape, "bytes": array.tobytes().decode("latin-1")}
    if type(tree) is bytes and not tree:  # these alone torch writes as a call of a class
        return {_NUMPY: "bytes"}
    return _mapped(tree, to_written)


def from_written(tree: Any) -> Any:
    """Return what :func:`to_written` was given."""
    if type(tree) is dict and _NUMPY in tree:
        if tree[_NUMPY] == "bytes":
            return b""
        array = np.frombuffer(tree["bytes"].encode("latin-1"), dtype=np.dtype(tree[_NUMPY])).copy()
        return array[0] if tree["shape"] is None else array.reshape(tree["shape"])
    return _mapped(tree, from_written)


def _mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Return a container with ``change`` applied to its values; the very same one where that changes nothing.

    In keys and sets NumPy's scalars become numbers, which are equal to them.
    """
    kind = type(tree)
    if kind in _MAPPINGS:
        if _SCALARS.issuperset(map(type, tree)) and _SCALARS.issuperset(map(type, tree.values())):
            return tree
        changed = {_hashable(key): change(value) for key, value in tree.items()}
        return tree if _alike(changed, tree) and _alike(changed.values(), tree.values()) else kind(changed)
    if kind in (list, tuple):
        if _SCALARS.issuperset(map(type, tree)):
            return tree
        values = [change(value) for value in tree]
        return tree if _alike(values, tree) else kind(values)
    return set(map(_hashable, tree)) if kind is set else tree


def _hashable(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    return tuple(map(_hashable, value)) if type(value) is tuple else value


def _alike(these: Iterable[Any], those: Iterable[Any]) -> bool:
    return all(mine is own for mine, own in zip(these, those, strict=True))


def checksum(tree: Any) -> str:
    """Return a checksum of a tree that :func:`to_written` has returned: the same before it is written and once read.

    Tensors count by dtype and shape; the archive of a checkpoint has checksums of their content.
    """
    hashed = blake2b(digest_size=8)
    for part in _parts(tree):
        hashed.update(part)
    return hashed.hexdigest()


def _parts(tree: Any) -> Iterator[bytes]:
    """Yield the values in a tree in their order, as bytes."""
    kind = type(tree)
    if kind in _SCALARS or kind is bytes:
        yield _in_bytes(tree)
    elif kind in _MAPPINGS:
        yield f"{kind.__name__} {len(tree)}".encode()
        for key, value in tree.items():
            yield from _parts(key)
            yield from _parts(value)
    elif kind is set:
        yield b"".join(sorted(b"".join(_parts(value)) for value in tree))
    elif kind in _SEQUENCES:
        if _SCALARS.issuperset(map(type, tree)):
            yield _in_bytes(tree)
            return
        yield f"{kind.__name__} {len(tree)}".encode()
        for value in tree:
            yield from _parts(value)
    elif hasattr(tree, "dtype") and hasattr(tree, "shape"):
        yield f"{tree.dtype} {tuple(tree.shape)}".encode()
    else:
        yield _name(tree).encode()


def _in_bytes(value: Any) -> bytes:
    return marshal.dumps(value, 2)  # later versions depend on which values are one object


def named_foreign(checkpoint: Mapping[str, Any]) -> str | None:
    """Say which part of a checkpoint cannot be read back, as in ``callbacks['Mine']['when'] is a datetime.datetime``.

    None if all of it can.
    """
    for name, part in checkpoint.items():
        if (found := find_foreign(part)) is not None:
            return f"{name}{found.place} {found}"
    return None
