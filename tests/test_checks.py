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
from torch.optim import LBFGS, SGD, Muon, SparseAdam
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, OneCycleLR, ReduceLROnPlateau, SequentialLR

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


def other_weights() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(2))]


def one_cycle(optimizer: torch.optim.Optimizer) -> OneCycleLR:
    return OneCycleLR(optimizer, 1e-3, total_steps=2)


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
            "OneCycleLR can be stepped 3 times, but the run makes 4 updates .* give it 4 steps",
        ),
        (
            {"lr_scheduler": lambda of: SequentialLR(of, [ConstantLR(of), one_cycle(of)], [1])},
            "SequentialLR can be stepped 3 times, but the run makes 4 updates",
        ),
        (
            {"optimizer": Muon},
            r"model.optimizer Muon cannot be made \(Muon only supports 2D .*; change its",
        ),
        ({"optimizer": partial(SGD, lr=-1)}, r"model.optimizer SGD cannot be made \(Invalid learning rate: -1\)"),
        (
            {"optimizer": lambda weights: [SGD(weights)]},
            "model.optimizer makes an object of type list; give a",
        ),
        ({"optimizer": lambda weights: None}, "model.optimizer makes an object of type NoneType"),
        ({"optimizer": lambda weights: SGD(other_weights())}, "model.optimizer SGD holds no weight of the policy"),
        (
            {"lr_scheduler": lambda optimizer: None},
            "model.lr_scheduler makes an object of type NoneType",
        ),
        (
            {"lr_scheduler": CosineAnnealingLR},
            r"lr_scheduler CosineAnnealingLR cannot be made \(.*'T_max'.*init_arg",
        ),
        (
            {"lr_scheduler": lambda optimizer: CosineAnnealingLR(SGD(other_weights()), 4)},
            "model.lr_scheduler CosineAnnealingLR is that of another optimizer",
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
    peft.get_peft_model(load_policy(str(policy_folder)), config).save_pretrained(str(folder))
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


TRAINERS = {
    "half an update": (
        {"val_check_interval": 0.5},
        r"val_check_interval is 0\.5, but it counts updates, .* 10",
    ),
    "a float": ({"val_check_interval": 1.0}, r"val_check_interval is 1\.0, but it counts updates"),
    "no update": ({"val_check_interval": 0}, "val_check_interval is 0, .* at least 1"),
    "fewer": ({"val_check_interval": -1}, "val_check_interval is -1, .* at least 1"),
    "no epoch": ({"check_val_every_n_epoch": 0}, "check_val_every_n_epoch is 0, .* at least 1"),
    "half an epoch": ({"check_val_every_n_epoch": 0.5}, r"check_val_every_n_epoch is 0\.5, .* whole number"),
    "more than an epoch": (
        {"check_val_every_n_epoch": 1, "val_check_interval": 1.5},
        r"val_check_interval is 1\.5, .* a fraction of an epoch",
    ),
    "longer than an epoch": (
        {"check_val_every_n_epoch": 1, "val_check_interval": 3},
        "val_check_interval is 3, .* which has 2; give at most 2, or leave check_val_every_n_epoch out",
    ),
    "longer than a limited epoch": (
        {"check_val_every_n_epoch": 1, "val_check_interval": 2, "limit_train_batches": 0.5},
        "val_check_interval is 2, .* which has 1; give at most 1",
    ),
    "barebones": ({"barebones": True}, "trainer.barebones leaves out loggers .*; leave it out"),
    "an epoch ends before a validation": (
        {"val_check_interval": 3, "callbacks": EarlyStopping("val/reward", check_on_train_epoch_end=True)},
        "EarlyStopping with monitor 'val/reward' and check_on_train_epoch_end, but an epoch ends after 2 batches, .*"
        "val_check_interval to 2 or less",
    ),
    "an epoch ends, and validations go by time": (
        {"val_check_interval": "00:01:00:00", "callbacks": EarlyStopping("val/reward", check_on_train_epoch_end=True)},
        "before the first validation; leave check_on_train_epoch_end out",
    ),
}


@pytest.mark.parametrize("name", TRAINERS)
def test_a_setting_of_the_trainer_that_cannot_work_is_refused_before_the_run(
    name: str, policy_folder: Path, tmp_path: Path
) -> None:
    trainer, message = TRAINERS[name]
    rows = [{"prompt": f"{number}+1="} for number in range(4)]
    settings: dict[str, Any] = {"batch_size": 2, "num_generations": 2, "sampling": {"max_tokens": 3}}
    trainer = {"accelerator": "cpu", "enable_progress_bar": False} | trainer
    with pytest.raises(ValueError, match=message) as caught:
        lit_grpo.train(
            str(policy_folder), rows, differing, validation=rows, max_steps=2, dir=str(tmp_path), trainer=trainer,
            **settings,
        )  # fmt: skip
    assert "\n" not in str(caught.value) and not list(tmp_path.glob("**/samples.jsonl"))
