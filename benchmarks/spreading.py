"""Differences of the ends of rollouts between ranks, by the distribution of prompts.

Prompts of long-tailed lengths come a second time. How long their completions were at the first visit is known, and the
lengths of the second are drawn again about the same mean of each prompt: log-normal, of a spread of 1 in all, one half
of its square between prompts, or nine tenths. Ranks are dealt prompts

- ``in order``, equally many each, as they come;
- ``first come``: each prompt goes to the rank that would be free first, which nobody can know beforehand; as a queue
  that all ranks share would do, with any number of prompts a rank;
- ``spread``: equally many each, by the mean length of the first visit, which is what a run does;
- ``foreseen``: likewise, by the true lengths.

Simulated are ranks of a size, 2 to 64; each decodes its prompts by the plan ``infinite_sampling`` with predictions
whose logarithm is off by 0.5. ``slowest`` is the time of the slowest rank over that of all on average: what an update
waits. ``apart`` is the difference between slowest and fastest over the slowest. Measured are two processes on a core
each that decode a random policy's completions at the same time, of lengths that are forced.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.processes import LEAN, CaseProcess
from benchmarks.report import Claim, Options, Row, finish, note, parse_options
from benchmarks.rollouts import lengths_of, replayed
from benchmarks.spreading_case import Case, Workload, dealt_first_come, draw_visits
from lit_grpo.budgets.spreading import spread
from lit_grpo.tools.simulation.traces import Trace

NOISE = 0.5
WORKLOADS = (Workload(16, 16, 64, 1024, 0.5), Workload(32, 16, 64, 1024, 0.5), Workload(32, 16, 64, 1024, 0.9))
RANKS, SEEDS = (2, 8, 64), {2: 8, 8: 4, 64: 1}
MEASURED = Workload(32, 16, 64, 256, 0.5)
REPEATS = 3
Dealing = Callable[[np.ndarray, np.ndarray, int], Sequence[Sequence[int]]]
DEALINGS: dict[str, Dealing] = {
    "in order": lambda known, true, ranks: np.arange(len(true)).reshape(ranks, -1).tolist(),
    "first come": lambda known, true, ranks: dealt_first_come(true.sum(1), ranks),
    "spread": lambda known, true, ranks: spread(known.mean(1).tolist(), ranks),
    "foreseen": lambda known, true, ranks: spread(true.mean(1).tolist(), ranks),
}


@dataclass(frozen=True)
class Times:
    """Times of ranks, in any unit."""

    each: Sequence[float]

    @property
    def slowest(self) -> float:
        """That of the slowest over the mean."""
        return max(self.each) / statistics.fmean(self.each)

    @property
    def apart(self) -> float:
        """The difference between slowest and fastest over the slowest."""
        return 1 - min(self.each) / max(self.each)


def main(options: Options) -> int:
    """Simulate and measure all dealings."""
    ranks = (2, 4) if options.quick else RANKS
    rows: list[Row] = []
    for workload in (Workload(4, 4, 4, 64, 0.5),) if options.quick else WORKLOADS:
        for num_ranks in ranks:
            note(f"{num_ranks} ranks, {workload}")
            times = _simulated(workload, num_ranks, 1 if options.quick else SEEDS[num_ranks])
            rows += [_row("steps, simulated", workload, num_ranks, dealing, each) for dealing, each in times.items()]
    workload = Workload(4, 4, 4, 32, 0.5) if options.quick else MEASURED
    times = _measured(workload, 1 if options.quick else REPEATS)
    rows += [_row("seconds, measured", workload, 2, dealing, each) for dealing, each in times.items()]
    claims = [
        Claim(f"{what}: ranks apart, spread", float(row["apart"]), "<=", 0.05)
        for what, row in (
            ("measured, 2 ranks", rows[-len(times) + list(times).index("spread")]),
            *((f"simulated, {row['ranks']} ranks of {row['workload']}", row) for row in rows if _is_judged(row)),
        )
    ]
    settings: Row = {"noise of lengths within a rank": NOISE, "repeats": 1 if options.quick else REPEATS}
    return finish("spreading", options, settings, rows, claims)


def _is_judged(row: Row) -> bool:
    return row["dealing"] == "spread" and row["time"] == "steps, simulated"


def _row(time: str, workload: Workload, num_ranks: int, dealing: str, times: list[Times]) -> Row:
    return {
        "time": time,
        "workload": str(workload),
        "ranks": num_ranks,
        "dealing": dealing,
        "slowest": round(statistics.fmean(each.slowest for each in times), 3),
        "apart": round(statistics.fmean(each.apart for each in times), 3),
        "apart_most": round(max(each.apart for each in times), 3),
        "slowest_rank": round(statistics.fmean(max(each.each) for each in times), 3),
    }


def _simulated(workload: Workload, num_ranks: int, seeds: int) -> dict[str, list[Times]]:
    times: dict[str, list[Times]] = {dealing: [] for dealing in DEALINGS}
    for seed in range(seeds):
        known, true = draw_visits(workload, num_ranks, seed)
        for dealing, deal in DEALINGS.items():
            dealt = deal(known, true, num_ranks)
            times[dealing].append(Times([_steps(workload, true[places]) for places in dealt]))
    return times


def _steps(workload: Workload, lengths: np.ndarray) -> float:
    """Decode steps of one rank."""
    num_prompts, group_size = lengths.shape
    if not num_prompts:
        return 0.0
    trace = Trace(
        "rank",
        [(str(prompt), 1, (sample,)) for prompt in range(num_prompts) for sample in range(group_size)],
        np.repeat(np.arange(num_prompts), group_size),
        np.full(lengths.size, 32),
        lengths.reshape(-1),
        np.full(lengths.size, workload.limit),
    )
    return float(replayed(trace, "infinite_sampling", workload.num_slots, lengths_of(trace, NOISE)).steps)


def _measured(workload: Workload, repeats: int) -> dict[str, list[Times]]:
    """Two processes that decode at the same time, all dealings in turn; the first round warms up."""
    times: dict[str, list[Times]] = {dealing: [] for dealing in DEALINGS}
    cases = [Case(workload, rank) for rank in range(2)]
    with (
        CaseProcess("benchmarks.spreading_case", cases[0], LEAN) as one,
        CaseProcess("benchmarks.spreading_case", cases[1], LEAN) as other,
    ):
        for process in (one, other):
            process.answer()  # it is ready
        for repeat in range(repeats + 1):
            known, true = draw_visits(workload, 2, repeat)
            for dealing, deal in DEALINGS.items():
                note(f"measured {repeat}: {dealing}")
                dealt = deal(known, true, 2)
                for process, places in zip((one, other), dealt, strict=True):
                    process.go_on((repeat, list(map(int, places))))
                seconds = [process.answer()["seconds"] for process in (one, other)]
                if repeat:
                    times[dealing].append(Times(seconds))
    return times


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(main(parse_options(__doc__)))
