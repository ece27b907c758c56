"""Mistakes that can be found before torch and Lightning are imported, which takes seconds.

Only names are checked. Values, fields of classes and those of the Trainer are left to the real parser.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import yaml

from lit_grpo.cli.parsing.declared import declared
from lit_grpo.cli.parsing.help import OPTIONS, short_help, whole_help
from lit_grpo.cli.parsing.sentences import CONFIG, did_you_mean, exit_with, near, nearest, with_paths
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
        if mistakes := list(_mistakes(list(with_paths(arguments[1:])))):
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


def _options() -> list[str]:
    return [f"--{name}" for name in _table()[1]]


def _exists(name: str) -> bool:
    """Whether a field may exist; false only for unknown names in our groups."""
    groups, fields = _table()
    parts = name.rstrip("+").removesuffix(".help").split(".")
    if parts[0] not in groups or parts[0] == "trainer":
        return True
    paths = [".".join(parts[: length + 1]) for length in range(len(parts))]
    return paths[-1] in groups or any(path in fields for path in paths) or parts[-1] in OF_A_CLASS


def _mistakes_of_file(path: Path) -> Iterator[str]:
    if not path.is_file():
        return
    try:
        root = yaml.compose(path.read_text(), Loader=yaml.CSafeLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f" in line {mark.line + 1}"
        yield f"{path} is no YAML{line}: {getattr(error, 'problem', None) or 'it is not text'}."
        return
    if root is None:
        return
    if _num_nodes(root, {}, set()) > MOST_NODES:
        yield f"{path} has over {MOST_NODES:,} values after its aliases are replaced; write it without aliases."
        return
    for name, node in _fields(path, root, ""):
        if not _exists(name):
            options = [option.removeprefix("--") for option in _options()]
            hint = did_you_mean(near(name, options), "fit --help lists all fields.")
            yield f"There is no field {name} ({path}, line {node.start_mark.line + 1}){hint}"


def _num_nodes(node: yaml.Node, known: dict[int, int], above: set[int]) -> int:
    """Count the values of a node with its aliases replaced; a node that holds itself has more than ``MOST_NODES``."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) in above:
        return MOST_NODES + 1
    if id(node) not in known:
        above.add(id(node))
        inner = [one for each in node.value for one in (each if isinstance(each, tuple) else (each,))]
        known[id(node)] = 1 + sum(_num_nodes(one, known, above) for one in inner)
        above.remove(id(node))
    return known[id(node)]


def _fields(file: Path, node: yaml.Node, path: str) -> Iterator[tuple[str, yaml.Node]]:
    """Yield the names in our groups with the nodes of their keys."""
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
        yield name, key
        if name in groups:
            yield from _fields(file, value, name)
