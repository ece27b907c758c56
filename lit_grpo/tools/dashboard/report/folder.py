"""Reads a run's folder, even while the run still writes to it."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from filelock import FileLock, Timeout

MAX_TIMELINES = 8
MAX_SPANS = 30_000  # of all timelines that are shown
MAX_LENGTHS = 4_000  # completions whose predicted length is compared with the actual one
MAX_TAIL_BYTES = 16 * 2**20  # read from the end of a file of rows
EVALUATED = Path("evaluation", "completions.jsonl")


@dataclass(frozen=True)
class RunRecords:
    """The records in a run's folder.

    Args:
        folder: Folder of the run.
        running: Whether the run still goes on.
        steps: The updates of the rows of metrics, shape (rows,), ascending.
        columns: Metrics by name, shape (rows,) each; NaN for a missing value.
        config: The run's configuration; empty if it was started from Python.
        config_text: The text of the configuration file.
        versions: The versions of packages at the last start of the run, a line each.
        samples: Rows of the file samples.jsonl.
        validated: Rows of the file val_samples.jsonl.
        evaluated: Rows of evaluation/completions.jsonl, one for each prompt and policy: the greedy one if there is one.
        lengths: Rows with ``step``, ``tokens`` and ``predicted``, from trace.jsonl or else from the timelines.
        timelines: Rows of timeline.jsonl; only some if there are many.
        num_timelines: The number of rows of timeline.jsonl.
        memory: The content of memory.json; empty if the run has none.
    """

    folder: Path
    running: bool
    steps: np.ndarray
    columns: dict[str, np.ndarray]
    config: dict[str, Any]
    config_text: str
    versions: str
    samples: list[dict[str, Any]]
    validated: list[dict[str, Any]]
    evaluated: list[dict[str, Any]]
    lengths: list[dict[str, Any]]
    timelines: list[dict[str, Any]]
    num_timelines: int
    memory: dict[str, Any]

    def settings(self, group: str) -> dict[str, Any]:
        """Return a group of the configuration, such as ``model``; empty if there is none."""
        found = self.config.get(group)
        return found if isinstance(found, dict) else {}


def read_folder(folder: Path, may_be_new: bool = False) -> RunRecords:
    """Read the records; unfinished lines are left out.

    Args:
        folder: Folder of the run.
        may_be_new: Whether a run that goes on may have logged nothing yet.

    Raises:
        ValueError: There is no such folder, or it has no metrics of a run.
    """
    if not folder.is_dir():
        raise ValueError(f"There is no run folder {str(folder)!r}; name one that holds a metrics.csv.")
    running = _is_running(folder)
    may_be_new = may_be_new and running
    if not (folder / "metrics.csv").is_file() and not may_be_new:
        raise ValueError(
            f"{str(folder)!r} has no metrics.csv, so it is no run's folder, or its run has logged nothing yet."
        )
    steps, columns = _read_metrics(folder / "metrics.csv")
    if not len(steps) and not may_be_new:
        raise ValueError(f"{str(folder / 'metrics.csv')!r} has no whole row yet; wait for the first update.")
    config_text = _text(folder / "config.yaml")
    timelines, num_timelines = _read_timelines(folder / "timeline.jsonl")
    lengths = [row for row in _tail(folder / "trace.jsonl") if "predicted" in row] or _lengths_of(timelines)
    return RunRecords(
        folder=folder,
        running=running,
        steps=steps,
        columns=columns,
        config=_config(config_text),
        config_text=config_text,
        versions="\n".join(f"{name} {value}" for name, value in _object(folder / "versions.json").items()),
        samples=list(_tail(folder / "samples.jsonl")),
        validated=list(_tail(folder / "val_samples.jsonl")),
        evaluated=_evaluated(folder / EVALUATED),
        lengths=lengths[-MAX_LENGTHS:],
        timelines=timelines,
        num_timelines=num_timelines,
        memory=_object(folder / "memory.json"),
    )


def _read_metrics(path: Path) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    if not path.is_file():
        return np.zeros(0, np.int64), {}
    lines = path.read_bytes().decode("utf-8", "replace").splitlines(keepends=True)
    reader = csv.reader(line.replace("\0", "") for line in lines if line.endswith("\n"))
    names = next(reader, [])
    rows = {}  # by step; a later row of the same step replaces the earlier one
    for cells in reader:
        if len(cells) == len(names) and cells and cells[0].isdecimal():
            rows[int(cells[0])] = [_number(cell) for cell in cells[1:]]
    steps = sorted(rows)
    table = np.array([rows[step] for step in steps], dtype=np.float64).reshape(len(steps), max(len(names) - 1, 0))
    columns = {name: table[:, place] for place, name in enumerate(names[1:]) if np.isfinite(table[:, place]).any()}
    return np.array(steps, dtype=np.int64), columns


def _number(cell: str) -> float:
    try:
        return float(cell) if cell else np.nan
    except ValueError:
        return np.nan


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _config(text: str) -> dict[str, Any]:
    try:
        config = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}
    return config if isinstance(config, dict) else {}


def _object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if there is none."""
    try:
        found = json.loads(_text(path) or "{}", parse_constant=lambda _: None)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _tail(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows at the end of a file, in order."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(size - MAX_TAIL_BYTES, 0))
        lines = file.read(MAX_TAIL_BYTES).splitlines(keepends=True)
    for line in lines[1:] if size > MAX_TAIL_BYTES else lines:
        if (row := _row(line)) is not None:
            yield row


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line, parse_constant=lambda _: None) if line.endswith(b"\n") else None  # NaN is no JSON
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _evaluated(path: Path) -> list[dict[str, Any]]:
    """Return one row for each prompt and policy of a file, however long: the greedy one, or else the first sample."""
    kept: dict[tuple[str, str], dict[str, Any]] = {}
    if not path.is_file():
        return []
    with path.open("rb") as file:
        for row in filter(None, map(_row, file)):
            if "policy" not in row or "prompt_id" not in row:
                continue
            place = str(row["prompt_id"]), str(row["policy"])
            if place not in kept or (row.get("greedy") and not kept[place].get("greedy")):
                kept[place] = row
    return list(kept.values())


def _read_timelines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the first, the last and some rows between, as many as can be drawn quickly, and the number of rows."""
    if not path.is_file():
        return [], 0
    places = []  # where lines begin; the lines themselves may take too much memory
    with path.open("rb") as file:
        begin = 0
        for line in file:
            if line.endswith(b"\n"):
                places.append(begin)
            begin += len(line)
        if not places:
            return [], 0
        file.seek(places[-1])
        last = _row(file.readline())
        most = MAX_SPANS // max(len((last or {}).get("spans", ())), 1)
        number = int(np.clip(most, 1, min(MAX_TIMELINES, len(places))))
        chosen = np.unique(np.linspace(len(places) - 1, 0, number).round().astype(int)).tolist()
        rows = []
        for place in chosen:
            file.seek(places[place])
            rows.append(_row(file.readline()))
    return [row for row in rows if row is not None and "spans" in row], len(places)


def _lengths_of(timelines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"step": row["step"], "tokens": tokens, "predicted": predicted}
        for row in timelines
        for _, _, tokens, predicted, _ in row["completions"]
        if tokens is not None
    ]


def _is_running(folder: Path) -> bool:
    """Whether a living run has the folder; if its lock can be taken, no run has it, and it is released at once."""
    path = folder.resolve()
    lock = path.with_name(f".{path.name}.lock")
    if not lock.exists():
        return False
    try:
        with FileLock(lock, blocking=False):
            return False
    except Timeout:
        return True
    except OSError:  # the folder belongs to another user
        return False
