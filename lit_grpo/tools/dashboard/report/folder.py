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
        lengths: Rows with ``step``, ``tokens`` and ``predicted``, from trace.jsonl or else from the timelines.
        timelines: Rows of timeline.jsonl; only some if there are many.
        num_timelines: The number of rows of timeline.jsonl.
    """

    folder: Path
    running: bool
    steps: np.ndarray
    columns: dict[str, np.ndarray]
    config: dict[str, Any]
    config_text: str
    versions: str
    samples: list[dict[str, Any]]
    lengths: list[dict[str, Any]]
    timelines: list[dict[str, Any]]
    num_timelines: int


def read_folder(folder: Path) -> RunRecords:
    """Read the records; unfinished lines are left out.

    Raises:
        ValueError: There is no such folder, or it has no metrics of a run.
    """
    if not folder.is_dir():
        raise ValueError(f"There is no run folder {str(folder)!r}; name one that holds a metrics.csv.")
    if not (folder / "metrics.csv").is_file():
        raise ValueError(
            f"{str(folder)!r} has no metrics.csv, so it is no run's folder, or its run has logged nothing yet."
        )
    steps, columns = _read_metrics(folder / "metrics.csv")
    if not len(steps):
        raise ValueError(f"{str(folder / 'metrics.csv')!r} has no whole row yet; wait for the first update.")
    config_text = _text(folder / "config.yaml")
    timelines, num_timelines = _read_timelines(folder / "timeline.jsonl")
    lengths = [row for row in _tail(folder / "trace.jsonl") if "predicted" in row] or _lengths_of(timelines)
    return RunRecords(
        folder=folder,
        running=_is_running(folder),
        steps=steps,
        columns=columns,
        config=_config(config_text),
        config_text=config_text,
        versions=_versions(folder / "versions.json"),
        samples=list(_tail(folder / "samples.jsonl")),
        lengths=lengths[-MAX_LENGTHS:],
        timelines=timelines,
        num_timelines=num_timelines,
    )


def _read_metrics(path: Path) -> tuple[np.ndarray, dict[str, np.ndarray]]:
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


def _versions(path: Path) -> str:
    try:
        found = json.loads(_text(path) or "{}")
    except ValueError:
        return ""
    return "\n".join(f"{name} {value}" for name, value in found.items()) if isinstance(found, dict) else ""


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
