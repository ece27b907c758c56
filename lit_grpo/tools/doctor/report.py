"""The findings of checks, and their lines on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from lit_grpo.process.terminal import visible

Verdict = Literal["pass", "warn", "fail", "skip"]


class CheckResult(NamedTuple):
    """One line of the report.

    Args:
        verdict: ``pass``; ``warn`` for something that may be intended; ``fail`` for something with which no run can
            learn; ``skip`` for something that could not be checked.
        name: Name of the check.
        figure: Measured value as text, with its unit.
        remedy: Remedy; empty with ``pass``.
    """

    verdict: Verdict
    name: str
    figure: str
    remedy: str = ""


WIDTH = 80
_COLORS = {"pass": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}


class Report:
    """Prints findings at once, 80 columns wide, and keeps them."""

    def __init__(self) -> None:
        self.findings: list[CheckResult] = []
        self._console = Console(width=WIDTH, highlight=False, markup=False, emoji=False, soft_wrap=False)

    def add(self, finding: CheckResult) -> None:
        """Print a finding."""
        self.findings.append(finding)
        text = f"{finding.figure}: {finding.remedy}" if finding.remedy else finding.figure
        line = Table.grid(padding=(0, 1), expand=True)
        line.add_column(width=4)
        line.add_column(width=18)
        line.add_column(ratio=1, overflow="fold")
        line.add_row(Text(finding.verdict, _COLORS[finding.verdict]), visible(finding.name), Text(visible(text)))
        self._console.print(line)

    def quote(self, text: str) -> None:
        """Print a text of a policy or of the data, with markup and control characters made visible."""
        line = Text(f"     {visible(text)}", "dim")
        line.truncate(WIDTH, overflow="ellipsis")
        self._console.print(line)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a small table."""
        table = Table(box=None, padding=(0, 2), pad_edge=False)
        for column in columns:
            table.add_column(column, justify="right")
        for row in rows:
            table.add_row(*map(Text, row))
        self._console.print(Padding(table, (0, 0, 0, 5)))

    def names(self, verdict: str) -> list[str]:
        return [finding.name for finding in self.findings if finding.verdict == verdict]

    @property
    def exit_code(self) -> int:
        return int(bool(self.names("fail")))

    def close(self) -> None:
        counts = [f"{len(self.names(verdict))} {verdict}" for verdict in _COLORS if self.names(verdict)]
        self._console.print(Text(", ".join(counts)))
