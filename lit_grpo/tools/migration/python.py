"""Our names of TRL's arguments, as one writes them in Python."""

from __future__ import annotations

import difflib
from collections.abc import Collection

from lit_grpo.tools.migration.table import TRAINER, TRL

OF_TRAIN = {
    "data.train": "train",
    "data.validation": "validation",
    "data.batch_size": "batch_size",
    "trainer.max_steps": "max_steps",
    "run.name": "name",
    "run.dir": "dir",
    "seed_everything": "seed",
    "model.policy": "policy",
}
"""Fields of a config that ``lit_grpo.train`` has as arguments, by their dotted names."""
CALLBACKS = ("rollout", "checkpoint", "sample_logger")
REWARD = 'rewards=[{"function": score, "weight": 0.1}]'
OPTIMIZER = "optimizer=functools.partial(torch.optim.AdamW, lr=1e-6, weight_decay=0.0)"
SCHEDULE = "lr_scheduler=functools.partial(lit_grpo.optim.WarmupDecayLR, total_steps=100, warmup_steps=10)"
LOGGER = 'trainer={"logger": [...]} with loggers of Lightning'


def as_argument(field: str) -> str:
    """Return how a field of a config is written as an argument of ``lit_grpo.train``."""
    group, _, name = field.partition(".")
    first, *inner = name.split(".")
    if field in OF_TRAIN:
        return f"{OF_TRAIN[field]}=..."
    if field == "model.rewards":
        return REWARD
    if field.startswith("model.optimizer"):
        return OPTIMIZER
    if field.startswith("model.lr_scheduler"):
        return SCHEDULE
    if group == "run":
        return LOGGER
    if field.startswith("model.generator"):
        return "generator=..., an object of lit_grpo.rollout.slots.SlotGenerator or lit_grpo.rollout.vllm.VLLMGenerator"
    value = "..."
    for part in reversed(inner if group == "model" else [first, *inner]):
        value = f'{{"{part}": {value}}}'
    if group in CALLBACKS:
        return f'callbacks={{"{group}": {value}}}'
    return f"{first if group == 'model' else group}={value}"


def about_argument(name: str, known: Collection[str]) -> str:
    """Return what to write in place of an argument that does not exist: the end of a sentence."""
    if name == "reward_weights":
        return f"each reward has its weight: {REWARD}."
    if name in TRAINER:
        row = TRAINER[name]
        return f"here it is {' and '.join(row.fields)}{f' ({row.note})' if row.note else ''}."
    if name in TRL:
        row = TRL[name]
        if row.fields:
            forms = dict.fromkeys(as_argument(field) for field in row.fields)
            return f"TRL's {name} is here {', '.join(forms)}{f' ({row.note})' if row.note else ''}."
        return f"TRL's {name} has no counterpart ({row.note}); leave it out."
    near = difflib.get_close_matches(name, [*known])
    return f"did you mean {' or '.join(map(repr, near))}?" if near else f"it has {', '.join(sorted(known))}."


def check_arguments(what: str, given: Collection[str], known: Collection[str]) -> None:
    """Check the names of arguments."""
    for name in given:
        if name not in known:
            raise ValueError(f"{what} {name!r}; {about_argument(str(name), known)}")
