"""The help of a subcommand: our own fields in short, and with ``--help-all`` everything."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Callable, Iterator
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from lit_grpo.cli.parsing.names import DEFAULTS, FIELDS

SHORT = "has_short_help"
FIRST = ("run", "model", "data")
LAST = ("checkpoint", "ckpt_path", "print_config")
WIDTH, GAP = 80, "   "
MOST_LINES, LEAST_CHARACTERS, MOST_CHARACTERS = 2, 24, 80
"""Limits of a field's help. At least the first clause is shown, in whole clauses; ``--help-all`` shows all."""
OUR_TEXTS = {
    "help": "Show this help and exit.",
    "config": "A YAML file, or a config of the package such as arithmetic.",
    "print_config": "Show all settings and exit.",
    "seed_everything": "The seed of sampling and of the order of the prompts.",
    "ckpt_path": "The checkpoint to resume from: a path, or last for that of run.name.",
}
"""Help for fields whose own help, by Lightning or jsonargparse, names what does not apply here."""
MORE = """\
Where a help ends in ..., --help-all NAME shows the whole, such as --help-all
model.objective. --help-all alone also lists the fields of Lightning's Trainer:
--trainer.max_steps, --trainer.val_check_interval, --trainer.devices, ...
The fields of a class: --model.generator.help slots, and so for model.optimizer,
model.lr_scheduler and data.train."""


def add_short_help(parser: Any) -> None:
    """Let ``--help`` of a parser show our own fields in short, and ``--help-all`` everything."""
    setattr(parser, SHORT, True)
    parser.add_argument("--help-all", action=_HelpAll, help="Show the whole help of all fields, or of NAME, and exit.")


class _HelpAll(argparse.Action):
    def __init__(self, option_strings: list[str], dest: str = "", **kwargs: Any) -> None:
        super().__init__(
            option_strings, argparse.SUPPRESS, nargs="?", default=argparse.SUPPRESS, help=kwargs.get("help")
        )

    def __call__(self, parser: Any, namespace: Any, value: Any = None, option: str | None = None) -> None:
        if value is None:
            delattr(parser, SHORT)
            parser.print_help()
        else:
            print(whole_help(parser, value.removeprefix("--")), end="")
        parser.exit()


def short_help(parser: Any) -> str:
    """Return the help of our own fields: the run's, the model's and the data's first, then the callbacks'.

    A field has its name, its type, its default and the first clauses of its help, in one line where they fit::

        --model.num_generations int = 16   G, the completions per prompt.
    """
    lines = [f"usage: {parser.prog.replace(' [options]', '')} --config CONFIG [--FIELD VALUE ...]"]
    for group in sorted(parser._action_groups, key=_place):
        fields = [line for action in group._group_actions if _is_ours(action) for line in _field(action, shortened)]
        if fields:
            lines += ["", *textwrap.wrap(f"{_clauses(group.title)[0].rstrip('.:')}:", WIDTH), *fields]
    return "\n".join([*lines, "", MORE, ""])


def whole_help(parser: Any, name: str) -> str:
    """Return the whole help of a field, or of all fields of a group such as ``model.objective``."""
    actions = [action for action in parser._actions if _is_ours(action) and f"{action.dest}.".startswith(f"{name}.")]
    lines = [line for action in actions for line in _field(action, whole)]
    return "\n".join([*lines, ""]) if lines else f"There is no field {name}; --help lists all fields.\n"


def _is_ours(action: argparse.Action) -> bool:
    """Whether a field is shown: not the Trainer's, nor one that describes a class, reads a group or is linked."""
    name, kind = action.dest, type(action).__name__
    if action.help == argparse.SUPPRESS or not action.option_strings or kind in ("_ActionConfigLoad", "ActionLink"):
        return False
    return not name.endswith(".help") and not name.startswith(("trainer", "weights_only"))


def _place(group: Any) -> int:
    names = {one.dest.split(".")[0] for one in group._group_actions}
    for place, name in enumerate(FIRST):
        if name in names:
            return place
    return len(FIRST) + 1 + any(name in names for name in LAST)


def _field(action: argparse.Action, text_of: Callable[[str], str]) -> Iterator[str]:
    options = [option for option in action.option_strings if not option.endswith("+")]
    head = " ".join([f"  {', '.join(options)}", *_kind_and_default(action)])
    text = text_of(OUR_TEXTS.get(action.dest, action.help or ""))
    if len(head) + len(GAP) + len(text) <= WIDTH:
        yield f"{head}{GAP}{text}"
        return
    yield from textwrap.wrap(head, WIDTH, subsequent_indent=" " * 8, break_long_words=False, break_on_hyphens=False)
    margin = " " * 6
    yield from textwrap.wrap(
        text,
        WIDTH,
        initial_indent=margin,
        subsequent_indent=margin,
        break_on_hyphens=False,
        max_lines=MOST_LINES if text_of is shortened else None,
        placeholder=" ...",
    )


def _kind_and_default(action: argparse.Action) -> list[str]:
    """Return the type of a field and its default, such as ``int`` and ``= 16``."""
    if isinstance(action, _HelpAll):
        return ["[NAME]"]
    if action.nargs == 0 or action.dest in ("config", "print_config"):
        return []
    if action.dest in FIELDS:
        default = DEFAULTS.get(action.dest, {}).get("class_path", "")
        names = {path: name for name, path in FIELDS[action.dest].items()}
        return ["|".join([*FIELDS[action.dest], "CLASS"]), f"= {names.get(str(default), 'null')}"]
    kind = type_name(getattr(action, "_typehint", action.type))
    return [kind, f"= {_value(action.default)}"]


def type_name(hint: Any) -> str:
    """Write a type in short: ``int|auto``, ``[int,...]``, ``true|false``.

    Args:
        hint: The type of a field.
    """
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return "|".join(dict.fromkeys(type_name(part) for part in parts))
    if origin is Literal:
        return "|".join(map(str, parts))
    if origin in (list, tuple):
        return f"[{type_name(parts[0])},...]"
    if origin is dict:
        return "{NAME: VALUE}"
    if origin is Callable:
        return "CLASS"
    if hint in (bool, NoneType):
        return {bool: "true|false", NoneType: "null"}[hint]
    return getattr(hint, "__name__", "VALUE")


def _value(default: Any) -> str:
    if isinstance(default, list | tuple):
        return f"[{', '.join(map(_value, default))}]"
    if isinstance(default, bool):
        return str(default).lower()
    return "null" if default is None else str(default)


def shortened(text: str) -> str:
    """Return the first clauses of a help, up to ``MOST_CHARACTERS``, followed by ``...`` if some are left out."""
    shown, *others = _clauses(text)
    for clause in others:
        if len(shown) >= LEAST_CHARACTERS and len(shown) + len(clause) > MOST_CHARACTERS:
            return f"{shown.rstrip(';:.')} ..."
        shown += f" {clause}"
    return shown


def whole(text: str) -> str:
    """Return a help as plain text, without the marks of reStructuredText."""
    return " ".join(_clauses(text))


def _clauses(text: str) -> list[str]:
    """Cut a text after full stops, semicolons and colons, but not within brackets; remove reStructuredText's marks."""
    text = re.sub(r"\s*\(:\w+:`[^`]*`\)", "", " ".join(text.split()))
    text = re.sub(r":\w+:`~?([\w.]+)`", lambda found: found[1].rpartition(".")[2], text)
    clauses, begin, depth = list[str](), 0, 0
    for place, sign in enumerate(text):
        depth += (sign in "([{") - (sign in ")]}")
        if depth == 0 and sign in ".;:" and text[place + 1 : place + 2] == " ":
            clauses.append(text[begin : place + 1].strip())
            begin = place + 1
    return [clause.replace("``", "") for clause in [*clauses, text[begin:].strip()]]
