"""Short names of the most common classes in configs, a table for each field."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

GENERATORS = {
    "slots": "lit_grpo.rollout.slots.SlotGenerator",
    "vllm": "lit_grpo.rollout.vllm.VLLMGenerator",
    "vllm_server": "lit_grpo.rollout.vllm.VLLMServerGenerator",
}
OPTIMIZERS = {
    "AdamW": "torch.optim.AdamW",
    "SGD": "torch.optim.SGD",
    "AdamW8bit": "bitsandbytes.optim.AdamW8bit",
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
