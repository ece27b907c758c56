"""Speedup of an update that computes a prompt once, by the prompt's fraction of a sequence.

The same module on the same groups, once packed and once with a prompt before every completion. All completions of a
group are equally long, so that neither side pads. The ideal is the quotient of the FLOPs that either way must do.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import replace

from benchmarks.report import Claim, Options, Row, finish, parse_options
from benchmarks.update_case import Case, measure
from benchmarks.update_work import Work

GROUP_SIZE = 16


def main(options: Options) -> int:
    """Measure both ways at each length of the prompt."""
    prompts, mean, policy = ((48,), 16, "smallest") if options.quick else ((32, 128, 512, 1024), 128, "7M")
    rows: list[Row] = []
    claims: list[Claim] = []
    for prompt in prompts:
        row = _compare(Work(prompt, mean, GROUP_SIZE, sigma=0.0), policy, options.device)
        rows.append(row)
        reached = float(row["speed_up"]) / float(row["ideal"])
        claims.append(
            Claim(f"speed-up over the ideal where the prompt is {row['prompt_share']:.0%}", reached, ">=", 0.85)
        )
    settings: Row = {"policy": f"random Qwen3, {policy}", "G": GROUP_SIZE, "completion_tokens": mean}
    return finish("shared_prefix", options, settings, rows, claims)


def _compare(work: Work, policy: str, device: str) -> Row:
    case = Case("lit_grpo", 4096, work, policy, device)
    alone = Case("lit_grpo", 4096, replace(work, group_size=1), policy, device)
    shared, plain = measure(case, 3), measure(replace(case, share=False), 3)
    one_tflop = measure(alone)["floor_tflop"]
    seconds, plain_seconds = (statistics.median(figures["seconds"]) for figures in (shared, plain))
    return {
        "prompt_tokens": work.prompt_tokens,
        "prompt_share": round(work.prompt_tokens / (work.prompt_tokens + work.mean_tokens), 3),
        "plain_s": round(plain_seconds, 4),
        "shared_s": round(seconds, 4),
        "speed_up": round(plain_seconds / seconds, 3),
        "ideal": round(GROUP_SIZE * one_tflop / shared["floor_tflop"], 3),
    }


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(main(parse_options(__doc__)))
