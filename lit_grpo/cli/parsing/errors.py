"""The parser, whose errors are one sentence."""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from jsonargparse import ArgumentError, set_parsing_settings
from jsonargparse._typehints import ActionTypeHint
from lightning.pytorch.cli import LightningArgumentParser

from lit_grpo.cli.parsing.fields import Field
from lit_grpo.cli.parsing.help import SHORT, short_help
from lit_grpo.cli.parsing.names import fields_after_classes, with_class_paths
from lit_grpo.cli.parsing.places import with_place
from lit_grpo.cli.parsing.sentences import did_you_mean, exit_with, near, nearest, shipped, with_paths
from lit_grpo.tools.commands import TOOLS

_NO_OPTION = re.compile(r"(?:does not accept option|Group '(?P<group>[\w.]+)' does not.*|Option) '(?P<name>[\w.]+)'")
_CLASS_PATH = re.compile(r"class_path[= ]'([\w.]+)'")
_NO_CONFIG = re.compile(r'Parser key "config": File does not exist: .*?([^/\']*)\'?$')
_NO_COMMAND = re.compile(r"argument subcommand: invalid choice: '([^']*)'")
COMMANDS = ("fit", "validate", "test", "predict", *TOOLS)
_KEY = re.compile(r'Parser key "([\w.]+)"')


class InputParser(LightningArgumentParser):
    """A parser whose errors are one sentence, without hundreds of lines of usage before it.

    A value that is the name of a file stays a name (``--data.train rows.jsonl``): jsonargparse would read the file as a
    configuration. Configurations are given with ``--config`` only: files, or names of those that come with the package
    (``arithmetic``, ``generators/vllm``).
    """

    given: ClassVar[list[str]] = []
    """The command line that was parsed last; a parser of a subcommand does not know it."""

    def parse_args(self, args: Sequence[str] | None = None, *rest: Any, **options: Any) -> Any:
        """Parse, after names of configurations and of classes are replaced by their paths.

        jsonargparse has ``--FIELD.help`` for fields that are classes; for other fields and groups it is ``--help-all``.
        """
        given = sys.argv[1:] if args is None else list(args)
        known = _options(self) if any(one.endswith(".help") for one in given) else ()
        for place, one in reversed(list(enumerate(given))):
            if one.startswith("--") and one.endswith(".help") and one not in known:
                given[place : place + 1] = ["--help-all", one[2:].removesuffix(".help")]
        InputParser.given = [*with_paths(given)]
        return super().parse_args([*with_class_paths(fields_after_classes(InputParser.given))], *rest, **options)

    def add_argument(self, *args: Any, **kwargs: Any) -> Any:
        """Add an argument whose classes have short names, and whose lists replace earlier lists."""
        if is_dataclass(kwargs.get("type")):
            set_parsing_settings(docstring_parse_attribute_docstrings=True)
        action = super().add_argument(*args, **kwargs)
        if type(action) is ActionTypeHint:
            action.__class__ = Field
        return action

    def add_class_arguments(self, theclass: Any, *args: Any, **kwargs: Any) -> list[str]:
        """Add a class's arguments; none of them is read from a file.

        The help of a dataclass's field is the docstring under it. Classes of other kinds have none there, and looking
        for it in the sources of torch's and Lightning's takes a quarter of a second.
        """
        set_parsing_settings(docstring_parse_attribute_docstrings=is_dataclass(theclass))
        return super().add_class_arguments(theclass, *args, **(kwargs | {"sub_configs": False}))

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        """Return the short help of our own fields; with ``--help-all`` everything."""
        return short_help(self.prog.split()[-1]) if SHORT in self.__dict__ else super().format_help(*args, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the mistake, for an unknown option with the nearest known ones, and exit with code 2.

        The parser of a class in a config raises an error instead, because its caller knows the place in the config.
        """
        if not self.exit_on_error:
            raise ArgumentError(None, message) from ex
        parser = getattr(ex, "subcommand_parser", None) or self
        sentence = _unknown_name(message) or _unknown_field(message, parser) or one_sentence(message)
        if sentence.startswith("unrecognized arguments: "):
            sentence += nearest(sentence.split()[2], _options(self))
        exit_with(with_place(sentence, InputParser.given))


def own_frames(error: BaseException) -> str:
    """Return a line for each frame of the user's own files in an error's traceback, and in those of its causes."""
    ours = [Path(__file__).parents[2], Path(__file__).parents[3] / "callbacks"]
    others = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    said: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        for frame in traceback.extract_tb(cause.__traceback__):
            path = Path(frame.filename)
            if path.is_file() and not any(path.is_relative_to(folder) for folder in (*ours, *others)):
                said.append(f"\n  {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}")
        cause = cause.__cause__
    return "".join(dict.fromkeys(said))


def one_sentence(message: str) -> str:
    """Shorten jsonargparse's message about a value to the types whose errors help."""
    lines = [line.strip() for line in message.strip().splitlines()]
    if "Errors:" not in lines:
        return " ".join(line for line in lines if not line.startswith("Given value"))
    parts = [lines[0]] if lines[0].startswith("Parser key") else [""]
    for line in lines[lines.index("Errors:") + 1 :]:
        if line.startswith("Given value"):
            break
        if line.startswith("- "):
            parts.append(line[2:])
        else:
            parts[-1] += f" {line}"
    place, *others = [part for part in parts if "NoneType" not in part]
    told = [part for part in others if part != "Expected a <class 'str'>"] or others  # the value names a class
    return " ".join(part for part in (place, *told) if part)


def _unknown_name(message: str) -> str | None:
    """Name an unknown command or configuration, with the nearest known one; ``None`` for another mistake."""
    if found := _NO_COMMAND.search(message):
        hint = f"take one of {', '.join(COMMANDS)}."
        return f"There is no command {found[1]!r}{did_you_mean(difflib.get_close_matches(found[1], COMMANDS), hint)}"
    if found := _NO_CONFIG.search(message):
        configs = sorted(str(path.relative_to(shipped()).with_suffix("")) for path in shipped().rglob("*.yaml"))
        alike = difflib.get_close_matches(found[1].removesuffix(".yaml"), configs, n=1)
        hint = f"give a file, or one that comes with the package: {', '.join(configs)}."
        return f"There is no config {found[1]!r}{did_you_mean(alike, hint)}"
    return None


def _unknown_field(message: str, parser: Any) -> str | None:
    """Name an unknown field by its whole path, with the nearest known one; ``None`` for another mistake."""
    unknown = _NO_OPTION.search(message)
    if unknown is None or "is not accepted before subcommand" in message:
        return None
    before = message[: unknown.start()]
    path = ".".join([*_KEY.findall(before), *filter(None, [unknown["group"]]), unknown["name"]])
    paths = _CLASS_PATH.findall(before) or _CLASS_PATH.findall(message)
    if not paths:
        options = [option.removeprefix("--") for option in _options(parser)]
        return f"There is no field {path}{did_you_mean(near(path, options), 'fit --help lists all fields.')}"
    fields = _parameters(paths[-1])
    alike = difflib.get_close_matches(unknown["name"], fields, n=1)
    hint = f"it has {', '.join(fields)}." if fields else "see its documentation."
    return f"There is no field {path}: {paths[-1]} has no {unknown['name']!r}{did_you_mean(alike, hint)}"


def _parameters(class_path: str) -> list[str]:
    """Return the fields of a class with those of its parents; nothing if they cannot be read."""
    module, _, name = class_path.rpartition(".")
    try:
        parents = getattr(importlib.import_module(module), name).__mro__
        names = [name for one in parents for name in inspect.signature(one.__init__).parameters]
    except (ImportError, AttributeError, TypeError, ValueError):
        return []
    return list(dict.fromkeys(name for name in names if name not in ("self", "args", "kwargs")))


def _options(parser: Any) -> list[str]:
    options: list[str] = []
    for action in parser._actions:
        options += action.option_strings
        for choice in (getattr(action, "_name_parser_map", None) or {}).values():
            options += _options(choice)
    return options
