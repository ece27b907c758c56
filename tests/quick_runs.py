"""Benchmarks in their quick form, in processes of their own, which are forks of one that has imported most."""

from __future__ import annotations

import datetime
import functools
import json
import math
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
IN_PROCESS = ("vllm.v1.engine.llm_engine",)
"""What a benchmark imports that has vLLM in its own process."""


@functools.cache
def forks() -> subprocess.Popen[str]:
    """The process whose forks the benchmarks are; it ends with this one, as its standard input does."""
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("forks.py"))],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def run_quick(name: str, output: Path, *arguments: str, imports: Sequence[str] = ()) -> tuple[dict[str, Any], str]:
    """Run a benchmark in a process of its own; return its result and what it printed.

    Args:
        name: The benchmark's.
        output: The file for its result.
        arguments: More of its own.
        imports: What it needs, and others after it, beside what all do.
    """
    stdout, stderr = (output.with_suffix(f".{stream}") for stream in ("stdout", "stderr"))
    task = {
        "module": f"benchmarks.{name}",
        "arguments": ["--quick", "--output", str(output), *arguments],
        "imports": imports,
        "stdout": str(stdout),
        "stderr": str(stderr),
    }
    process = forks()
    assert process.stdin is not None and process.stdout is not None
    print(json.dumps(task), file=process.stdin, flush=True)
    code = process.stdout.readline()
    assert code == "0\n", f"exit code {code}{stderr.read_text()}"
    return json.loads(output.read_text()), stdout.read_text()


def check_result(result: dict[str, Any], name: str) -> None:
    """What every result file holds, and what none may."""
    assert result["name"] == name
    assert result["command"].startswith(f"python -m benchmarks.{name} --quick")
    assert result["date"] == datetime.date.today().isoformat()
    assert result["commit"] == "unknown" or len(result["commit"]) == 40
    assert isinstance(result["dirty"], bool)
    assert result["versions"].keys() == {"python", "torch", "transformers", "lightning", "lit_grpo"}
    assert result["machine"].keys() == {"cpu", "cores", "ram_gib", "system"}
    assert result["machine"]["cores"] >= 1 and result["machine"]["ram_gib"] > 0
    for claim in result["claims"]:
        assert claim.keys() == {"text", "value", "bound", "holds"}
        assert math.isfinite(claim["value"])
    text = json.dumps(result)
    for place in (str(ROOT), str(Path.home()), os.environ.get("TMPDIR", "/tmp") + "/", socket.gethostname()):
        assert place not in text
