"""Output of every benchmark: rows, claims, and the machine they were measured on."""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("torch", "transformers", "lightning", "lit_grpo")
Row = dict[str, str | int | float]


@dataclass(frozen=True)
class Options:
    """Command-line options of a benchmark."""

    quick: bool
    device: str
    policy: str | None
    output: Path | None


@dataclass(frozen=True)
class Claim:
    """A sentence, the figure it stands on, and the bound that decides whether it holds."""

    text: str
    value: float
    relation: Literal["<=", ">="]
    limit: float

    @property
    def holds(self) -> bool:
        """Whether the figure is on the right side of the bound; NaN never is."""
        return self.value <= self.limit if self.relation == "<=" else self.value >= self.limit

    def to_json(self) -> dict[str, Any]:
        """Return the claim as it stands in a result file."""
        bound = f"{self.relation} {self.limit:g}"
        return {"text": self.text, "value": self.value, "bound": bound, "holds": self.holds}


def parse_options(description: str, arguments: Sequence[str] | None = None) -> Options:
    """Read the command line that all benchmarks share."""
    return Options(**vars(options_parser(description).parse_args(arguments)))


def options_parser(description: str) -> argparse.ArgumentParser:
    """Return the parser of the options that all benchmarks share, for one that adds its own."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="a small version, which only checks that it runs")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--policy", help="a folder or a hub id, instead of the benchmark's own policy")
    parser.add_argument("--output", type=Path, help="where the result goes instead of benchmarks/results")
    return parser


def need(package: str) -> None:
    """End with a sentence where a system that is measured beside ours is not installed."""
    if find_spec(package) is None:
        raise SystemExit(f"This benchmark compares with {package}, which is not installed; `make install` installs it.")


def finish(
    name: str, options: Options, settings: Row, rows: Sequence[Row], claims: Sequence[Claim], program: str | None = None
) -> int:
    """Print the table and the claims, write the result file, and return the exit code.

    A quick run writes only where ``--output`` says so, and claims no more than finite figures. ``program`` is the
    module and its arguments where it measures more than one thing.
    """
    _print(write(name, options, settings, rows, claims, program), judged=not options.quick)
    if options.quick:
        return int(not all(math.isfinite(claim.value) for claim in claims))
    return int(not all(claim.holds for claim in claims))


def write(
    name: str,
    options: Options,
    settings: Row,
    rows: Sequence[Row],
    claims: Sequence[Claim],
    program: str | None = None,
    command: str | None = None,
) -> dict[str, Any]:
    """Write the result file as :func:`finish` does; return what is in it.

    ``command`` is what repeats the measurement where that is not a program of ``benchmarks``.
    """
    result = {
        "name": name,
        "date": datetime.date.today().isoformat(),
        "command": command or _command(program or name, options),
        **commit(),
        "versions": versions(),
        "machine": _machine(options.device),
        "settings": settings,
        "rows": list(rows),
        "claims": [claim.to_json() for claim in claims],
    }
    path = options.output or (None if options.quick else result_path(name, options.device))
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(_finite(result), indent=2, allow_nan=False) + "\n")
    return result


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that figures depend on."""
    return {"python": platform.python_version()} | {name: metadata.version(name) for name in PACKAGES}


def note(text: str) -> None:
    """Say what is going on, on standard error."""
    print(text, file=sys.stderr, flush=True)


def _finite(value: Any) -> Any:
    """Return a value with ``None`` for every number that JSON does not have."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def result_path(name: str, device: str) -> Path:
    """Where today's result of a benchmark is to be."""
    suffix = "" if device == "cpu" else f"-{device}"
    return RESULTS / f"{name}{suffix}-{datetime.date.today().isoformat()}.json"


def _command(program: str, options: Options) -> str:
    flags = " --quick" if options.quick else ""
    if options.policy is not None:  # a path would name a place on this machine
        flags += " --policy " + ("FOLDER" if Path(options.policy).exists() else options.policy)
    return f"python -m benchmarks.{program}{flags} --device {options.device}"


def commit() -> dict[str, Any]:
    """The commit, and whether files differ from it that benchmarks do not write."""
    try:
        commit = _git("rev-parse", "HEAD")
        written = (":(exclude)benchmarks/results", ":(exclude)docs/pictures")
        dirty = bool(_git("status", "--porcelain", "--", ".", *written))
    except (OSError, subprocess.CalledProcessError):
        return {"commit": "unknown", "dirty": True}
    return {"commit": commit, "dirty": dirty}


def _git(*arguments: str) -> str:
    run = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    return run.stdout.strip()


def _machine(device: str) -> Row:
    import psutil
    import torch

    machine: Row = {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "ram_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": platform.system(),
    }
    if device == "cuda":
        machine["gpu"] = torch.cuda.get_device_name()
    return machine


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _print(result: dict[str, Any], judged: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 120, markup=False, emoji=False)
    machine = ", ".join(f"{name} {value}" for name, value in result["machine"].items())
    console.print(f"{result['name']}: {result['command']}\n{machine}", highlight=False)
    console.print(", ".join(f"{name} {value}" for name, value in result["settings"].items()), highlight=False)
    columns = list(dict.fromkeys(column for row in result["rows"] for column in row))
    table = Table(*columns)
    for row in result["rows"]:
        table.add_row(*(_cell(row.get(column, "")) for column in columns))
    console.print(table)
    for claim in result["claims"]:
        verdict = ("holds" if claim["holds"] else "FAILS") if judged else "not judged in a quick run"
        console.print(f"{verdict}: {claim['text']}: {claim['value']:.3f} ({claim['bound']})", highlight=False)


def _cell(value: str | int | float) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
