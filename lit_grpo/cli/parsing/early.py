"""Mistakes that can be found before torch and Lightning are imported, which takes seconds.

Only names are checked. Values, fields of classes and those of the Trainer are left to the real parser.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import islice
from pathlib import Path

import yaml

from lit_grpo.cli.parsing.declared import declared
from lit_grpo.cli.parsing.help import MORE_OPTIONS, OPTIONS, short_help, whole_help
from lit_grpo.cli.parsing.sentences import CONFIG, did_you_mean, exit_with, near, nearest, with_paths
from lit_grpo.process.inputs import compose_config
from lit_grpo.tools.commands import TOOLS

COMMANDS = ("fit", "validate", "test", "predict", *(name for name, tool in TOOLS.items() if tool.has_settings_of_a_run))
"""The commands that take the settings of a run."""
OVERVIEW = """\
usage: python -m lit_grpo COMMAND [--config CONFIG] [--FIELD VALUE ...]

Train, with the settings of a run (python -m lit_grpo fit --help lists them):
  fit        train a policy
  validate   sample and reward the validation prompts
  test       the same with the test prompts
  predict    sample completions, and write them to a file
{of_a_run}

Around a run:
{around}

Each has its own --help.

  -c CONFIG, --config CONFIG  a YAML file, or the name of a config of the package
  --print_config              show all settings, and exit
  --version                   show the version, and exit
"""
MOST_NODES = 100_000
"""The most values of a configuration after its aliases are replaced."""
MOST_MISTAKES = 20
"""The number of mistakes that are told at once."""
OF_A_CLASS = ("class_path", "init_args", "dict_kwargs", "<<")


def check_early(arguments: Sequence[str]) -> None:
    """Show the help, also without arguments; end with a sentence on each unknown field, or on what is no YAML."""
    if list(arguments) in ([], ["--help"], ["-h"]):
        print(OVERVIEW.format(of_a_run=_tools(True), around=_tools(False)), end="")
        sys.exit()
    if arguments[:1] and arguments[0] in COMMANDS and arguments[1:] in (["--help"], ["-h"]):
        print(TOOLS[arguments[0]].help if arguments[0] in TOOLS else short_help(arguments[0]), end="")
        sys.exit()
    if arguments[:1] and arguments[0] in COMMANDS and arguments[1:2] == ["--help-all"] and len(arguments) == 3:
        print(whole_help(arguments[2]), end="")
        sys.exit()
    if arguments[:1] and arguments[0] in COMMANDS:
        if ignored := sorted(name for name in os.environ if name.startswith("PL_FIT__")):
            print(
                f"{', '.join(ignored)} has no effect; give settings as --FIELD VALUE or by --config.", file=sys.stderr
            )
        if mistakes := list(islice(_mistakes(list(with_paths(arguments[1:]))), MOST_MISTAKES)):
            exit_with("\nerror: ".join(mistakes))


def _mistakes(given: Sequence[str]) -> Iterator[str]:
    for before, argument in zip(["", *given], given, strict=False):
        name = argument.split("=")[0]
        if before in CONFIG or argument.startswith("--config="):
            yield from _mistakes_of_file(Path(argument.removeprefix("--config=")))
        elif name.startswith("--") and " " not in name and not _exists(name.removeprefix("--")):
            yield f"unrecognized arguments: {argument}{nearest(argument, _options())}"


def _tools(has_settings_of_a_run: bool) -> str:
    tools = [(name, tool) for name, tool in TOOLS.items() if tool.has_settings_of_a_run == has_settings_of_a_run]
    return "\n".join(f"  {name:9}  {tool.what}" for name, tool in tools)


@cache
def _table() -> tuple[frozenset[str], list[str]]:
    """Return the names of groups, and those of fields; names within a field belong to its class."""
    groups = declared()
    fields = [field.name for group in groups for field in group.settings] + [option.name for option in OPTIONS]
    return frozenset(group.name for group in groups), fields


@cache
def _top_names() -> frozenset[str]:
    of_commands = [option.name for options in MORE_OPTIONS.values() for option in options]
    groups, fields = _table()
    settings = {*groups, *(name.partition(".")[0] for name in fields), *of_commands, "weights_only"}
    return frozenset(settings - {"config", "print_config", "help", "help-all"})


def _options() -> list[str]:
    return [f"--{name}" for name in _table()[1]]


def _exists(name: str) -> bool:
    """Return whether a field may exist; false only for unknown names in our groups."""
    groups, fields = _table()
    parts = name.rstrip("+").removesuffix(".help").split(".")
    if parts[0] not in groups or parts[0] == "trainer":
        return True
    paths = [".".join(parts[: length + 1]) for length in range(len(parts))]
    return paths[-1] in groups or any(path in fields for path in paths) or parts[-1] in OF_A_CLASS


def _mistakes_of_file(path: Path) -> Iterator[str]:
    try:
        root = compose_config(path, MOST_NODES)
    except FileNotFoundError:  # the parser knows the names of configs
        return
    except OSError as error:
        yield f"{path} cannot be read ({error.strerror}); check the path."
        return
    except ValueError as error:
        yield str(error)
        return
    if not isinstance(root, yaml.MappingNode):
        yield f"{path} holds no fields; write each as NAME: VALUE, such as trainer: {{max_steps: 100}}."
        return
    for name, node, value in _fields(path, root, ""):
        if name in _table()[0] and not isinstance(value, yaml.MappingNode):
            given = f"{value.value or 'null':.60}" if isinstance(value, yaml.ScalarNode) else "a list"
            yield (
                f"{name} is {given}, but it is a group of fields ({path}, line {node.start_mark.line + 1}); "
                "give these, or leave it out."
            )
        elif not _exists(name) or ("." not in name and name not in _top_names()):
            options = [option.removeprefix("--") for option in _options()]
            hint = did_you_mean(near(name, options), "fit --help lists all fields.")
            yield f"There is no field {name} ({path}, line {node.start_mark.line + 1}){hint}"


def _fields(file: Path, node: yaml.Node, path: str) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
    """Yield the names in our groups with the nodes of their keys and of their values."""
    groups, _ = _table()
    if not isinstance(node, yaml.MappingNode):
        return
    seen: set[str] = set()
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        name = f"{path}.{key.value}" if path else key.value
        if name in seen:
            line = key.start_mark.line + 1
            print(f"{file} sets {name} twice; that of line {line} is taken.", file=sys.stderr)
        seen.add(name)
        yield name, key, value
        if name in groups:
            yield from _fields(file, value, name)
