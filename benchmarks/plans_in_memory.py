"""Decode steps of each plan where KV tokens, not slots alone, limit what is decoded together.

The budget is a share of the KV tokens that first come holds at its peak when there is no limit. A completion is
admitted where it fits beside what is expected of all others, and the youngest is set aside when tokens run out all
the same. Figures are means over five families of lengths: steps over the lower bound, which counts slots and the area
of the KV tokens; and with no limit the peak of the KV tokens, over first come's. Predictions are off by 0.35 in log,
which is assumed (``length_prediction`` measures our predictor's), and by 0.7 in rows of their own.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.baseline_plans import FIXED_SLOT, MICRO_ROUNDS
from benchmarks.report import Claim, Options, Row, finish, note, parse_options
from benchmarks.rollouts import lengths_of, replayed
from lit_grpo.scheduling.plans.plan import memory_bound
from lit_grpo.tools.simulation.traces import FAMILIES, Trace, load_trace

NOISES = (0.35, 0.7)
NUM_SLOTS = 64
BUDGETS = (0.5, 0.75, 1.0)
PLANS = (MICRO_ROUNDS, FIXED_SLOT, "fcfs", "sjf", "lpt", "short_last", "balanced", "infinite_sampling")
WORKLOADS = ((32, 16), (64, 32))  # prompts x group


@dataclass(frozen=True)
class Case:
    """One plan on one trace with one budget, as a share of first come's peak (None for no limit), and one error."""

    workload: tuple[int, int]
    budget: float | None
    plan: str
    noise: float


def main(options: Options) -> int:
    """Simulate everything and report means."""
    workloads, seeds = (((8, 8),), 1) if options.quick else (WORKLOADS, 1)
    values: dict[Case, list[float]] = {}
    for workload in workloads:
        note("{} x {}".format(*workload))
        for family in FAMILIES:
            for seed in range(seeds):
                spec = f"{family}:prompts={workload[0]},group={workload[1]},seed={seed}"
                for noise in NOISES:
                    for case, value in _measure(workload, load_trace(spec), seed, noise):
                        values.setdefault(case, []).append(value)
    means = {case: statistics.fmean(repeated) for case, repeated in values.items()}
    rows = [
        _row(means, workload, budget, noise)
        for noise in NOISES
        for workload in workloads
        for budget in (None, *BUDGETS)
    ]
    settings: Row = {"slots": NUM_SLOTS, "max_tokens": 1024, "seeds": seeds}
    claims = [claim for noise in NOISES for claim in _claims(means, workloads, noise)]
    return finish("plans_in_memory", options, settings, rows, claims)


def _claims(means: dict[Case, float], workloads: Sequence[tuple[int, int]], noise: float) -> list[Claim]:
    peaks = [
        means[Case(workload, None, "short_last", noise)] / means[Case(workload, None, "lpt", noise)]
        for workload in workloads
    ]
    text = f"error {noise}, no limit: peak KV tokens of short_last over those of lpt"
    claims = [Claim(text, statistics.fmean(peaks), "<=", 0.9)]
    for other, limit in (("lpt", 0.9), ("fcfs", 1.0)):
        ratios = [
            means[Case(workload, budget, "short_last", noise)] / means[Case(workload, budget, other, noise)]
            for workload in workloads
            for budget in BUDGETS
        ]
        text = f"error {noise}, limited: steps of short_last over those of {other}"
        claims.append(Claim(text, statistics.fmean(ratios), "<=", limit))
    return claims


def _row(means: dict[Case, float], workload: tuple[int, int], budget: float | None, noise: float) -> Row:
    figures = {plan: round(means[Case(workload, budget, plan, noise)], 3) for plan in PLANS}
    figure = "peak" if budget is None else "steps"
    where: Row = {"workload": "{} x {}".format(*workload), "error": noise, "budget": budget or "no limit"}
    return where | {"figure": figure} | figures


def _measure(workload: tuple[int, int], trace: Trace, seed: int, noise: float) -> list[tuple[Case, float]]:
    """Return the figure of each plan with each budget on one trace."""
    lengths = lengths_of(trace, noise, seed)
    free = {plan: replayed(trace, plan, NUM_SLOTS, lengths).peak_kv_tokens for plan in PLANS}
    measured = [(Case(workload, None, plan, noise), peak / free["fcfs"]) for plan, peak in free.items()]
    for budget in BUDGETS:
        kv_tokens = int(budget * free["fcfs"])
        bound = memory_bound(trace.group, trace.prompt_tokens, trace.lengths, NUM_SLOTS, kv_tokens)
        for plan in PLANS:
            steps = replayed(trace, plan, NUM_SLOTS, lengths, kv_tokens).steps
            measured.append((Case(workload, budget, plan, noise), steps / bound))
    return measured


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(main(parse_options(__doc__)))
