"""Mistakes in the input, told in one sentence."""

from __future__ import annotations

import difflib
import sys
import sysconfig
import traceback
from pathlib import Path
from typing import Any, NoReturn

from lightning.pytorch.cli import LightningArgumentParser


class InputParser(LightningArgumentParser):
    """A parser whose errors are one sentence, without hundreds of lines of usage before it.

    A value that is the name of a file (``--data.train rows.jsonl``) is that name: jsonargparse would read the
    file as a configuration of its own. Configurations come by ``--config`` alone.
    """

    def add_class_arguments(self, *args: Any, **kwargs: Any) -> list[str]:
        """Add a class's arguments, none of which is read from a file."""
        return super().add_class_arguments(*args, **(kwargs | {"sub_configs": False}))

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the mistake, with the nearest option where one is unknown, and exit with code 2."""
        sentence = one_sentence(message)
        if sentence.startswith("unrecognized arguments: "):
            sentence += _nearest(sentence.split()[2], self)
        exit_with(sentence)


def exit_with(sentence: str) -> NoReturn:
    """Print an error and exit with code 2."""
    print(f"error: {sentence}", file=sys.stderr)
    sys.exit(2)


def own_frames(error: BaseException) -> str:
    """Where in the user's own files an error came about: a line a frame, of it and of its causes."""
    ours = [Path(__file__).parents[1], Path(__file__).parents[2] / "callbacks"]
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
    """Shorten what jsonargparse says of a value: of all the types that it tried, those that say something."""
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
    return " ".join(part for part in parts if part and "NoneType" not in part)


def _nearest(argument: str, parser: Any) -> str:
    """The options that are spelled alike; else those whose last part is, wherever they are."""
    option, options = argument.split("=")[0], _options(parser)
    near = difflib.get_close_matches(option, options, n=3, cutoff=0.85)
    if not near:
        last = {name: name.rsplit(".", 1)[-1] for name in options}
        parts = difflib.get_close_matches(option.rsplit(".", 1)[-1], set(last.values()), n=1, cutoff=0.8)
        near = [name for name in last if last[name] in parts][:3]
    near = near or difflib.get_close_matches(option, options, n=3)
    return f"; did you mean {' or '.join(near)}?" if near else "; --help lists all there are."


def _options(parser: Any) -> list[str]:
    options: list[str] = []
    for action in parser._actions:
        options += action.option_strings
        for choice in (getattr(action, "_name_parser_map", None) or {}).values():
            options += _options(choice)
    return options
