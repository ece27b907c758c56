"""Cost of scheduling: 100,000 queued completions are ordered and admitted, one for each that ends.

The plans are those that a rollout uses. Lengths are told with an assumed error of 0.35 in their logarithm, on which
the cost does not depend; looking them up is part of it. Those admitted first finish first. Seconds are those that the
process had a core for.

The share of scheduling (plan, predictor, bookkeeping) in the time of a rollout is measured in real rollouts of the
demo's policy, whose steps are as short as steps get, and of a random Qwen3 of 31 million parameters.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import deque
from dataclasses import replace
from typing import Any

from benchmarks.baseline_plans import FIXED_SLOT, FULL_GROUP, MICRO_ROUNDS
from benchmarks.random_policies import QWEN3_31M, random_qwen3
from benchmarks.report import Claim, Options, Row, finish, note, parse_options
from benchmarks.rollouts import lengths_of, roll_out, slots
from benchmarks.workloads import arithmetic_prompts, load
from lit_grpo.methods.plans import find_plan, shipped_plans
from lit_grpo.scheduling.jobs import Job, Lengths
from lit_grpo.scheduling.lengths import LengthPredictor
from lit_grpo.scheduling.plans.plan import make_plan
from lit_grpo.tools.simulation.traces import load_trace
from lit_grpo.types import SamplingParams

MOST_SECONDS = 1.0


def main(options: Options) -> int:
    """Measure all plans in turn, several times, and report medians."""
    num_jobs, repeats = (2_000, 1) if options.quick else (100_000, 5)
    trace = load_trace(f"lognormal_heavy:prompts={num_jobs // 50},group=50")
    jobs, lengths = trace.jobs, lengths_of(trace, 0.35)
    plans = (FULL_GROUP, MICRO_ROUNDS, FIXED_SLOT, *shipped_plans())
    cases = [(name, slots) for name in plans for slots in ((num_jobs,) if name == FULL_GROUP else (4, 256))]
    figures: dict[tuple[str, int], list[tuple[float, float]]] = {case: [] for case in cases}
    for repeat in range(repeats):
        note(f"repeat {repeat + 1} of {repeats}")
        for name, num_slots in cases:
            figures[name, num_slots].append(_measure(name, num_slots, jobs, lengths))
    rows = [_row(name, num_slots, num_jobs, repeated) for (name, num_slots), repeated in figures.items()]
    claims = [
        Claim(
            f"{num_jobs:,} completions planned and handed out by {name}, in s",
            max(float(row["total_s"]) for row in rows if row["plan"] == name),
            "<=",
            MOST_SECONDS,
        )
        for name in plans
    ]
    for policy, share in _shares(options).items():
        claims.append(Claim(f"share of scheduling in the time of a rollout, {policy}", share, "<=", 0.02))
    settings: Row = {"completions": num_jobs, "repeats": repeats, "lengths": "lognormal_heavy, noise 0.35"}
    return finish("planner_cost", options, settings, rows, claims)


def _shares(options: Options) -> dict[str, float]:
    """The share of scheduling in the last rollout of some, by policy."""
    tiny, tokenizer = load("tiny", options.device)
    policies: dict[str, Any] = (
        {"tiny": tiny} if options.quick else {"tiny": tiny, "31 M": random_qwen3(QWEN3_31M, options.device)}
    )
    num_prompts, group_size, limit, visits = (2, 4, 8, 2) if options.quick else (16, 16, 128, 4)
    shares = {}
    for name, policy in policies.items():
        lengths = LengthPredictor((0, 8, 32, 64), num_scalars=2)
        generator = slots(policy, tokenizer, 64, feature_points=lengths.points)
        prompts = arithmetic_prompts(tokenizer, num_prompts)
        for visit in range(visits):
            batch = [replace(prompt, visit=visit) for prompt in prompts]
            _, stats = roll_out(generator, batch, group_size, SamplingParams(max_tokens=limit), "short_last", lengths)
            start = time.perf_counter()
            lengths.end(commit=True)
            scheduling_s = stats.scheduling_s + time.perf_counter() - start
            note(f"{name}: {scheduling_s:.3f} s of {stats.rollout_s:.2f} s")
            shares[name] = scheduling_s / stats.rollout_s
    return shares


def _measure(name: str, num_slots: int, jobs: list[Job], lengths: Lengths) -> tuple[float, float]:
    """Return seconds until the slots are filled, and from then on until nothing waits."""
    start = time.process_time()
    plan = make_plan(find_plan(name), lengths, num_slots)
    plan.add(jobs)
    active = deque(plan.admit(num_slots))
    filled = time.process_time()
    while active:
        plan.left(active.popleft())
        active += plan.admit(num_slots - len(active))
    return filled - start, time.process_time() - filled


def _row(name: str, num_slots: int, num_jobs: int, repeated: list[tuple[float, float]]) -> Row:
    fill, refill = (statistics.median(seconds) for seconds in zip(*repeated, strict=True))
    refill_us = 1e6 * refill / num_jobs
    totals = [sum(seconds) for seconds in repeated]
    return {
        "plan": name,
        "slots": num_slots,
        "fill_s": round(fill, 4),
        "refill_us_per_completion": round(refill_us, 2),
        "total_s": round(statistics.median(totals), 4),
        "spread_s": round(max(totals) - min(totals), 4),
    }


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(main(parse_options(__doc__)))
