"""A run from Python: functions, models, rows and dicts at hand."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any, cast

import datasets
import lightning.pytorch as pl
import pytest
import torch
from conftest import random_policy, read_metrics
from hand_made import make_trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger

import lit_grpo
from lit_grpo.callbacks import MemoryMonitor, RolloutScheduler, WeightSync
from lit_grpo.cli.command_line import run as command_line
from lit_grpo.data import PromptDataModule
from lit_grpo.module import GRPOModule
from lit_grpo.plugins import Listener
from lit_grpo.policy.loading import load_tokenizer
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.rewards import RewardSpec
from lit_grpo.rewards.function import listed
from lit_grpo.rollout.slots import SlotGenerator
from lit_grpo.training import TRAINER_DEFAULTS, default_callbacks
from lit_grpo.training.quiet import LOGGERS
from lit_grpo.types import SamplingParams

REMAINDERS = [{"prompt": f"0{n}%5="} for n in range(10, 18)]  # of the policy that comes with the package
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


def listening(**attributes: Any) -> Any:
    """A callback of a user that hears of rollouts."""
    return type("Listening", (pl.Callback, Listener), attributes)()


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
        ({"rewards": [3]}, "the reward 3 is no function, path or RewardSpec; give one of these, or a mapping"),
        ({"policy": 3}, "policy is of type int; give a name, a folder or a PreTrainedModel."),
        ({"generator": "slots"}, "generator is of type str; give an object such as lit_grpo.rollout.slots.SlotGen"),
        ({"generator": SlotGenerator}, "generator is the class SlotGenerator; give an object such as"),
        ({"optimizer": {"lr": 1e-5}}, "optimizer is of type dict; give a function of the parameters, such as"),
        ({"lr_scheduler": 0.1}, "lr_scheduler is of type float; give a function of the optimizer, such as"),
        (
            {"trainer": {"logger": "csv"}},
            "trainer.logger holds 'csv', which is no Lightning Logger; give loggers, such",
        ),
        (
            {"trainer": {"callbacks": [listening(forks=True)]}, "train": REMAINDERS},
            "callback Listening has forks, which nothing reads there; put 'forks' into traits.",
        ),
        (
            {"trainer": {"callbacks": [listening(traits=frozenset({"lockstep"}))]}, "train": REMAINDERS},
            "callback Listening has 'lockstep' in traits, which is no trait; did you mean 'lock_step'?",
        ),
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
    ],
)
def test_callbacks_that_an_own_trainer_lacks_are_named(callbacks: list[Any], problem: str, policy_folder: Path) -> None:
    module = GRPOModule(str(policy_folder), rewards=[RewardSpec("lit_grpo.rewards.exact_match")])
    data = PromptDataModule(str(policy_folder), train=ROWS, batch_size=2)  # pyrefly: ignore[bad-argument-type]
    with pytest.raises(ValueError) as caught:
        make_trainer(*callbacks).fit(module, datamodule=data)
    assert str(caught.value).startswith(problem)


class Counter(pl.Callback):
    """Counts batches."""

    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.batches += 1


def test_train_takes_one_callback_and_one_reward_without_lists(tmp_path: Path, policy_folder: Path) -> None:
    """The answers of two rows have another form than the reward's pattern gives, as a warning says before the run."""
    counter = Counter()
    reward = {"function": "exact_match", "name": "low", "args": {"pattern": "([12])"}}
    said = (
        r"2 of 4 rows of train cannot be won by reward 'low' as they are \(train/2, train/3\): of train/2, no match of"
    )
    with pytest.warns(UserWarning, match=said):
        run = lit_grpo.train(
            str(policy_folder),
            ROWS,
            reward,
            max_steps=1,
            batch_size=2,
            num_generations=2,
            sampling={"max_tokens": 4},
            trainer={"accelerator": "cpu", "enable_progress_bar": False, "logger": False},
            callbacks=counter,
            dir=str(tmp_path),
        )
    assert counter.batches == 1 and [each.name for each in run.module.rewards] == ["low"]


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


def test_a_run_from_python_is_resumed_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = lit_grpo.train(
        str(policy_folder),
        ROWS,
        [digits, {"function": "exact_match", "weight": 0.5, "args": {"answer_column": "answer"}}],
        validation=ROWS[:2],
        max_steps=1,
        batch_size=2,
        seed=3,
        num_generations=4,
        sampling={"max_tokens": 8},
        objective={"kl": {"beta": 0.1}},
        optimizer=partial(torch.optim.SGD, lr=0.1),
        lr_scheduler=partial(torch.optim.lr_scheduler.LinearLR, total_iters=5),
        trainer={"accelerator": "cpu", "enable_progress_bar": False},
        callbacks={"rollout": {"plan": "lpt"}},
    )
    shown = repr(run).splitlines()
    assert len(shown) == 3 and shown[0] == "run     runs/grpo, 1 updates" and "lacks" not in capsys.readouterr().out
    command = shown[2].removeprefix("resume  python -m lit_grpo ").split()
    command_line([*command, "--trainer.max_steps", "2"])
    said = capsys.readouterr()
    assert "goes on from update 1" in said.out and "other settings" not in said.out + said.err
    rows = [row for row in read_metrics(tmp_path / "runs" / "grpo" / "metrics.csv") if row["loss"]]
    assert [row["step"] for row in rows] == ["1", "2"] and rows[1]["rewards/digits/mean"] and rows[1]["kl"]


SCRIPT = """
import lit_grpo

def score(completion): return len(completion) / 8

def once():
    run = lit_grpo.train(
        {policy!r}, [{{"prompt": "1+1=", "when": {when}}}] * 2, [score, {extra}], max_steps=1, batch_size=2,
        num_generations=2, sampling={{"max_tokens": 4}}, trainer={{"accelerator": "cpu", "enable_progress_bar": False}},
        callbacks={{"rollout_timeline": None}},
    )

{start}
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("start", "when", "extra", "lacks"),
    [
        ('if __name__ == "__main__":\n    once()', "1", "score", []),
        ("once()", "1", "score", ["model.rewards (score is defined in script.py, which would train again"]),
        (
            'if __name__ == "__main__":\n    once()',
            "(1, 2)",
            "lambda completion: 0.0",
            [
                "data.train (row 0 holds what JSON does not)",
                "model.rewards (once.<locals>.<lambda> is defined within a",
            ],
        ),
    ],
)
def test_what_a_config_cannot_hold_is_said_when_the_run_begins(
    start: str, when: str, extra: str, lacks: list[str], tmp_path: Path, policy_folder: Path
) -> None:
    text = SCRIPT.format(policy=str(policy_folder), start=start, when=when, extra=extra).replace(
        "[score, score]", "score"
    )
    (tmp_path / "script.py").write_text(text)
    environment = os.environ | {"COLUMNS": "300"}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    (said,) = [line for line in done.stdout.splitlines() if line.startswith("runs/grpo/config.yaml lacks")]
    assert "rollout_timeline (the run is without it)" in said and all(one in said for one in lacks)
    config = (tmp_path / "runs" / "grpo" / "config.yaml").read_text()
    assert ("script.py:score" in config) == (not lacks)


def test_an_own_trainer_saves_with_a_checkpoint_of_the_users_and_finds_best_and_last(
    policy_folder: Path, tmp_path: Path
) -> None:
    def trainer(max_steps: int, *own: pl.Callback) -> pl.Trainer:
        callbacks = default_callbacks({"policy_exporter": None}, own)
        options: dict[str, Any] = {**TRAINER_DEFAULTS, "accelerator": "cpu", "logger": False}
        options["enable_progress_bar"] = False
        return pl.Trainer(**options, max_steps=max_steps, default_root_dir=tmp_path, callbacks=callbacks)

    trained: list[bool] = []

    class Slots(SlotGenerator):
        def start(self, policy: PolicySpec) -> None:
            trained.append(policy.trained)
            super().start(policy)

    def parts() -> tuple[GRPOModule, PromptDataModule]:
        sources: Any = {"train": ROWS, "validation": ROWS, "test": ROWS}
        module = GRPOModule(
            str(policy_folder),
            rewards=cast(Any, listed(digits)),
            generator=Slots(),
            num_generations=2,
            sampling=SamplingParams(max_tokens=3),
            pass_threshold=0.0,
        )
        return module, PromptDataModule(str(policy_folder), **sources, batch_size=2)

    first = trainer(1, ModelCheckpoint(tmp_path / "own", save_top_k=-1, every_n_epochs=1))
    with pytest.raises(ValueError, match=r'ckpt_path is "best", but this Trainer has saved no best\.ckpt'):
        trainer(1).fit(*parts(), ckpt_path="best")
    first.fit(*parts())
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"last.ckpt", "best.ckpt"}
    assert len(list((tmp_path / "own").iterdir())) == 1 and not (tmp_path / "lightning_logs").exists()
    module, data = parts()
    second = trainer(2)
    second.fit(module, data, ckpt_path="last")
    assert module.policy_version == 2
    second.test(module, data, ckpt_path="best", verbose=False)
    assert second.ckpt_path == str(tmp_path / "checkpoints" / "best.ckpt")
    assert trained == [True, True, False]  # without an update, its memory is the KV cache's


LOGGERS_OF_A_USER: dict[str, Any] = {
    "one": lambda place: CSVLogger(place / "mine"),
    "several": lambda place: [CSVLogger(place / "mine"), DummyLogger()],
    "Lightning's own": lambda place: True,
}


@pytest.mark.parametrize("name", LOGGERS_OF_A_USER)
def test_loggers_of_the_users_leave_the_runs_own_table(name: str, tmp_path: Path, policy_folder: Path) -> None:
    trainer = {"accelerator": "cpu", "enable_progress_bar": False, "logger": LOGGERS_OF_A_USER[name](tmp_path)}
    settings: dict[str, Any] = {"batch_size": 2, "num_generations": 2, "sampling": {"max_tokens": 4}}
    run = lit_grpo.train(
        str(policy_folder), ROWS, digits, max_steps=1, dir=str(tmp_path / "runs"), trainer=trainer, **settings
    )
    (row,) = read_metrics(run.folder / "metrics.csv")
    assert row["step"] == "1" and row["reward"]
    mine = list((tmp_path / "mine").glob("**/metrics.csv"))
    assert len(mine) == (name != "Lightning's own")
    assert all(float(read_metrics(path)[0]["reward"]) == pytest.approx(float(row["reward"])) for path in mine)
