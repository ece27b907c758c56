"""The content of the report, as plain values that the page's script draws."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from lit_grpo.findings.rewards import (
    HELD_OUT,
    LESSON,
    OTHER_LOSSES,
    TRAINING,
    Finding,
    NoSignalCount,
    RewardCurves,
)
from lit_grpo.findings.tool_calls import ToolCalls
from lit_grpo.process.terminal import visible
from lit_grpo.tools.dashboard.report.advice import what_to_try
from lit_grpo.tools.dashboard.report.completions import completions
from lit_grpo.tools.dashboard.report.curves import AXES, MAX_POINTS, axis, points, rank_correlation
from lit_grpo.tools.dashboard.report.folder import RunRecords
from lit_grpo.tools.dashboard.report.memory import memory_bars
from lit_grpo.tools.dashboard.specification import Panel, Section, explain, sections
from lit_grpo.types import PassRule

MAX_OWN = 40
MAX_SCATTER = 2_000
MAX_CONFIG = 200_000  # characters


def report_content(run: RunRecords, label: str = "", num_runs: int = 1) -> dict[str, Any]:
    """Return everything that the page shows of a run, in its share of the size of a page of ``num_runs``."""
    most = max(MAX_POINTS // num_runs, 100)
    return {
        "name": label or visible(run.folder.resolve().name),
        "head": _heading(run),
        "problems": [visible(sentence) for sentence in run.problems.values()],
        "advice": what_to_try(run.columns),
        "axis": axis(run.steps, run.columns, most),
        "axes": {name: title for name, title in AXES.items() if name in run.columns},
        "rows": len(run.steps),
        "metrics": {name: points(values, most) for name, values in run.columns.items()},
        "memory": memory_bars(run.memory, run.columns),
        "sections": [_section(section, run) for section in sections()] + _own(run.columns),
        "timelines": run.timelines[-max(len(run.timelines) // num_runs, 1) :],
        "num_timelines": run.num_timelines,
        "lengths": _lengths(run.lengths, MAX_SCATTER // num_runs),
        **completions(run.samples, run.evaluated, run.validated, num_runs),
        "config": run.config_text[:MAX_CONFIG],
        "versions": run.versions,
    }


# ---- the heading --------------------------------------------------------------------------------------


def _heading(run: RunRecords) -> dict[str, Any]:
    updates, wanted = int(run.steps[-1]) if len(run.steps) else 0, wanted_updates(run)
    state = "running" if run.running else "stopped" if wanted is not None and updates < wanted else "ended"
    found = figures(run)
    facts = [("Updates", *found["updates"])]
    title = (score_of(run.columns) or "").removeprefix("val/")
    title += _passes(run) if "pass" in title else ""
    facts += [(f"{name.capitalize()} {title}", *found[name]) for name in ("best", "last") if name in found]
    facts += _parted(run) + _failing_tools(run.columns) + _without_signal(run.columns)
    titles = {"time": "Time in steps", "memory": "Peak memory", "tokens": "Sampled tokens"}
    facts += [(title, *found[name]) for name, title in titles.items() if name in found]
    policy = run.settings("model").get("policy")
    if isinstance(policy, str):
        facts.append(("Policy", visible(policy), ""))
    return {"state": state, "facts": facts}


def figures(run: RunRecords) -> dict[str, tuple[str, str]]:
    """Return the figures that a run comes to, by name: the text of each, and a note on it.

    ``first``, ``best`` and ``last`` are of the metric that :func:`score_of` names; ``reward`` is the mean of the last
    quarter of the updates. What the run has not logged is left out.
    """
    columns = run.columns
    updates, wanted = int(run.steps[-1]) if len(run.steps) else 0, wanted_updates(run)
    found = {"updates": (f"{updates:,}" + (f" of {wanted:,}" if wanted is not None else ""), "")}
    if (name := score_of(columns)) is not None:
        values = columns[name]
        (there,) = np.nonzero(np.isfinite(values))
        form = "{:.1%}" if "pass" in name else "{:.3g}"
        for title, row in (("first", there[0]), ("best", there[np.argmax(values[there])]), ("last", there[-1])):
            found[title] = form.format(values[row]), f"at update {run.steps[row]:,}"
    if "reward" in columns:
        rewards = columns["reward"][np.isfinite(columns["reward"])]
        found["reward"] = f"{rewards[-max(len(rewards) // 4, 1) :].mean():.3g}", ""
    if (seconds := _seconds(columns)) is not None:
        found["time"] = _duration(seconds), ""
    peaks = {name: np.nanmax(columns[name]) for name in columns if name.startswith("memory/") and "peak" in name}
    if peaks:
        name = max(peaks, key=lambda name: peaks[name])
        where = name.removeprefix("memory/").removesuffix("_peak_gib")
        found["memory"] = f"{peaks[name]:.3g} GiB", f"in the {where}{_capacity(columns)}"
    if "num_tokens" in columns:
        found["tokens"] = f"{np.nanmax(columns['num_tokens']):,.0f}", ""
    return found


def score_of(columns: Mapping[str, np.ndarray]) -> str | None:
    """Return the metric that says how good a run is: pass@1 of validation prompts, or else a reward."""
    return next((name for name in ("val/pass@1", "val/reward", "reward") if name in columns), None)


def wanted_updates(run: RunRecords) -> int | None:
    """Return ``trainer.max_steps``; None if the run has no such limit."""
    wanted = run.settings("trainer").get("max_steps")
    return wanted if isinstance(wanted, int) and wanted > 0 else None


def _parted(run: RunRecords) -> list[tuple[str, str, str]]:
    """Return what the curves of several reward functions show to be wrong, of training and of validations."""
    decides, weights = _pass_rule(run), _weights(run)
    if decides is None or decides.reward not in weights:
        return []
    found: list[Finding] = []
    for place, prefix in ((TRAINING, ""), (HELD_OUT, "val/")):
        names = {name: f"{prefix}{name}" for name in ("reward", *(f"rewards/{each}/mean" for each in weights))}
        if not all(column in run.columns for column in names.values()):
            continue
        curves = RewardCurves(weights, decides, place)
        for row in zip(*(run.columns[column].tolist() for column in names.values()), strict=True):
            curves.add(dict(zip(names, row, strict=True)))
        found += curves.findings()
    return [(finding.name.capitalize(), visible(finding.about), visible(finding.sentence)) for finding in found]


def _failing_tools(columns: Mapping[str, np.ndarray]) -> list[tuple[str, str, str]]:
    """Return the tools whose calls all failed."""
    calls = ToolCalls()
    for name in columns:
        tool = name.removeprefix("environments/calls/")
        if tool != name and (failed := columns.get(f"environments/failed_calls/{tool}")) is not None:
            calls.add_many(tool, int(np.nansum(columns[name])), int(np.nansum(failed)))
    found = calls.findings()
    return [(visible(finding.name).capitalize(), finding.about, visible(finding.sentence)) for finding in found]


def _without_signal(columns: Mapping[str, np.ndarray]) -> list[tuple[str, str, str]]:
    """Return the number of batches without a learning signal, if several in a row had none."""
    if not all(name in columns for name in LESSON):
        return []
    named = {name: columns[name] for name in (*LESSON, *OTHER_LOSSES) if name in columns}
    lessons = NoSignalCount()
    for row in np.flatnonzero(np.isfinite(columns[LESSON[0]])).tolist():
        lessons.add({name: float(values[row]) for name, values in named.items()})
    number, _, why = str(lessons).partition(", ")
    return [("No signal", number, why)] if lessons.is_worth_a_word else []


def _passes(run: RunRecords) -> str:
    """Return the rule of passing, such as `` (correct >= 1)``; empty if the run's configuration does not say."""
    rule = _pass_rule(run)
    return "" if rule is None else f" ({visible(str(rule))})"


def _pass_rule(run: RunRecords) -> PassRule | None:
    """Return the rule of passing; None if the run's configuration does not say."""
    model = run.settings("model")
    name, threshold = model.get("pass_reward") or next(iter(_weights(run)), None), model.get("pass_threshold", 1.0)
    return PassRule(str(name), threshold) if name and isinstance(threshold, int | float) else None


def _weights(run: RunRecords) -> dict[str, float]:
    """Return the weights of the run's reward functions by name; empty if its configuration does not say."""
    rewards = run.settings("model").get("rewards")
    weights: dict[str, float] = {}
    for spec in rewards if isinstance(rewards, list) else []:
        spec = spec if isinstance(spec, dict) else {"function": spec}
        weight = spec.get("weight", 1.0)
        name = spec.get("name") or re.split(r"[:.]", str(spec.get("function")))[-1]
        weights[str(name)] = weight if isinstance(weight, int | float) else 1.0
    return weights


def _capacity(columns: Mapping[str, np.ndarray]) -> str:
    values = columns.get("memory/capacity_gib")
    return "" if values is None else f", of {np.nanmax(values):.3g} GiB"


def _seconds(columns: Mapping[str, np.ndarray]) -> float | None:
    if "time/total_s" in columns:
        return float(np.nanmax(columns["time/total_s"]))
    parts = [np.nansum(columns[name]) for name in ("time/rollout_s", "time/update_s") if name in columns]
    return float(sum(parts)) if parts else None


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 120:
        return f"{seconds:.3g} s"
    hours, minutes = whole // 3600, whole % 3600 // 60
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {whole % 60:02d} s"


# ---- sections -----------------------------------------------------------------------------------------


def _section(section: Section, run: RunRecords) -> dict[str, Any]:
    columns = run.columns
    panels = [_panel(panel, columns) for panel in section.panels]
    for panel in panels:
        panel["title"] += _passes(run) if "val/pass@1" in panel["metrics"] else ""
    known = [name for name in columns if (found := explain(name)) is not None and found[0] is section]
    return {
        "title": section.title,
        "about": section.about,
        "panels": [panel for panel in panels if panel["metrics"]],
        "table": _table(known, columns),
    }


def _own(columns: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """Return a section with the metrics that the user's own functions and callbacks have logged, a panel each."""
    names = sorted(name for name in columns if explain(name) is None)
    if not names:
        return []
    panels = [_panel(Panel(name, (name,)), columns) for name in names[:MAX_OWN]]
    about = "What this run's own functions and callbacks have logged."
    if len(names) > MAX_OWN:
        about += f" The first {MAX_OWN} of {len(names)} are drawn; the table has all."
    return [{"title": "Own", "about": about, "panels": panels, "table": _table(names, columns)}]


def _panel(panel: Panel, columns: Mapping[str, np.ndarray]) -> dict[str, Any]:
    names = list(dict.fromkeys(panel.of(columns)))
    return {
        "title": panel.title,
        "metrics": names,
        "limits": [name for name in names if (known := explain(name)) and known[1].limit],
        "stacked": panel.stacked,
        "about": [{"name": name, **metric_meaning(name)} for name in names],
    }


def metric_meaning(name: str) -> dict[str, str]:
    """Return what a metric means, its normal values, and what to do about others."""
    found = explain(name)
    if found is None:
        return {"means": "A metric of this run's own."}
    metric = found[1]
    meaning = {"means": metric.means, "normal": metric.normal}
    return meaning if metric.otherwise == "-" else meaning | {"otherwise": metric.otherwise}


def _table(names: Iterable[str], columns: Mapping[str, np.ndarray]) -> list[list[Any]]:
    rows = []
    for name in names:
        there = columns[name][np.isfinite(columns[name])]
        rows.append([name, *(float(f"{value:.5g}") for value in (there[-1], there.min(), there.mean(), there.max()))])
    return rows


def _lengths(rows: Sequence[Mapping[str, Any]], most: int) -> dict[str, Any] | None:
    """Return predicted and actual lengths by rollout, with the rank correlation of each; None without a prediction.

    Completions of which nothing was known before their first token have no prediction. The rollouts with points are the
    newest ones that together have at most ``most`` of them.
    """
    pairs = [row for row in rows if row["tokens"]]
    told: dict[int, list[list[float]]] = {}
    for row in pairs:
        if row["predicted"]:
            told.setdefault(row["step"], []).append([round(float(row["predicted"]), 1), int(row["tokens"])])
    if not told:
        return None
    found, left = [], most
    for step in sorted(told, reverse=True):
        table = np.array(told[step], dtype=np.float64)
        correlation = rank_correlation(table[:, 0], table[:, 1])
        chosen = np.unique(np.linspace(0, len(table) - 1, min(len(table), most)).round().astype(int)).tolist()
        left -= len(chosen)
        found.append(
            {
                "step": int(step),
                "number": len(table),
                "correlation": None if correlation is None else round(correlation, 3),
                "points": [told[step][place] for place in chosen] if left >= 0 or not found else [],
            }
        )
    known = [each for each in found if each["correlation"] is not None]
    total = sum(each["number"] for each in known)
    mean = sum(each["correlation"] * each["number"] for each in known) / total if known else None
    return {
        "rollouts": found[::-1],
        "number": sum(each["number"] for each in found),
        "without": len(pairs) - sum(each["number"] for each in found),
        "correlation": None if mean is None else round(mean, 3),
    }
