"""Checks for a first run on a GPU, in less than ten minutes: ``python -m benchmarks.gpu --device cuda``.

The stages go by worth: whether slots, update and vLLM are alive there; the pair of Infinite Sampling (arXiv
2506.22950), which is memory and rate of a full group, of naive micro groups and of ours on the configuration of
Qwen3-1.7B with random weights; an update beside TRL's; idle time of modes; and with the pair the share of what the
memory's bandwidth allows. Each stage has a process and a time limit of its own. What one has found is written before
the next begins, so that a GPU that goes away leaves what there is.

``--quick`` rehearses the stages at a tiny size under the pretended GPU (``pretend_cuda``), without a GPU.
"""

from __future__ import annotations

import json
import subprocess
import sys

from benchmarks.gpu_stages import STAGES, Scale, finite
from benchmarks.report import ROOT, Claim, Options, Row, finish, note, parse_options, write
from tests.doubles.pretend_cuda import pretend_cuda


def main(options: Options) -> int:
    """Run all stages; the result is written after each.

    Raises:
        SystemExit: The full size is asked for on a CPU.
    """
    if options.device != "cuda" and not options.quick:
        raise SystemExit("gpu measures a GPU: give --device cuda, or --quick to rehearse it without one.")
    settings: Row = {"rehearsal": int(options.quick)}
    rows: list[Row] = []
    claims: list[Claim] = []
    for name in STAGES:
        note(f"stage: {name}")
        found, outcome = _rehearsed(name) if options.quick else _measured(name)
        rows += [row for one in found for row in _by_figure(name, one)]
        rows.append({"stage": name, "case": outcome})
        if not (options.quick and STAGES[name][2]):
            claims.append(Claim(f"{name}: {outcome}", float(outcome == "ran"), ">=", 1))
        write("gpu", options, settings, rows, claims)
    return finish("gpu", options, settings, rows, claims)


def _by_figure(stage: str, found: Row) -> list[Row]:
    """Turn what one case of a stage has found into a row for each figure; its words name the case."""
    case = ", ".join(str(value) for value in found.values() if isinstance(value, str))
    figures = ((name, value) for name, value in found.items() if not isinstance(value, str))
    return [{"stage": stage, "case": case, "figure": name, "value": value} for name, value in figures]


def _rehearsed(name: str) -> tuple[list[Row], str]:
    """Run a stage in this process, tiny, under the pretended GPU."""
    function, _, why_not = STAGES[name]
    if why_not:
        return [], f"not rehearsed: {why_not}"
    with pretend_cuda():
        rows = function(Scale(tiny=True))
    return rows, "ran" if finite(rows) else "a figure is no number"


def _measured(name: str) -> tuple[list[Row], str]:
    """Run a stage in a process of its own, until its time is over."""
    limit_s = STAGES[name][1]
    command = [sys.executable, "-m", "benchmarks.gpu_stages", name]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return [], f"took longer than {limit_s} s"
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return [], f"failed: {said[-1]}"
    rows: list[Row] = json.loads(done.stdout.splitlines()[-1])
    return rows, "ran" if finite(rows) else "a figure is no number"


if __name__ == "__main__":
    sys.exit(main(parse_options(__doc__ or "")))
