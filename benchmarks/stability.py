"""Does training survive a sampler that is many updates old, and what of the objective does it take?

The demo's task, sampled throughout by the weights of 16 updates ago: every token is 16 versions old when it is learnt
from (in the first 16 updates, as old as the run). Objectives differ in nothing else. The mean reward is that of the
sampler, and so is old too.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.learning_callbacks import StaleSlots
from benchmarks.learning_runs import Curves, LearningRun, kept_runs, mean_curve, run_all, spread
from benchmarks.lines import distinct
from benchmarks.report import ROOT, Claim, Options, Row, finish, parse_options

PICTURE = ROOT / "docs" / "pictures" / "stability.svg"
PLAIN = "plain"
FAR = "1.0e+6"
OBJECTIVES = {
    PLAIN: {"epsilon": "1", "epsilon_high": FAR},  # ratios are from 0 up: nothing is clipped
    "clipped": {},
    "token_truncate": {"correction.mode": "token_truncate"},
    "token_mask": {"correction.mode": "token_mask"},
    "sequence_mask": {"correction.mode": "sequence_mask"},
    "interpolated": {"correction.mode": "token_truncate", "proximal": "interpolated"},
    "f_tis": {"correction.mode": "token_truncate", "correction.high": "2", "off_policy_kl": "50"},
    "vcpo": {
        "epsilon": "1",
        "epsilon_high": FAR,
        "correction.mode": "sequence_truncate",
        "correction.high": "8",
    },
}
"""The compared objectives, by the fields of ``model.objective``; a line here is a line in table and picture."""
PLUGINS = {"vcpo": "vcpo"}
"""By objective, what ``rollout.plugins`` has."""
LAST = 5
"""Updates that the reward at the end is the mean of."""


@dataclass(frozen=True)
class Size:
    """Of all runs alike."""

    seeds: tuple[int, ...] = (0, 1, 2)
    updates: int = 96
    lag: int = 16
    prompts: int = 8
    group: int = 8
    learning_rate: float = 2e-3
    arguments: tuple[str, ...] = ()


QUICK = Size((0,), 4, 2, 2, 4, arguments=("--data.train.init_args.num_rows", "16"))


def main(options: Options) -> int:
    """Run all, draw them, and judge."""
    size = QUICK if options.quick else Size()
    names = [PLAIN, "token_truncate"] if options.quick else list(OBJECTIVES)
    runs = {(name, seed): _run(name, seed, size) for seed in size.seeds for name in names}
    with kept_runs("stability", options) as folder:
        curves = run_all(list(runs.values()), folder)
    found = {name: [curves[runs[name, seed].name] for seed in size.seeds] for name in names}
    rows = [_row(name, found[name]) for name in names]
    if options.output is not None or not options.quick:  # a quick run leaves the docs' picture as it is
        draw(found, PICTURE if options.output is None else options.output.with_suffix(".svg"))
    settings: Row = {name: value for name, value in vars(size).items() if isinstance(value, int | float)}
    return finish("stability", options, settings | {"seeds": len(size.seeds), "threads": 1}, rows, _claims(rows, size))


def _run(name: str, seed: int, size: Size) -> LearningRun:
    generator = f"{StaleSlots.__module__}.{StaleSlots.__name__}"
    arguments = {
        "--model.generator": generator,
        "--model.generator.lag": size.lag,
        **{f"--model.objective.{field}": value for field, value in OBJECTIVES[name].items()},
        **({"--rollout.plugins": PLUGINS[name]} if name in PLUGINS else {}),
        "--seed_everything": seed,
        "--trainer.max_steps": size.updates,
        "--trainer.limit_val_batches": 0,
        "--model.num_generations": size.group,
        "--model.optimizer.lr": size.learning_rate,
        "--model.lr_scheduler.init_args.end_factor": 1.0,
        "--data.batch_size": size.prompts,
    }
    words = tuple(str(word) for pair in arguments.items() for word in pair)
    return LearningRun(f"{name}-{seed}", "arithmetic", (*words, *size.arguments))


def _row(name: str, seeds: Sequence[Curves]) -> Row:
    smooth_U = _smooth(mean_curve(seeds, "reward_U")[1:])
    return {
        "objective": name,
        "start": float(smooth_U[0]),
        "best": float(smooth_U.max()),
        **spread([float(each.reward_U[-LAST:].mean()) for each in seeds], "final"),
        "fall": float(smooth_U.max() - smooth_U[-1]),
        "staleness": float(mean_curve(seeds, "staleness_U")[-1]),
        "cpu_s": float(mean_curve(seeds, "cpu_s_U")[-1]),
    }


def _smooth(reward_U: np.ndarray) -> np.ndarray:
    """The mean of each ``LAST`` updates that follow each other."""
    return np.convolve(reward_U, np.ones(min(LAST, len(reward_U))) / min(LAST, len(reward_U)), mode="valid")


def _claims(rows: Sequence[Row], size: Size) -> list[Claim]:
    by_name = {str(row["objective"]): row for row in rows}
    staleness = min(float(row["staleness"]) for row in rows)
    claims = [Claim("updates between sampling a token and learning from it, at the end", staleness, ">=", size.lag)]
    claims.append(Claim(f"{PLAIN}: reward at its best over that at the end", float(by_name[PLAIN]["fall"]), ">=", 0.1))
    claims += [
        Claim(f"{name}: the same", float(row["fall"]), "<=", 0.05)
        for name, row in by_name.items()
        if name not in (PLAIN, "clipped")
    ]
    return claims


def draw(found: dict[str, list[Curves]], path: Path) -> None:
    """Draw the mean reward by update, with the range of the seeds as a band."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axis = figure.subplots()
    distinct(axis)
    for name, seeds in found.items():
        reward_SU = np.array([_smooth(each.reward_U[1:]) for each in seeds])
        x_U = np.arange(reward_SU.shape[1]) + len(seeds[0].reward_U) - reward_SU.shape[1]
        (line,) = axis.plot(x_U, reward_SU.mean(0), label=name)
        axis.fill_between(x_U, reward_SU.min(0), reward_SU.max(0), color=line.get_color(), alpha=0.15, linewidth=0)
    axis.set(xlabel="update", ylabel=f"mean reward, of {LAST} updates")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path)


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(main(parse_options(__doc__)))
