"""Peak memory and time of an update of long sequences, on one rank and on two that share the tokens of every row.

A group of two completions of one prompt, packed into one row, with a random Qwen3 of 7 million parameters. Every
step is taken in a real fit, each rank a process on one thread, after a first one: memory is the peak of the fullest
rank above weights, gradients and moments. Two ranks have a row each, which go through both, one after another.
"""

from __future__ import annotations

import statistics
import sys
from contextlib import ExitStack

from lightning.fabric.plugins.environments.lightning import find_free_network_port

from benchmarks.processes import LEAN, LEAN_TEXT
from benchmarks.report import Claim, Options, Row, finish, parse_options
from benchmarks.update_case import Case, Steps
from benchmarks.update_work import Work

PROMPT = 64
LENGTHS, QUICK_LENGTHS = (1024, 2048, 4096), (16, 32)
REPEATS = 3


def main(options: Options) -> int:
    """Measure rows of all lengths, on one rank and on two."""
    policy, repeats = ("smallest", 1) if options.quick else ("7M", REPEATS)
    rows: list[Row] = []
    for length in QUICK_LENGTHS if options.quick else LENGTHS:
        work = Work(PROMPT, length, 2, sigma=0.0)
        for ranks in (1, 2):
            case = Case("lit_grpo", PROMPT + 2 * length, work, policy, options.device, warm=True, ranks=ranks)
            rows.append({"completion tokens": length, "ranks": ranks, **_measured(case, repeats)})
    alone, shared = rows[-2:]
    longest = alone["completion tokens"]
    peaks = float(shared["peak_mib"]) / float(alone["peak_mib"])
    half = [row for row in rows if row["ranks"] == 1][-2]
    twice = float(shared["peak_mib"]) / float(half["peak_mib"])
    claims = [
        Claim(f"peak memory of a rank, two that share rows over one, {longest} tokens", peaks, "<=", 0.6),
        Claim("peak memory of a rank, two that share rows over one with rows half as long", twice, "<=", 1.2),
    ]
    settings: Row = {"policy": f"random Qwen3, {policy}", "prompt tokens": PROMPT, "environment": LEAN_TEXT}
    return finish("sequence_parallel", options, settings, rows, claims)


def _measured(case: Case, repeats: int) -> Row:
    """The fullest rank's peak, and the seconds a step takes, over the rows of all ranks."""
    with ExitStack() as stack:
        port = find_free_network_port()
        steps = [stack.enter_context(Steps(case, _environment(case, rank, port))) for rank in range(case.ranks)]
        for rank in steps:
            rank.warm_up()
        for _ in range(repeats):
            for rank in steps:
                rank.begin()
            for rank in steps:
                rank.end()
        peak = max(float(rank.figures["peak_mib"]) for rank in steps)
        seconds = statistics.median(steps[0].seconds)
    return {"peak_mib": round(peak, 1), "seconds_a_row": round(seconds / case.ranks, 3)}


def _environment(case: Case, rank: int, port: int) -> dict[str, str]:
    """Return the environment variables that torchrun would set for a rank."""
    if case.ranks == 1:
        return LEAN
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": case.ranks, "LOCAL_WORLD_SIZE": case.ranks, "GROUP_RANK": 0}
    told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "benchmark"}
    return LEAN | {name: str(value) for name, value in told.items()}


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(main(parse_options(__doc__)))
