"""A run from Python: functions, models, rows and dicts at hand."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import datasets
import lightning.pytorch as pl
import pytest
import torch
from conftest import random_policy
from hand_made import make_trainer

import lit_grpo
from lit_grpo.callbacks import MemoryMonitor, RolloutScheduler, WeightSync
from lit_grpo.data import PromptDataModule
from lit_grpo.module import GRPOModule
from lit_grpo.policy.loading import load_tokenizer
from lit_grpo.rewards import RewardSpec
from lit_grpo.training.quiet import LOGGERS
from lit_grpo.types import SamplingParams

pytestmark = pytest.mark.integration

ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(4)]


def digits(completion: str) -> float:
    return sum(character.isdigit() for character in completion) / 16


def test_train_takes_a_loaded_model_rows_functions_and_dicts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    policy_folder: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def short(completion): return -len(completion) / 16")
    policy: Any = random_policy()
    levels = [logger.level for logger in LOGGERS]
    capfd.readouterr()
    run = lit_grpo.train(
        policy,
        ROWS,
        [digits, "mine.py:short", {"function": "lit_grpo.rewards.exact_match", "weight": 0.5}],
        tokenizer=load_tokenizer(str(policy_folder)),
        validation=datasets.Dataset.from_list(ROWS),
        max_steps=2,
        batch_size=2,
        num_generations=4,
        sampling={"max_tokens": 8},
        objective={"kl": {"beta": 0.1}},
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        trainer={"accelerator": "cpu", "enable_progress_bar": False},
        callbacks={"sample_logger": {"every_n_updates": 1}},
    )
    assert run.module.policy is policy and run.module.sampling == SamplingParams(max_tokens=8)
    assert not torch.equal(policy.lm_head.weight, random_policy().lm_head.weight)  # type: ignore[attr-defined]
    rows = (run.folder / "metrics.csv").read_text().splitlines()
    logged = {"rewards/digits/mean", "rewards/short/std", "kl", "val/pass@1"}
    assert len(rows) == 4 and logged <= set(rows[0].split(","))
    assert {path.name for path in run.folder.iterdir()} >= {"policy", "checkpoints", "samples.jsonl"}
    assert capfd.readouterr().err == "" and not caplog.records  # no tips, and no progress of others
    assert [logger.level for logger in LOGGERS] == levels


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"sampling": {"max_token": 8}}, "sampling has no setting 'max_token'; did you mean max_tokens?"),
        ({"objective": {"kl": {"b": 1}}}, "objective.kl has no setting 'b'; it has beta, "),
        (
            {"callbacks": {"sampler": {}}},
            "callbacks has no 'sampler'; it has checkpoint, rollout, weight_sync, ",
        ),
        ({"callbacks": ["mine"]}, "callbacks holds 'mine', which is no Lightning Callback; give callbacks, or"),
        ({"callbacks": MemoryMonitor}, "callbacks holds <class '"),
        (
            {"tools": digits, "callbacks": {"rollout": {"plugins": [{"environments": {"tools": [digits]}}]}}},
            "tools of the plug-in environments is set in callbacks, and given as tools too; leave one of them out.",
        ),
        (
            {"environment": "a.py:A", "callbacks": {"rollout": {"plugins": {"environments": {"factory": "a.py:B"}}}}},
            "factory of the plug-in environments is set in callbacks, and given as environment too; leave one of",
        ),
        ({"environment": "a.py:A"}, "rollout.plugins environments: environment 'a.py:A': there is no file a.py"),
        ({"environment": {}}, "rollout.plugins environments: factory is an empty mapping; give at least one"),
        ({"rewards": [3]}, "the reward 3 is no function, path or RewardSpec; give one of these."),
        ({"policy": 3}, "policy is of type int; give a name, a folder or a PreTrainedModel."),
        ({"tokenizer": object()}, "tokenizer belongs to a loaded model; leave it out"),
        (
            {"policy": (random_policy(), object()), "tokenizer": object()},
            "tokenizer belongs to a loaded model; leave it out, because policy is a pair, which has one.",
        ),
    ],
)
def test_a_mistake_in_python_is_one_sentence_before_the_run(settings: Any, problem: str, tmp_path: Path) -> None:
    given = {"policy": "tiny", "train": ROWS, "rewards": [digits], "max_steps": 1, "dir": str(tmp_path)}
    with pytest.raises(ValueError) as caught:
        lit_grpo.train(**(given | settings))
    assert str(caught.value).startswith(problem)


@pytest.mark.parametrize(
    ("callbacks", "problem"),
    [
        (
            [],
            "trainer.callbacks lacks RolloutScheduler and WeightSync; give the Trainer callbacks=default_callbacks(),",
        ),
        ([RolloutScheduler()], "trainer.callbacks lacks WeightSync; give "),
        ([WeightSync()], "trainer.callbacks lacks RolloutScheduler; give "),
        (
            [WeightSync(), RolloutScheduler()],
            "trainer.callbacks lists WeightSync before RolloutScheduler; put",
        ),
        ([MemoryMonitor(), RolloutScheduler(), WeightSync()], "trainer.callbacks lists MemoryMonitor before Rollout"),
    ],
)
def test_callbacks_of_an_own_trainer_that_are_missing_or_misplaced_are_named(
    callbacks: list[Any], problem: str, policy_folder: Path
) -> None:
    module = GRPOModule(str(policy_folder), rewards=[RewardSpec("lit_grpo.rewards.exact_match")])
    data = PromptDataModule(str(policy_folder), train=ROWS, batch_size=2)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError) as caught:
        make_trainer(*callbacks).fit(module, datamodule=data)
    assert str(caught.value).startswith(problem)


class Counter(pl.Callback):
    """Counts batches."""

    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.batches += 1


@pytest.mark.parametrize("in_a_list", [True, False])
def test_train_takes_callbacks_as_lightning_does_and_one_reward(
    tmp_path: Path, policy_folder: Path, in_a_list: bool
) -> None:
    counter = Counter()
    run = lit_grpo.train(
        str(policy_folder),
        ROWS,
        digits,
        max_steps=1,
        batch_size=2,
        num_generations=2,
        sampling={"max_tokens": 4},
        trainer={"accelerator": "cpu", "enable_progress_bar": False, "logger": False},
        callbacks=[counter] if in_a_list else counter,
        dir=str(tmp_path),
    )
    assert counter.batches == 1 and [reward.name for reward in run.module.rewards] == ["digits"]


def test_a_run_within_a_run_and_within_an_event_loop_disturb_neither(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy_folder: Path
) -> None:
    """As in a notebook, whose cells run in a loop, and whose callbacks may train something else."""
    monkeypatch.chdir(tmp_path)

    async def slow_digits(completion: str) -> float:
        await asyncio.sleep(0)
        return digits(completion)

    def train(name: str, *callbacks: pl.Callback) -> Any:
        settings: dict[str, Any] = {"sampling": {"max_tokens": 8}, "callbacks": list(callbacks)}
        tokenizer = load_tokenizer(str(policy_folder))
        return lit_grpo.train(
            cast(Any, random_policy()), ROWS, slow_digits, tokenizer=tokenizer, max_steps=2, batch_size=2,
            num_generations=2, name=name, **settings,
        )  # fmt: skip

    class Inner(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
            if trainer.global_step == 1:
                train("inner")

    async def in_a_loop() -> None:
        train("outer", Inner())

    asyncio.run(in_a_loop())
    for name in ("inner", "outer"):
        rows = (tmp_path / "runs" / name / "metrics.csv").read_text().splitlines()
        assert rows[-1].startswith("2,"), rows[-1]
        assert (tmp_path / "runs" / name / "policy" / "model.safetensors").exists()
