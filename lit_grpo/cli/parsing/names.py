"""Short names of the most common classes in configs, a table for each field."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lit_grpo.cli.parsing.sentences import CONFIG

GENERATORS = {
    "slots": "lit_grpo.rollout.slots.SlotGenerator",
    "vllm": "lit_grpo.rollout.vllm.VLLMGenerator",
    "vllm_server": "lit_grpo.rollout.vllm.VLLMServerGenerator",
}
OPTIMIZERS = {
    "AdamW": "torch.optim.AdamW",
    "SGD": "torch.optim.SGD",
    "AdamW8bit": "bitsandbytes.optim.AdamW8bit",
    "MuonAdamW": "lit_grpo.optim.MuonAdamW",
}
SCHEDULERS = {"WarmupDecayLR": "lit_grpo.optim.WarmupDecayLR"} | {
    name: f"torch.optim.lr_scheduler.{name}"
    for name in ("ConstantLR", "CosineAnnealingLR", "ExponentialLR", "LinearLR", "OneCycleLR", "StepLR")
}
FIELDS: dict[str, Mapping[str, str]] = {
    "model.generator": GENERATORS,
    "model.optimizer": OPTIMIZERS,
    "model.lr_scheduler": SCHEDULERS,
}
"""The short names of a field's classes. Those of reward functions are in :mod:`lit_grpo.rewards.loading`."""
DEFAULTS: dict[str, dict[str, Any]] = {
    "model.generator": {"class_path": GENERATORS["slots"]},
    "model.optimizer": {"class_path": OPTIMIZERS["AdamW"], "init_args": {"lr": 1e-6}},
}
"""The defaults of these fields, so that ``--model.generator.num_slots 8`` needs no class."""


_NO_CLASS = re.compile(r"null|none|true|false|[^A-Za-z_].*", re.IGNORECASE)


def fields_after_classes(arguments: Sequence[str]) -> list[str]:
    """Put the fields of a class after the option that names the class, if they stand before it.

    ``--model.generator.adapters alone --model.generator vllm`` would else be a field of the class that comes before.
    """
    options: list[list[str]] = [[]]
    for argument in arguments:
        if argument.startswith("--") or argument in CONFIG:
            options.append([argument])
        else:
            options[-1].append(argument)
    for option in options[1:]:
        name, equals, value = option[0].partition("=")
        values = [value] if equals else option[1:]
        if len(values) != 1 or _NO_CLASS.fullmatch(values[0]):
            continue
        here = next(place for place, one in enumerate(options) if one is option)
        early = [one for one in options[1:here] if one[0].startswith(f"{name}.") and ".help" not in one[0]]
        others = [one for one in options if not any(one is moved for moved in early)]
        after = next(place for place, one in enumerate(others) if one is option) + 1
        options = [*others[:after], *early, *others[after:]]
    return [argument for option in options for argument in option]


def with_class_paths(arguments: Sequence[str]) -> Iterator[str]:
    """Replace the short name of a class whose help is asked for, as in ``--model.generator.help slots``."""
    field = ""
    for argument in arguments:
        option, equals, name = argument.partition("=")
        asked = option.removeprefix("--").removesuffix(".help") if option.endswith(".help") else ""
        yield (
            option + equals + FIELDS.get(asked, {}).get(name, name)
            if equals
            else FIELDS.get(field, {}).get(argument, argument)
        )
        field = "" if equals else asked
