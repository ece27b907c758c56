"""What a trainer must leave to the module, and the order of its callbacks: refused before anything is loaded."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from conftest import random_policy
from hand_made import Batches, differing, make_module, make_trainer, random_groups, sgd
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    TQDMProgressBar,
)
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import DDPStrategy
from torch.optim import LBFGS, SparseAdam
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau

import lit_grpo
from lit_grpo.callbacks import MemoryMonitor, RolloutScheduler, RunCheckpoint, ThroughputMonitor, WeightSync
from lit_grpo.checks import check_monitors
from lit_grpo.methods.capo import Capo
from lit_grpo.methods.router_loss import RouterLoss
from lit_grpo.methods.tr_dpo import MovingReference
from lit_grpo.plugins import Plugin
from lit_grpo.policy.loading import load_policy
from lit_grpo.update.objective.kl import KLTerm
from lit_grpo.update.objective.objective import Objective


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
        ({"gradient_clip_algorithm": "value"}, r"gradient_clip_algorithm is set, .* model\.max_grad_norm; leave"),
        ({"precision": "bf16-true"}, r"precision bf16-true .* but model\.dtype is float32; use bf16-mixed"),
        ({"precision": "64-true"}, r"precision '64-true' is not supported; use bf16-mixed or 32-true"),
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
        (
            [MemoryMonitor(), RolloutScheduler(), WeightSync()],
            "lists MemoryMonitor before RolloutScheduler; put it",
        ),
        ([RolloutScheduler(), ThroughputMonitor(), WeightSync()], "lists ThroughputMonitor before WeightSync"),
        ([WeightSync(), RolloutScheduler()], "lists WeightSync before RolloutScheduler"),
        ([RolloutScheduler(), WeightSync(), RunCheckpoint()], "lists RolloutScheduler before RunCheckpoint"),
    ],
)
def test_callbacks_that_would_see_too_early_what_is_done_are_refused(callbacks: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_trainer(*callbacks).fit(make_module("nowhere"), train_dataloaders=Batches([]))


@pytest.mark.parametrize(
    ("callback", "remedy"),
    [
        (GradientAccumulationScheduler({0: 2}), "max_tokens_per_micro_batch; leave it out, and raise data.batch_size"),
        (LearningRateFinder(), "set model.optimizer.init_args.lr"),
        (BatchSizeFinder(), "set model.max_tokens_per_micro_batch to auto"),
        (StochasticWeightAveraging(1e-3, 1), "average the policies"),
        (EMAWeightAveraging(), "average the policies"),
        (BackboneFinetuning(), "set model.lora"),
        (ModelPruning("l1_unstructured"), "prune the exported policy"),
    ],
)
def test_callbacks_of_lightning_that_cannot_work_are_refused_with_a_remedy(callback: Any, remedy: str) -> None:
    with pytest.raises(ValueError) as caught:
        make_trainer(callback).fit(make_module("nowhere"), train_dataloaders=Batches([]))
    assert str(caught.value).startswith(f"trainer.callbacks has {type(callback).__name__}, which ")
    assert remedy in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": LBFGS}, "model.optimizer LBFGS .* closure.* take one that needs gradients alone"),
        ({"optimizer": SparseAdam}, "model.optimizer SparseAdam needs sparse gradients"),
        ({"lr_scheduler": ReduceLROnPlateau}, "model.lr_scheduler ReduceLROnPlateau needs metrics at each step"),
        (
            {"lr_scheduler": lambda optimizer: OneCycleLR(optimizer, 1e-3, total_steps=3)},
            "OneCycleLR has total_steps 3, but the run makes 4 updates .* set total_steps to 4",
        ),
    ],
)
def test_what_cannot_be_stepped_once_per_update_is_refused_before_the_run(
    options: dict[str, Any], message: str, policy_folder: Path
) -> None:
    module = make_module(policy_folder, **({"optimizer": sgd(1e-3)} | options))
    with pytest.raises(ValueError, match=message):
        make_trainer(max_steps=4).fit(module, train_dataloaders=Batches([[]]))


class Begun(Callback):
    """Notes that the run has begun, whose first hook comes before checkpoints, validation and rollouts."""

    has_begun = False

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.has_begun = True


def adapter_of(policy_folder: Path, folder: Path) -> Path:
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(load_policy(str(policy_folder)), config).save_pretrained(str(folder))  # pyright: ignore
    return folder


@pytest.mark.parametrize(
    ("plugin", "options", "message"),
    [
        (Capo(), {"optimizer": torch.optim.RMSprop}, "Capo: it simulates steps of Adam, AdamW and SGD, and .* is RMSp"),
        (Capo(), {"lora": {"r": 2}}, "Capo: it needs a plain linear head that is trained"),
        (RouterLoss(), {}, "RouterLoss: it needs the logits of routers, which Qwen3ForCausalLM does not tell"),
        (
            MovingReference(),
            {"policy": adapter_of, "objective": Objective(kl=KLTerm(0.1))},
            "MovingReference: it needs a reference policy with weights of its own, but model.policy takes the policy",
        ),
    ],
)
def test_a_plug_in_refuses_a_policy_or_an_optimizer_before_the_run_begins(
    plugin: Plugin, options: dict[str, Any], message: str, policy_folder: Path, tmp_path: Path
) -> None:
    settings = {"optimizer": sgd(1e-3)} | options
    make = settings.pop("policy", None)
    module = make_module(policy_folder if make is None else make(policy_folder, tmp_path / "adapter"), **settings)
    module.set_plugins(plugin)
    begun = Begun()
    with pytest.raises(ValueError, match=message):
        make_trainer(begun, max_steps=1).fit(module, train_dataloaders=Batches([[]]))
    assert not begun.has_begun


def test_callbacks_that_monitor_a_validation_are_refused_without_one() -> None:
    for callback in (EarlyStopping("val/reward"), EarlyStopping("reward"), ModelCheckpoint(monitor="val/reward")):
        trainer: Any = SimpleNamespace(callbacks=[callback])
        kind = type(callback).__name__
        with pytest.raises(
            ValueError, match=f"{kind}, which looks at its metric after each validation, .* leave {kind}"
        ):
            check_monitors(trainer, False, ["val/reward"], may_log=True)
        assert check_monitors(trainer, True, ["val/reward"], may_log=False) is None


class LogsMore(Callback):
    """A callback of the user's, which may log anything."""


@pytest.mark.parametrize("kind", [EarlyStopping, ModelCheckpoint])
def test_a_monitored_metric_that_no_validation_logs_is_refused_before_the_run(
    kind: Any,
) -> None:
    said = (
        f"trainer.callbacks has {kind.__name__} with monitor 'val_reward', but validation logs val/pass@1, val/reward, "
        "val/completion_length, val/truncated, val/rewards/exact_match/mean; "
    )
    own = kind(monitor="val_reward")
    with pytest.raises(ValueError, match=re.escape(f"{said}take one of these.")):
        make_trainer(own, enable_checkpointing=True).fit(make_module("nowhere"), train_dataloaders=Batches([]))
    trainer, warned = (
        make_trainer(own, LogsMore(), enable_checkpointing=True),
        "the run ends with an error unless a rew",
    )
    with pytest.warns(UserWarning, match=re.escape(said + warned)), pytest.raises(ValueError, match="nowhere"):
        trainer.fit(make_module("nowhere"), train_dataloaders=Batches([]))


def test_checkpoints_and_progress_bars_of_the_users_own_work_and_go_on_exactly(
    policy_folder: Path, tmp_path: Path
) -> None:
    def train(**options: Any) -> Any:
        rows = [{"prompt": f"{number}+1="} for number in range(4)]
        trainer = {"accelerator": "cpu", "logger": False}
        settings = {"batch_size": 2, "num_generations": 2, "sampling": {"max_tokens": 3}, "trainer": trainer}
        return lit_grpo.train(
            str(policy_folder), rows, differing, max_steps=2, dir=str(tmp_path), **settings, **options
        )

    own = [ModelCheckpoint(tmp_path / "own", every_n_train_steps=1, save_top_k=-1), TQDMProgressBar()]
    module = train(callbacks=own).module
    saved = torch.load(tmp_path / "own" / "epoch=0-step=1.ckpt", weights_only=True)
    assert saved["policy_version"] == 1 and saved["state_dict"].keys() == module.state_dict().keys()
