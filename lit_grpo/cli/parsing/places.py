"""The place in a configuration that sets a field, for sentences about the field."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from lit_grpo.cli.parsing.sentences import CONFIG

_FIELD = re.compile(r"\b[a-z_]\w*(?:\.\w+)+")


def configs_of(arguments: Sequence[str]) -> Iterator[Path]:
    for before, argument in zip(["", *arguments], arguments, strict=False):
        if before in CONFIG or argument.startswith("--config="):
            yield Path(argument.removeprefix("--config="))


def with_place(sentence: str, arguments: Sequence[str]) -> str:
    """Add file and line to a sentence about a field that a configuration of the command line sets."""
    for config in reversed(list(configs_of(arguments))):
        if str(config) in sentence or not config.is_file():
            continue
        root = yaml.compose(config.read_bytes(), Loader=yaml.CSafeLoader)  # it has been read before
        for field in _FIELD.findall(sentence):
            if not _is_given(field, arguments) and (line := _line_of(root, field.split("."))) is not None:
                return f"{sentence} ({config}, line {line})"
    return sentence


def _is_given(field: str, arguments: Sequence[str]) -> bool:
    names = [one.partition("=")[0].removeprefix("--").rstrip("+").replace(".init_args.", ".") for one in arguments]
    return any(f"{name}.".startswith(f"{field}.") or f"{field}.".startswith(f"{name}.") for name in names)


def _line_of(node: yaml.Node | None, parts: Sequence[str]) -> int | None:
    """Return the line of a field, of which ``init_args`` is no part; None if it is not set."""
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        if key.value == "init_args" and (line := _line_of(value, parts)) is not None:
            return line
        if key.value == parts[0] and len(parts) > 1 and isinstance(value, yaml.MappingNode):
            return _line_of(value, parts[1:])
        if key.value == parts[0]:
            return key.start_mark.line + 1
    return None
