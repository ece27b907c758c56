"""What lossless speculation would save, counted on the tokens that real runs have sampled.

The demo and the harder task are trained for a while, and their completions recorded. Then each rollout is decoded again
from the record, by the default plan with predictions whose errors have a spread of 0.35: a token a row and step, and
with drafts of up to K tokens a row from completions of the same prompt, siblings and earlier visits alike. A drafted
token counts where it is the recorded one, which is the one that would have been sampled, for random numbers depend on
the completion and the position alone. Drafts take only slots that are free, so no step computes more positions than one
with all slots in use. Steps are counted, and no time: on a CPU a position costs nearly as much as a row.
"""

from __future__ import annotations

import sys

from benchmarks.learning_runs import LearningRun, kept_runs, run_all
from benchmarks.report import Claim, Options, Row, finish, note, parse_options
from lit_grpo.tools.simulation import Engine, Trace, load_trace, simulate
from lit_grpo.tools.simulation.known import lengths_of
from lit_grpo.tools.simulation.speculation import Speculation, SpeculativeReplay

PLAN, NOISE = "short_last", 0.35
TASKS = {"arithmetic": 60, "knights": 20}
"""Updates of each task."""
SLOTS, DRAFTED = (64, 128, 256), (2, 4, 8)
QUARTER = 0.75


def main(options: Options) -> int:
    """Record, and count."""
    tasks = {"arithmetic": 2} if options.quick else TASKS
    runs = {task: _run(task, updates, options.quick) for task, updates in tasks.items()}
    rows: list[Row] = []
    with kept_runs("speculation", options) as folder:
        run_all(list(runs.values()), folder)
        for task, run in runs.items():
            trace = load_trace(str(next((folder / run.name).glob("runs/*/trace.jsonl"))))
            for num_slots in SLOTS[:1] if options.quick else SLOTS:
                rows += count(task, trace, num_slots)
    settings: Row = {**{f"updates, {task}": updates for task, updates in tasks.items()}, "plan": PLAN, "noise": NOISE}
    return finish("speculation", options, settings, rows, _claims(rows))


def _run(task: str, updates: int, quick: bool) -> LearningRun:
    arguments = ["--rollout_timeline.record_trace", "tokens", "--trainer.limit_val_batches", "0"]
    arguments += ["--trainer.max_steps", str(updates)]
    if quick:
        arguments += ["--model.num_generations", "4", "--data.batch_size", "2"]
        arguments += ["--data.train.init_args.num_rows", "4"]
    return LearningRun(task, task, tuple(arguments))


def count(task: str, trace: Trace, num_slots: int) -> list[Row]:
    """Decode all rollouts, with drafts and without."""
    engine, batches = Engine(num_slots), trace.batches()
    known = [(batch, lengths_of(batch, NOISE, seed)) for seed, batch in enumerate(batches)]
    plain = sum(simulate(batch, PLAN, engine, lengths).steps for batch, lengths in known)
    rows: list[Row] = []
    for most in DRAFTED:
        speculation, steps = Speculation(most), 0
        for batch, lengths in known:
            generator = SpeculativeReplay(engine, batch, speculation)
            steps += simulate(batch, PLAN, engine, lengths, generator=generator).steps
        row: Row = {"task": task, "slots": num_slots, "drafted": most, "steps": steps, "without": plain}
        row |= {"ratio": steps / plain, "accepted": speculation.accepted}
        rows.append(row)
        note(str(row))
    return rows


def _claims(rows: list[Row]) -> list[Claim]:
    best: dict[tuple[str, int], float] = {}
    for row in rows:
        case = str(row["task"]), int(row["slots"])
        best[case] = min(best.get(case, 1.0), float(row["ratio"]))
    return [Claim(f"{task}, {slots} slots: steps over those without drafts", ratio, "<=", QUARTER)
            for (task, slots), ratio in best.items()]  # fmt: skip


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(main(parse_options(__doc__)))
