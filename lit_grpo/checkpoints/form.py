"""The form of a checkpoint: the fields that its readers need, and a checksum of each field as it was saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NotRequired

import torch
from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

from lit_grpo.process.inputs import typed
from lit_grpo.process.values import checksum

if TYPE_CHECKING:
    from pathlib import Path

CHECKSUMS = "checksums"
"""The field with the checksums of the other fields."""
_REMEDY = "give one that a run of lit_grpo has left in its folder checkpoints/"
_WITH_TENSORS = ConfigDict(arbitrary_types_allowed=True)
Fields = dict[str, Any]


class _Settings(TypedDict):
    policy: str
    dtype: Literal["float32", "bfloat16"]
    lora: Fields | None


@with_config(_WITH_TENSORS)
class _Policy(TypedDict):
    """The fields of a checkpoint that its policy needs."""

    state_dict: dict[str, torch.Tensor]
    hyper_parameters: _Settings
    policy_version: int
    base: NotRequired[str]
    drafts: NotRequired[dict[str, torch.Tensor]]


class _Optimizer(TypedDict):
    state: dict[int | str, Fields]
    param_groups: list[Fields]


class _Loops(TypedDict):
    fit_loop: Fields


class _Learner(TypedDict):
    beta: float
    history: Fields
    skipped: int
    budget: int | None


@with_config(_WITH_TENSORS)
class _Run(_Policy):
    """The fields that a run needs to be resumed."""

    format: int
    epoch: int
    global_step: int
    loops: _Loops
    callbacks: Fields
    optimizer_states: list[_Optimizer]
    lr_schedulers: list[Fields]
    told: Fields
    logged: tuple[Fields, Fields]
    reward_curves: tuple[Fields, Fields]
    learner: _Learner


def sealed(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint with the checksums of its fields.

    The archive of a checkpoint proves that its bytes are those that were written. The checksums prove that nobody has
    loaded, changed and saved it: a position in the data that was changed would train to other weights without a word.
    """
    own = {name: checksum(part) for name, part in checkpoint.items() if name != CHECKSUMS}
    return {**checkpoint, CHECKSUMS: own}


def change_of(checkpoint: Mapping[str, Any]) -> str | None:
    """Say how a checkpoint differs from what was saved; None if it does not, or has no checksums."""
    if CHECKSUMS not in checkpoint:
        return None
    saved, own = checkpoint[CHECKSUMS], sealed(checkpoint)[CHECKSUMS]
    if not isinstance(saved, Mapping):
        return f"{CHECKSUMS} was changed"
    name = next((name for name in {**saved, **own} if saved.get(name) != own.get(name)), None)
    if name is None:
        return None
    return f"{name!s:.80} was {'removed' if name not in own else 'changed' if name in saved else 'added'}"


def check_form(checkpoint: Any, path: Path | str | None = None, resumes: bool = False) -> None:
    """Refuse a checkpoint, before anything is loaded from it, by the first field that is missing or of another type.

    Args:
        checkpoint: The content that has been read.
        path: Path of the checkpoint, for the message.
        resumes: Whether a run is to be resumed from it; for its policy fewer fields are needed.
    """
    typed(checkpoint, _Run if resumes else _Policy, place_of(path), _REMEDY)


def place_of(path: Path | str | None) -> str:
    return "The checkpoint" if path is None else f"The checkpoint {str(path)!r}"
