"""A run whose trainer computes other log-probs than were sampled stops, whatever the cause."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from conftest import save_policy
from hand_made import make_module, make_trainer, sgd

from lit_grpo.callbacks import RolloutScheduler, WeightSync
from lit_grpo.data import PromptDataModule
from lit_grpo.types import SamplingParams
from lit_grpo.update.metrics import LogprobGapError
from lit_grpo.update.objective.corrections import Correction
from lit_grpo.update.objective.objective import Objective

Cause = Callable[[Any], None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_policy(tmp_path)
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+2="}\n{"prompt": "3+4="}\n')
    return tmp_path


class Change(pl.Callback):
    """Does something to a module once it is loaded."""

    def __init__(self, cause: Cause) -> None:
        self.cause = cause

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.cause(pl_module)


def random_in_training(module: Any) -> None:
    """What router jitter and dropout do: the inputs of a layer are random in training mode."""

    def shake(layer: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(output, 0.1, layer.training)

    module.policy.model.layers[0].mlp.register_forward_hook(shake)


def other_temperature(module: Any) -> None:
    """The trainer computes at another temperature than the generator samples at."""
    module.settings.temperature = 0.7


def reward_that_trains(module: Any) -> None:
    """A reward function touches the policy's weights."""

    def call(completion: str, num_tokens: int) -> float:
        with torch.no_grad():
            module.policy.model.norm.weight.mul_(1.1)
        return float(len(completion) % 3)

    object.__setattr__(module.rewards[0], "call", call)


def varied(completion: str, num_tokens: int) -> float:
    return float(num_tokens % 3) + len(completion) % 2


def train(folder: Path, *causes: Cause, **options: Any) -> Any:
    sampling = SamplingParams(max_tokens=12)
    module = make_module(folder, rewards=[varied], optimizer=sgd(1e-2), sampling=sampling, **options)
    changes = [Change(cause) for cause in causes]
    trainer = make_trainer(*changes, RolloutScheduler(), WeightSync(), max_steps=2, max_epochs=-1)
    trainer.fit(module, datamodule=PromptDataModule(str(folder), train=str(folder / "train.jsonl"), batch_size=2))
    return trainer


@pytest.mark.parametrize("cause", [random_in_training, other_temperature, reward_that_trains])
def test_the_first_update_is_refused(folder: Path, cause: Cause) -> None:
    with pytest.raises(LogprobGapError, match=r"by up to .* nats a token.*weight_sync\.max_.*correction, or raise"):
        train(folder, cause)


def test_a_correction_makes_a_warning_of_it(folder: Path) -> None:
    objective = Objective(correction=Correction("token_truncate"))
    with pytest.warns(UserWarning, match="model.objective.correction weighs what is learned"):
        trainer = train(folder, other_temperature, objective=objective)
    assert trainer.callback_metrics["sampling/logprob_gap_max"] > 0.05


def test_an_honest_run_is_far_below_the_limit(folder: Path) -> None:
    assert train(folder).callback_metrics["sampling/logprob_gap_max"] < 1e-4
