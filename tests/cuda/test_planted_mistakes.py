"""Thirteen mistakes that only a GPU shows, planted one at a time: the checks of slots and update go red on each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from on_gpu import check_slots, check_update

from lit_grpo.rollout.slots import generator as generator_module
from lit_grpo.rollout.slots.copies import LoweredWeights
from lit_grpo.rollout.slots.fused import FusedDecoder
from lit_grpo.rollout.slots.graphs import GraphedDecoder
from lit_grpo.rollout.slots.kv import cache as cache_module
from lit_grpo.update import step
from lit_grpo.update.batches import layout
from lit_grpo.update.objective import policy_loss
from lit_grpo.update.passes import PolicyPasses
from lit_grpo.update.prefix.sharing import SharedPrefix

Patch = pytest.MonkeyPatch
Where = Literal["slots", "slots in bf16-mixed", "update"]


def after(owner: Any, name: str, do: Callable[[Any], object]) -> Callable[[Patch], None]:
    """Plant something that is done with what a function returns."""

    def plant(patch: Patch) -> None:
        original = getattr(owner, name)

        def changed(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            do(result)
            return result

        patch.setattr(owner, name, changed)

    return plant


def instead(function: Any, *places: tuple[Any, str]) -> Callable[[Patch], None]:
    """Plant another function."""

    def plant(patch: Patch) -> None:
        for owner, name in places:
            patch.setattr(owner, name, function)

    return plant


def one_by_one(tensors: Any, device: torch.device) -> Any:
    here = {name: torch.as_tensor(each) for name, each in tensors.items()}
    return {name: tensor.to(device, non_blocking=True) for name, tensor in here.items()}  # from pageable memory


def pinned_one_by_one(tensors: Any, device: torch.device) -> Any:
    here = {name: torch.as_tensor(each) for name, each in tensors.items()}
    if device.type == "cpu":
        return here
    return {name: tensor.pin_memory().to(device, non_blocking=True) for name, tensor in here.items()}


def left_on_the_host(batch: layout.PackedRow, device: Any, to: Any = layout.PackedRow.to) -> layout.PackedRow:
    return replace(to(batch, device), advantages_N=batch.advantages_N)


def picks_rows(logits_BV: torch.Tensor, *rest: Any, sample: Any = generator_module.sample_tokens) -> Any:
    assert logits_BV[logits_BV.isfinite().all(-1)].numel()
    return sample(logits_BV, *rest)


def three_copies(*tensors: torch.Tensor) -> Any:
    return tuple(tensor.cpu().numpy() for tensor in tensors)


def read_each(others: Any, parts: Any) -> Any:
    return [other.cpu() for other in others], parts


def spread_by_lengths(values_C: torch.Tensor, lengths_C: torch.Tensor, num_tokens: int | None = None) -> torch.Tensor:
    return values_C.repeat_interleave(lengths_C)


def labels_again(layout: SharedPrefix, device: torch.device, labels: Any = SharedPrefix._labels) -> torch.Tensor:
    layout._labels_3K = None
    return labels(layout, device)


def nothing(*_: object) -> None:
    pass


MISTAKES: dict[str, tuple[Where, Callable[[Patch], None]]] = {
    "a recorded part reads a number": ("slots", after(FusedDecoder, "after", lambda hidden: hidden.sum().item())),
    "a step reads what it sampled in three copies": ("slots", instead(three_copies, (generator_module, "to_host"))),
    "a step's inputs come from pageable memory": (
        "slots", instead(one_by_one, (generator_module, "in_one_copy"), (cache_module, "in_one_copy")),
    ),
    "a step's inputs come one by one": (
        "slots", instead(pinned_one_by_one, (generator_module, "in_one_copy"), (cache_module, "in_one_copy")),
    ),
    "a step picks rows by a mask": ("slots", instead(picks_rows, (generator_module, "sample_tokens"))),
    "recordings outlive weights that moved": ("slots", instead(nothing, (GraphedDecoder, "refresh"))),
    "copies in bfloat16 outlive an update": ("slots in bf16-mixed", instead(nothing, (LoweredWeights, "refresh"))),
    "a tensor stays on the host": ("update", instead(left_on_the_host, (layout.PackedRow, "to"))),
    "a micro-batch comes tensor by tensor": ("update", instead(pinned_one_by_one, (layout, "in_one_copy"))),
    "lengths are read to spread values": (
        "update", instead(spread_by_lengths, (policy_loss, "spread"), (step, "spread")),
    ),
    "metrics are read one by one": ("update", instead(read_each, (step, "read_sums"))),
    "each micro-batch's loss is read": ("update", after(PolicyPasses, "_loss", float)),
    "labels of the mask come in a copy of their own": ("update", instead(labels_again, (SharedPrefix, "_labels"))),
}  # fmt: skip


def check(where: Where, folder: Path) -> None:
    if where == "update":
        check_update()
    else:
        check_slots(folder, torch.bfloat16 if "bf16" in where else None)


@pytest.mark.nightly
@pytest.mark.parametrize("where", ["slots", "slots in bf16-mixed", "update"])
def test_without_a_mistake_the_checks_pass(where: Where, policy_folder: Path) -> None:
    check(where, policy_folder)


@pytest.mark.nightly
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_found(mistake: str, policy_folder: Path, monkeypatch: Patch) -> None:
    where, plant = MISTAKES[mistake]
    plant(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError)):
        check(where, policy_folder)
