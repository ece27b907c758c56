"""Record of a run from its folder: what was trained, how, and whether the policy became better."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lit_grpo.findings.rewards import DOUBTFUL, TRAINING, CurveChange
from lit_grpo.process.inputs import read_lines
from lit_grpo.process.terminal import counted, visible
from lit_grpo.tools.dashboard.report.content import report_content
from lit_grpo.tools.dashboard.report.folder import RunRecords
from lit_grpo.tools.dashboard.report.rows import SampleRow
from lit_grpo.tools.evaluation.intervals import wilson

MAX_CHARACTERS = 300
"""Of a setting that the card shows."""
HELD_OUT = {"val/pass@1": "pass@1 on held-out prompts", "val/reward": "reward on held-out prompts"}
LOSSES = {"val/sft/loss": "loss of held-out examples", "ce/loss": "loss of examples"}
"""Metrics that fall as the policy learns."""
SETTINGS = {
    "Updates planned": "trainer.max_steps",
    "Prompts per batch": "data.batch_size",
    "Completions per prompt": "model.num_generations",
    "Sampling temperature": "model.sampling.temperature",
    "Max tokens of a completion": "model.sampling.max_tokens",
    "Optimizer": "model.optimizer.class_path",
    "Learning rate": "model.optimizer.init_args.lr",
    "Loss": "model.objective.loss",
    "KL coefficient": "model.objective.kl.beta",
    "Advantages": "model.advantages.estimator",
    "LoRA": "model.lora",
    "Dtype": "model.dtype",
    "Scheduling policy": "rollout.plan",
    "Plug-ins": "rollout.plugins",
    "Seed": "seed_everything",
}
"""Settings that the card shows, by their place in the run's config.yaml."""


@dataclass(frozen=True)
class Progress:
    """A metric of the run from its beginning to the finished policy.

    Args:
        metric: Name of the metric, as the card shows it.
        before: The value at the beginning.
        after: The value of the finished policy.
        before_at: The update of the first value.
        after_at: The update of the last one.
        certain: Whether the difference is more than noise explains; None if noise is not known.
        falls: Whether a better policy has a smaller value.
        rows: Number of held-out rows that the values are fractions of, each answered once; None if that is not known.
        how: How the rows were answered, as a sentence; empty if that is not known.
    """

    metric: str
    before: float
    after: float
    before_at: int
    after_at: int
    certain: bool | None
    falls: bool = False
    rows: int | None = None
    how: str = ""

    @property
    def has_improved(self) -> bool:
        """True if the policy has become better, as far as the metric shows."""
        better = self.before - self.after if self.falls else self.after - self.before
        return better > 0 and self.certain is not False

    def __str__(self) -> str:
        """The progress as a sentence."""
        before, after = (self._shown(value) for value in (self.before, self.after))
        values = f"{self.metric} was {before} at update {self.before_at} and {after} at update {self.after_at}"
        better = self.before - self.after if self.falls else self.after - self.before
        if better <= 0:
            return f"**The run has learned nothing that this metric shows:** {values}."
        if self.certain is False:
            return f"**The run may have learned nothing:** {values}, a difference that noise explains."
        return f"{values[0].upper()}{values[1:]}."

    def _shown(self, value: float) -> str:
        """Write a value, with its interval if it is a fraction of rows."""
        if "pass@" not in self.metric:
            return f"{value:.4g}"
        if self.rows is None:
            return f"{value:.1%}"
        low, high = wilson(value * self.rows, self.rows)
        return f"{value:.1%} (95% interval {100 * low:.1f} to {100 * high:.1f})"


def progress(run: RunRecords, version: int) -> Progress | None:
    """Return how the policy of an update compares with the one that training began with.

    The held-out metric counts if there is one, else the loss of examples, else the reward of training batches. A
    difference of held-out metrics is certain from twice its standard error on (of two proportions, if the number of
    held-out rows is known), or if the reward of training batches has risen by as much.
    """
    reward = _training(run, version)
    for name, told in {**HELD_OUT, **LOSSES}.items():
        values = run.columns.get(name)
        there = [] if values is None else np.flatnonzero(np.isfinite(values) & (run.steps <= version)).tolist()
        if len(there) < 2:
            continue
        assert values is not None
        before, after = float(values[there[0]]), float(values[there[-1]])
        certain = reward.certain if reward is not None and name in HELD_OUT else None
        rows = _num_held_out(run)
        if "pass@" in name and rows is not None:
            error = math.sqrt((before * (1 - before) + after * (1 - after)) / rows)
            certain = after - before > DOUBTFUL * error or bool(certain)
        steps = int(run.steps[there[0]]), int(run.steps[there[-1]])
        one_each = name == "val/pass@1" and run.settings("model").get("eval_num_generations", 1) == 1
        how = _how_answered(run, rows) if name in HELD_OUT else ""
        return Progress(told, before, after, *steps, certain, name in LOSSES, rows if one_each else None, how)
    return reward


def _how_answered(run: RunRecords, rows: int | None) -> str:
    """Say which held-out rows a run has asked, and how it has decoded their completions."""
    model = run.settings("model")
    sampling = model.get("eval_sampling") or model.get("sampling") or {}
    temperature, each = sampling.get("temperature"), model.get("eval_num_generations", 1)
    unknown = "Held-out prompts, whose number the run's config does not say"
    many = unknown if rows is None else counted(rows, "held-out row")
    decoded = f"at temperature {temperature:g}" if temperature else "greedily"
    decoded = "at a temperature that the run's config does not say" if temperature is None else decoded
    return f"{many}, {each} completion{'' if each == 1 else 's'} each, decoded {decoded}."


def _training(run: RunRecords, version: int) -> Progress | None:
    """Compare the rewards of the first batches with those of the last quarter (Welch's test)."""
    values = run.columns.get("reward")
    if values is None:
        return None
    kept = np.isfinite(values) & (run.steps <= version)
    rewards, steps = values[kept], run.steps[kept]
    if len(rewards) < 4:
        return None
    num_first = min(TRAINING.num_first, len(rewards) // 2)
    first, last = rewards[:num_first], rewards[-max(num_first, len(rewards) // 4) :]
    error = math.sqrt(sum(float(part.var(ddof=1)) / len(part) for part in (first, last)))
    change = CurveChange(float(first.mean()), float(last.mean()), error)
    certain = change.size > DOUBTFUL * change.error
    name = "mean reward of training batches"
    return Progress(name, change.first, change.last, int(steps[0]), int(steps[-1]), certain)


def _num_held_out(run: RunRecords) -> int | None:
    """Return the number of held-out rows, if the configuration tells it; a file is counted."""
    told = (run.config.get("data") or {}).get("validation")
    if isinstance(told, dict):
        number = (told.get("init_args") or {}).get("num_rows")
        return number if isinstance(number, int) and 0 < number <= 2**53 else None
    path = Path(told) if isinstance(told, str) else Path()
    if path.suffix != ".jsonl":
        return None
    try:
        return sum(not line.isspace() for line in read_lines(path)) or None
    except (OSError, ValueError):  # it is no longer the file of the run
        return None


def facts(run: RunRecords) -> list[tuple[str, str]]:
    """Return the heading of the run's report: names and values, findings among them."""
    return [(name, f"{value} {more}".strip()) for name, value, more in report_content(run)["head"]["facts"]]


def settings(run: RunRecords) -> list[tuple[str, str]]:
    found = [(name, _shown(_at(run.config, place))) for name, place in SETTINGS.items()]
    return [(name, value) for name, value in found if value]


def data(run: RunRecords) -> list[tuple[str, str]]:
    told: Mapping[str, object] = run.config.get("data") or {}
    names = {"train": "Training prompts", "validation": "Held-out prompts"}
    return [(name, _shown(told[place])) for place, name in names.items() if told.get(place)]


def rewards(run: RunRecords) -> list[tuple[str, str]]:
    """Return the reward functions: name, and function with its weight."""
    found = []
    for spec in (run.config.get("model") or {}).get("rewards") or []:
        spec = spec if isinstance(spec, dict) else {"function": spec}
        function, weight = _shown(spec.get("function")), spec.get("weight", 1.0)
        name = str(spec.get("name") or re.split(r"[:.]", str(spec.get("function")))[-1])
        found.append((name, f"{function}, weight {weight:g}" if isinstance(weight, int | float) else function))
    return found


def _at(config: Mapping[str, Any], place: str) -> Any:
    for part in place.split("."):
        config = config.get(part) if isinstance(config, Mapping) else None  # pyrefly: ignore[bad-assignment]
    return config


def _shown(value: Any) -> str:
    """Write a setting on one line, paths of this machine as their last part."""
    if value is None or value in ({}, []):
        return ""
    if isinstance(value, Mapping) and "class_path" in value:
        arguments = _shown(value.get("init_args"))
        return f"{str(value['class_path']).rsplit('.', 1)[-1]}{f' ({arguments})' if arguments else ''}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_shown(one)}" for name, one in value.items() if one is not None)
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value))
    text = str(value)
    text = visible(Path(text).name if Path(text).is_absolute() else text).replace("\n", " ")
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]} ..."


def validated(run: RunRecords, version: int) -> list[tuple[int, list[SampleRow]]]:
    """Return some completions of the first validation and of the last one up to the finished policy.

    Returns:
        The update with its rows, the best and the worst of the last validation, and of the first those to the same
        prompts; of a single validation its own alone, and nothing without one.
    """
    by_step: dict[int, list[SampleRow]] = {}
    for row in run.validated:
        if row["step"] <= version:
            by_step.setdefault(row["step"], []).append(row)
    if not by_step:
        return []
    first, last = min(by_step), max(by_step)
    shown = _best(by_step[last])
    if first == last:
        return [(last, shown)]
    asked = [row.get("prompt_id") for row in shown]
    before = {row.get("prompt_id"): row for row in reversed(by_step[first])}
    return [(first, [before[name] for name in asked if name in before]), (last, shown)]


def sampled(run: RunRecords, version: int) -> list[tuple[int, list[SampleRow]]]:
    """Return some completions of the first update that was sampled from in training, and of the last.

    Returns:
        The update with its rows, best reward first; of prompts that both updates have, if there are any.
    """
    first = run.first_samples
    rows = [row for row in run.samples if row["step"] <= version]
    if not first or not rows:
        return []
    last = [row for row in rows if row["step"] == rows[-1]["step"]]
    if last[0]["step"] == first[0]["step"]:
        return [(last[0]["step"], _best(last))]
    both = {row.get("prompt_id") for row in first} & {row.get("prompt_id") for row in last}
    groups = [[row for row in part if row.get("prompt_id") in both] or part for part in (first, last)]
    return [(part[0]["step"], _best(part)) for part in groups]


def _best(rows: Sequence[SampleRow]) -> list[SampleRow]:
    """Return the rows with the highest and the lowest reward."""
    ordered = sorted(rows, key=lambda row: -_reward(row))
    return ordered if len(ordered) < 3 else [ordered[0], ordered[-1]]


def _reward(row: SampleRow) -> float:
    """Return the reward of a row; that of a row without one is the lowest."""
    reward = row.get("reward")
    return -math.inf if reward is None else reward
