"""Benchmarks in their quick form, in processes of their own."""

from __future__ import annotations

import datetime
import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def run_quick(name: str, output: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """Run a benchmark in a process of its own; return its result and what it printed."""
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--output", str(output), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(output.read_text()), run.stdout


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
