"""``python -m lit_grpo from-trl CONFIG``: converts a config of TRL's GRPO or SFT into one of ours."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Sequence
from pathlib import Path

import yaml

from lit_grpo.cli.parsing.sentences import SentenceParser, exit_with
from lit_grpo.tools.migration import Converted, convert_trl, convert_trl_sft


def main(arguments: Sequence[str]) -> None:
    """Print the config, or write it; a mistake ends with one sentence and exit code 2."""
    parser = SentenceParser(
        prog="python -m lit_grpo from-trl", description="Convert a YAML file of trl grpo --config or trl sft."
    )
    parser.add_argument("config", type=Path, metavar="CONFIG")
    parser.add_argument("--sft", action="store_true", help="the file is one for trl sft --config")
    parser.add_argument("--rows", type=int, help="the number of training prompts, to turn epochs into steps")
    parser.add_argument("--devices", type=int, default=1, help="the number of devices of the run (1)")
    parser.add_argument("--drop", action="store_true", help="leave out the fields that have no counterpart here")
    parser.add_argument("--output", type=Path, help="the file to write; by default the config is printed")
    options = parser.parse_args(arguments)
    try:
        given = yaml.safe_load(options.config.read_text())
        if not isinstance(given, dict):
            raise ValueError(f"{options.config} holds no fields; give a YAML file as for trl grpo --config.")
        convert = convert_trl_sft if options.sft else convert_trl
        text = as_yaml(options.config.name, convert(given, options.rows, options.devices, options.drop))
    except (OSError, ValueError, yaml.YAMLError) as error:
        exit_with("\n".join(" ".join(line.split()) for line in str(error).splitlines()))
    if options.output is None:
        print(text, end="")
        print("# Next: save this as a file (--output OURS.yaml), and python -m lit_grpo doctor --config OURS.yaml")
    else:
        options.output.write_text(text)
        print(
            f"{options.output} is written. Next: python -m lit_grpo doctor --config {shlex.quote(str(options.output))}"
        )


def as_yaml(name: str, converted: Converted) -> str:
    """Write a config with its notes as comments at the top."""
    says = [
        f"From {name} of TRL 1.16."
        + (" What has another meaning here, or none:" if converted.notes else " All fields mean the same here."),
        *(f"- {one}" for one in converted.notes),
    ]
    lines = [line for text in says for line in textwrap.wrap(text, 118, subsequent_indent="  ", break_on_hyphens=False)]
    return "".join(f"# {line}\n" for line in lines) + yaml.safe_dump(converted.config, sort_keys=False, width=110)
