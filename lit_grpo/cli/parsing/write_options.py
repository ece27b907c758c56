"""``python -m lit_grpo.cli.parsing.write_options``: write the names of all fields, and fit's help, from the parser."""

from __future__ import annotations

import argparse
import os
from typing import Any

from jsonargparse._common import parser_context

from lit_grpo.cli.command_line import LikeFitCLI, cli_arguments
from lit_grpo.cli.parsing.early import HELP, TABLE


class _Parsers(LikeFitCLI):
    """Stops after the parsers are made."""

    def parse_arguments(self, parser: Any, args: Any) -> None:
        raise _Made(parser)


class _Made(Exception):
    pass


def fit_parser() -> Any:
    """Return the parser of ``fit``."""
    try:
        _Parsers(None, **cli_arguments(["fit"]))  # pyright: ignore[reportArgumentType]
    except _Made as made:
        return made.args[0]._subcommands_action._name_parser_map["fit"]
    raise AssertionError("parsers are made first")


def help_of(parser: Any) -> str:
    """Return what ``fit --help`` shows, 80 columns wide."""
    os.environ["COLUMNS"] = "80"
    with parser_context(parent_parser=parser):
        return parser.format_help()


def options(parser: Any) -> str:
    """Return a line for each name; the name of a group ends in a dot."""
    return "".join(f"{name}\n" for name in _names(parser))


def _names(parser: Any) -> list[str]:
    actions: list[argparse.Action] = parser._actions
    names: dict[str, None] = {}
    for action in actions:
        for option in action.option_strings:
            name = option.removeprefix("--")
            if option.startswith("--") and not name.endswith(("+", ".help")):
                names[name + "." * (type(action).__name__ == "_ActionConfigLoad")] = None
        for name in [action.dest.rsplit(".", count)[0] for count in range(1, action.dest.count(".") + 1)]:
            if name not in names:
                names[f"{name}."] = None
    fields = [name for name in names if not name.endswith(".")]
    return [name for name in names if name.removesuffix(".") not in fields or not name.endswith(".")]


if __name__ == "__main__":
    made = fit_parser()
    TABLE.write_text(options(made))
    HELP.write_text(help_of(made))
