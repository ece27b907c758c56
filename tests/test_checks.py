"""What a trainer must leave to the module, and the order of its callbacks: refused before anything is loaded."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import random_policy
from hand_made import Batches, make_module, make_trainer, random_groups, sgd
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins import HalfPrecision, MixedPrecision
from lightning.pytorch.strategies import DDPStrategy

from lit_grpo.callbacks import MemoryMonitor, RolloutScheduler, RunCheckpoint, ThroughputMonitor, WeightSync


@pytest.mark.parametrize("plugin", [MixedPrecision("16-mixed", "cpu"), HalfPrecision("16-true")])
def test_float16_is_refused(plugin: Any) -> None:
    trainer = make_trainer(plugins=[plugin])
    with pytest.raises(ValueError, match=rf"trainer\.precision '{plugin.precision}' is not supported; use bf16-mixed"):
        trainer.fit(make_module("nowhere"), train_dataloaders=Batches([]))


class Sharded(DDPStrategy):
    """As DeepSpeed's: it counts as a DDPStrategy, and the policy is not whole."""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": Sharded()}, r"trainer\.strategy Sharded is not supported; use one device, ddp or fsdp2"),
        ({"gradient_clip_val": 0.5}, r"trainer\.gradient_clip_val is 0\.5, .* model\.max_grad_norm; set that"),
        (
            {"accumulate_grad_batches": 2},
            r"accumulate_grad_batches is 2, .* model\.max_tokens_per_micro_batch; set",
        ),
    ],
)
def test_what_the_trainer_must_leave_to_the_module_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_trainer(**options).fit(make_module("nowhere"), train_dataloaders=Batches([]))


def test_lightnings_own_monitor_sees_the_learning_rate_of_every_step(policy_folder: Path) -> None:
    schedule = partial(torch.optim.lr_scheduler.LinearLR, start_factor=0.5, total_iters=2)
    module = make_module(policy_folder, optimizer=sgd(1.0), lr_scheduler=schedule)
    rates: list[float] = []

    class Rates(LearningRateMonitor):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            super().on_train_batch_start(trainer, *_)
            rates.append(float(trainer.callback_metrics["lr-SGD"]))

    groups = random_groups(random_policy(), [[1.0, 0.0, 0.0, 1.0]])
    make_trainer(Rates(), logger=DummyLogger(), log_every_n_steps=1).fit(module, Batches([groups] * 3))
    assert rates == [0.5, 0.75, 1.0]


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        ([MemoryMonitor(), RolloutScheduler()], "lists MemoryMonitor before RolloutScheduler; put it after"),
        ([RolloutScheduler(), ThroughputMonitor(), WeightSync()], "lists ThroughputMonitor before WeightSync"),
        ([WeightSync(), RolloutScheduler()], "lists WeightSync before RolloutScheduler"),
        ([RolloutScheduler(), RunCheckpoint()], "lists RolloutScheduler before RunCheckpoint"),
    ],
)
def test_callbacks_that_would_see_too_early_what_is_done_are_refused(callbacks: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_trainer(*callbacks).fit(make_module("nowhere"), train_dataloaders=Batches([]))
