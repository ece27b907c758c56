"""Policies in GGUF files, the format of llama.cpp: their weights are made floats when they are read."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import util
from mmap import ACCESS_READ, mmap
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from lit_grpo.process.terminal import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

SUFFIX = ".gguf"
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _LIST = 8, 9
_FLOATS = {"F64", "F32", "F16", "BF16"}
ROPE_FACTORS = "rope_freqs.weight"
"""The tensor of the numbers that a rotary embedding divides its frequencies by."""
_FEW = 0.01
"""Quantization types that fewer of the weights have are not told."""


class GGUFError(ValueError):
    """A sentence on a GGUF file that cannot be a policy."""


@dataclass(frozen=True)
class Header:
    """The header of a GGUF file.

    Args:
        facts: Numbers and texts of the header by name, without lists.
        num_weights: The number of weights by their type, such as ``Q4_1``.
        num_bytes: The bytes of the weights by their type.
        num_tensors: The number of tensors.
        rope_factors: The numbers that a rotary embedding divides its frequencies by; empty if it does not.
    """

    facts: dict[str, Any]
    num_weights: Counter[str]
    num_bytes: Counter[str]
    num_tensors: int
    rope_factors: tuple[float, ...] = ()


@dataclass(frozen=True)
class GGUFFile:
    """A policy in a GGUF file, with its tokenizer.

    Args:
        path: Path of the GGUF file.
        folder: The folder that transformers reads the file from; by default the file's own.
    """

    path: Path
    folder: Path | None = None
    errors = (
        *(OSError, ValueError, RuntimeError, LookupError, TypeError, AttributeError, ArithmeticError, AssertionError),
        struct.error,
    )
    """Errors that a reader raises for a file that it cannot read; transformers' reader checks little."""

    @property
    def place(self) -> str:
        """The folder that transformers loads from."""
        return str(self.folder or self.path.parent)

    @contextmanager
    def alone(self) -> Iterator[GGUFFile]:
        """Give the same file in a folder of its own.

        Where a folder has other files of a tokenizer, transformers reads those in place of what the GGUF file holds.
        """
        with TemporaryDirectory(prefix="lit_grpo-") as folder:
            (Path(folder) / self.path.name).symlink_to(self.path.resolve())
            yield replace(self, folder=Path(folder))

    def options(self) -> dict[str, Any]:
        """Return the options of transformers' ``from_pretrained`` that name the file.

        Raises:
            GGUFError: The package gguf is not installed, or the file is damaged or one part of several.
        """
        parts = self.header.facts.get("split.count", 1)
        if parts != 1:
            raise GGUFError(
                f"The GGUF file {str(self.path)!r} is one of {parts} parts; join them with llama-gguf-split --merge."
            )
        return {"gguf_file": self.path.name}

    def weight_options(self, dtype: str, nf4: bool) -> dict[str, Any]:
        """Return the options of ``from_pretrained`` that make floats of the weights.

        transformers would keep the weights as they are, and fetch code for them, where the package ``kernels`` is
        installed.

        Raises:
            GGUFError: ``nf4`` is asked for.
        """
        if nf4:
            raise GGUFError(
                f"lora.base is nf4, which the weights of the GGUF file {str(self.path)!r} cannot be turned into; leave "
                "lora.base out."
            )
        from transformers import GgufConfig

        return {"quantization_config": GgufConfig(dequantize=True)}

    def check(self) -> None:
        """Refuse a file that names more layers than it has tensors, before memory is taken for the layers.

        Raises:
            GGUFError: It does.
        """
        facts, num_tensors = self.header.facts, self.header.num_tensors
        layers = facts.get(f"{facts.get('general.architecture')}.block_count", 0)
        if not isinstance(layers, int) or layers > num_tensors:
            raise GGUFError(
                f"The GGUF file {str(self.path)!r} names {layers} layers (block_count), but has {num_tensors} tensors "
                "in all; download it again."
            )

    @cached_property
    def header(self) -> Header:
        """The header of the file.

        Raises:
            GGUFError: The package gguf is not installed, or the file is damaged.
        """
        if util.find_spec("gguf") is None:
            raise GGUFError(
                f"Policy {str(self.path)!r} is a GGUF file, which needs gguf; install the extra lit_grpo[smollm2]."
            )
        try:
            with self.path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
                return _read_header(_Reader(content), len(content))
        except self.errors as error:
            raise GGUFError(
                f"The GGUF file {str(self.path)!r} is damaged ({unreadable(error)}); download it again."
            ) from error

    def complete(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """Add what transformers' reader passes over: the size of a head, and Llama 3.1's scaled frequencies."""
        facts, factors = self.header.facts, self.header.rope_factors
        architecture = facts.get("general.architecture")
        head_dim = facts.get(f"{architecture}.attention.key_length")
        if isinstance(head_dim, int) and hasattr(config, "head_dim") and not hasattr(config, "global_head_dim"):
            config.head_dim = head_dim
        if factors:
            kept = {
                "rope_theta": config.rope_parameters["rope_theta"],
                "rope_type": "longrope",
                "attention_factor": 1.0,
            }
            kept |= {"factor": 1.0, "original_max_position_embeddings": config.max_position_embeddings}
            config.rope_parameters = {**kept, "short_factor": list(factors), "long_factor": list(factors)}
        return config

    def finish(self, model: PreTrainedModel) -> None:
        """Make a model, whose weights are floats now, one like any other: nothing says that it is quantized."""
        told: Any = model
        told.name_or_path = told.config.name_or_path = str(self.path)
        for name in ("hf_quantizer", "quantization_method", "is_quantized"):
            vars(told).pop(name, None)
        for name in ("quantization_config", "_model_name_or_path"):
            vars(told.config).pop(name, None)

    def note(self, dtype: str) -> str:
        """Return a sentence on what rounding has done to the weights; empty if none of them is quantized."""
        weights, num_bytes = self.header.num_weights, self.header.num_bytes
        rounded = {name: number for name, number in weights.items() if name not in _FLOATS}
        if not rounded:
            return ""
        bits = 8 * num_bytes.total() / weights.total()
        kinds = ", ".join(name for name, number in Counter(rounded).most_common() if number >= _FEW * weights.total())
        return (
            f"{self.path.name} holds weights of {bits:.2g} bits on average ({kinds or next(iter(rounded))}); they are "
            f"read as {dtype}, so the run begins with the rounded model"
        )


def gguf_file(name: str) -> GGUFFile | None:
    """Return the GGUF file that a policy's name means; None if it means something else.

    It is the path of a file that ends in ``.gguf``, or a folder with one such file and neither a config.json nor
    safetensors.

    Raises:
        GGUFError: There is no such file, or the folder has several.
    """
    path = Path(name)
    if path.is_dir():
        if (path / "config.json").exists() or any(path.glob("*.safetensors")):
            return None
        found = sorted(path.glob(f"*{SUFFIX}"))
        if len(found) > 1:
            raise GGUFError(
                f"The policy folder {name!r} has {len(found)} GGUF files; give the path of one, such as {found[0]}."
            )
        return GGUFFile(found[0]) if found else None
    if path.suffix != SUFFIX:
        return None
    if not path.is_file():
        raise GGUFError(f"There is no GGUF file {name!r}; give the path of a file on this machine.")
    return GGUFFile(path)


def unreadable(error: Exception) -> str:
    """Say what is wrong with a file, by the error that came of reading it; a lookup's error names only the key."""
    return f"it lacks {error}" if isinstance(error, LookupError) else first_line(error)


@contextmanager
def without_bars() -> Iterator[None]:
    """Keep transformers' reader of GGUF files from drawing a progress bar for each call."""
    from transformers import modeling_gguf_pytorch_utils
    from transformers.utils import logging

    reader: Any = modeling_gguf_pytorch_utils
    bars = reader.tqdm
    reader.tqdm = logging.tqdm  # the bars that can be switched off
    try:
        yield
    finally:
        reader.tqdm = bars


class _Reader:
    """Reads values one after the other; an attempt to read beyond the end raises ``struct.error``."""

    def __init__(self, content: mmap) -> None:
        self._content, self.place = content, 0

    def numbers(self, form: str, count: int = 1) -> tuple[Any, ...]:
        layout = f"<{count}{form}"
        values = struct.unpack_from(layout, self._content, self.place)
        self.place += struct.calcsize(layout)
        return values

    def text(self) -> str:
        (length,) = self.numbers("Q")
        (value,) = self.numbers("s", length) if length else (b"",)
        return value.decode()

    def skip_list(self) -> None:
        kind, count = *self.numbers("I"), *self.numbers("Q")
        if kind != _TEXT:
            self.place += count * struct.calcsize(_FORMATS[kind])
            return
        for _ in range(count):
            (length,) = self.numbers("Q")
            self.place += length


def _read_header(reader: _Reader, size: int) -> Header:
    """Read the header of a file of ``size`` bytes, up to its tensors (version 2 and 3 of the format)."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    if reader.numbers("s", 4) != (b"GGUF",):
        raise ValueError("it does not begin with GGUF")
    if (version := reader.numbers("I")[0]) not in (2, 3):
        raise ValueError(f"it is of version {version} of the format, and 2 and 3 are known")
    num_tensors, num_facts = reader.numbers("Q", 2)
    facts: dict[str, Any] = {}
    for _ in range(num_facts):
        name, (kind,) = reader.text(), reader.numbers("I")
        if kind == _LIST:
            reader.skip_list()
        else:
            facts[name] = reader.text() if kind == _TEXT else reader.numbers(_FORMATS[kind])[0]
    num_weights, num_bytes, end, factors = Counter[str](), Counter[str](), 0, None
    for _ in range(num_tensors):
        name, (dimensions,) = reader.text(), reader.numbers("I")
        count = 1
        for length in reader.numbers("Q", dimensions):
            count *= length
        kind, begin = *reader.numbers("I"), *reader.numbers("Q")
        told = GGMLQuantizationType(kind)
        block, block_bytes = GGML_QUANT_SIZES[told]
        num_weights[told.name] += count
        num_bytes[told.name] += count // block * block_bytes
        end = max(end, begin + count // block * block_bytes)
        if name == ROPE_FACTORS and told == GGMLQuantizationType.F32:
            factors = begin, count
    alignment = facts.get("general.alignment", 32)
    begin = -(-reader.place // alignment) * alignment
    if begin + end > size:
        raise ValueError(f"it has {size:,} bytes and its tensors end at {begin + end:,}")
    reader.place = begin + (factors or (0, 0))[0]
    return Header(facts, num_weights, num_bytes, num_tensors, reader.numbers("f", factors[1]) if factors else ())
