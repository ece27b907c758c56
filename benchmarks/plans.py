"""Decode steps of each scheduling policy divided by the lower bound, on synthetic and recorded lengths.

Five families of lengths, five workloads (prompts x group on slots), and predictions of several qualities: the true
lengths, errors of 0.35 and 0.7 in the logarithm, nothing known, and lengths of other completions that claim to be
those of these (``misleading``). The errors are assumed.
Figures are steps over the lower bound, means over families, workloads and seeds; those with a star have seeds of
their own, and more of them. Lengths recorded in the demo have rows of their own and are part of no mean and no claim:
with few long completions on few slots there is little to win, and naive rounds are much nearer to the bound.

The paper is Infinite Sampling, arXiv 2506.22950; its baseline is naive micro groups (``MicroRounds``), and it
reports 45% fewer steps than those. Claims on that are made on all workloads and on the one like the paper's own (one
prompt, a group of 32 on 8 slots). ``FullGroup`` would need a slot for each completion, and is no plan for these
workloads.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from benchmarks.baseline_plans import FIXED_SLOT, MICRO_ROUNDS
from benchmarks.report import ROOT, Claim, Options, Row, finish, note, parse_options
from benchmarks.rollouts import KnownLengths, lengths_of, replayed
from lit_grpo.scheduling.jobs import FittedLengths, NoLengths
from lit_grpo.scheduling.plans.plan import slot_bound
from lit_grpo.tools.simulation.traces import FAMILIES, Trace, load_trace

RECORDED = ROOT / "benchmarks" / "traces" / "demo.jsonl"
RECORDED_SLOTS = (8, 32)
RECORDED_BATCHES = 32  # spread evenly over the run
NOISES: dict[str, float | None] = {"true": 0.0, "0.35": 0.35, "0.7": 0.7, "nothing": None}
PREDICTIONS = (*NOISES, "misleading")
BLIND = (MICRO_ROUNDS, FIXED_SLOT, "fcfs")
FOLLOWING = ("sjf", "lpt", "short_last", "balanced", "infinite_sampling")
PLANS = (*BLIND, *FOLLOWING)
WORTHLESS = ("fcfs", "lpt", "short_last")  # compared on misleading predictions with more seeds


@dataclass(frozen=True)
class Workload:
    """Prompts x group on slots, and how often: with all plans, and with some on worthless predictions."""

    num_prompts: int
    group_size: int
    num_slots: int
    seeds: int
    worthless_seeds: int

    def __str__(self) -> str:
        """Return what it is called in tables."""
        return f"{self.num_prompts} x {self.group_size} on {self.num_slots}"


WORKLOADS = (
    Workload(1, 32, 8, 32, 80),
    Workload(8, 16, 32, 8, 40),
    Workload(32, 16, 64, 4, 20),
    Workload(64, 32, 256, 2, 10),
    Workload(128, 32, 512, 1, 6),
)
QUICK = (Workload(1, 32, 8, 1, 1), Workload(8, 16, 32, 1, 1))


class Figures:
    """Steps over the lower bound of everything that was simulated."""

    def __init__(self) -> None:
        self._values: defaultdict[tuple[str, str, str, str], list[float]] = defaultdict(list)

    def add(self, key: tuple[str, str, str, str], value: float) -> None:
        """Note one schedule: of a workload, a family, a plan and predictions."""
        self._values[key].append(value)

    def mean(self, plan: str, predictions: str, workload: str | None = None, family: str | None = None) -> float:
        """Return the mean over workloads and families, each of equal weight, of the means over seeds."""
        wanted = (workload, family, plan, predictions)
        cells = [
            statistics.fmean(values)
            for key, values in self._values.items()
            if all(want in (None, have) for want, have in zip(wanted, key, strict=True))
        ]
        return statistics.fmean(cells)


def main(options: Options) -> int:
    """Simulate everything and report means."""
    workloads = QUICK if options.quick else WORKLOADS
    figures, worthless = Figures(), Figures()
    for workload in workloads:
        note(str(workload))
        for family in FAMILIES:
            _measure(figures, workload, family)
            _measure_worthless(worthless, workload, family)
    rows = [
        _row(figures, str(workload), case, workload=str(workload)) for workload in workloads for case in PREDICTIONS
    ]
    rows += [_row(figures, family, "0.35", family=family) for family in FAMILIES]
    rows += [_row(figures, "all", case) for case in PREDICTIONS]
    rows += [_worthless_row(worthless, family) for family in FAMILIES]
    rows += _recorded_rows(1 if options.quick else RECORDED_BATCHES)
    settings: Row = {
        "figures": "steps over the lower bound",
        "max_tokens": 1024,
        "seeds": ", ".join(str(workload.seeds) for workload in workloads),
        "seeds_of_worthless": ", ".join(str(workload.worthless_seeds) for workload in workloads),
    }
    return finish("plans", options, settings, rows, _claims(figures, worthless, str(workloads[0])))


def _claims(figures: Figures, worthless: Figures, paper: str) -> list[Claim]:
    """Figures of the plans that keep the slots full, then the paper's, on all workloads and the one like its own."""
    naive, naive_paper = figures.mean(MICRO_ROUNDS, "true"), figures.mean(MICRO_ROUNDS, "true", paper)
    claims: list[Claim] = []
    for plan in ("lpt", "short_last"):
        for case, limit in (("true", 1.03), ("0.35", 1.06)):
            text = f"{plan}, predictions {case}: steps over the lower bound"
            claims.append(Claim(text, figures.mean(plan, case), "<=", limit))
        for case, measured in (("nothing", figures), ("misleading", worthless)):
            text = f"{plan}, predictions {case}: steps over those of first come"
            ratio = measured.mean(plan, case) / measured.mean("fcfs", case)
            claims.append(Claim(text, ratio, "<=", 1.01))
    for case in ("true", "0.35", "0.7"):
        steps, steps_paper = figures.mean("infinite_sampling", case), figures.mean("infinite_sampling", case, paper)
        name = f"infinite_sampling, predictions {case}"
        claims += [
            Claim(f"{name}: naive rounds' steps over its own", naive / steps, ">=", 1.25),
            Claim(f"{name}: steps saved of naive rounds'", 1 - steps / naive, ">=", 0.45),
            Claim(f"{name}, {paper} alone: steps saved of naive rounds'", 1 - steps_paper / naive_paper, ">=", 0.45),
        ]
    return claims


def _row(figures: Figures, what: str, predictions: str, **where: str) -> Row:
    means = {plan: round(figures.mean(plan, predictions, **where), 3) for plan in PLANS}
    return {"lengths": what, "predictions": predictions, **means}


def _worthless_row(figures: Figures, family: str) -> Row:
    """A row for the plans that are compared on worthless predictions, from many more seeds."""
    means = {plan: round(figures.mean(plan, "misleading", family=family), 3) for plan in WORTHLESS}
    return {"lengths": f"{family} *", "predictions": "misleading"} | means


def _measure(figures: Figures, workload: Workload, family: str) -> None:
    """Run all plans, with predictions of all qualities."""
    for seed in range(workload.seeds):
        trace = _trace(workload, family, seed)
        blind = {plan: _over_bound(plan, trace, workload.num_slots, NoLengths()) for plan in BLIND}
        for case in PREDICTIONS:
            lengths = _lengths(trace, case, seed)
            for plan in PLANS:
                value = blind[plan] if plan in blind else _over_bound(plan, trace, workload.num_slots, lengths)
                figures.add((str(workload), family, plan, case), value)


def _measure_worthless(figures: Figures, workload: Workload, family: str) -> None:
    """Run some plans on worthless predictions, often: they differ by little."""
    for seed in range(1000, 1000 + workload.worthless_seeds):
        trace = _trace(workload, family, seed)
        lengths = _lengths(trace, "misleading", seed)
        for plan in WORTHLESS:
            value = _over_bound(plan, trace, workload.num_slots, lengths)
            figures.add((str(workload), family, plan, "misleading"), value)


def _trace(workload: Workload, family: str, seed: int) -> Trace:
    return load_trace(f"{family}:prompts={workload.num_prompts},group={workload.group_size},seed={seed}")


def _over_bound(plan: str, trace: Trace, num_slots: int, lengths: FittedLengths) -> float:
    return replayed(trace, plan, num_slots, lengths).steps / slot_bound(trace.lengths, num_slots)


def _lengths(trace: Trace, predictions: str, seed: int) -> FittedLengths:
    if predictions == "misleading":
        return KnownLengths(trace.jobs, np.random.default_rng((2, seed)).permutation(trace.lengths))
    if predictions == "recorded":
        assert trace.predicted is not None
        return KnownLengths(trace.jobs, trace.predicted)
    return lengths_of(trace, NOISES[predictions], seed)


def _recorded_rows(num_batches: int) -> Iterable[Row]:
    """Rows for the lengths of some batches of a real run, where there is one."""
    if not RECORDED.exists():
        return
    whole = load_trace(str(RECORDED))
    batches = whole.batches()
    batches = batches[:: -(-len(batches) // num_batches)]
    cases = PREDICTIONS if whole.predicted is None else (*PREDICTIONS, "recorded")
    for num_slots in RECORDED_SLOTS:
        for case in cases:
            means = {
                plan: statistics.fmean(
                    _over_bound(plan, batch, num_slots, _lengths(batch, case, seed))
                    for seed, batch in enumerate(batches)
                )
                for plan in PLANS
            }
            yield {"lengths": f"{RECORDED.name} on {num_slots}", "predictions": case} | means


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(main(parse_options(__doc__)))
