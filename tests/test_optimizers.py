"""Optimizers that need less memory than AdamW, by class path: what they compute, keep and resume from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import random_policy
from hand_made import Batches, Checkpoints, make_module, make_trainer, random_groups, weights_of

from lit_grpo.optim.galore import GaLoreAdamW
from lit_grpo.policy.adapters import LoraSettings
from lit_grpo.policy.loading import embeddings

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before"),
]
REWARDS = [[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.2, 0.5]]
SHAPES = [(24, 10), (10, 24), (16, 16), (10, 4), (12,)]


def random_weights(seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def take_steps(optimizer: torch.optim.Optimizer, weights: list[torch.nn.Parameter], num_steps: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()


def test_galore_is_that_of_its_authors() -> None:
    galore_torch = pytest.importorskip("galore_torch")
    ours, theirs = random_weights(), random_weights()
    take_steps(GaLoreAdamW(ours, lr=0.01, eps=1e-12, weight_decay=0.0, rank=4, update_every=3), ours, 8)
    low_rank = {"rank": 4, "update_proj_gap": 3, "scale": 0.25, "proj_type": "std"}
    groups = [{"params": theirs[:3], **low_rank}, {"params": theirs[3:]}]
    take_steps(galore_torch.GaLoreAdamW(groups, lr=0.01, eps=1e-12, no_deprecation_warning=True), theirs, 8)
    for mine, its, first in zip(ours, theirs, random_weights(), strict=True):
        assert torch.allclose(mine, its, atol=1e-6) and not torch.allclose(mine, first, atol=1e-2)


def test_galore_of_full_rank_or_on_whole_weights_is_adamw() -> None:
    expected = random_weights()
    take_steps(torch.optim.AdamW(expected, lr=0.01), expected, 8)
    for rank, whole in ((16, []), (4, [0, 1, 2])):
        actual = random_weights()
        optimizer = GaLoreAdamW(actual, lr=0.01, rank=rank)
        optimizer.leave_whole([actual[place] for place in whole])
        take_steps(optimizer, actual, 8)
        for mine, its in zip(actual, expected, strict=True):
            assert torch.allclose(mine, its, atol=1e-6)


def test_galore_keeps_moments_of_the_rank() -> None:
    weights = random_weights()
    optimizer = GaLoreAdamW(weights, rank=4)
    take_steps(optimizer, weights, 1)
    shapes = [tuple(optimizer.state[weight]["exp_avg"].shape) for weight in weights]
    assert shapes == [(24, 4), (4, 24), (16, 4), (10, 4), (12,)]


def galore(parameters: Any) -> torch.optim.Optimizer:
    return GaLoreAdamW(parameters, lr=1e-3, rank=8, update_every=2)


def eight_bit(parameters: Any) -> torch.optim.Optimizer:
    from bitsandbytes.optim.adamw import AdamW8bit  # pyright: ignore[reportMissingImports]

    return AdamW8bit(parameters, lr=1e-3, min_8bit_size=1024)


@pytest.mark.parametrize(("optimizer", "most"), [(galore, 0.4), (eight_bit, 0.3)])
def test_a_run_goes_on_exactly_from_a_checkpoint_of_less_memory(
    optimizer: Any, most: float, policy_folder: Path, tmp_path: Path
) -> None:
    def run(make: Any, ckpt_path: Path | None = None) -> Any:
        groups = random_groups(random_policy(), REWARDS)
        module, trainer = make_module(policy_folder, optimizer=make), make_trainer(Checkpoints(tmp_path))
        trainer.fit(module, Batches([groups] * 4), ckpt_path=ckpt_path)
        return module, num_bytes(trainer.optimizers[0])

    _, adamw_bytes = run(torch.optim.AdamW)
    whole, our_bytes = run(optimizer)
    torch.load(tmp_path / "1.ckpt", weights_only=True)
    resumed, _ = run(optimizer, tmp_path / "1.ckpt")
    assert whole.policy_version == resumed.policy_version == 4
    assert torch.equal(weights_of(resumed), weights_of(whole))
    assert our_bytes < most * adamw_bytes


def num_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Of everything that the optimizer remembers of the weights."""
    tensors = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def test_a_run_leaves_embeddings_whole_and_adapters_as_they_are(policy_folder: Path) -> None:
    groups = random_groups(random_policy(), REWARDS)
    for lora in (None, LoraSettings(r=4)):
        module, trainer = make_module(policy_folder, optimizer=galore, lora=lora), make_trainer()
        trainer.fit(module, Batches([groups]))
        (optimizer,) = trainer.optimizers
        projected = {id(weight) for weight, state in optimizer.state.items() if "basis" in state}
        assert bool(projected) == (lora is None)
        assert not projected & {id(weight) for weight in embeddings(module.policy)}


def test_numbers_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match=r"optimizer\.rank must be at least 1, not 0"):
        GaLoreAdamW(random_weights(), rank=0)
    with pytest.raises(ValueError, match=r"optimizer\.update_every must be at least 1, not 0"):
        GaLoreAdamW(random_weights(), update_every=0)
