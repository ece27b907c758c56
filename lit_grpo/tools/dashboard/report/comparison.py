"""Several runs beside each other: their final figures, the settings that differ, and the metrics to draw."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lit_grpo.process.terminal import visible
from lit_grpo.tools.dashboard.report.content import figures, metric_meaning, score_of
from lit_grpo.tools.dashboard.report.folder import RunRecords
from lit_grpo.tools.dashboard.specification import explain, sections

FIGURES = {
    "updates": "Updates",
    "first": "First {}",
    "best": "Best {}",
    "last": "Last {}",
    "reward": "Reward, last quarter",
    "tokens": "Sampled tokens",
    "time": "Time in steps",
    "memory": "Peak memory",
}
"""The final figures of a run, in the order of the table's columns; `{}` is the score."""
PLACES = ("run.name", "run.dir", "trainer.default_root_dir")
"""Settings that say where a run is, not how it learns."""
MAX_VALUE = 300  # characters of a setting


def labels(runs: Sequence[RunRecords]) -> list[str]:
    """Return the runs' names; runs with the same name are called by their folders as they were given."""
    names = [run.folder.resolve().name for run in runs]
    counts = Counter(names)
    return [visible(name if counts[name] == 1 else str(run.folder)) for name, run in zip(names, runs, strict=True)]


def comparison(runs: Sequence[RunRecords]) -> dict[str, Any]:
    """Return what a page shows of several runs together; curves are drawn from the contents of the runs."""
    logged = list(dict.fromkeys(name for run in runs for name in run.columns))
    return {
        "figures": _table(runs),
        "settings": differences([run.config for run in runs]),
        "versions": differences([_versions(run) for run in runs]),
        "without_settings": [place for place, run in enumerate(runs) if not run.config],
        "sections": [
            {"title": title, "about": about, "metrics": [_panel(name) for name in names]}
            for title, about, names in _metrics(logged)
            if names
        ],
    }


def _table(runs: Sequence[RunRecords]) -> dict[str, Any]:
    """Return the final figures, a row for each run; where runs have different scores, each says which it is."""
    scores = [score_of(run.columns) for run in runs]
    several = len({*scores} - {None}) > 1
    title = "score" if several else next(filter(None, scores), "score").removeprefix("val/")
    found = [figures(run) for run in runs]
    shown = [name for name in FIGURES if any(name in each for each in found)]
    rows = []
    for score, each in zip(scores, found, strict=True):
        if several:
            each |= {
                name: (each[name][0], f"{score} {each[name][1]}") for name in ("first", "best", "last") if name in each
            }
        rows.append([each.get(name) for name in shown])
    return {"columns": [FIGURES[name].format(title) for name in shown], "rows": rows}


def differences(settings: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str | None]]]:
    """Return the fields that differ, each with its value in every run; None where a run has no such field.

    Fields are written as on the command line, so without ``class_path`` and ``init_args``. Runs without any settings do
    not count as different.
    """
    flat = [dict(_leaves(each)) if each else {} for each in settings]
    fields = dict.fromkeys(field for each in flat for field in each if field not in PLACES)
    rows = []
    for field in fields:
        values = [each.get(field) for each in flat]
        if len({value for value, each in zip(values, flat, strict=True) if each}) > 1:
            rows.append((visible(field), values))
    return rows


def _leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Yield the path and the text of each value; elements of a list are numbered only if they have fields."""
    if isinstance(value, Mapping) and value:
        for name, part in value.items():
            yield from _leaves(part, path if name in ("class_path", "init_args") else (*path, str(name)))
    elif isinstance(value, list) and any(isinstance(part, Mapping) for part in value):
        for number, part in enumerate(value):
            yield from _leaves(part, (*path, str(number)))
    else:
        text = visible(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))
        yield ".".join(path), text if len(text) <= MAX_VALUE else text[:MAX_VALUE] + " …"


def _versions(run: RunRecords) -> dict[str, str]:
    lines = (line.partition(" ") for line in run.versions.splitlines())
    return {name: version for name, _, version in lines}


def _metrics(logged: Sequence[str]) -> Iterator[tuple[str, str, list[str]]]:
    """Yield title, text and metrics of each section: those of its panels, each metric in a chart of its own."""
    for section in sections():
        limits = [metric for metric in section.metrics if metric.limit]
        names = [name for panel in section.panels for name in panel.of(logged)]
        names = [name for name in names if not any(limit.covers(name) for limit in limits)]
        yield section.title, section.about, list(dict.fromkeys(names))
    own = [name for name in logged if explain(name) is None]
    yield "Own", "Metrics that the runs' own functions and callbacks have logged.", sorted(own)


def _panel(name: str) -> dict[str, Any]:
    return {"title": name, "about": [{"name": name, **metric_meaning(name)}]}
