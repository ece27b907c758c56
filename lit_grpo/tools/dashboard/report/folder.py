"""Reads a run's folder, even while the run still writes to it."""

from __future__ import annotations

import csv
import math
import os
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from filelock import FileLock, Timeout

from lit_grpo.process.inputs import open_input, read_json, read_lines, read_text, read_yaml, row_reader, typed
from lit_grpo.process.terminal import counted
from lit_grpo.tools.dashboard.report.rows import (
    MAX_NAME,
    MAX_SPANS,
    Config,
    Evaluated,
    Length,
    Memory,
    SampleRow,
    Short,
    TimelineRow,
    WholeTimeline,
)

MAX_TIMELINES = 8
MAX_LENGTHS = 4_000  # completions whose predicted length is compared with the actual one
MAX_PART_BYTES = 16 * 2**20  # read from the beginning or the end of a file of rows
MAX_CONFIG_BYTES = 16 * 2**20
MAX_FIRST = 400  # samples of the first update
MAX_WRONG = 10_000  # lines of a file that cannot be read
MAX_METRICS = 10_000
MAX_CELLS = 40_000_000  # of metrics.csv; they take 8 bytes each, twice
MAX_LINES = 10_000_000  # of timeline.jsonl
LARGEST = 1e100
"""A metric whose size is larger is left out: squares and sums of others are finite."""
EVALUATED = Path("evaluation", "completions.jsonl")
MEND = "mend the file, or copy it again"
Form = TypeVar("Form")


@dataclass(frozen=True)
class RunRecords:
    """The records in a run's folder.

    Args:
        folder: Folder of the run.
        running: Whether the run still goes on.
        steps: The updates of the rows of metrics, shape (rows,), ascending.
        columns: Metrics by name, shape (rows,) each; NaN for a missing value.
        config: The run's configuration; empty if the run has none.
        config_text: The text of the configuration file.
        versions: The versions of packages at the last start of the run, a line each.
        samples: Rows of the file samples.jsonl.
        first_samples: Samples of the first update that was sampled from.
        validated: Rows of the file val_samples.jsonl.
        evaluated: Rows of evaluation/completions.jsonl, one for each prompt and policy: the greedy one if there is one.
        lengths: Rows with ``step``, ``tokens`` and ``predicted``, from trace.jsonl or else from the timelines.
        timelines: Rows of timeline.jsonl; only some if there are many.
        num_timelines: The number of rows of timeline.jsonl.
        memory: The content of memory.json; empty if the run has none.
        problems: What could not be read, a sentence for each file by its name in the folder.
    """

    folder: Path
    running: bool
    steps: np.ndarray
    columns: dict[str, np.ndarray]
    config: Config
    config_text: str
    versions: str
    samples: list[SampleRow]
    first_samples: list[SampleRow]
    validated: list[SampleRow]
    evaluated: list[Evaluated]
    lengths: list[Length]
    timelines: list[TimelineRow]
    num_timelines: int
    memory: Memory
    problems: dict[str, str]

    def settings(self, group: str) -> dict[str, Any]:
        """Return a group of the configuration, such as ``model``; empty if there is none."""
        found: Any = self.config.get(group)
        return found or {}


def read_folder(folder: Path, may_be_new: bool = False) -> RunRecords:
    """Read the records; an unfinished last line is left out.

    Args:
        folder: Folder of the run.
        may_be_new: Whether a run that goes on may have logged nothing yet.

    Raises:
        ValueError: There is no such folder, or it has no metrics of a run that can be read.
    """
    if not os.path.isdir(folder):  # unlike Path.is_dir also of a name that is too long
        raise ValueError(f"There is no run folder {str(folder)!r}; name one that holds a metrics.csv.")
    running = _is_running(folder)
    reader = _Reader(folder)
    steps, columns = reader.metrics(may_be_new and running)
    config: Config = reader.content("config.yaml", Config, lambda path: read_yaml(path, MAX_CONFIG_BYTES)) or {}
    timelines, num_timelines = reader.timelines()
    lengths = [row for row in reader.rows("trace.jsonl", Length, "end") if "predicted" in row and "tokens" in row]
    versions = reader.content("versions.json", dict[str, Short], read_json) or {}
    return RunRecords(
        folder=folder,
        running=running,
        steps=steps,
        columns=columns,
        config=config,
        config_text=reader.text("config.yaml"),
        versions="\n".join(f"{name} {value}" for name, value in versions.items()),
        samples=list(reader.rows("samples.jsonl", SampleRow, "end")),
        first_samples=reader.first_samples(),
        validated=list(reader.rows("val_samples.jsonl", SampleRow, "end")),
        evaluated=reader.evaluated(),
        lengths=(lengths or _lengths_of(timelines))[-MAX_LENGTHS:],
        timelines=timelines,
        num_timelines=num_timelines,
        memory=reader.content("memory.json", Memory, read_json) or {},
        problems=reader.problems,
    )


class _Wrong:
    """The lines of a file that are left out, in whole or in part."""

    def __init__(self, path: Path) -> None:
        self._path, self._number, self._first = path, 0, ""

    def add(self, line: int, why: str) -> None:
        """Count a line."""
        self._number += 1
        self._first = self._first or f"Line {line} of {self._path} is not read as a whole: {why}."
        if self._number > MAX_WRONG:
            raise ValueError(f"{self} Nothing of the file is used; {MEND}.")

    def __str__(self) -> str:
        more = f" Neither are {counted(self._number - 1, 'more line')}." if self._number > 1 else ""
        return self._first + more


class _Reader:
    """Reads the files of a folder; :attr:`problems` has a sentence for each that could not be read as a whole."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.problems: dict[str, str] = {}

    def metrics(self, may_be_missing: bool) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return the updates, ascending, and the metrics of each."""
        path = self.folder / "metrics.csv"
        wrong = _Wrong(path)
        try:
            steps, columns = _read_metrics(path, wrong)
        except FileNotFoundError:
            if may_be_missing:
                return np.zeros(0, np.int64), {}
            raise ValueError(
                f"{str(self.folder)!r} has no metrics.csv, so it is no run's folder, or its run has logged nothing yet."
            ) from None
        except OSError as error:
            raise ValueError(_unreadable(path, error)) from None
        if not len(steps) and not may_be_missing:
            raise ValueError(str(wrong) or f"{str(path)!r} has no whole row yet; wait for the first update.")
        self._tell("metrics.csv", str(wrong))
        return steps, columns

    def content(self, name: str, form: type[Form], read: Callable[[Path], Any]) -> Form | None:
        """Return the content of a file; None if it is missing or cannot be read."""
        path = self.folder / name
        try:
            value = read(path)
            return None if value is None else typed(value, form, str(path), MEND)
        except FileNotFoundError:
            return None
        except (ValueError, OSError) as error:
            self._tell(name, _unreadable(path, error))
            return None

    def text(self, name: str) -> str:
        """Return a text; empty if it is missing or cannot be read, which :meth:`content` has told."""
        try:
            return read_text(self.folder / name, MAX_CONFIG_BYTES)
        except (ValueError, OSError):
            return ""

    def rows(self, name: str, form: Any, part: Literal["all", "begin", "end"] = "all") -> Iterator[Any]:
        """Yield the rows of a file that have the form; of its beginning or its end MAX_PART_BYTES are read."""
        path, read = self.folder / name, row_reader(form)
        wrong, begin, left = _Wrong(path), 0, math.inf if part == "all" else MAX_PART_BYTES
        number = 0
        try:
            if part == "end":
                with open_input(path) as file:
                    begin = max(file.seek(0, 2) - MAX_PART_BYTES, 0)
            for number, line in enumerate(read_lines(path, begin), 1):
                left -= len(line)
                if left < 0 or not line.endswith(b"\n"):
                    break
                if (begin and number == 1) or line.isspace():
                    continue
                try:
                    row = read(line)
                except ValueError as error:
                    wrong.add(number + _lines_before(path, begin), str(error))
                else:
                    yield row
            if begin and number < 2:
                raise ValueError(f"{path} has no whole line in its last {MAX_PART_BYTES // 2**20} MiB; {MEND}.")
        except FileNotFoundError:
            return
        except (ValueError, OSError) as error:
            self._tell(name, _unreadable(path, error))
        finally:  # the reader may have enough
            self._tell(name, str(wrong))

    def first_samples(self) -> list[SampleRow]:
        """Return the samples of the first update."""
        found: list[SampleRow] = []
        for row in self.rows("samples.jsonl", SampleRow, "begin"):
            if len(found) == MAX_FIRST or (found and row["step"] != found[0]["step"]):
                break
            found.append(row)
        return found

    def evaluated(self) -> list[Evaluated]:
        """Return one row for each prompt and policy of a file, however long: the greedy one, or else the first."""
        kept: dict[tuple[str, str], Evaluated] = {}
        for row in self.rows(str(EVALUATED), Evaluated):
            place = row["prompt_id"], row["policy"]
            if place not in kept or (row.get("greedy") and not kept[place].get("greedy")):
                kept[place] = row
        return list(kept.values())

    def timelines(self) -> tuple[list[TimelineRow], int]:
        """Return the first, the last and some rows between, as many as can be drawn quickly, and their number."""
        name = "timeline.jsonl"
        path, read = self.folder / name, row_reader(WholeTimeline)
        wrong, rows = _Wrong(path), list[TimelineRow]()
        places = array("q")  # where lines begin; the lines themselves may take too much memory
        try:
            begin = 0
            for line in read_lines(path):
                if line.endswith(b"\n") and not line.isspace():
                    places.append(begin)
                begin += len(line)
                if len(places) > MAX_LINES:
                    raise ValueError(f"{path} has more than {MAX_LINES:,} lines; {MEND}.")
            with open_input(path) as file:

                def row(number: int) -> TimelineRow | None:
                    file.seek(places[number])
                    try:
                        return read(file.readline())
                    except ValueError as error:
                        wrong.add(number + 1, str(error))
                        return None

                last = row(len(places) - 1) if places else None
                most = MAX_SPANS // max(len(last["spans"]) if last else 0, 1)
                number = int(np.clip(most, 1, min(MAX_TIMELINES, max(len(places), 1))))
                chosen = (
                    np.unique(np.linspace(len(places) - 1, 0, number).round().astype(int)).tolist() if places else []
                )
                rows = [found for each in chosen[:-1] if (found := row(each)) is not None]
                rows += [] if last is None else [last]
        except FileNotFoundError:
            return [], 0
        except (ValueError, OSError) as error:
            self._tell(name, _unreadable(path, error))
        self._tell(name, str(wrong))
        return rows, len(places)

    def _tell(self, name: str, sentence: str) -> None:
        if sentence:
            self.problems.setdefault(name, sentence)


def _unreadable(path: Path, error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{path} cannot be read ({error.strerror}); make it readable, or copy it again."
    return str(error)


def _lines_before(path: Path, end: int) -> int:
    """Return the number of line ends before a byte of a file."""
    number = 0
    with open_input(path) as file:
        while end > 0 and (part := file.read(min(end, 2**20))):
            number += part.count(b"\n")
            end -= len(part)
    return number


def _read_metrics(path: Path, wrong: _Wrong) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Read metrics.csv.

    Raises:
        ValueError: It is no file of metrics, or has too many values.
    """
    whole = (line for line in read_lines(path) if line.endswith(b"\n"))
    texts = (line.replace(b"\0", b"").decode("utf-8-sig", "replace") for line in whole)
    try:
        names = next(csv.reader(texts), [])
    except csv.Error as error:
        raise ValueError(f"Line 1 of {path} is no header ({error}); {MEND}.") from None
    if names and names[0] != "step":
        raise ValueError(f"Line 1 of {path} begins with {names[0]!r:.60}, where metrics of a run have 'step'; {MEND}.")
    limits = (
        (len(names) > MAX_METRICS, f"has {len(names):,} columns, more than a run logs"),
        (len({*names}) < len(names), "has a column twice"),
        (any(len(name) > MAX_NAME for name in names), f"has a name of more than {MAX_NAME:,} characters"),
    )
    for found, what in limits:
        if found:
            raise ValueError(f"Line 1 of {path} {what}; {MEND}.")
    rows: dict[int, array[float]] = {}  # by step; a later row of the same step replaces the earlier one
    lines: dict[int, int] = {}
    for number, line in enumerate(texts, 2):
        step, *cells = line.rstrip("\r\n").split(",")
        if not (step.isascii() and step.isdecimal() and len(step) < 16):
            wrong.add(number, f"its step is {step!r:.60}")
        elif len(cells) != len(names) - 1:
            wrong.add(number, f"it has {counted(len(cells) + 1, 'value')}, and the header has {len(names)}")
        else:
            try:
                values = array("d", [float(cell) if cell else math.nan for cell in cells])
            except ValueError:
                numbers = [_number(cell) for cell in cells]
                place = numbers.index(None)
                wrong.add(number, f"{names[1 + place]} is {cells[place]!r:.60}, which is no number")
                values = array("d", [math.nan if one is None else one for one in numbers])
            rows[int(step)], lines[int(step)] = values, number
            if len(rows) * len(names) > MAX_CELLS:
                raise ValueError(f"{path} has more than {MAX_CELLS:,} values, too many for a report; shorten it.")
    steps = sorted(rows)
    table = np.array([rows[step] for step in steps], dtype=np.float64).reshape(len(steps), max(len(names) - 1, 0))
    large = np.abs(table) > LARGEST
    for place in np.flatnonzero(large.any(axis=1)).tolist():
        name = names[1 + int(large[place].argmax())]
        wrong.add(lines[steps[place]], f"{name} is {table[place][large[place]][0]:g}")
    table[large] = np.nan
    columns = {name: table[:, place] for place, name in enumerate(names[1:]) if np.isfinite(table[:, place]).any()}
    return np.array(steps, dtype=np.int64), columns


def _number(cell: str) -> float | None:
    """Return a number, NaN for an empty cell; None if the cell is no number."""
    try:
        return float(cell) if cell else math.nan
    except ValueError:
        return None


def _lengths_of(timelines: list[TimelineRow]) -> list[Length]:
    return [
        {"step": row["step"], "tokens": tokens, "predicted": predicted}
        for row in timelines
        for _, _, tokens, predicted, _ in row["completions"]
        if tokens is not None
    ]


def _is_running(folder: Path) -> bool:
    """Return whether a living run has the folder; a lock that can be taken is no run's, and released at once."""
    path = folder.resolve()
    if not path.name:  # of the root
        return False
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
