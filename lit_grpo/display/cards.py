"""The cards that a run prints before its first update and after its last."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.rule import Rule
from rich.text import Text

from lit_grpo.process.terminal import shell, visible

MARGIN = "  "
LEAST_WIDTH = 10


class Card:
    """Facts with their names, and commands to copy, folded to the width of the terminal.

    Args:
        title: The first line; an empty title makes no line.
        facts: The facts by name.
        commands: Commands to copy, each a list of a command and its arguments.
    """

    def __init__(self, title: str, facts: Mapping[str, str], commands: Sequence[Sequence[str]] = ()) -> None:
        self.title, self.facts, self.commands = title, facts, commands

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the lines."""
        if self.title:
            yield Rule(Text(visible(self.title), "bold"), align="left", style="dim")
        facts = {visible(name): fact for name, fact in self.facts.items()}
        label = max(map(cell_len, facts))
        width = max(options.max_width - label - len(MARGIN), LEAST_WIDTH)
        for name, fact in facts.items():
            parts = [Text(part).wrap(console, width, overflow="fold") for part in _at_commas(visible(fact), width)]
            for number, line in enumerate(line for lines in parts for line in lines):
                line.rstrip()
                margin = set_cell_size("" if number else name, label)
                yield Text(no_wrap=True, overflow="crop").append(f"{margin}{MARGIN}", "dim").append_text(line)
        if self.commands:
            yield Text("next", "dim")
            for command in self.commands:
                yield from (Text(line, no_wrap=True, overflow="fold") for line in folded(command, options.max_width))


def folded(command: Sequence[str], width: int) -> list[str]:
    """Write a command for a shell, in lines of at most ``width`` columns unless one argument is longer."""
    lines = [MARGIN + command[0]]
    for argument in command[1:]:
        if len(lines[-1]) + len(argument) + len(" \\") < width:
            lines[-1] += f" {argument}"
        else:
            lines[-1] += " \\"
            lines.append(2 * MARGIN + argument)
    return lines


def _at_commas(fact: str, width: int) -> list[str]:
    """Break a fact after commas into lines of at most ``width`` columns, unless one part is longer."""
    parts = fact.split(", ")
    lines = parts[:1]
    for part in parts[1:]:
        if cell_len(f"{lines[-1]}, {part},") <= width:
            lines[-1] += f", {part}"
        else:
            lines[-1] += ","
            lines.append(part)
    return lines


def near(path: str | Path) -> str:
    """Write a path for a shell; a path below the working directory is written relative to it."""
    path = Path(path)
    here = Path(os.getcwd())
    return shell(str(path.relative_to(here) if path.is_absolute() and path.is_relative_to(here) else path))
