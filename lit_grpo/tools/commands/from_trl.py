"""``python -m lit_grpo from-trl CONFIG``: converts a config or a script of TRL's GRPO or SFT into a config of ours."""

from __future__ import annotations

import argparse
import functools
import importlib
import shlex
import textwrap
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lit_grpo.cli.parsing.names import FIELDS
from lit_grpo.cli.parsing.sentences import SentenceParser, exit_with
from lit_grpo.process.files import replace_file
from lit_grpo.process.inputs import read_yaml, typed
from lit_grpo.tools.migration import Converted, convert_trl, convert_trl_sft, plain_fields, read_script
from lit_grpo.tools.migration.forms import LARGEST


def main(arguments: Sequence[str]) -> None:
    """Print the config, or write it; a mistake ends with one sentence and exit code 2."""
    parser = SentenceParser(
        prog="python -m lit_grpo from-trl",
        description="Convert a YAML file of trl grpo --config or trl sft, or a Python script that calls GRPOTrainer or "
        "SFTTrainer. The script is read, and not run.",
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help="a YAML file, or a script (.py)")
    parser.add_argument("--sft", action="store_true", help="the YAML file is one for trl sft --config")
    parser.add_argument("--rows", type=_count, help="the number of training prompts, to turn epochs into steps")
    parser.add_argument("--devices", type=_count, default=1, help="the number of devices of the run (1)")
    parser.add_argument("--drop", action="store_true", help="leave out the fields that have no counterpart here")
    parser.add_argument("--output", type=Path, help="the file to write; by default the config is printed")
    parser.epilog = "The arguments of a script that uses TrlParser follow after --, as in: -- --learning_rate 1e-5"
    end = list(arguments).index("--") if "--" in arguments else len(arguments)
    options, flags = parser.parse_args(arguments[:end]), arguments[end + 1 :]
    try:
        if options.config.suffix == ".py":
            made = _converted_script(options, flags)
        elif flags:
            raise ValueError(f"{flags[0]!r} is of a script, and {options.config} is none; leave it out.")
        else:
            made = _converted_file(options)
        text = as_yaml(options.config.name, made)
    except OSError as error:
        exit_with(f"{options.config} cannot be read ({error.strerror}); check the path.")
    except ValueError as error:
        said = str(error) if str(options.config) in str(error) else f"{options.config}: {error}"
        exit_with("\n".join(" ".join(line.split()) for line in said.splitlines()))
    if options.output is None:
        print(text, end="")
        print("# Next: save this as a file (--output OURS.yaml), and python -m lit_grpo doctor --config OURS.yaml")
    else:
        try:
            replace_file(options.output, text.encode())
        except (OSError, ValueError) as error:
            said = (
                f"{options.output} cannot be written ({error.strerror})" if isinstance(error, OSError) else str(error)
            )
            exit_with(f"{said.rstrip('.')}; choose another --output.")
        print(
            f"{options.output} is written. Next: python -m lit_grpo doctor --config {shlex.quote(str(options.output))}"
        )


def _count(text: str) -> int:
    """Read a number of things."""
    if not text.isdecimal() or not 1 <= int(text[:20]) <= LARGEST:
        raise argparse.ArgumentTypeError(f"{text[:60]!r} is no number of these; give a whole number of 1 or more.")
    return int(text)


def _converted_file(options: Namespace) -> Converted:
    given = read_yaml(options.config)
    if not isinstance(given, dict):
        raise ValueError(
            f"{options.config} holds no fields; give a YAML file as for trl grpo --config, or a script (.py)."
        )
    given = typed(given, dict[str, Any], str(options.config), "write names of fields as text")
    return (convert_trl_sft if options.sft else convert_trl)(given, options.rows, options.devices, options.drop)


def _converted_script(options: Namespace, flags: Sequence[str]) -> Converted:
    """Convert a script; what is known only when it runs is refused with all other problems, or left out and named."""
    script = read_script(options.config, flags)
    if options.sft and script.trainer != "SFT":
        raise ValueError(f"{options.config} calls GRPOTrainer; leave --sft out.")
    convert = convert_trl_sft if script.trainer == "SFT" else convert_trl
    problems = [] if options.drop else list(script.unread.values())
    try:
        made = convert(script.fields, options.rows, options.devices, options.drop)
    except ValueError as error:
        raise ValueError("\n".join([*problems, str(error)])) from error
    if problems:
        names = ", ".join(script.unread)
        raise ValueError("\n".join(problems) + f" With --drop the rest is converted without {names}.")
    if script.turns:
        rollout = made.config.setdefault("rollout", {})
        rollout["plugins"] = [*rollout.get("plugins", []), {"environments": script.turns}]
    left = [f"Left out: {sentence}" for sentence in script.unread.values()]
    return Converted(made.config, [*left, *script.notes, *made.notes])


def train_arguments(config: Any, *, rows: int | None = None, devices: int = 1, **fields: Any) -> dict[str, Any]:
    """Return the arguments of ``lit_grpo.train`` that a ``GRPOConfig`` of TRL stands for.

    Args:
        config: The object. Its fields may be changed, and those of TRL's ModelConfig added, by ``fields``.
        rows: Number of training prompts, to turn epochs into steps.
        devices: Number of devices of the run.
        fields: Further fields of ``trl grpo --config``, such as ``use_peft=True``.

    Returns:
        All arguments except ``policy``, ``train``, ``validation`` and ``rewards``.

    Raises:
        ValueError: A field would change the training and has no counterpart, or ``rows`` is missing.

    Example:
        ``lit_grpo.train("Qwen/Qwen3-0.6B", dataset, score, **train_arguments(GRPOConfig(max_steps=100)))``
    """
    given = plain_fields(config) | fields
    apart = {"model_name_or_path": "policy", "dataset_name": "train", "reward_funcs": ["lit_grpo.rewards.exact_match"]}
    made = convert_trl({**apart, **given}, rows, devices).config
    model, data, trainer, run = (dict(made.pop(name, {})) for name in ("model", "data", "trainer", "run"))
    for name in ("policy", "rewards"):
        model.pop(name)
    for name in FIELDS:
        field = name.partition(".")[2]
        if field in model:
            model[field] = _object(name, model[field])
    if isinstance(model.get("generator"), functools.partial):
        model["generator"] = model["generator"]()
    for name in ("train", "validation"):
        data.pop(name, None)
    if "wandb" in run:
        raise ValueError(
            f'report_to is {given["report_to"]!r}, but a run from Python takes loggers as trainer={{"logger": [...]}}; '
            "set report_to to none, and give a WandbLogger of Lightning there."
        )
    return {
        **{name: run[name] for name in ("name", "dir") if name in run},
        "seed": made.pop("seed_everything"),
        "max_steps": trainer.pop("max_steps"),
        "batch_size": data.pop("batch_size"),
        "data": data,
        "trainer": trainer,
        "callbacks": made,
        **model,
    }


def _object(field: str, given: Mapping[str, Any]) -> functools.partial[Any]:
    path = FIELDS[field].get(given["class_path"], given["class_path"])
    module, _, name = path.rpartition(".")
    return functools.partial(getattr(importlib.import_module(module), name), **given["init_args"])


def as_yaml(name: str, converted: Converted) -> str:
    """Write a config with its notes as comments at the top."""
    says = [
        f"From {name} of TRL 1.16."
        + (" What has another meaning here, or none:" if converted.notes else " All fields mean the same here."),
        *(f"- {one}" for one in converted.notes),
    ]
    lines = [line for text in says for line in textwrap.wrap(text, 118, subsequent_indent="  ", break_on_hyphens=False)]
    return "".join(f"# {line}\n" for line in lines) + yaml.safe_dump(converted.config, sort_keys=False, width=110)
