"""A pretrained chat model with a calculator, beside the same model without one: word problems of one step.

The policy is SmolLM2-135M-Instruct (``lit_grpo smollm2`` makes it). ``configs/word_problems.yaml`` has it answer at
once, ``configs/word_problems_tool.yaml`` lets it call the tool first, and says in the system prompt and two examples
how. Both have the same questions, batches and settings of training, in float32 on one thread, one after the other.
Compared is greedy exact match on held-out questions, before training and after a few updates, and how many calls a
completion makes in training, of which how many cannot be read.

The tool is claimed to help before training, and training not to unlearn it.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np

from benchmarks.learning_runs import Curves, LearningRun, kept_runs, read_curves, train_all
from benchmarks.report import Claim, Options, Row, finish, parse_options

PLAIN, TOOL = "word_problems", "word_problems_tool"
UPDATES, PROMPTS, HELD_OUT = 3, 4, 32


def main(options: Options) -> int:
    """Train both."""
    updates, prompts, held_out = (1, 2, 2) if options.quick else (UPDATES, PROMPTS, HELD_OUT)
    words = ("--trainer.max_steps", str(updates), "--trainer.val_check_interval", str(updates))
    words += ("--model.lr_scheduler.init_args.total_iters", str(updates), "--data.batch_size", str(prompts))
    words += ("--data.validation.init_args.num_rows", str(held_out), "--data.eval_batch_size", str(held_out))
    runs = [LearningRun(config, config, words, alone=True) for config in (TOOL, PLAIN)]
    with kept_runs("tool_use", options) as folder:
        train_all(runs, folder)
        rows = [_row(run.name, folder / run.name) for run in runs]
    settings: Row = {"updates": updates, "prompts of a batch": prompts, "held_out": held_out}
    return finish("tool_use", options, settings, rows, _claims(*rows))


def _row(config: str, folder: Path) -> Row:
    curves: Curves = read_curves(folder)
    (path,) = folder.glob("runs/*/metrics.csv")
    with path.open(newline="") as file:
        logged = list(csv.DictReader(file))
    sums = {
        name: sum(float(row[f"environments/{name}"]) for row in logged if row.get(f"environments/{name}"))
        for name in ("tool_calls", "tool_failures", "broken_calls")
    }
    samples = float(curves.samples_U[-1])
    return {
        "config": config,
        "start": float(curves.exact_U[0]),
        "end": float(curves.exact_U[-1]),
        "in training": float(np.nanmean(curves.reward_U)),
        **{f"{name} of a completion": round(number / samples, 3) for name, number in sums.items()},
        "cpu_s": round(float(curves.cpu_s_U[-1]), 1),
    }


def _claims(tool: Row, plain: Row) -> list[Claim]:
    start, end = float(tool["start"]), float(tool["end"])
    return [
        Claim("held-out accuracy before training, with the tool less without", start - float(plain["start"]), ">=", 0.1),
        Claim("held-out accuracy with the tool, end over start", end - start, ">=", 0.0),
    ]


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(main(parse_options(__doc__)))
