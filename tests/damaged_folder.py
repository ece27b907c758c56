"""Policy folders whose config.json and safetensors contradict each other, and a process that says what becomes of each.

Usage: python damaged_folder.py WHOLE FOLDER, which prints a JSON object for each damaged folder.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from damaged_gguf import report, within_a_gibibyte

SIZES = (
    *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size"),
)
WEIGHTS, PART = "model.safetensors", "model-00001-of-00001.safetensors"


def damages(settings: dict[str, Any], header: dict[str, Any]) -> Iterator[tuple[str, Callable[[Path], Any]]]:
    """Yield names of damages, and functions that damage a folder."""

    def sets(**changes: Any) -> Callable[[Path], Any]:
        return lambda folder: (folder / "config.json").write_text(json.dumps(settings | changes))

    for name in SIZES:
        right = settings[name]
        for value in {0, 1, right // 2, right - 1, right + 1, 2 * right, 10**6, 2**31, 2**60} - {right}:
            yield f"{name} is {value}", sets(**{name: value})
        for value in (-right, float(right), str(right), [right], None, True, {}):
            yield f"{name} is {value!r}", sets(**{name: value})
    for name in ("rms_norm_eps", "rope_theta"):
        for value in (math.nan, math.inf, -1.0, 0.0, 1e30, "1e-6", None, [1.0], True):
            changes = {name: value} if name in settings else {"rope_parameters": {"rope_type": "default", name: value}}
            yield f"{name} is {value!r}", sets(**changes)
    for value in (None, "", "none of these", 5, ["qwen3"], "llama", "gpt2", "t5"):
        yield f"model_type is {value!r}", sets(model_type=value)
    for value in ("float99", 5, None):
        yield f"dtype is {value!r}", sets(dtype=value)
    yield "layer_types is short", sets(layer_types=["full_attention"])
    yield "layer_types is unknown", sets(layer_types=["none"] * 2)
    yield "layer_types is a text", sets(layer_types="full_attention")
    yield "text_config is a number", sets(text_config=5)
    for text in (
        "",
        "[]",
        "5",
        "null",
        "{",
        "[" * 100_000,
        '{"model_type": "qwen3", "vocab_size": ' + "9" * 5000 + "}",
    ):
        yield f"config.json {text[:40]!r}", lambda folder, text=text: (folder / "config.json").write_text(text)
    yield "config.json is a pipe", lambda folder: ((folder / "config.json").unlink(), os.mkfifo(folder / "config.json"))
    yield "config.json is no UTF-8", lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe{}")
    yield "weights are a pipe", lambda folder: ((folder / WEIGHTS).unlink(), os.mkfifo(folder / WEIGHTS))
    yield (
        "config.json is a folder",
        lambda folder: ((folder / "config.json").unlink(), (folder / "config.json").mkdir()),
    )
    yield from _of_headers(header)


def _of_headers(header: dict[str, Any]) -> Iterator[tuple[str, Callable[[Path], Any]]]:
    names = [name for name in header if name != "__metadata__"]
    one = "model.layers.0.self_attn.q_proj.weight"

    def written(folder: Path, changed: Any, length: int | None = None) -> None:
        data = (folder / WEIGHTS).read_bytes()
        (size,) = struct.unpack_from("<Q", data)
        told = changed if isinstance(changed, bytes) else json.dumps(changed).encode()
        (folder / WEIGHTS).write_bytes(
            struct.pack("<Q", len(told) if length is None else length) + told + data[8 + size :]
        )

    def changes(name: str, **values: Any) -> Callable[[Path], Any]:
        return lambda folder: written(folder, header | {name: header[name] | values})

    shape, (begin, end) = header[one]["shape"], header[one]["data_offsets"]
    for value in ([shape[1], shape[0]], [shape[0] * shape[1]], [], [2**60, 2**60], [-1, 5], [1, *shape], ["a"], None):
        yield f"shape {value}", changes(one, shape=value)
    for value in (
        [0, end],
        [begin, end + 4],
        [begin + 4, end + 4],
        [end, begin],
        [0, 2**63],
        [-4, end - begin - 4],
        "a",
    ):
        yield f"offsets {value}", changes(one, data_offsets=value)
    for value in ("F16", "I32", "F64", "F8_E4M3", "none", 5):
        yield f"dtype {value}", changes(one, dtype=value)
    yield (
        "a shape that another model has",
        lambda folder: written(folder, header | {one: header[one] | {"shape": [shape[0] // 2, shape[1] * 2]}}),
    )
    for name in names[:6]:
        yield (
            f"{name} renamed",
            lambda folder, name=name: written(
                folder, {("x." + each if each == name else each): value for each, value in header.items()}
            ),
        )
    yield (
        "a layer renamed",
        lambda folder: written(
            folder, {each.replace("layers.1.", "layers.2."): value for each, value in header.items()}
        ),
    )
    for length in (0, 1, 2**20, 2**40, 2**63):
        yield f"header of {length} bytes", lambda folder, length=length: written(folder, header, length)
    for text in (b"", b"{", b"[]", b"\xff" * 9, b"[" * 100_000):
        yield f"header {text[:9]!r}", lambda folder, text=text: written(folder, text)
    for length in (0, 7, 8, 100, -1, -1000):
        yield (
            f"cut at {length}",
            lambda folder, length=length: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:length]),
        )
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, PART)}
    for what, value in {
        "of a missing file": {"weight_map": dict.fromkeys(names, "model-00001-of-00002.safetensors")},
        "of another folder": {"weight_map": dict.fromkeys(names, "../nowhere/model.safetensors")},
        "without a map": {},
        "a list": [],
        "of numbers": {"weight_map": dict.fromkeys(names, 5)},
        "with a weight more": {
            **index,
            "weight_map": index["weight_map"] | {"model.layers.2.mlp.up_proj.weight": PART},
        },
        "with a weight less": {**index, "weight_map": dict.fromkeys(names[1:], PART)},
    }.items():
        yield (
            f"an index {what}",
            lambda folder, value=value: (
                (folder / "model.safetensors.index.json").write_text(json.dumps(value)),
                (folder / WEIGHTS).rename(folder / PART),
            ),
        )


def main(whole: Path, folder: Path) -> None:
    settings = json.loads((whole / "config.json").read_text())
    data = (whole / WEIGHTS).read_bytes()
    header = json.loads(data[8 : 8 + struct.unpack_from("<Q", data)[0]])
    expected = within_a_gibibyte(str(whole))
    for number, (name, damage) in enumerate(damages(settings, header)):
        damaged = folder / f"policy-{number}"
        shutil.copytree(whole, damaged)
        damage(damaged)
        report(name, str(damaged), expected)
        shutil.rmtree(damaged)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
