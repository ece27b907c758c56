"""Optimizers that need less memory than AdamW, by class path: what they compute, keep and resume from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import random_policy
from hand_made import Batches, Checkpoints, make_module, make_trainer, random_groups, weights_of

from examples.galore import GaLore

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


def test_galore_keeps_moments_of_the_rank() -> None:
    weights = random_weights()
    optimizer = GaLore(weights, rank=4)
    take_steps(optimizer, weights, 1)
    shapes = [tuple(optimizer.state[weight]["exp_avg"].shape) for weight in weights]
    assert shapes == [(24, 4), (4, 24), (16, 4), (10, 4), (12,)]


def galore(parameters: Any) -> torch.optim.Optimizer:
    return GaLore(parameters, lr=1e-3, rank=8, update_proj_gap=2)


def eight_bit(parameters: Any) -> torch.optim.Optimizer:
    from bitsandbytes.optim.adamw import AdamW8bit

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
    """Of everything that a checkpoint keeps of the optimizer."""
    states = optimizer.state_dict()["state"].values()
    tensors = [value for state in states for value in state.values() if torch.is_tensor(value)]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())
