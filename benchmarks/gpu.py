"""A first run on a GPU, in nine minutes: ``python -m benchmarks.gpu --device cuda``.

The stages go by worth: whether slots are alive there; a decode step by class of kernel; the pair of Infinite Sampling
(arXiv 2506.22950), which is memory and rate of a full group, of naive micro groups and of ours on the configuration of
Qwen3-1.7B with random weights; the update's attention; an update beside TRL's; vLLM, where it is installed; and a fit
that is resumed. Each stage has a process and a time limit of its own. Each row is written as soon as it is found, so
that a stage that is cut off, or a GPU that goes away, leaves what there is.

``--quick`` rehearses all stages at a tiny size without a GPU: those of kernels under the pretended GPU
(``pretend_cuda``), the others on the CPU.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from threading import Timer

from benchmarks.gpu_stages import STAGES, Scale, finite
from benchmarks.report import ROOT, Claim, Options, Row, finish, note, parse_options, write
from tests.doubles.pretend_cuda import pretend_cuda


def main(options: Options) -> int:
    """Run all stages; the result is written after each row.

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

        def take(found: Row, name: str = name) -> None:
            rows.extend(_by_figure(name, found))
            write("gpu", options, settings, rows, claims)

        outcome = run_stage(name, options.quick, take)
        rows.append({"stage": name, "case": outcome})
        claims.append(Claim(f"{name}: {outcome}", float(outcome == "ran"), ">=", 1))
        write("gpu", options, settings, rows, claims)
    return finish("gpu", options, settings, rows, claims)


def _by_figure(stage: str, found: Row) -> list[Row]:
    """Turn what one case of a stage has found into a row for each figure; its words name the case."""
    case = ", ".join(str(value) for value in found.values() if isinstance(value, str) and value)
    figures = [(name, value) for name, value in found.items() if not isinstance(value, str)]
    return [{"stage": stage, "case": case, "figure": name, "value": value} for name, value in figures] or [
        {"stage": stage, "case": case, "figure": "measured", "value": 0}
    ]


def run_stage(name: str, rehearsed: bool, take: Callable[[Row], None]) -> str:
    """Run a stage and hand each row to ``take``; return ``ran``, or what has become of it."""
    if rehearsed and STAGES[name].pretended:
        with pretend_cuda():
            return _taken(STAGES[name].function(Scale(tiny=True)), take)
    command = [sys.executable, "-m", "benchmarks.gpu_stages", name, *(["rehearse"] if rehearsed else [])]
    return in_time(command, STAGES[name].limit_s * (10 if rehearsed else 1), take)


def in_time(command: list[str], limit_s: float, take: Callable[[Row], None]) -> str:
    """Run a command that prints rows, and hand each one over; at the limit it ends, with all that it has started."""
    is_late = False
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )

        def end() -> None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        def end_late() -> None:
            nonlocal is_late
            is_late = True
            end()

        timer = Timer(limit_s, end_late)
        timer.start()
        try:
            assert process.stdout is not None
            outcome = _taken(_rows(process.stdout), take)
            code = process.wait()
        finally:
            timer.cancel()
            end()
        errors.seek(0)
        said = errors.read().strip().splitlines() or [f"exit code {code}"]
    if is_late:
        return f"took longer than {limit_s:g} s"
    return f"failed: {said[-1]}" if code else outcome


def _rows(lines: Iterable[str]) -> Iterator[Row]:
    """Yield the rows among what a stage prints; what packages print besides is left out."""
    for line in lines:
        if line.startswith('{"row": '):
            yield json.loads(line)["row"]


def _taken(rows: Iterable[Row], take: Callable[[Row], None]) -> str:
    all_finite = True
    for row in rows:
        take(row)
        all_finite = all_finite and finite([row])
    return "ran" if all_finite else "a figure is no number"


if __name__ == "__main__":
    sys.exit(main(parse_options(__doc__ or "")))
