"""docs/papers.md says what is true of the files here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Entry(NamedTuple):
    """A row of what is here."""

    system: str
    what: str
    status: str
    files: str
    tests: str
    results: str


def tables() -> list[list[list[str]]]:
    """The cells of the page's two tables: what is here, what was declined."""
    parts = (ROOT / "docs" / "papers.md").read_text().split("\n## ")
    lines = [[line for line in part.splitlines() if line.startswith("|")] for part in parts]
    return [[[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]] for table in lines]


def entries() -> list[Entry]:
    return [Entry(*row) for row in tables()[0]]


def names(cell: str) -> list[str]:
    """The names in a cell; a dash is none."""
    found = re.findall(r"`([^`]+)`", cell)
    assert cell == "-" or cell == ", ".join(f"`{name}`" for name in found), cell
    return found


def test_every_system_has_one_row_that_says_what_it_is() -> None:
    rows = [row for table in tables() for row in table]
    assert len({row[0] for row in rows}) == len(rows)
    assert all(all(row) for row in rows)


def test_a_row_names_what_is_there() -> None:
    for entry in entries():
        for folder, cell in (("lit_grpo", entry.files), ("tests", entry.tests)):
            for path in names(cell):
                assert (ROOT / folder / path).is_file(), (entry.system, path)
    results = [(row[0], row[-1]) for table in tables() for row in table]
    for system, cell in results:
        for result in names(cell):
            assert (ROOT / "benchmarks" / "results" / f"{result}.json").is_file(), (system, result)
