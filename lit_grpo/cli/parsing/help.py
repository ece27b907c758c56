"""The help of a subcommand: our own fields first and alone, and the Trainer's where they are asked for."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SHORT = "has_short_help"
FIRST = ("run", "model", "data")
LAST = ("checkpoint", "ckpt_path", "print_config")
MORE = (
    "Classes: --model.optimizer.help AdamW lists the fields of one, and so for model.generator, model.lr_scheduler and "
    "data.train.\nThe Trainer's fields, such as --trainer.max_steps, --trainer.val_check_interval, --trainer.devices "
    "and --trainer.precision:\n--help-all lists them as well."
)


def add_short_help(parser: Any) -> None:
    """Let ``--help`` of a parser leave out the Trainer's fields, which ``--help-all`` shows."""
    setattr(parser, SHORT, True)
    parser.add_argument("--help-all", action=_HelpAll, help="Show the Trainer's fields too, and exit.")


class _HelpAll(argparse.Action):
    def __init__(self, option_strings: list[str], dest: str = "", **kwargs: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, help=kwargs.get("help"))

    def __call__(self, parser: Any, *_: Any) -> None:
        delattr(parser, SHORT)
        parser.print_help()
        parser.exit()


def short_help(parser: Any) -> str:
    """Format the help of our own fields: the run's, the model's and the data's first, then the callbacks'."""
    with _left_out(parser, [one for one in parser._actions if _is_lightnings(one)]):
        formatter = parser._get_formatter()
        formatter.add_usage(f"{parser.prog.replace(' [options]', '')} --config CONFIG [--FIELD VALUE ...]", [], [], "")
        formatter.add_text(parser.description)
        for group in sorted(parser._action_groups, key=_place):
            if any(one.help != argparse.SUPPRESS for one in group._group_actions):
                formatter.start_section(group.title)
                formatter.add_text(group.description)
                formatter.add_arguments(group._group_actions)
                formatter.end_section()
        return f"{formatter.format_help()}\n{MORE}\n"


def _is_lightnings(action: argparse.Action) -> bool:
    """Whether a field is the Trainer's, or one that only describes a class, or reads a group from a file."""
    name = action.dest
    describes = name.endswith(".help") or type(action).__name__ == "_ActionConfigLoad"
    return describes or name == "weights_only" or name.startswith("trainer")


def _place(group: Any) -> int:
    names = {one.dest.split(".")[0] for one in group._group_actions}
    for place, name in enumerate(FIRST):
        if name in names:
            return place
    return len(FIRST) + 1 + any(name in names for name in LAST)


@contextmanager
def _left_out(parser: Any, actions: list[argparse.Action]) -> Iterator[None]:
    helps = [action.help for action in actions]
    for action in actions:
        action.help = argparse.SUPPRESS
    try:
        yield
    finally:
        for action, text in zip(actions, helps, strict=True):
            action.help = text
