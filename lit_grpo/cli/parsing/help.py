"""The help of a subcommand: the fields that runs set, each in a sentence, and with ``--help-all`` everything."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Callable, Iterator
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from lit_grpo.cli.parsing.names import DEFAULTS, FIELDS

SHORT = "has_short_help"
FIRST = ("run", "trainer", "model", "data")
LAST = ("checkpoint", "ckpt_path", "print_config")
WIDTH, GAP = 80, "   "
OUR_TEXTS = {
    "help": "Show this help and exit.",
    "config": "A YAML file, or a config of the package such as arithmetic.",
    "print_config": "Show all settings and exit.",
    "seed_everything": "The seed of sampling and of the order of the prompts.",
    "ckpt_path": "The checkpoint to resume from: a path, or last for that of run.name.",
    "trainer.max_steps": "Optimizer steps of the whole run, including those before its checkpoint.",
    "trainer.val_check_interval": "Training iterations from one validation to the next.",
    "trainer.devices": "Number of devices; each one is a rank, with a process of its own.",
    "trainer.accelerator": "Type of device to train on.",
    "trainer.strategy": "Strategy for training on several devices; fsdp2 shards the policy.",
    "trainer.precision": "Compute precision: float32 by default; bf16-mixed is for GPUs with bfloat16.",
}
"""Help for fields whose own help, by Lightning or jsonargparse, names what does not apply here."""
OUR_TYPES = {
    "trainer.accelerator": "auto|cpu|gpu|...",
    "trainer.strategy": "auto|ddp|fsdp2|...",
    "trainer.devices": "auto|int|[int,...]",
    "trainer.precision": "32-true|bf16-mixed|...",
    "trainer.val_check_interval": "int",
}
"""Types of fields whose own type names what does not apply here."""
TRAINER = "Lightning's Trainer, its main fields"
MORE = """\
A help that ends in ... has further sentences; --help-all NAME shows them, for
a field or a group, and so does --NAME.help (--model.objective.help,
--rollout.help). --help-all trainer lists all fields of Lightning's Trainer.
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
    """Return the help of fields: the run's, the trainer's, the model's and the data's first, then the callbacks'.

    A field has its name, its type, its default and the first sentence of its help, in one line where they fit::

        --model.num_generations int = 16   G, the completions per prompt.
    """
    lines = [f"usage: {parser.prog.replace(' [options]', '')} --config CONFIG [--FIELD VALUE ...]"]
    for group in sorted(parser._action_groups, key=_place):
        fields = [line for action in group._group_actions if _is_shown(action) for line in _field(action, shortened)]
        if fields:
            title = TRAINER if fields[0].startswith("  --trainer.") else _sentences(group.title)[0].rstrip(".:")
            lines += ["", *textwrap.wrap(f"{title}:", WIDTH), *fields]
    return "\n".join([*lines, "", MORE, ""])


def whole_help(parser: Any, name: str) -> str:
    """Return the whole help of a field, or of all fields of a group such as ``model.objective``."""
    actions = [action for action in parser._actions if _is_field(action) and f"{action.dest}.".startswith(f"{name}.")]
    lines = [line for action in actions for line in _field(action, whole)]
    return "\n".join([*lines, ""]) if lines else f"There is no field {name}; --help lists all fields.\n"


def _is_field(action: argparse.Action) -> bool:
    """Whether an argument is a field: it neither describes a class, nor reads a group, nor is linked to another."""
    if action.help == argparse.SUPPRESS or not action.option_strings:
        return False
    return type(action).__name__ not in ("_ActionConfigLoad", "ActionLink") and not action.dest.endswith(".help")


def _is_shown(action: argparse.Action) -> bool:
    """Whether the short help has a field: of the Trainer's only those that have a text here."""
    name = action.dest
    return _is_field(action) and (name in OUR_TEXTS or not name.startswith(("trainer", "weights_only")))


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
    yield from textwrap.wrap(text, WIDTH, initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False)


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
    kind = OUR_TYPES.get(action.dest) or type_name(getattr(action, "_typehint", action.type))
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
    """Return a short help as it is, and of a long one the first sentence, followed by ``...``."""
    first, *others = _sentences(text)
    if others and len(shown := " ".join([first, *others])) <= WIDTH:
        return shown
    return f"{first} ..." if others else first


def whole(text: str) -> str:
    """Return a help as plain text, without the marks of reStructuredText."""
    return " ".join(_sentences(text))


def _sentences(text: str) -> list[str]:
    """Cut a text after full stops, but not within brackets; remove reStructuredText's marks."""
    text = re.sub(r"\s*\(:\w+:`[^`]*`\)", "", " ".join(text.split()))
    text = re.sub(r":\w+:`~?([\w.]+)`", lambda found: found[1].rpartition(".")[2], text)
    sentences, begin, depth = list[str](), 0, 0
    for place, sign in enumerate(text):
        depth += (sign in "([{") - (sign in ")]}")
        if depth == 0 and sign == "." and text[place + 1 : place + 2] == " ":
            sentences.append(text[begin : place + 1].strip())
            begin = place + 1
    return [sentence.replace("``", "") for sentence in [*sentences, text[begin:].strip()]]
