"""Tokens per second on long-tailed lengths, with the same memory for all: our plans, and what others do.

All systems decode completions of the same given lengths, of the same prompts, in the same number of rows, and so hold
at most the same number of keys and values: rows x (prompt + longest completion). Our default predicts nothing here:
it is told the lengths beforehand, with an assumed error of 0.35 in their logarithm, and of 0.7 in a row beside it. So
what a real predictor costs and how often it errs is not in these figures (``length_prediction`` and ``planner_cost``
measure that). Naive micro groups (as in Infinite Sampling, arXiv 2506.22950) decode a round of rows to the end of its
longest completion, on our engine, and compute all of its rows to that end. ``generate`` (as TRL calls it: sdpa,
dynamic cache, inference mode) does the same in batches, on transformers. Transformers' continuous batching refills,
with paged sdpa attention, at most as many requests a batch as there are rows, and a cache of as many tokens; its
start is not timed.

Lengths are log-normal with a heavy tail and up to 128 tokens; the policies are the demo's and a random Qwen3 of 31
million parameters.
"""

from __future__ import annotations

import statistics
import sys

import numpy as np
import torch

from benchmarks.decode_systems import LARGE_NOISE, NOISE, Run, Steps, Work, continuous_batching, generate, naive, ours
from benchmarks.random_policies import QWEN3_31M, random_qwen3
from benchmarks.report import Claim, Options, Row, finish, note, parse_options
from benchmarks.workloads import arithmetic_prompts, load, long_tailed
from lit_grpo.tools.simulation.step_cost import StepCost

CASES = ((2, 32, 16), (1, 256, 64))  # prompts, group size, rows
PEERS = {"generate": 2.5, "naive micro groups": 1.8, "transformers' continuous batching": 3.0}


def main(options: Options) -> int:
    """Measure every system on every workload, interleaved, and report medians of paired ratios."""
    torch.set_num_threads(1)  # continuous batching decodes beside the thread that waits for it
    repeats, cases = (1, ((1, 4, 2),)) if options.quick else (3, CASES)
    limit = 12 if options.quick else 128
    rows: list[Row] = []
    claims: list[Claim] = []
    policies = {"tiny": load("tiny", options.device)}
    if not options.quick:
        policies["random Qwen3, 31 M"] = random_qwen3(QWEN3_31M, options.device), policies["tiny"][1]
    for name, (policy, tokenizer) in policies.items():
        for num_prompts, group_size, num_rows in cases:
            prompts = arithmetic_prompts(tokenizer, num_prompts)
            lengths = long_tailed(prompts, group_size, limit)
            work = Work(policy, tokenizer, prompts, lengths, group_size, num_rows)
            case: Row = {"policy": name, "G": group_size, "rows": num_rows, "prompts": num_prompts}
            case["max/mean"] = max(lengths.values()) / statistics.fmean(lengths.values())
            measured, case_claims = _measure(work, repeats, f"{name}, G = {group_size}, {num_rows} rows")
            rows += [case | row for row in measured]
            claims += case_claims
    settings: Row = {
        "threads": torch.get_num_threads(),
        "repeats": f"{repeats}, of the large policy 1",
        "error of what is told (log)": NOISE,
        "larger error (log)": LARGE_NOISE,
    }
    return finish("decode_throughput", options, settings, rows, claims)


def _measure(work: Work, repeats: int, where: str) -> tuple[list[Row], list[Claim]]:
    steps = Steps([], [], [])
    num_steps: dict[str, int] = {}
    systems: dict[str, Run] = {
        "default": ours(work, "short_last", steps),
        "default, larger error": ours(work, "short_last", noise=LARGE_NOISE),
        "first come": ours(work, "fcfs"),
        "naive micro groups": naive(work),
        "generate": generate(work),
        "transformers' continuous batching": continuous_batching(work),
    }
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    is_small = work.policy.num_parameters() < 10**7  # a large one needs no warm-up, and takes minutes
    for repeat in range(repeats + 1) if is_small else (1,):
        for name, run in systems.items():
            num_steps[name], elapsed = run()
            note(f"{where}: {repeat or 'warm-up'}: {name}: {work.num_tokens / elapsed:.0f} tokens/s")
            if repeat:
                seconds[name].append(elapsed)
    over = {
        name: statistics.median(theirs / ours for theirs, ours in zip(seconds[name], seconds["default"], strict=True))
        for name in systems
    }
    rows: list[Row] = [
        {
            "system": name,
            "tokens_per_s": work.num_tokens / statistics.median(seconds[name]),
            "steps": num_steps[name] or "",
            "default_over_it": over[name],
        }
        for name in systems
    ]
    cost = StepCost.fit(np.array(steps.rows), np.array(steps.kv_tokens), np.array(steps.seconds))
    rows[0] |= {"a_ms": cost.step_s * 1e3, "b_us_per_row": cost.row_s * 1e6, "c_ns_per_kv_token": cost.token_s * 1e9}
    claims = [Claim(f"{where}: tokens/s over {peer}", over[peer], ">=", limit) for peer, limit in PEERS.items()]
    fewer = num_steps["first come"] / num_steps["default"]
    claims.append(Claim(f"{where}: steps of first come over the default's", fewer, ">=", 1.15))
    if work.num_rows <= 16:
        claims.append(Claim(f"{where}: time of first come over the default's", over["first come"], ">=", 1.15))
    return rows, claims


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(main(parse_options(__doc__)))
