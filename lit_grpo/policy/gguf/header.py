"""The header of a GGUF file: read within its bounds, typed, and compared with the file itself."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Annotated, Any

from lit_grpo.policy.architecture.outline import ranges
from lit_grpo.process.inputs import MOST_BYTES, open_input, typed
from lit_grpo.process.terminal import first_line

ROPE_FACTORS = "rope_freqs.weight"
"""The tensor of the numbers that a rotary embedding divides its frequencies by."""
TOKENS = "tokenizer.ggml.tokens"
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _LIST = 8, 9
_MOST_ENTRIES, _MOST_SIDES = 2**21, 4
"""The most entries of a list, and the most sides of a tensor."""
_REMEDY = "download it again"


class GGUFError(ValueError):
    """A sentence on a GGUF file that cannot be a policy."""


@dataclass(frozen=True)
class Tensor:
    """A tensor by the header.

    Args:
        shape: Shape of the tensor, rows first.
        kind: The type of its numbers, such as ``Q4_1``.
        begin: First byte of the tensor, from the beginning of the data.
        num_bytes: Size of the tensor in bytes.
    """

    shape: tuple[int, ...]
    kind: str
    begin: int
    num_bytes: int


@dataclass(frozen=True)
class Header:
    """The header of a GGUF file.

    Args:
        facts: Numbers, texts and lists of the header by name.
        tensors: The tensors by name, in the order in which they lie in the file.
        rope_factors: The numbers that a rotary embedding divides its frequencies by; empty if it does not.
    """

    facts: dict[str, Any]
    tensors: dict[str, Tensor]
    rope_factors: tuple[float, ...] = ()

    @property
    def architecture(self) -> str:
        """The name of the architecture, which names of facts begin with."""
        return str(self.facts["general.architecture"])

    def fact(self, name: str) -> Any:
        """Return a fact of the architecture, such as ``block_count``; None if the file does not say it."""
        return self.facts.get(f"{self.architecture}.{name}")


def read_header(path: Path) -> Header:
    """Read and check the header of a GGUF file (versions 2 and 3 of the format).

    llama.cpp reads only files whose tensors follow each other in the order of the header, each from the next multiple
    of the alignment; every writer makes such files. So an offset or an extent that is wrong is seen here.

    Raises:
        GGUFError: It is no GGUF file, its header ends early or too late, a value has another type than its readers
            expect or is out of range, or values contradict each other.
    """
    try:
        with open_input(path) as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
            header = _read(_Reader(content), len(content))
    except (OSError, ValueError, struct.error) as error:
        raise GGUFError(f"The GGUF file {str(path)!r} is damaged ({first_line(error)}); {_REMEDY}.") from error
    try:
        _check_types(header, path)
    except ValueError as error:
        raise GGUFError(str(error)) from error
    for contradiction in _contradictions(header):
        raise GGUFError(f"The GGUF file {str(path)!r} contradicts itself: {contradiction}; {_REMEDY}.")
    return header


class _Reader:
    """Reads values one after the other, up to the end of the file or of what may be a header."""

    def __init__(self, content: mmap) -> None:
        self._content, self.place = content, 0
        self.end = min(len(content), MOST_BYTES)

    def numbers(self, form: str, count: int = 1) -> tuple[Any, ...]:
        if count > _MOST_ENTRIES:
            raise ValueError(f"a list of its header has {count:,} entries, and at most {_MOST_ENTRIES:,} are read")
        layout = f"<{count}{form}"
        return struct.unpack_from(layout, self._content, self._take(struct.calcsize(layout)))

    def text(self) -> str:
        (length,) = self.numbers("Q")
        begin = self._take(length)
        return self._content[begin : begin + length].decode()

    def value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self.text()
        if kind == _LIST:
            entries, (count,) = self.numbers("I")[0], self.numbers("Q")
            if entries != _TEXT:
                return list(self.numbers(_form(entries), count))
            if count > _MOST_ENTRIES:
                raise ValueError(f"a list of its header has {count:,} texts, and at most {_MOST_ENTRIES:,} are read")
            return [self.text() for _ in range(count)]
        return self.numbers(_form(kind))[0]

    def _take(self, num_bytes: int) -> int:
        begin, self.place = self.place, self.place + num_bytes
        if self.place > self.end:
            raise ValueError(f"a value of its header would end at byte {self.place:,}, and {self.end:,} are read")
        return begin


def _form(kind: int) -> str:
    if kind not in _FORMATS:
        raise ValueError(f"its header has a value of the unknown type {kind}")
    return _FORMATS[kind]


def _read(reader: _Reader, size: int) -> Header:
    """Read the header of a file of ``size`` bytes, and compare the extents of its tensors with the file."""
    if reader.numbers("s", 4) != (b"GGUF",):
        raise ValueError("it does not begin with GGUF")
    if (version := reader.numbers("I")[0]) not in (2, 3):
        raise ValueError(f"it is of version {version} of the format, and 2 and 3 are known")
    num_tensors, num_facts = reader.numbers("Q", 2)
    facts: dict[str, Any] = {}
    for _ in range(num_facts):
        name, (kind,) = reader.text(), reader.numbers("I")
        if name in facts:
            raise ValueError(f"its header says {name!r:.80} twice")
        facts[name] = reader.value(kind)
    alignment = facts.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment is {alignment!r:.80}, which is no power of two")
    tensors, end, padded_end = dict[str, Tensor](), 0, 0
    for _ in range(num_tensors):
        name, tensor = reader.text(), _read_tensor(reader)
        if name in tensors:
            raise ValueError(f"it has two tensors {name!r:.80}")
        if tensor.begin != padded_end:
            raise ValueError(
                f"the tensor {name!r:.80} begins at byte {tensor.begin:,} of the data, and the one before it ends at "
                f"{padded_end:,}"
            )
        tensors[name], end = tensor, tensor.begin + tensor.num_bytes
        padded_end = -(-end // alignment) * alignment
    begin = -(-reader.place // alignment) * alignment
    if not begin + end <= size <= begin + padded_end:
        raise ValueError(f"it has {size:,} bytes and its tensors end at {begin + end:,}")
    factors = tensors.get(ROPE_FACTORS)
    if factors is None:
        return Header(facts, tensors)
    if factors.kind != "F32":
        raise ValueError(f"the tensor {ROPE_FACTORS} is of type {factors.kind}, and F32 is read")
    reader.place, reader.end = begin + factors.begin, size
    return Header(facts, tensors, reader.numbers("f", prod(factors.shape)))


def _read_tensor(reader: _Reader) -> Tensor:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    (num_sides,) = reader.numbers("I")
    if not 1 <= num_sides <= _MOST_SIDES:
        raise ValueError(f"a tensor has {num_sides} sides, and 1 to {_MOST_SIDES} are known")
    shape = reader.numbers("Q", num_sides)[::-1]
    kind, begin = *reader.numbers("I"), *reader.numbers("Q")
    told = GGMLQuantizationType(kind)
    block, block_bytes = GGML_QUANT_SIZES[told]
    if not all(shape) or shape[-1] % block:
        raise ValueError(f"a tensor of type {told.name} has the shape {shape}, whose rows are no blocks of {block}")
    return Tensor(shape, told.name, begin, prod(shape) // block * block_bytes)


_HEADS = ("attention.head_count", "attention.head_count_kv")
_SIDES = (
    *("block_count", "embedding_length", "vocab_size", *_HEADS),
    *("attention.key_length", "attention.value_length", "rope.dimension_count"),
    *("expert_count", "expert_used_count", "expert_feed_forward_length"),
)
"""Facts of an architecture that are at most as large as the longest side of a tensor, or the number of tensors."""
_BY_LAYER = (*_HEADS, "feed_forward_length")
"""Facts that may be a list with a number for each layer."""
_NEEDED = ("block_count", "embedding_length", "context_length", "attention.head_count")
"""Facts that every architecture has."""


def _check_types(header: Header, path: Path) -> None:
    """Hold the facts that readers compute with to their types and ranges."""
    facts, place = header.facts, f"in the header of the GGUF file {str(path)!r}"
    typed(facts.get("general.architecture"), str, f"general.architecture {place}", _REMEDY)
    for name in _NEEDED:
        if header.fact(name) is None:
            raise ValueError(f"{header.architecture}.{name} is missing {place}; {_REMEDY}.")
    for name, form in _forms(header).items():
        if name in facts:
            typed(facts[name], form, f"{name} {place}", _REMEDY)


def _forms(header: Header) -> dict[str, Any]:
    """Return the types and ranges of facts by their names."""
    from pydantic import Field, FiniteFloat

    facts, own, tokens = header.facts, f"{header.architecture}.", header.facts.get(TOKENS)
    natural, positive, epsilon, base = ranges()
    row = Annotated[int, Field(ge=0, lt=len(tokens) if isinstance(tokens, list) else 2**31)]
    forms: dict[str, Any] = {name: FiniteFloat for name, value in facts.items() if isinstance(value, float)}
    forms |= {name: epsilon for name in facts if name.startswith(own) and name.endswith("epsilon")}
    forms |= {name: base for name in facts if name.startswith(f"{own}rope.freq_base")}
    forms |= {own + name: natural for name in (*_SIDES, "feed_forward_length")}
    if header.fact("ssm.state_size") is None:  # a state-space model may have no heads
        forms |= {own + name: positive for name in _HEADS}
    forms |= {own + name: list[natural] for name in _BY_LAYER if isinstance(header.fact(name), list)}
    forms |= {own + name: positive for name in ("block_count", "embedding_length", "context_length")}
    forms |= {f"tokenizer.{name}": str for name in ("ggml.model", "ggml.pre", "chat_template")}
    forms |= {name: row for name in facts if name.startswith("tokenizer.ggml.") and name.endswith("_token_id")}
    forms |= {name: bool for name in facts if name.startswith("tokenizer.ggml.add_")}
    return forms | {
        "split.count": int,
        TOKENS: list[str],
        "tokenizer.ggml.merges": list[str],
        "tokenizer.ggml.scores": list[FiniteFloat],
        "tokenizer.ggml.token_type": list[Annotated[int, Field(ge=0, le=6)]],
    }


def _contradictions(header: Header) -> Iterator[str]:
    """Yield what two values of a header say differently of the same thing."""
    facts, fact = header.facts, header.fact
    longest = max((len(header.tensors), *(side for tensor in header.tensors.values() for side in tensor.shape)))
    for name in _SIDES:
        if isinstance(value := fact(name), int) and value > longest:
            yield f"{name} is {value:,}, and no tensor has a side of more than {longest:,}"
    for name in _BY_LAYER:
        if isinstance(value := fact(name), list) and len(value) != fact("block_count"):
            yield f"{name} has {len(value):,} numbers, and block_count is {fact('block_count'):,}"
    if not any(name.startswith(f"{header.architecture}.") and name.endswith("epsilon") for name in facts):
        yield "it names no epsilon of the normalization"
    tokens, embedding = facts.get(TOKENS), header.tensors.get("token_embd.weight")
    told = {"vocab_size": fact("vocab_size"), "the number of tokens": None if tokens is None else len(tokens)}
    for name, number in {**told, "embedding_length": fact("embedding_length")}.items():
        side = -1 if name == "embedding_length" else 0
        if embedding is not None and number not in (None, embedding.shape[side]):
            yield f"{name} is {number:,}, and the embedding has the shape {embedding.shape}"
    if tokens is None:
        return
    for name in ("token_type", "scores"):
        if len(entries := facts.get(f"tokenizer.ggml.{name}", tokens)) != len(tokens):
            yield f"the vocabulary has {len(tokens):,} tokens, and tokenizer.ggml.{name} {len(entries):,} entries"
    rows: dict[str, int] = {}
    for row, token in enumerate(tokens):
        if token and rows.setdefault(token, row) != row:
            yield f"the tokens {rows[token]:,} and {row:,} are both {token!r:.80}"
    for row, merge in enumerate(facts.get("tokenizer.ggml.merges", ())):
        if len(parts := merge.split(" ")) != 2 or not all(parts):
            yield f"merge {row:,} is {merge!r:.80}, and not two parts with a space between them"
