"""GGUF files whose headers were damaged, and a process that says what becomes of each.

Usage: python damaged_gguf.py WHOLE.gguf FOLDER, which prints a JSON object for each damaged file.
"""

from __future__ import annotations

import copy
import json
import math
import resource
import struct
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FORMS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
U32, F32, TEXT, LIST, I32 = 4, 6, 8, 9, 5
GIB = 2**30


@dataclass
class Parts:
    """A GGUF file in parts; ``counts`` are those of tensors and facts that it says it has, where they are others."""

    version: int
    facts: list[list[Any]]  # name, type and value; of a list the value is a pair of the entries' type and the entries
    tensors: list[list[Any]]  # name, sides, type and offset
    data: bytes
    counts: dict[str, int] = field(default_factory=dict)

    def fact(self, name: str) -> list[Any]:
        return next(each for each in self.facts if each[0].endswith(name))

    def value(self, name: str, value: Any, kind: int | None = None) -> None:
        changed = self.fact(name)
        changed[1:] = [changed[1] if kind is None else kind, value]

    def written(self) -> bytes:
        told = [self.counts.get("tensors", len(self.tensors)), self.counts.get("facts", len(self.facts))]
        out = b"GGUF" + struct.pack("<IQQ", self.version, *told)
        for name, kind, value in self.facts:
            out += text(name) + struct.pack("<I", kind) + packed(kind, value)
        for name, sides, kind, offset in self.tensors:
            out += text(name) + struct.pack(f"<I{len(sides)}QIQ", len(sides), *sides, kind, offset)
        return out + bytes(-len(out) % 32) + self.data


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def packed(kind: int, value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if kind == TEXT:
        return text(value)
    if kind == LIST:
        of, entries = value
        return struct.pack("<IQ", of, len(entries)) + b"".join(packed(of, entry) for entry in entries)
    return struct.pack("<" + FORMS[kind], value)


def parse(data: bytes) -> Parts:
    place = 24

    def number(form: str) -> Any:
        nonlocal place
        (found,) = struct.unpack_from("<" + form, data, place)
        place += struct.calcsize("<" + form)
        return found

    def words() -> str:
        nonlocal place
        length = number("Q")
        place += length
        return data[place - length : place].decode()

    def value(kind: int) -> Any:
        if kind == TEXT:
            return words()
        if kind == LIST:
            of = number("I")
            return of, [value(of) for _ in range(number("Q"))]
        return number(FORMS[kind])

    version, num_tensors, num_facts = struct.unpack_from("<IQQ", data, 4)
    facts = []
    for _ in range(num_facts):
        name, kind = words(), number("I")
        facts.append([name, kind, value(kind)])
    tensors = []
    for _ in range(num_tensors):
        name = words()
        tensors.append([name, [number("Q") for _ in range(number("I"))], number("I"), number("Q")])
    return Parts(version, facts, tensors, data[place + -place % 32 :])


SIZES = (
    *("block_count", "embedding_length", "feed_forward_length", "attention.head_count", "attention.head_count_kv"),
    *("attention.key_length", "attention.value_length", "rope.dimension_count", "llama.vocab_size", "qwen3.vocab_size"),
)
REALS = ("attention.layer_norm_rms_epsilon", "rope.freq_base")
TOKENIZER = ("tokens", "token_type", "merges", "model", "pre", "eos_token_id", "padding_token_id")


def damages(whole: Parts) -> Iterator[tuple[str, Callable[[Parts], Any]]]:
    """Yield names of damages, and functions that damage parts of a file, or return the bytes of a damaged one."""

    def sets(name: str, value: Any, kind: int | None = None) -> Callable[[Parts], None]:
        return lambda parts: parts.value(name, value, kind)

    names = [name for name, _, _ in whole.facts]
    for name in SIZES:
        if not any(each.endswith(name) for each in names):
            continue
        right = whole.fact(name)[2]
        for value in {0, 1, right // 2, right - 1, right + 1, 2 * right, 2**31, 2**32 - 1} - {right}:
            yield f"{name} is {value}", sets(name, value)
        yield f"{name} is a real number", sets(name, float(right), F32)
        yield f"{name} is a text", sets(name, str(right), TEXT)
        yield f"{name} is a list", sets(name, (U32, [right, right, right]), LIST)
        yield f"{name} is negative", sets(name, -right, I32)
        yield f"{name} is missing", lambda parts, name=name: parts.facts.remove(parts.fact(name))
    for value in (0, 2**31, 2**32 - 1):
        yield f"context_length is {value}", sets("context_length", value)
    for name in REALS:
        for value in (math.nan, math.inf, -math.inf, -whole.fact(name)[2], 0.0, 1e-38, 3e38):
            yield f"{name} is {value:g}", sets(name, value)
        yield f"{name} is a text", sets(name, "1e-5", TEXT)
        yield f"{name} is a list", sets(name, (F32, [1.0]), LIST)
        yield f"{name} is a whole number", sets(name, 1, U32)
    yield "no epsilon", lambda parts: parts.facts.remove(parts.fact("epsilon"))
    for name in names:
        yield f"{name} twice", lambda parts, name=name: parts.facts.append(list(parts.fact(name)))
    yield from _of_tokenizers(whole, sets)
    yield from _of_tensors(whole)
    yield from _of_files(whole)


def _of_tokenizers(whole: Parts, sets: Callable[..., Any]) -> Iterator[tuple[str, Callable[[Parts], Any]]]:
    prefix = "tokenizer.ggml."
    tokens, types = whole.fact("ggml.tokens")[2][1], whole.fact("ggml.token_type")[2][1]
    for name in TOKENIZER:
        yield f"{name} is a number", sets(prefix + name, 2.5, F32)
        yield f"{name} is a list of numbers", sets(prefix + name, (F32, [1.5, 2.5]), LIST)
        yield f"{name} is a nested list", sets(prefix + name, struct.pack("<IQIQ", LIST, 1, LIST, 2**60), LIST)
        yield f"{name} has 2^60 entries", sets(prefix + name, struct.pack("<IQ", TEXT, 2**60), LIST)
        yield f"{name} has 2^60 numbers", sets(prefix + name, struct.pack("<IQ", 10, 2**60), LIST)
        yield f"{name} is of an unknown type", sets(prefix + name, b"", 13)
    for name in ("tokens", "merges", "model", "eos_token_id"):
        yield f"{name} is missing", lambda parts, name=name: parts.facts.remove(parts.fact(prefix + name))
    for length in (0, 1, len(tokens) - 1):
        yield f"{length} tokens", sets(prefix + "tokens", (TEXT, tokens[:length]), LIST)
        yield f"{length} types of tokens", sets(prefix + "token_type", (I32, types[:length]), LIST)
        scores = ["tokenizer.ggml.scores", LIST, (F32, [0.0] * length)]
        yield f"{length} scores", lambda parts, scores=scores: parts.facts.append(scores)
    scores = ["tokenizer.ggml.scores", LIST, (F32, [math.nan] * len(tokens))]
    yield "scores of NaN", lambda parts: parts.facts.append(scores)
    yield "a token more", sets(prefix + "tokens", (TEXT, [*tokens, "more"]), LIST)
    yield "a token twice", sets(prefix + "tokens", (TEXT, [*tokens[:-1], tokens[5]]), LIST)
    yield "a type more", sets(prefix + "token_type", (I32, [*types, 1]), LIST)
    for value in (-1, 7, 2**31 - 1):
        yield f"a type {value}", sets(prefix + "token_type", (I32, [*types[:-1], value]), LIST)
    for merge in ("1", "1 2 3", "", " ", "1 ", "1 \u20ac", "\u0120 zz"):
        yield f"merge {merge!r}", sets(prefix + "merges", (TEXT, [merge]), LIST)
    for name in ("eos_token_id", "padding_token_id"):
        for value in (len(tokens), 2**31, 2**32 - 1):
            yield f"{name} is {value}", sets(prefix + name, value)
        yield f"{name} is negative", sets(prefix + name, -1, I32)
        yield f"{name} is a text", sets(prefix + name, "<eos>", TEXT)
    yield "a token is no UTF-8", sets(prefix + "tokens", struct.pack("<IQQ", TEXT, 1, 1) + b"\xff", LIST)
    yield "a text is no UTF-8", sets(prefix + "model", text(b"gpt\xff"))
    yield "a text of 2^60 bytes", sets(prefix + "model", struct.pack("<Q", 2**60))
    yield "a text of 2^64 - 1 bytes", sets(prefix + "model", struct.pack("<Q", 2**64 - 1))
    yield "an unknown tokenizer", sets(prefix + "model", "none of these")


def _of_tensors(whole: Parts) -> Iterator[tuple[str, Callable[[Parts], Any]]]:
    places = range(len(whole.tensors))

    def changes(row: int, part: int, value: Any) -> Callable[[Parts], Any]:
        return lambda parts: parts.tensors[row].__setitem__(part, value)

    def exchange(parts: Parts, one: int, other: int, part: int) -> None:
        first, second = parts.tensors[one], parts.tensors[other]
        first[part], second[part] = second[part], first[part]

    for row in places[1:]:
        before = next(one for one in places if whole.tensors[one][1] != whole.tensors[row][1])
        name = whole.tensors[row][0]
        yield f"offset of {name} exchanged", lambda parts, row=row: exchange(parts, row, row - 1, 3)
        yield f"name of {name} exchanged", lambda parts, row=row, before=before: exchange(parts, row, before, 0)
        yield f"{name} is missing", lambda parts, row=row: parts.tensors.pop(row)
    offset = whole.tensors[3][3]
    for value in (0, 32, offset + 1, offset + 32, len(whole.data), 2**40, 2**63, 2**64 - 1):
        yield f"offset {value}", changes(3, 3, value)
    matrix = next(row for row in places[3:] if len(set(whole.tensors[row][1])) == 2)
    wide, high = whole.tensors[matrix][1]
    for shape in (
        *([high, wide], [wide * high], [wide, high, 1, 1, 1], [], [wide // 2, high], [wide, high - 1], [0, high]),
        *([2 * wide, high // 2], [2**60, 2**60], [wide, 2**32], [-(-wide // 1), high, 2]),
    ):
        yield f"shape {shape}", changes(matrix, 1, shape)
    for value in (1, 2, 8, 26, 4, 999, 2**32 - 1):
        if value != whole.tensors[matrix][2]:
            yield f"type {value}", changes(matrix, 2, value)
    for value in ("", "blk.0.attn_q", "blk.99.attn_q.weight", "x" * 100_000, whole.tensors[4][0], "\x1b[31m"):
        yield f"name {value[:30]!r}", changes(3, 0, value)
    yield "name of no UTF-8", changes(3, 0, b"\xff\xfe")
    nothing = ["nothing.weight", [32], 0, len(whole.data) + -len(whole.data) % 32]
    yield (
        "a tensor more",
        lambda parts: (
            parts.tensors.append(nothing),
            setattr(parts, "data", parts.data + bytes(-len(parts.data) % 32 + 128)),
        ),
    )
    yield "a tensor twice", lambda parts: parts.tensors.append(list(parts.tensors[0]))
    yield "no tensors", lambda parts: parts.tensors.clear()


def _of_files(whole: Parts) -> Iterator[tuple[str, Callable[[Parts], Any]]]:
    data = whole.written()
    for kind in ("tensors", "facts"):
        right = len(getattr(whole, kind))
        for value in (0, right - 1, right + 1, 2**31, 2**60, 2**64 - 1):
            yield f"{value} {kind}", lambda parts, kind=kind, value=value: parts.counts.update({kind: value})
    for value in (0, 1, 4, 2**24, 2**31):
        yield f"version {value}", lambda parts, value=value: setattr(parts, "version", value)
    for kind, value in ((U32, 0), (U32, 3), (U32, 4096), (U32, 2**31), (I32, -32), (TEXT, "32"), (F32, 32.0)):
        fact = ["general.alignment", kind, value]
        yield f"alignment {value!r}", lambda parts, fact=fact: parts.facts.append(fact)
    architecture = "general.architecture"
    for value in ("", "mamba99", "t5", "gpt2", "qwen35", "l", "clip"):
        yield f"architecture {value!r}", lambda parts, value=value: parts.value(architecture, value)
    yield "architecture is a number", lambda parts: parts.value(architecture, 5, U32)
    yield "no architecture", lambda parts: parts.facts.remove(parts.fact(architecture))
    yield "one part of three", lambda parts: parts.facts.append(["split.count", 2, 3])
    for length in (0, 3, 4, 12, 23, 24, 100, 1000, 2000, len(data) // 2, len(data) - 33, len(data) - 1):
        yield f"cut at {length}", lambda parts, length=length: data[:length]
    yield "bytes at the end", lambda parts: data + bytes(64)
    yield "other magic", lambda parts: b"GGML" + data[4:]
    yield "zeros", lambda parts: bytes(len(data))
    yield "zeros after the counts", lambda parts: data[:8] + struct.pack("<QQ", 2**60, 2**60) + bytes(len(data))


def fingerprint(path: str) -> dict[str, Any]:
    """Return what is got of a file, so that another one can be compared with it."""
    import torch

    from lit_grpo.policy.loading import load_config, load_policy, load_tokenizer

    config, tokenizer, model = load_config(path), load_tokenizer(path), load_policy(path)
    ids = tokenizer("12+3 = a", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logits = model(ids).logits
    assert config.num_hidden_layers == model.config.num_hidden_layers
    return {
        "weights": {name: float(weight.double().sum()) for name, weight in model.state_dict().items()},
        "logits": logits.flatten().tolist(),
        "ids": ids.flatten().tolist(),
        "special": tokenizer.special_tokens_map,
    }


def within_a_gibibyte(whole: str) -> dict[str, Any]:
    """Return the fingerprint of a whole policy; from then on the process gets a gibibyte more."""
    expected = fingerprint(whole)
    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + GIB, taken + GIB))
    return expected


def report(damage: str, path: str, expected: dict[str, Any]) -> None:
    """Load a damaged policy, and print what became of it."""
    told: dict[str, Any] = {"damage": damage}
    try:
        told["is_right"] = fingerprint(path) == expected
    except ValueError as error:
        told["refused"] = str(error)
    except BaseException:  # what is not refused in a sentence is what this looks for
        told["traceback"] = traceback.format_exc()
    print(json.dumps(told), flush=True)


def main(whole: str, folder: Path) -> None:
    parts = parse(Path(whole).read_bytes())
    assert parts.written()[: len(Path(whole).read_bytes())] == Path(whole).read_bytes()
    expected = within_a_gibibyte(whole)
    for number, (name, damage) in enumerate(damages(parts)):
        damaged = copy.deepcopy(parts)
        made = damage(damaged)
        path = folder / f"{number}.gguf"
        path.write_bytes(made if isinstance(made, bytes) else damaged.written())
        report(name, str(path), expected)
        path.unlink()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
