"""docs/papers.md says what is true of the files here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
STATUSES = {"implemented", "deviates", "planned", "declined"}


class Entry(NamedTuple):
    """A row of the table."""

    system: str
    what: str
    status: str
    files: str
    tests: str
    results: str


def entries() -> list[Entry]:
    lines = (ROOT / "docs" / "papers.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return [Entry(*row) for row in rows[2:]]  # after the names of the columns and their rule


def names(cell: str) -> list[str]:
    """The names in a cell; a dash is none."""
    found = re.findall(r"`([^`]+)`", cell)
    assert cell == "-" or cell == ", ".join(f"`{name}`" for name in found), cell
    return found


def test_every_system_has_one_row() -> None:
    systems = [entry.system for entry in entries()]
    assert len(systems) > 70 and len({*systems}) == len(systems)


def test_a_row_names_what_is_there() -> None:
    for entry in entries():
        assert entry.what, entry.system
        for path in (*names(entry.files), *names(entry.tests)):
            assert (ROOT / path).is_file(), (entry.system, path)
        assert all(Path(test).parts[0] == "tests" for test in names(entry.tests)), entry.system
        for result in names(entry.results):
            assert (ROOT / "benchmarks" / "results" / f"{result}.json").is_file(), (entry.system, result)


def test_a_status_is_one_of_four_and_says_what_it_must() -> None:
    for entry in entries():
        status, _, reason = entry.status.partition(": ")
        assert status in STATUSES, entry.system
        if status == "implemented":
            assert names(entry.files) and names(entry.tests), entry.system
        if status in ("deviates", "declined"):
            assert reason, f"{entry.system}: say how it deviates, or why it was declined"
        if status == "declined":
            assert not names(entry.files), entry.system
