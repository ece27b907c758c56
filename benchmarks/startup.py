"""CPU seconds until a command answers: help, a mistake, and the first line of a run; beside an earlier commit.

``BEFORE`` is checked out to a temporary folder, and both run each command in turn. CPU seconds are those of the process
and all that it starts, user and system, which other work on the machine changes little.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.report import ROOT, Claim, Options, Row, finish, note, parse_options

BEFORE = "ad8b6fa"
YAML = "model:\n  num_generatoins: 4\n"
COMMANDS = {
    "--help": ("--help",),
    "from-trl --help": ("from-trl", "--help"),
    "fit --help": ("fit", "--help"),
    "a misspelt field": ("fit", "--config", "arithmetic", "--model.num_generatoins", "4"),
    "a misspelt field in a config": ("fit", "--config", "arithmetic", "--config", "wrong.yaml"),
    "a value of another type": ("fit", "--config", "arithmetic", "--model.num_generations", "many"),
    "the first line of a run": ("fit", "--config", "arithmetic", "--trainer.max_steps", "1"),
}
AT_MOST = {name: 1.5 for name in COMMANDS if name not in ("a value of another type", "the first line of a run")}
"""CPU seconds, for what needs neither torch nor the parser of all classes."""
FIRST_LINE = "policy  "


def main(options: Options) -> int:
    """Time all commands on both commits, in turn."""
    rounds = 1 if options.quick else 3
    names = list(COMMANDS)[:2] if options.quick else list(COMMANDS)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "wrong.yaml").write_text(YAML)
        before = _earlier(folder)
        seconds: dict[tuple[str, str], list[float]] = {}
        for _ in range(rounds):
            for name in names:
                for side, root in (("before", before), ("now", ROOT)):
                    if root is not None:
                        seconds.setdefault((name, side), []).append(_cpu_s(COMMANDS[name], root, folder))
            note(str({key: [round(value, 2) for value in values] for key, values in seconds.items()}))
    rows: list[Row] = []
    for name in names:
        sides = {side: statistics.median(seconds[name, side]) for side in ("before", "now") if (name, side) in seconds}
        rows.append({"command": name, **{f"{side}_cpu_s": value for side, value in sides.items()}})
    claims = [
        Claim(f"CPU seconds of {row['command']}", float(row["now_cpu_s"]), "<=", AT_MOST[str(row["command"])])
        for row in rows
        if row["command"] in AT_MOST
    ]
    return finish("startup", options, {"rounds": rounds, "before": BEFORE}, rows, claims)


def _earlier(folder: Path) -> Path | None:
    """The earlier commit's files, where git has it."""
    archive = subprocess.run(["git", "archive", BEFORE], cwd=ROOT, capture_output=True)
    if archive.returncode:
        note(f"Commit {BEFORE} is not here; only the present one is timed.")
        return None
    place = folder / "before"
    place.mkdir()
    subprocess.run(["tar", "-x"], cwd=place, input=archive.stdout, check=True)
    return place


def _cpu_s(arguments: tuple[str, ...], root: Path, folder: Path) -> float:
    """Run a command of the code in ``root``; end a run once it has said what it is."""
    began = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "lit_grpo", *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(FIRST_LINE):
            process.kill()
    process.stdout.close()
    process.wait()
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime


if __name__ == "__main__":
    sys.exit(main(parse_options(__doc__ or "")))
