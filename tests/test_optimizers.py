"""Optimizers beside AdamW, by class path: what they compute, keep and resume from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import random_policy, table_rows
from hand_made import Batches, Checkpoints, make_module, make_trainer, random_groups, weights_of

from examples.galore import DCT, GaLore
from lit_grpo.optim import MuonAdamW
from lit_grpo.policy.weights import TrainedWeights
from lit_grpo.training.forecast import Demand, Sizes, forecast

REWARDS = [[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.2, 0.5]]
SHAPES = [(24, 10), (10, 24), (16, 16), (10, 4), (12,)]
PRINTED = [0.01209, 0.01454, 0.01036]


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


def test_projections_by_the_dct_step_as_those_of_their_authors() -> None:
    """Printed by ``DCTAdamW`` of ista-daslab-optimizers 1.1.15 with ``proj="dct"``, ``rotate_subspace``, eps 1e-6."""
    weights = random_weights()[:2]
    before = weights[0].detach().clone()
    take_steps(DCT(weights, lr=0.01, rank=4), weights, 5)
    assert (weights[0].detach() - before).flatten()[:3].tolist() == pytest.approx(PRINTED, abs=2e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_muon_steps_matrices_of_layers_and_adamw_all_other_weights(tied: bool) -> None:
    """Both are torch's own, side by side, and a schedule changes the rates of both."""
    ours, beside = (random_policy(tie_word_embeddings=tied) for _ in range(2))
    by_name = dict(beside.named_parameters())
    matrices = {name for name in by_name if name.endswith("_proj.weight")}
    assert all(by_name[name].ndim == 2 for name in matrices) and len(matrices) >= 7
    parts = [
        torch.optim.Muon(
            [by_name[name] for name in matrices], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW([one for name, one in by_name.items() if name not in matrices], lr=0.01, weight_decay=0.1),
    ]
    optimizer = MuonAdamW(TrainedWeights(ours), lr=0.02, adamw_lr=0.01, weight_decay=0.1)
    schedules = [torch.optim.lr_scheduler.StepLR(one, 1, 0.5) for one in (optimizer, *parts)]
    for _ in range(3):
        for one, other in zip(ours.parameters(), beside.parameters(), strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        for one in (optimizer, *parts, *schedules):
            one.step()
    for name, weight in ours.named_parameters():
        assert torch.equal(weight, by_name[name]), name
    kept = num_bytes(optimizer)
    demand = Demand(1, 2, 1, 1, 1, optimizer="MuonAdamW")
    assert forecast(Sizes.of(ours.config), demand).resident["optimizer"] == pytest.approx(kept, rel=0.03)
    layers = sum(4 * one.numel() for name, one in by_name.items() if name in matrices)
    others = sum(8 * one.numel() + 4 for name, one in by_name.items() if name not in matrices)
    assert kept == layers + others


def test_muon_refuses_weights_of_which_it_does_not_know_the_embeddings() -> None:
    with pytest.raises(ValueError, match=r"give it lit_grpo\.policy\.weights\.TrainedWeights\(policy\) in place of"):
        MuonAdamW(random_weights())


def galore(parameters: Any) -> torch.optim.Optimizer:
    return GaLore(parameters, lr=1e-3, rank=8, update_proj_gap=2)


def dct(parameters: Any) -> torch.optim.Optimizer:
    return DCT(parameters, lr=1e-3, rank=8)


def muon(parameters: Any) -> torch.optim.Optimizer:
    return MuonAdamW(parameters, lr=1e-3, adamw_lr=1e-4)


def eight_bit(parameters: Any) -> torch.optim.Optimizer:
    from bitsandbytes.optim.adamw import AdamW8bit

    return AdamW8bit(parameters, lr=1e-3, min_8bit_size=1024)


@pytest.mark.parametrize(
    ("optimizer", "most"),
    table_rows([(galore, 0.4), (dct, 0.4), (eight_bit, 0.3), (muon, 0.7)], [(galore, 0.4), (muon, 0.7)]),
)
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
