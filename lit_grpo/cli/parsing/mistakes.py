"""All mistakes that parsing finds in the settings of a run, where the parser itself ends at the first."""

from __future__ import annotations

import io
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from pathlib import Path

import yaml

from lit_grpo.cli.parsing.early import MOST_MISTAKES, MOST_NODES
from lit_grpo.cli.parsing.sentences import CONFIG, with_paths
from lit_grpo.process.inputs import compose_config

_FIELD = re.compile(
    r'Parser key "([\w.]+)"|There is no field ([\w.]+)|unrecognized arguments: --([\w.]+)|^error: (\w+(?:\.\w+)+) is '
)


def parse_or_exit(parse: Callable[[Sequence[str]], None], arguments: Sequence[str]) -> None:
    """Parse arguments; if that fails, print a sentence on each mistake, and exit with code 2.

    After a mistake the field that it names is left out, on the command line and in copies of the configs, and the rest
    is parsed again. Of several mistakes in one field the first is told.

    Args:
        parse: Prints a sentence and exits at the first mistake.
        arguments: Arguments of the command line, after the command's name.
    """
    told: list[str] = []
    given: list[str] | None = list(with_paths(arguments))
    with tempfile.TemporaryDirectory() as folder:
        while given is not None and len(told) < MOST_MISTAKES:
            errors = io.StringIO()
            try:
                with redirect_stderr(errors):
                    parse(given)
            except SystemExit as ended:
                if not ended.code:  # after a help
                    raise
                sentence = errors.getvalue().strip()
                field = _FIELD.search(sentence)
                told.append(sentence)
                copies = Path(folder) / str(len(told))
                given = field and _without(given, next(filter(None, field.groups())), copies)
            except Exception:
                if not told:
                    raise
                given = None  # what is left out is missed; its mistakes are told
            else:
                if not told:
                    print(errors.getvalue(), end="", file=sys.stderr)
                given = None
    if told:
        print("\n".join(dict.fromkeys(told)), file=sys.stderr)
        sys.exit(2)


def _without(arguments: Sequence[str], field: str, folder: Path) -> list[str] | None:
    """Return arguments without a field, or without the one around it that is set; None if neither is."""
    folder.mkdir(exist_ok=True)
    left: list[str] = []
    rest, changed = list(arguments), False
    while rest:
        option, equals, value = (argument := rest.pop(0)).partition("=")
        own = option.removeprefix("--").rstrip("+").replace(".init_args.", ".")
        if option in CONFIG:
            path = Path(value if equals or not rest else rest.pop(0))
            copy = _copy_without(path, field.split("."), folder / f"{len(left)}.yaml")
            changed |= copy != path
            left += ["--config", str(copy)]
        elif option.startswith("--") and f"{own}.".startswith(f"{field}."):
            changed = True
            if not equals and rest and not rest[0].startswith("--"):
                rest.pop(0)
        else:
            left.append(argument)
    around = field.rpartition(".")[0]
    return left if changed else _without(arguments, around, folder) if "." in around else None


def _copy_without(path: Path, parts: Sequence[str], copy: Path) -> Path:
    """Write a config without a field; return the config itself if it does not set the field."""
    root = compose_config(path, MOST_NODES) if path.is_file() else None
    if not _remove(root, parts):
        return path
    copy.write_text(yaml.serialize(root, Dumper=yaml.CSafeDumper))
    return copy


def _remove(node: yaml.Node | None, parts: Sequence[str]) -> bool:
    """Remove a field from a mapping or its ``init_args``; return whether it was there."""
    if not isinstance(node, yaml.MappingNode):
        return False
    for place, (key, value) in enumerate(node.value):
        if key.value == "init_args" and _remove(value, parts):
            return True
        if key.value == parts[0] and len(parts) > 1:
            return _remove(value, parts[1:])
        if key.value == parts[0]:
            del node.value[place]
            return True
    return False
