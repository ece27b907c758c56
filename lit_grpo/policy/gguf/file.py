"""Policies in GGUF files, the format of llama.cpp: their weights are made floats when they are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import util
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from lit_grpo.policy.architecture.outline import bare_model
from lit_grpo.policy.gguf.fitting import check_rotation, check_tensors, complete_config
from lit_grpo.policy.gguf.header import GGUFError, Header, read_header
from lit_grpo.process.terminal import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

SUFFIX = ".gguf"
_FLOATS = {"F64", "F32", "F16", "BF16"}
_FEW = 0.01
"""Quantization types that fewer of the weights have are not told."""


@dataclass(frozen=True)
class GGUFFile:
    """A policy in a GGUF file, with its tokenizer.

    Args:
        path: Path of the GGUF file.
        folder: The folder that transformers reads the file from; by default the file's own.
    """

    path: Path
    folder: Path | None = None
    errors = (Exception,)
    """Errors that readers raise for a file that they cannot use: the library tokenizers has no class of its own."""

    @property
    def place(self) -> str:
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
        """Return the options of transformers' ``from_pretrained`` that name the file."""
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
        """Do nothing: ``options`` reads the header, and ``complete`` compares it with the tensors."""

    @cached_property
    def header(self) -> Header:
        """The header of the file."""
        if util.find_spec("gguf") is None:
            raise GGUFError(
                f"Policy {str(self.path)!r} is a GGUF file, which needs gguf; install the extra lit_grpo[smollm2]."
            )
        return read_header(self.path)

    def complete(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """Add what transformers' reader passes over, and compare the model with the tensors of the file."""
        with self._said():
            check_rotation(self.header, complete_config(self.header, config))
        model = bare_model(config)
        with self._said():
            check_tensors(self.header, model)
        return config

    @contextmanager
    def _said(self) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise GGUFError(
                f"The GGUF file {str(self.path)!r} contradicts itself: {first_line(error)}; download it again."
            ) from error

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
        weights, num_bytes = Counter[str](), 0
        for tensor in self.header.tensors.values():
            weights[tensor.kind] += prod(tensor.shape)
            num_bytes += tensor.num_bytes
        rounded = {name: number for name, number in weights.items() if name not in _FLOATS}
        if not rounded:
            return ""
        bits = 8 * num_bytes / weights.total()
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
    """Say what is wrong with a file, by the error that came of reading it.

    A lookup's error names only the key, and the first line of others may end where their cause begins.
    """
    if isinstance(error, LookupError):
        return f"it lacks {error}"
    first, *others = str(error).strip().splitlines() or [""]
    return f"{first} {others[0].strip().rstrip('.')}" if first.endswith(":") and others else first_line(error)


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
