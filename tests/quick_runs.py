"""Benchmarks in their quick form, in processes of their own."""

from __future__ import annotations

import datetime
import json
import math
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forks import Forked

ROOT = Path(__file__).parents[1]


def run_quick(
    name: str, output: Path, *arguments: str, imports: Sequence[str] = (), forks: bool = True
) -> tuple[dict[str, Any], str]:
    """Run a benchmark in a process of its own; return its result and what it printed.

    Args:
        name: The benchmark's; of one that measures more than one thing, with what it is to measure.
        output: The file for its result.
        arguments: More of its own.
        imports: What it needs, and others after it, beside what all do.
        forks: False where it, or a process of it, has to import torch itself.
    """
    stdout, stderr = (output.with_suffix(f".{stream}") for stream in ("stdout", "stderr"))
    command = [sys.executable, "-m", *f"benchmarks.{name}".split(), "--quick", "--output", str(output), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with stdout.open("w") as said, stderr.open("w") as errors:
        streams: dict[str, Any] = {"cwd": ROOT, "env": environment, "stdout": said, "stderr": errors}
        process = Forked(command, imports=imports, **streams) if forks else subprocess.Popen(command, **streams)
        code = process.wait()
    assert code == 0, f"exit code {code}: {stderr.read_text()}"
    return json.loads(output.read_text()), stdout.read_text()


def check_result(result: dict[str, Any], name: str) -> None:
    """What every result file holds, and what none may."""
    assert result["name"] == name.split()[-1]
    assert result["command"].startswith(f"python -m benchmarks.{name} ") and " --quick" in result["command"]
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
