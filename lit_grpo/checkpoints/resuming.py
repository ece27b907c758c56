"""The settings of a run are saved in its checkpoints; changed settings are applied on resuming, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

RunSettings = dict[str, Any]
"""Settings by the names that they have on the command line."""
SCHEDULE = "model.lr_scheduler"
OPTIMIZER = "model.optimizer"
BESIDE = ("last_epoch", "base_lrs", "params", "initial_lr")
"""Entries of a scheduler or a parameter group that are counted or derived, not set by a user."""

PLUGINS = "rollout.plugins"


def recorded_settings(
    trainer: Any, policy: Any, settings: Any, teacher: Any, optimizer: torch.optim.Optimizer, scheduler: Any
) -> RunSettings:
    """Return all settings of a run that its checkpoints save; the optimizer has made no step yet."""
    of_update = {f"model.{name}": getattr(settings, name) for name in ("objective", "advantages")}
    told = flattened({**of_update, "model.policy": policy, "model.teacher": teacher})
    return told | plugin_settings(trainer) | optimizer_settings(optimizer, scheduler)


def flattened(settings: Mapping[str, Any]) -> RunSettings:
    """Flatten settings, some of which are dataclasses; keep only plain values."""
    told: RunSettings = {}
    for name, value in settings.items():
        if is_dataclass(value):
            told |= flattened({f"{name}.{field.name}": getattr(value, field.name) for field in fields(value)})
        elif _is_plain(value):
            told[name] = value
    return told


def optimizer_settings(optimizer: torch.optim.Optimizer, scheduler: Any) -> RunSettings:
    """Return class and settings of an optimizer before its first step, and of its scheduler if there is one."""
    told = {OPTIMIZER: _path(optimizer)}
    group = {**vars(optimizer), **optimizer.param_groups[0]}
    group["lr"] = group.get("initial_lr", group["lr"])  # a schedule has changed it already
    told |= flattened({f"{OPTIMIZER}.{name}": value for name, value in group.items() if _is_set(name)})
    if scheduler is not None:
        told[SCHEDULE] = _path(scheduler)
        state = scheduler.state_dict()
        told |= flattened({f"{SCHEDULE}.{name}": value for name, value in state.items() if _is_set(name)})
    return told


def plugin_settings(trainer: Any) -> RunSettings:
    plugins = next((callback.plugins for callback in trainer.callbacks if hasattr(callback, "plugins")), [])
    return {PLUGINS: [_plugin(plugin) for plugin in plugins]}


def _plugin(given: str | Mapping[str, Mapping[str, Any] | None]) -> str:
    """A plug-in as one word: ``april:max_staleness=3``."""
    if isinstance(given, str):
        return given
    ((name, fields_given),) = given.items()
    told = ",".join(f"{field}={value}" for field, value in (fields_given or {}).items())
    return f"{name}:{told}" if told else name


def differences(before: RunSettings, now: RunSettings) -> dict[str, str]:
    """Return the changed settings by name, with their old and new values."""
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return {name: f"{name} was {before.get(name)} and is now {now.get(name)}" for name in names}


def check_optimizer(before: RunSettings, now: RunSettings) -> None:
    """Refuse another optimizer or schedule than the checkpoint's, whose state would not fit or would override it."""
    differing = differences(before, now)
    scheduled = {f"{OPTIMIZER}.lr"} if SCHEDULE in before else set()
    refused = [text for name, text in differing.items() if name in {OPTIMIZER, *scheduled} or name.startswith(SCHEDULE)]
    if refused:
        raise ValueError(
            f"Resuming continues with the checkpoint's optimizer and schedule, but {', '.join(refused)}; leave them as "
            "they were, or export the checkpoint and start a new run on it."
        )


def apply_to(optimizer: torch.optim.Optimizer, before: RunSettings, now: RunSettings) -> None:
    """Apply the present settings of an optimizer over those restored from a checkpoint."""
    for name in differences(before, now):
        option = name.removeprefix(f"{OPTIMIZER}.")
        for group in optimizer.param_groups:
            if option in group and option != name:
                group[option] = now[name]


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _is_set(name: str) -> bool:
    return not name.startswith("_") and name not in BESIDE


def _path(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"
