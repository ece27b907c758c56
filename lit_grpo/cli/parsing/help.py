"""The help of a command that takes the settings of a run: each setting in a sentence, or all sentences on some."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from lit_grpo.cli.parsing.declared import MAIN_OF_TRAINER, Setting, SettingGroup, declared

SHORT = "has_short_help"
WIDTH, GAP = 80, "   "
OPTIONS = [
    Setting("seed_everything", "Seed of sampling and of the order of the prompts.", "0", hint="true|false|int"),
    Setting("validate_first", "Validate the policy before fit changes it.", "true", hint="true|false"),
    Setting(
        "ckpt_path",
        "The checkpoint to resume from: a path, or last for that of run.name.",
        "null",
        hint="str|Path|null",
    ),
    Setting("config", "A YAML file, or a config of the package such as arithmetic."),
    Setting("print_config", "Show all settings and exit."),
    Setting("help", "Show this help and exit."),
    Setting("help-all", "Show the whole help of all fields, or of NAME, and exit."),
]
"""The options of a command that are in no group."""
MORE_OPTIONS = {
    "validate": [Setting("verbose", "Print the results.", "true", hint="true|false")],
    "test": [Setting("verbose", "Print the results.", "true", hint="true|false")],
    "predict": [Setting("return_predictions", "Keep all predictions in memory.", "null", hint="true|false|null")],
}
SPELLINGS = {"config": "-c, --config CONFIG", "help": "-h, --help", "help-all": "--help-all [NAME]"}
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
            print(whole_help(value), end="")
        parser.exit()


def short_help(command: str) -> str:
    """Return the help of a command: the settings of a run, of the Trainer's only the main ones, and its options.

    A setting has its name, its type, its default and the first sentence of its help, in one or two lines::

        --model.eval_num_generations int = 1
            Number of completions per prompt in validation and test.
    """
    *ours, (name, _, settings) = declared()
    main = [setting for setting in settings if setting.name in MAIN_OF_TRAINER]
    options = SettingGroup("", "Other options", [*OPTIONS, *MORE_OPTIONS.get(command, [])])
    lines = [f"usage: python -m lit_grpo {command} --config CONFIG [--FIELD VALUE ...]"]
    for group in [*ours, SettingGroup(name, "Lightning's Trainer, its main fields", main), options]:
        lines += ["", *textwrap.wrap(f"{_sentences(group.title)[0].rstrip('.:')}:", WIDTH)]
        lines += [line for setting in group.settings for line in _lines(setting, shortened)]
    return "\n".join([*lines, "", MORE, ""])


def whole_help(name: str) -> str:
    """Return all sentences about a setting, or about those of a group such as ``model.objective`` and within it."""
    name = name.removeprefix("--")
    settings = [*OPTIONS, *(setting for group in declared() for setting in group.settings)]
    chosen = [setting for setting in settings if f"{setting.name}.".startswith(f"{name}.")]
    lines = [line for setting in chosen for line in _lines(setting, whole)]
    return "\n".join([*lines, ""]) if lines else f"There is no field {name}; --help lists all fields.\n"


def _lines(setting: Setting, text_of: Callable[[str], str]) -> Iterator[str]:
    option = SPELLINGS.get(setting.name, f"--{setting.name}")
    head = f"  {option} {setting.kind} = {setting.default}" if setting.kind else f"  {option}"
    text = text_of(setting.text)
    if len(head) + len(GAP) + len(text) <= WIDTH:
        yield f"{head}{GAP}{text}"
        return
    yield from textwrap.wrap(head, WIDTH, subsequent_indent=" " * 8, break_long_words=False, break_on_hyphens=False)
    margin = " " * 6
    yield from textwrap.wrap(text, WIDTH, initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False)


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
