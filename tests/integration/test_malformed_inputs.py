"""Whatever a file for a command holds: the command does its work, or ends with 2 and one sentence that names the file.

Commands run in this process, which must not grow: a file that is no file, or has no end, is not read.
"""

from __future__ import annotations

import io
import json
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import save_policy, table_rows
from odd_files import NO_FILES, make_no_file

from lit_grpo.__main__ import main

MOST_MIB = 1024
"""The memory that a command may take beyond that of its imports."""
MOST_SAID = 8000
TRL = {
    "model_name_or_path": "tiny",
    "dataset_name": "rows.jsonl",
    "reward_funcs": ["accuracy_reward"],
    "max_steps": 10,
    "per_device_train_batch_size": 8,
    "num_generations": 8,
}
SCRIPT = """
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
config = GRPOConfig(max_steps=3, per_device_train_batch_size=8, {})
GRPOTrainer(model="tiny", args=config, reward_funcs=["x.y"], train_dataset=load_dataset("a/b", split="train"))
"""
TRACE = {"prompt_id": "a", "sample_id": 0, "prompt_tokens": 5, "tokens": 7}
CONFIG = "model: {policy: policy, rewards: [exact_match]}\ndata: {train: rows.jsonl, batch_size: 2}\n"
ROW = '{"prompt": "1+1=", "answer": "2"}\n'
ANY: dict[str, bytes] = {
    "empty": b"",
    "spaces": b" \n\n",
    "zeros": b"\0" * 100,
    "UTF-16": CONFIG.encode("utf-16"),
    "Latin-1": b"# \xe9\n",
    "binary": bytes(range(256)) * 40,
    "brackets": b"[" * 100_000,
    "braces": b'{"a":' * 100_000,
    "digits": b"9" * 10_000,
    "a list": b"[1, 2]",
    "a text": b"hello",
    "null": b"null",
    "laughs": b"a0: &a0 [1, 1]\n" + b"".join(b"a%d: &a%d [*a%d, *a%d]\n" % (n, n, n - 1, n - 1) for n in range(1, 40)),
    "merged laughs": b"a0: &a0 {x: 1}\n"
    + b"".join(b"a%d: &a%d {<<: [*a%d, *a%d]}\n" % (n, n, n - 1, n - 1) for n in range(1, 25)),
    "a chain": b"a0: &a0 [1]\n" + b"".join(b"a%d: &a%d [*a%d]\n" % (n, n, n - 1) for n in range(1, 2000)),
    "itself": b"a: &a [*a]",
    "a month": b"seed: 2026-13-01\n",
    "an object": b"a: !!python/object/apply:os.system [ls]",
    "a tag": b"a: !!timestamp x\n",
    "an int": b"a: !!int x\n",
    "3,000 fields": b"".join(b"field_%d: 1\n" % number for number in range(3000)),
    "a tab": b"a:\n\t- b\n",
    "two documents": b"a: 1\n---\nb: 2\n",
    "a number as a name": b"1: 2\n",
    "a list as a name": b"? [1, 2]\n: 3\n",
    "null as a name": b"null: 3\n",
    "a date as a name": b"2026-01-01: 3\n",
    "an escape": b"\x1b[2J: 1\n",
    "a lone surrogate": b'"\\ud800": 1\n',
    "a set": b"!!set {a, b}",
    "a bad merge": b"<<: [1, 2]\n",
    "no anchor": b"a: *b\n",
    "another YAML": b"%YAML 9.9\n---\na: 1\n",
    "half": b'{"prompt_id": "a", "sample',
}
ODD: dict[str, Any] = {
    "none": None,
    "true": True,
    "minus": -1,
    "zero": 0,
    "huge": 10**30,
    "infinite": float("inf"),
    "not a number": float("nan"),
    "large": 1e308,
    "text": "x",
    "list": [1],
    "object": {"a": 1},
}
"""Values in place of a field's own."""
KINDS = (*NO_FILES, "nothing", "5 GiB", "a long name")
SUFFIXES = {"from-trl": ".yaml", "a script": ".py", "simulate": ".jsonl", "fit": ".yaml", "fit-check": ".yaml"}
SUFFIXES |= {"doctor": ".yaml", "evaluate": ".yaml", "sft": ".yaml"}
SUFFIXES |= {f"rows of fit ({kind})": f".{kind}" for kind in ("jsonl", "json", "csv", "parquet")}
SUFFIXES |= {"rows of sft": ".jsonl"}
FIELDS: dict[str, list[str]] = {
    "from-trl": ["max_steps", "learning_rate", "num_generations", "warmup_steps", "reward_funcs", "lora_r", "seed"],
    "a script": ["learning_rate", "beta"],
    "simulate": ["prompt_id", "sample_id", "prompt_tokens", "tokens", "step", "visit", "predicted"],
}
TABLE = [
    *((command, kind) for command in SUFFIXES for kind in (*ANY, *KINDS)),
    *((command, f"{field}: {odd}") for command, fields in FIELDS.items() for field in fields for odd in ODD),
]
QUICK = [
    ("from-trl", "a pipe"), ("from-trl", "a month"), ("from-trl", "3,000 fields"), ("from-trl", "a number as a name"),
    ("from-trl", "warmup_steps: infinite"), ("from-trl", "max_steps: list"), ("a script", "/dev/zero"),
    ("simulate", "brackets"), ("simulate", "tokens: huge"), ("simulate", "5 GiB"), ("fit-check", "a tag"),
    ("rows of fit (json)", "5 GiB"), ("rows of fit (csv)", "a long name"),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory with a policy and rows, and no network."""
    import huggingface_hub.constants

    folder = tmp_path_factory.mktemp("inputs")
    save_policy(folder / "policy")
    (folder / "rows.jsonl").write_text(ROW * 4)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(folder)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
        yield folder


def make_input(command: str, kind: str, path: Path) -> None:
    """Make the file of a row of the table, or what is none."""
    field, _, odd = kind.partition(": ")
    match kind:
        case _ if kind in (*NO_FILES, "5 GiB"):
            make_no_file(kind, path)
        case "nothing" | "a long name":
            pass
        case _ if command == "a script" and odd:
            path.write_text(SCRIPT.format(f"{field}={ODD[odd]!r}"))
        case _ if odd:
            path.write_text(json.dumps((TRL if command == "from-trl" else TRACE) | {field: ODD[odd]}))
        case _:
            path.write_bytes(ANY[kind])


def arguments(command: str, path: Path) -> list[str]:
    run = ["--trainer.accelerator", "cpu", "--trainer.max_steps", "1", "--run.dir", "runs"]
    match command:
        case "from-trl" | "a script":
            return ["from-trl", str(path)]
        case "simulate":
            return ["simulate", "--trace", str(path), "--noise", "recorded", "--plans", "fcfs"]
        case "rows of sft":
            rows = ["--model.policy", "policy", "--model.rewards", "[]", "--rollout.plugins", "sft:column=answer"]
            return ["sft", *rows, "--data.train", str(path), *run]
        case _ if command.startswith("rows"):
            rows = ["--model.policy", "policy", "--model.rewards", "exact_match", "--data.train", str(path)]
            return ["fit", *rows, *run]
        case "evaluate":
            return ["evaluate", "policy", "--config", str(path), "--output", "evaluation"]
        case _:
            return [command, "--config", str(path), *run]


@pytest.mark.fuzz
@pytest.mark.parametrize(("command", "kind"), table_rows(TABLE, QUICK))
def test_a_malformed_input_ends_with_a_sentence(
    command: str, kind: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"{'x' * 300 if kind == 'a long name' else 'given'}{SUFFIXES[command]}"
    make_input(command, kind, path)
    out = io.StringIO()
    code = _run(arguments(command, path), monkeypatch, out)
    said = out.getvalue()
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert code in (0, 2), said
    assert code == 0 or (errors and path.stem in said), said
    assert len(said) < MOST_SAID and "Traceback" not in said, said[:MOST_SAID]
    assert not list(folder.glob("runs/*")) or code == 0


def _run(given: list[str], monkeypatch: pytest.MonkeyPatch, out: io.StringIO) -> int:
    """Run a command here; return its exit code."""
    monkeypatch.setattr(sys, "argv", ["lit_grpo", *given])
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", out)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        main()
    except SystemExit as ended:
        code = ended.code
    else:
        code = 0
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < MOST_MIB, f"{grown:,.0f} MiB"
    assert code is None or isinstance(code, int)
    return code or 0
