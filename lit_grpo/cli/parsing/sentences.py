"""Mistakes in one sentence, with the nearest known names; needs neither torch nor Lightning."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from lit_grpo.process.terminal import visible
from lit_grpo.tools.migration import TRL

CONFIG = ("--config", "-c")


def exit_with(sentence: str, code: int = 2) -> NoReturn:
    """Print an error, with control characters of quoted values made visible, and exit; code 2 is a wrong input."""
    print(f"error: {visible(sentence)}", file=sys.stderr)
    sys.exit(code)


class SentenceParser(argparse.ArgumentParser):
    """A parser whose errors are one sentence, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        exit_with(message)


def did_you_mean(near: Sequence[str], otherwise: str) -> str:
    return f"; did you mean {' or '.join(near)}?" if near else f"; {otherwise}"


def nearest(argument: str, options: list[str]) -> str:
    return did_you_mean(near(argument.split("=")[0], options), "--help lists all options.")


def near(option: str, options: list[str]) -> list[str]:
    """Return our name of TRL's field, or else options with a similar spelling, or with a similar last part."""
    last = option.removeprefix("--").rsplit(".", 1)[-1]
    if last in TRL and not any(name.endswith(f".{last}") for name in options):
        return [f"--{name}" if option.startswith("--") else name for name in TRL[last].fields]
    found = difflib.get_close_matches(option, options, n=3, cutoff=0.85)
    if not found:
        lasts = {name: name.rsplit(".", 1)[-1] for name in options}
        parts = difflib.get_close_matches(option.rsplit(".", 1)[-1], set(lasts.values()), n=1, cutoff=0.8)
        found = [name for name in lasts if lasts[name] in parts][:3]
    return found or difflib.get_close_matches(option, options, n=3)


def shipped_config(name: str) -> str:
    """Return the path of a configuration that comes with the package; a file or an unknown name stays unchanged."""
    path = shipped() / f"{name.removesuffix('.yaml')}.yaml"
    return str(path) if not os.path.isfile(name) and os.path.isfile(path) else name  # Path's fails for long names


def shipped() -> Path:
    package = Path(__file__).parents[2]
    return package / "configs" if (package / "configs").is_dir() else package.parent / "configs"  # in a checkout


def with_paths(arguments: Sequence[str]) -> Iterator[str]:
    """Yield arguments, with names of configurations replaced by their paths."""
    for before, argument in zip(["", *arguments], arguments, strict=False):
        if before in CONFIG:
            yield shipped_config(argument)
        elif argument.startswith("--config="):
            yield f"--config={shipped_config(argument.removeprefix('--config='))}"
        else:
            yield argument
