"""Ways in which a run's folder is damaged: by a full disk, an editor, a copy that broke off, or somebody's intent."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import yaml

RIGHT, TOLD, REFUSED = "right", "told", "refused"
"""The result is right; what was left out of it is told in a sentence; or there is none, and a sentence says why."""
METRICS, CONFIG, SAMPLES, TIMELINE = "metrics.csv", "config.yaml", "samples.jsonl", "timeline.jsonl"
TRACE, MEMORY, VERSIONS, EVALUATED = "trace.jsonl", "memory.json", "versions.json", "evaluation/completions.jsonl"
FILES = (METRICS, CONFIG, SAMPLES, TIMELINE, TRACE, MEMORY, VERSIONS, EVALUATED)
SPARSE_BYTES = 5 * 2**30


class Damage(NamedTuple):
    """A damage: the file, what is done in the run's folder, and what ``report`` and ``finish`` make of it."""

    file: str
    do: Callable[[Path], Any]
    report: str
    finish: str


def _in_place_of(file: str, make: Callable[[Path], Any]) -> Callable[[Path], None]:
    def do(run: Path) -> None:
        (run / file).unlink()
        make(run / file)

    return do


def _text(file: str, content: str | bytes) -> Callable[[Path], Any]:
    data = content.encode() if isinstance(content, str) else content
    return lambda run: (run / file).write_bytes(data)


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(SPARSE_BYTES)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        here = os.getcwd()
        os.chdir(path.parent)  # the address of a socket has at most 107 bytes
        made.bind(path.name)
        os.chdir(here)


NO_FILES: dict[str, Callable[[Path], Any]] = {
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a device without end": lambda path: path.symlink_to("/dev/zero"),
    "a socket": _socket,
    "a sparse file": _sparse,
}
CONTENTS: dict[str, bytes] = {
    "zeros": b"\0" * 5000,
    "bytes": bytes(range(256)) * 20 + b"\n",
    "brackets": b"[" * 100_000 + b"\n",
    "a number of 10,000 digits": b'{"step": ' + b"9" * 10_000 + b"}\n",
    "a line of 20 MB": b'{"step": "' + b"x" * 20_000_000 + b'"}\n',
    "a list": b"[1, 2]\n",
    "a page": b"<html>\n<body>Not found</body>\n</html>\n",
}


def _set(file: str, place: str, value: Any, line: int = 1) -> Callable[[Path], None]:
    """Change a field of a row of JSON, of a JSON file or of the config; ``...`` removes it."""

    def change(content: Any) -> Any:
        *parents, last = place.split(".")
        part: Any = content
        for name in parents:
            part = part[int(name) if isinstance(part, list) else name]
        key: Any = int(last) if isinstance(part, list) else last
        if value is ...:
            del part[key]
        else:
            part[key] = value
        return content

    def do(run: Path) -> None:
        path = run / file
        if file.endswith(".yaml"):
            path.write_text(yaml.dump(change(yaml.load(path.read_text(), yaml.CSafeLoader)), Dumper=yaml.CSafeDumper))
        elif file.endswith(".json"):
            path.write_text(json.dumps(change(json.loads(path.read_text()))))
        else:
            lines = path.read_text().splitlines()
            lines[line] = json.dumps(change(json.loads(lines[line])))
            path.write_text("\n".join(lines) + "\n")

    return do


def _cell(column: str, value: str) -> Callable[[Path], None]:
    """Change a value of the third row of metrics.csv."""

    def do(run: Path) -> None:
        lines = (run / METRICS).read_text().splitlines()
        cells = lines[3].split(",")
        cells[lines[0].split(",").index(column)] = value
        lines[3] = ",".join(cells)
        (run / METRICS).write_text("\n".join(lines) + "\n")

    return do


def _lines(file: str, change: Callable[[list[str]], list[str]]) -> Callable[[Path], None]:
    def do(run: Path) -> None:
        (run / file).write_text("\n".join(change((run / file).read_text().splitlines())) + "\n")

    return do


def _damages() -> dict[str, Damage]:
    found: dict[str, Damage] = {}

    def add(file: str, name: str, do: Callable[[Path], Any], report: str, finish: str) -> None:
        assert f"{file}: {name}" not in found, name
        found[f"{file}: {name}"] = Damage(file, do, report, finish)

    for file in FILES:
        results = (REFUSED, REFUSED) if file == METRICS else (TOLD, REFUSED) if file == CONFIG else (TOLD, TOLD)
        for name, make in NO_FILES.items():
            add(file, name, _in_place_of(file, make), *results)
        for name, content in CONTENTS.items():
            unfinished = name == "zeros" and file.endswith(".jsonl")
            unknown = name == "a line of 20 MB" and file == MEMORY
            add(file, name, _text(file, content), *((RIGHT, RIGHT) if unfinished or unknown else results))
    add(
        "policy",
        "a policy that is a file",
        lambda run: (run / "policy").rename(run / "x") or _text("policy", "x")(run),
        RIGHT,
        REFUSED,
    )

    # ---- metrics ----
    for value in ("nan", "", "-0.0", "1e-320", "-5", "1e99"):
        add(METRICS, f"reward {value!r}", _cell("reward", value), RIGHT, RIGHT)
    for value in ("1e308", "-1e308", "inf", "hm", "0x10", "9" * 400, "[1]", '"0.5"', "0,5", "1\u0660\u066b5"):
        add(METRICS, f"reward {value[:9]!r}", _cell("reward", value), TOLD, TOLD)
    for value in ("1e308", "inf"):
        add(METRICS, f"time {value!r}", _cell("time/total_s", value), TOLD, TOLD)
        add(METRICS, f"tokens {value!r}", _cell("num_tokens", value), TOLD, TOLD)
        add(METRICS, f"pass@1 {value!r}", _cell("val/pass@1", value), TOLD, TOLD)
    add(METRICS, "pass@1 beyond 1", _cell("val/pass@1", "7"), RIGHT, RIGHT)
    for column in ("time/total_s", "num_tokens", "memory/update_peak_gib"):
        add(METRICS, f"{column} 1e99", _cell(column, "1e99"), RIGHT, RIGHT)
    for step in ("1" + "0" * 30, "9" * 5000, "nan", "-3", "1.5", "", "\u00b2", "1e3"):
        add(METRICS, f"step {step[:9]!r}", _cell("step", step), TOLD, TOLD)
    add(METRICS, "step of 15 digits", _cell("step", "9" * 15), RIGHT, RIGHT)
    add(METRICS, "a step twice", _cell("step", "1"), RIGHT, RIGHT)
    add(METRICS, "no header", _lines(METRICS, lambda lines: lines[1:]), REFUSED, REFUSED)
    add(METRICS, "a header alone", _lines(METRICS, lambda lines: lines[:1]), REFUSED, REFUSED)
    add(
        METRICS,
        "a quote that never ends",
        _lines(METRICS, lambda lines: ['step,"' + lines[0], *lines[1:]]),
        REFUSED,
        REFUSED,
    )
    add(
        METRICS,
        "a column twice",
        _lines(METRICS, lambda lines: [line + "," + line.split(",")[1] for line in lines]),
        REFUSED,
        REFUSED,
    )
    add(
        METRICS, "half a line within", _lines(METRICS, lambda lines: [*lines[:5], lines[5][:9], *lines[6:]]), TOLD, TOLD
    )
    add(
        METRICS,
        "half a last line",
        lambda run: os.truncate(run / METRICS, (run / METRICS).stat().st_size - 9),
        RIGHT,
        RIGHT,
    )
    add(METRICS, "rows in any order", _lines(METRICS, lambda lines: [lines[0], *lines[:0:-1]]), RIGHT, RIGHT)
    add(METRICS, "one row", _lines(METRICS, lambda lines: lines[:2]), RIGHT, RIGHT)
    add(
        METRICS,
        "carriage returns",
        lambda run: (run / METRICS).write_text((run / METRICS).read_text().replace("\n", "\r\n")),
        RIGHT,
        RIGHT,
    )
    add(
        METRICS,
        "a mark of bytes",
        lambda run: (run / METRICS).write_text("\ufeff" + (run / METRICS).read_text()),
        RIGHT,
        RIGHT,
    )
    add(METRICS, "2,000,000 columns", _text(METRICS, "step" + ",a" * 2_000_000 + "\n"), REFUSED, REFUSED)
    add(
        METRICS,
        "a long name",
        _lines(METRICS, lambda lines: [lines[0] + "," + "x" * 9999, *[line + ",1" for line in lines[1:]]]),
        REFUSED,
        REFUSED,
    )
    add(METRICS, "200,000 wrong lines", _lines(METRICS, lambda lines: [*lines, *["x"] * 200_000]), REFUSED, REFUSED)
    add(
        METRICS,
        "every value is nan",
        _lines(
            METRICS,
            lambda lines: [lines[0], *[line.split(",")[0] + ",nan" * lines[0].count(",") for line in lines[1:]]],
        ),
        RIGHT,
        RIGHT,
    )
    add(
        METRICS,
        "every value is 1e99",
        _lines(
            METRICS,
            lambda lines: [lines[0], *[line.split(",")[0] + ",1e99" * lines[0].count(",") for line in lines[1:]]],
        ),
        RIGHT,
        RIGHT,
    )
    add(
        METRICS,
        "every value is 1e308",
        _lines(
            METRICS,
            lambda lines: [lines[0], *[line.split(",")[0] + ",1e308" * lines[0].count(",") for line in lines[1:]]],
        ),
        TOLD,
        TOLD,
    )
    add(METRICS, "missing", lambda run: (run / METRICS).unlink(), REFUSED, REFUSED)

    # ---- config ----
    for place, values in {
        "model": (5, [1], "x", True),
        "trainer": (5, [{}]),
        "data": ("x", [3]),
        "trainer.max_steps": ("ten", [1], 1.5, {"a": 1}, True),
        "model.policy": (5, ["x"], {"a": 1}, "x" * 10_000_000, "a\0b"),
        "model.rewards": ("exact_match", 5, {"function": "x"}, [5], [[1]], [{"function": 5}], [{"name": [1]}]),
        "model.rewards.0.weight": ("much", [1], float("nan"), float("inf"), 10**400),
        "model.pass_threshold": ("x", [0.5], float("nan")),
        "model.pass_reward": (5, ["right"]),
        "model.sampling": (5, [{"temperature": 1}], {"temperature": "hot"}),
        "model.eval_sampling": ("greedy", {"temperature": float("nan")}),
        "model.eval_num_generations": ("two", [1], 0),
        "data.train": (5, {"class_path": 5}, {"class_path": "Rows", "init_args": 5}),
        "data.validation": (1.5, {"init_args": [1]}),
    }.items():
        for value in values:
            add(CONFIG, f"{place} {str(value)[:20]!r}", _set(CONFIG, place, value), TOLD, REFUSED)
    for place, value in {
        "trainer.max_steps": 10**300,
        "model.rewards.0.weight": 1e308,
        "model.pass_threshold": -1e308,
        "model.rewards": [],
        "model.objective": 5,
        "model.lora": "x" * 10_000_000,
        "data.train": "x" * 10_000_000,
        "data.validation": {"class_path": "Rows", "init_args": {"num_rows": "many"}},
        "model.optimizer": {"class_path": [1], "init_args": {"lr": {"a": [1, {"b": 2}]}}},
        "rollout": 7,
    }.items():
        add(CONFIG, f"{place} may be {str(value)[:20]!r}", _set(CONFIG, place, value), RIGHT, RIGHT)
    rows = {"class_path": "Rows", "init_args": {"num_rows": 10**400}}
    add(CONFIG, "data.validation may have 10^400 rows", _set(CONFIG, "data.validation", rows), RIGHT, RIGHT)
    for name, text in {
        "itself": "a: &a [*a]\n",
        "a mapping in itself": "model: &a\n  policy: x\n  b: *a\n",
        "laughs": "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9) if n else 'x'}]\n" for n in range(12)),
        "deep": "{a: " * 5000 + "1" + "}" * 5000 + "\n",
        "a month": "a: 2026-13-01\n",
        "an object": "a: !!python/object/apply:os.system [ls]\n",
        "two documents": "a: 1\n---\nb: 2\n",
        "a tab": "model:\n\tpolicy: x\n",
        "keys that are numbers": "1: 2\n",
        "keys that are lists": "? [1, 2]\n: 3\n",
        "a text": "hello\n",
    }.items():
        add(CONFIG, name, _text(CONFIG, text), TOLD, REFUSED)
    add(CONFIG, "empty", _text(CONFIG, ""), RIGHT, RIGHT)
    add(CONFIG, "missing", lambda run: (run / CONFIG).unlink(), RIGHT, RIGHT)
    add(CONFIG, "dates and sets", _text(CONFIG, "a: 2026-01-01\nb: !!set {x, y}\nc: !!binary aGk=\n"), RIGHT, RIGHT)

    # ---- rows ----
    wrong: dict[str, dict[str, tuple[Any, ...]]] = {
        SAMPLES: {
            "step": (..., "1", 1.5, None, True, -1, 10**30, [1], {}),
            "reward": ([1.0], "0.5", {"a": 1}, True),
            "tokens": ("12", [1], 1.5, -1),
            "advantage": ("x", [1]),
            "prompt": (5, ["x"], {"a": 1}),
            "prompt_id": (5, ["x"]),
            "completion": (5, ["x"], {"a": "b"}),
            "finish": (5, ["stop"]),
        },
        TIMELINE: {
            "step": (..., "1", 10**30),
            "spans": (..., 5, "x", [1], [[1, 2]], [["a", 0, 1, 2]], [[0, 0, 5, 1]], [[99, 0, 0, 1]], [[0, 99, 0, 1]]),
            "spans.0": ([0, -1, 0, 1], [0, 0, 0, 10**30], [0, 0, float("nan"), 1], None),
            "completions": (..., 5, [[1]], [[99, "0", 1, 1.0, "stop"]], [[0, 5, 1, 1.0, "stop"]], {}),
            "prompts": (..., 5, [1], []),
            "clock": (..., 5, [[1]], [["a", 0, 0]], [[0, 1e308, 0]], None),
            "seconds": (..., 5, [], {"rollout": "x"}, {"rollout": 1e308, "reward_wait": 0}, {}),
            "slots": (..., "8", 10**12, None),
            "slots_kept": (..., 10**9, -1, 0),
            "prefills": (..., [[1]], 5),
            "kv_limit": ("x", [1]),
            "prompts.0": ("x" * 100_000, 5),
        },
        TRACE: {"step": (..., "1", 10**30), "tokens": ("5", [1], -1), "predicted": ("5", [1])},
        EVALUATED: {
            "policy": (..., 5, ["a"]),
            "prompt_id": (..., ["a"], None),
            "correct": ("yes", 1, [True]),
            "greedy": ("yes", [1]),
            "reward": ([1], "1"),
            "completion": (5, ["x"]),
            "prompt": ([{"role": "user"}],),
        },
    }  # fmt: skip
    for file, fields in wrong.items():
        for field, values in fields.items():
            for value in values:
                name = f"{field} {'is missing' if value is ... else repr(str(value)[:20])}"
                line = -1 if file == TIMELINE else 1
                add(file, name, _set(file, field, value, line), TOLD, TOLD)
    for file, field, value in (
        (SAMPLES, "reward", 1e308),
        (SAMPLES, "reward", 10**400),
        (SAMPLES, "reward", float("nan")),
        (SAMPLES, "completion", "\ud800 half a pair"),
        (SAMPLES, "completion", "x" * 10_000_000),
        (SAMPLES, "prompt", "x" * 10_000_000),
        (SAMPLES, "columns/answer", {"a": [{"b": [1] * 1000}]}),
        (SAMPLES, "rewards/correct", [1]),
        (SAMPLES, "", "no name"),
        (TRACE, "predicted", float("nan")),
        (TRACE, "predicted", 1e300),
        (EVALUATED, "reward", -1e308),
        (EVALUATED, "prompt_id", "x" * 1_000_000),
    ):
        shown = f"{field} may be {str(value)[:12]!r} ({len(str(value))})".encode("ascii", "replace").decode()
        add(file, shown, lambda run, file=file, field=field, value=value: _lines(
            file, lambda lines: [lines[0], json.dumps(json.loads(lines[1]) | {field: value}), *lines[2:]]
        )(run), RIGHT, RIGHT)  # fmt: skip
    for file in wrong:
        add(file, "half a line within", _lines(file, lambda lines: [lines[0][:20], *lines[1:]]), TOLD, TOLD)
        add(file, "empty lines", _lines(file, lambda lines: [*lines, *[""] * 1000]), RIGHT, RIGHT)
        add(file, "100,000 wrong lines", _lines(file, lambda lines: [*["{}"] * 100_000, *lines]), TOLD, TOLD)
        add(file, "no rows", _text(file, ""), RIGHT, RIGHT)
    add(TIMELINE, "40,000 spans", _set(TIMELINE, "spans", [[0, 0, 0, 1]] * 40_000, -1), TOLD, TOLD)
    for place, values in {
        "measured": (5, [1], {"weights": "x"}),
        "forecast": (5, {"rollout": 5}, {"update": {"a": "b"}}, {"why": 5}),
        "device": (5, ["cpu"]),
    }.items():
        for value in values:
            add(MEMORY, f"{place} {str(value)[:20]!r}", _set(MEMORY, place, value), TOLD, TOLD)
    add(MEMORY, "parts of 1e308 bytes", _set(MEMORY, "measured", {"weights": 1e308, "other": -1e308}), RIGHT, RIGHT)
    add(VERSIONS, "numbers", _text(VERSIONS, '{"torch": 2.5}'), TOLD, TOLD)

    # ---- the policy that the run has exported ----
    for name, content in {
        "no JSON": "{",
        "a list": "[]",
        "no model": "{}",
        "a dtype that is none": '{"dtype": "float7", "model_type": "llama"}',
        "a dtype that is a number": '{"dtype": 5, "model_type": "llama"}',
        "deep": '{"a": ' * 100_000,
        "another model": '{"model_type": "no such model"}',
    }.items():
        add("policy", f"config.json {name}", _text("policy/config.json", content), RIGHT, REFUSED)
    for name, make in NO_FILES.items():
        add("policy", f"config.json {name}", _in_place_of("policy/config.json", make), RIGHT, REFUSED)
    for file in ("model.safetensors", "tokenizer.json"):
        add("policy", f"{file} is missing", lambda run, file=file: (run / "policy" / file).unlink(), RIGHT, REFUSED)
        add("policy", f"half of {file}", lambda run, file=file: os.truncate(run / "policy" / file, 999), RIGHT, REFUSED)
        add("policy", f"no {file}", _text(f"policy/{file}", "x"), RIGHT, REFUSED)
    return found


DAMAGES = _damages()
