"""Checks of the command line's settings, before anything is made, moved or loaded."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch
from jsonargparse import Namespace

from lit_grpo.checkpoints import check_folder, check_form, check_whole, read_state, settled
from lit_grpo.checkpoints.form import CHECKSUMS
from lit_grpo.checks import check_format, check_intervals, check_left_to_module
from lit_grpo.process.packages import require
from lit_grpo.training.run_folder import RunConfig, is_first_rank

KINDS: dict[str, tuple[type, ...]] = {
    "model.optimizer": (torch.optim.Optimizer,),
    "model.lr_scheduler": (torch.optim.lr_scheduler.LRScheduler, torch.optim.lr_scheduler.ReduceLROnPlateau),
}
"""The base classes of fields whose type is a callable; jsonargparse checks the classes of other fields itself."""


def check_values(settings: Mapping[str, Any], classes: Mapping[str, Callable[..., Any]]) -> None:
    """Refuse ``null`` in place of a value, and a value in place of fields; jsonargparse accepts both.

    Raises:
        ValueError: A field has such a value, or names something that is no class of its kind; nothing is called.
    """
    _check_classes("", settings)
    for name, kind in classes.items():
        if name in settings:  # a class without fields is no group
            _check_fields(name, settings[name], kind)


def _check_classes(path: str, value: Any) -> None:
    """Refuse a ``class_path`` that is a function, such as ``os.system``, or a class of another kind."""
    if isinstance(value, list | tuple):
        for number, item in enumerate(value):
            _check_classes(f"{path}[{number}]", item)
    if not isinstance(value, Mapping | Namespace):
        return
    if isinstance(class_path := value.get("class_path"), str):
        _check_class(path, class_path)
    for name, inner in vars(value).items() if isinstance(value, Namespace) else value.items():
        place = path if name == "init_args" else f"{path}.{name}".removeprefix(".")
        _check_classes(place, inner)


def _check_class(path: str, class_path: str) -> None:
    module, _, name = class_path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name) if module else None
    except (ImportError, AttributeError):  # a value with the name class_path, not a class
        return
    made, kinds = found, KINDS.get(path, (object,))
    if not isinstance(found, type):  # a function makes what its annotation says
        try:
            made = get_type_hints(found).get("return")
        except (TypeError, NameError):
            made = None
    if not (isinstance(made, type) and issubclass(made, kinds)):
        wanted = f"{' or '.join(kind.__name__ for kind in kinds)} class" if path in KINDS else "class"
        raise ValueError(f"{path} names {class_path!r}, which is no {wanted}; give the path of one.")


def _check_group(path: str, fields: Any) -> None:
    if not isinstance(fields, Mapping | Namespace):
        shown = "null" if fields is None else f"{fields!r:.80}"
        raise ValueError(f"{path} is {shown}, but it is a group of fields; give these, or leave it out.")


def _check_fields(path: str, fields: Any, kind: Callable[..., Any]) -> None:
    _check_group(path, fields)
    hints = get_type_hints(kind.__init__)
    for name, value in vars(fields).items() if isinstance(fields, Namespace) else fields.items():
        _check_value(f"{path}.{name}", value, hints.get(name, Any))


def _check_value(path: str, value: Any, hint: Any) -> None:
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if value is None:
        if Any not in options and NoneType not in options:
            raise ValueError(f"{path} is null, but needs a value; give one, or leave it out for the default.")
        return
    class_path = value.get("class_path") if isinstance(value, Mapping | Namespace) else None
    if isinstance(class_path, str):
        module, _, name = class_path.rpartition(".")
        kind = getattr(importlib.import_module(module), name)
        if isinstance(kind, type):
            _check_fields(path, value.get("init_args") or {}, kind)
    elif len(options) == 1 and isinstance(hint, type) and is_dataclass(hint):
        _check_fields(path, value, hint)
    elif isinstance(value, list) and len(items := [get_args(one) for one in options if get_origin(one) is list]) == 1:
        for number, item in enumerate(value):
            _check_value(f"{path}[{number}]", item, items[0][0])


def check_settings(settings: Mapping[str, Any], fits: bool) -> None:
    """Refuse settings that Lightning would accept, or would refuse without naming the field."""
    _check_group("trainer", settings["trainer"])
    for check, _ in SETTINGS:
        check(settings, fits)


def _check_devices(settings: Mapping[str, Any], fits: bool) -> None:
    strategy, accelerator = settings["trainer"]["strategy"], settings["trainer"]["accelerator"]
    known = ("auto", "ddp", "single_device", "fsdp2", "ray_ddp", "ray_fsdp2")
    if isinstance(strategy, str) and not strategy.startswith(known):
        raise ValueError(
            f"trainer.strategy {strategy!r} is not supported; use auto, or of several devices ddp or fsdp2 (in workers "
            "of Ray ray_ddp or ray_fsdp2)."
        )
    has_cuda = torch.cuda.is_available()
    on_apple = torch.backends.mps.is_available() and not has_cuda and accelerator in ("auto", "gpu")
    if on_apple or accelerator == "mps":
        raise ValueError(
            f"trainer.accelerator is {accelerator!r}, which would train on an Apple GPU (mps); these have no float64, "
            "which sampling needs, so set trainer.accelerator to cpu."
        )
    if isinstance(accelerator, str) and not {"gpu": has_cuda, "cuda": has_cuda}.get(accelerator, True):
        built = "" if torch.backends.cuda.is_built() else " (this build of torch is for CPUs alone)"
        raise ValueError(
            f"trainer.accelerator is {accelerator!r}, but torch finds no such device here{built}; take cpu, or auto."
        )


def _check_steps(settings: Mapping[str, Any], fits: bool) -> None:
    if fits:
        check_left_to_module(settings["trainer"]["gradient_clip_val"], settings["trainer"]["accumulate_grad_batches"])


def _check_interval(settings: Mapping[str, Any], fits: bool) -> None:
    if fits:
        check_intervals(settings["trainer"])


def _check_wandb(settings: Mapping[str, Any], fits: bool) -> None:
    if (wandb := settings["run"]["wandb"]) != "disabled":
        sentence = f"run.wandb is {wandb}, but wandb is not installed; install lit_grpo[wandb], or leave it out."
        require("wandb", sentence)
    if wandb == "online":
        import wandb as client

        if not client.login(prompt=False):
            raise ValueError(
                "run.wandb is online, but W&B knows no API key of yours; run wandb login, or set WANDB_API_KEY, or set "
                "run.wandb to offline."
            )


def _check_weights_only(settings: Mapping[str, Any], fits: bool) -> None:
    if settings.get("weights_only") is False:
        raise ValueError("weights_only is false, but a checkpoint may never run code; leave it out.")


def _check_resuming(settings: Mapping[str, Any], fits: bool) -> None:
    if path := settings.get("ckpt_path"):
        check_ckpt_path(str(path), fits)


SETTINGS: tuple[tuple[Callable[[Mapping[str, Any], bool], None], dict[str, Any]], ...] = (
    (_check_devices, {"trainer.strategy": "auto", "trainer.accelerator": "auto"}),
    (_check_steps, {"trainer.gradient_clip_val": None, "trainer.accumulate_grad_batches": 1}),
    (
        _check_interval,
        {"trainer.val_check_interval": None, "trainer.check_val_every_n_epoch": None, "trainer.barebones": False},
    ),
    (_check_wandb, {"run.wandb": "disabled"}),
    (_check_weights_only, {"weights_only": True}),
    (_check_resuming, {"ckpt_path": None}),
)
"""The checks of :func:`check_settings`, and values of the same fields with which the rest can be examined."""


def find_checkpoint(settings: Namespace) -> None:
    """Replace the ``ckpt_path`` ``last`` or ``best`` by that file of the run: Lightning would not find it."""
    if (name := settings.get("ckpt_path")) in ("last", "best"):
        folder = RunConfig(**settings["run"]).folder / settings["checkpoint"]["folder"]
        settings["ckpt_path"] = str(settled(folder / f"{name}.ckpt"))


def check_ckpt_path(path: str, fits: bool) -> None:
    """Refuse a checkpoint that does not exist, is not on this machine, is damaged, or cannot be resumed from."""
    if "://" in path:
        raise ValueError(
            f"ckpt_path is {path!r}, but checkpoints are loaded from disk only; download it from a place that you "
            "trust, and give the file's path."
        )
    file = Path(path)
    try:
        file = settled(file)
        is_folder, is_there = file.is_dir(), file.exists()
    except OSError as error:  # no file can have such a name
        raise ValueError(f"ckpt_path {path!r} cannot be looked for ({error.strerror}); give a file's path.") from error
    if not is_there:
        raise ValueError(
            f"There is no checkpoint {path!r}; give the path of one, such as runs/NAME/checkpoints/last.ckpt."
        )
    if is_folder:
        if checkpoints := sorted(str(one) for one in file.glob("*.ckpt")):
            raise ValueError(
                f"ckpt_path {str(file)!r} is a folder of checkpoints; give one of them, such as {checkpoints[-1]!r}."
            )
        check_folder(file)
    if is_first_rank():  # it checks for all ranks, because the check reads every file
        check_whole(file)
    checkpoint = read_state(file)
    check_form(checkpoint, path)
    if fits:
        check_format(checkpoint, path)
        check_form(checkpoint, path, resumes=True)
        if CHECKSUMS not in checkpoint:
            raise ValueError(
                f"The checkpoint {path!r} was not written by lit_grpo, or was changed after that: it has no field "
                f"{CHECKSUMS}; give one that a run has left in its folder checkpoints/."
            )
