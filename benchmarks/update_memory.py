"""Peak memory of the update against the group size, the vocabulary and the batch, at a fixed token budget.

Every case takes a step of a real fit in a process of its own. Memory is the peak of that step above the process after a
first step, so that weights, gradients and AdamW's moments, which grow with the vocabulary by themselves, are not in it;
AdamW is the fused one, which needs no copy of a weight while it steps.
Every step fills the budget, at least twice: in the first micro-batch of all there are no gradients yet. Against the
group size and the batch all completions are equally long, so that the budget is always filled alike.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

from benchmarks.processes import LEAN, LEAN_TEXT
from benchmarks.report import Claim, Options, Row, finish, parse_options
from benchmarks.update_case import Case, measure
from benchmarks.update_work import Work

FULL = {
    "group size": [(288, Work(32, 64, size, sigma=0.0)) for size in (8, 64, 1024)],
    "vocabulary": [(2048, Work(32, 64, 72, vocab_size=size)) for size in (1_000, 32_000, 150_000)],
    "batch": [(256, Work(32, 64, 20, num_groups=size, sigma=0.0)) for size in (1, 8, 32)],
}
QUICK = {"group size": [(256, Work(16, 16, size)) for size in (24, 32)]}


def main(options: Options) -> int:
    """Measure all cases; each series must be flat."""
    series, policy = (QUICK, "smallest") if options.quick else (FULL, "7M")
    plan = [(name, tokens, work) for name, works in series.items() for tokens, work in works]
    cases = [Case("lit_grpo", tokens, work, policy, options.device, warm=True) for _, tokens, work in plan]
    workers = 1 if options.device == "cuda" else 2  # each has one thread
    with ThreadPoolExecutor(workers) as pool:
        figures = list(pool.map(lambda case: measure(case, environment=LEAN), cases))
    rows: list[Row] = [
        {
            "against": name,
            "G": work.group_size,
            "V": work.vocab_size,
            "groups": work.num_groups,
            "token_budget": tokens,
            "peak_mib": round(float(one["peak_mib"]), 2),
        }
        for (name, tokens, work), one in zip(plan, figures, strict=True)
    ]
    claims = [_flat(name, [float(row["peak_mib"]) for row in rows if row["against"] == name]) for name in series]
    settings: Row = {"policy": f"random Qwen3, {policy}", "prompt + mean completion": _shape(plan[0][2])}
    settings["environment"] = LEAN_TEXT
    return finish("update_memory", options, settings, rows, claims)


def _shape(work: Work) -> str:
    return f"{work.prompt_tokens} + {work.mean_tokens} tokens"


def _flat(name: str, peaks: list[float]) -> Claim:
    return Claim(
        f"peak memory of the update against the {name}, largest over smallest", max(peaks) / min(peaks), "<=", 1.05
    )


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(main(parse_options(__doc__)))
