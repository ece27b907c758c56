"""Warm starts in real runs: updates on examples alone, then GRPO with or without them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hand_made import make_module, make_trainer, sgd
from sampled_runs import Trained, train_on_sums

from lit_grpo.callbacks import RolloutScheduler, RunSummary, WeightSync
from lit_grpo.data.module import PromptDataModule
from lit_grpo.rewards import RewardSpec

pytestmark = pytest.mark.filterwarnings("ignore")
SIZES: dict[str, Any] = {"num_prompts": 6, "batch_size": 2, "max_steps": 6, "num_generations": 3}
WARM = {"column": "solution", "warm_up": 3}


def letters(completion: str) -> float:
    return float(sum(map(ord, completion)) % 3)


def weights_of(policy: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in policy.parameters()])


def train(policy_folder: Path, folder: Path, **settings: Any) -> tuple[Trained, torch.Tensor]:
    """Train; return what was learned from, and the final weights."""
    trained = Trained()
    usual: Any = {"rewards": [RewardSpec(f"{__file__}:letters")], "plugins": [{"sft": WARM | {"weight": 0.25}}]}
    own: dict[str, Any] = {**SIZES, **usual, **settings}
    module, _, _ = train_on_sums(policy_folder, folder, trained, **own)
    return trained, weights_of(module.policy)


@pytest.fixture(scope="module")
def whole(policy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trained, torch.Tensor]:
    folder = tmp_path_factory.mktemp("whole")
    return folder, *train(policy_folder, folder)


def test_the_warm_start_samples_nothing_and_takes_no_prompt(whole: tuple[Path, Trained, torch.Tensor]) -> None:
    _, trained, _ = whole
    assert [len(batch) for batch in trained.batches.values()] == [0, 0, 0, 6, 6, 6]
    prompts = {rollout.prompt.prompt_id for rollout in trained.rollouts}
    assert len(prompts) == 6 and all(rollout.prompt.visit == 0 for rollout in trained.rollouts)
    losses = [logs["ce/loss"] for logs in trained.logs]
    assert losses[2] < losses[0] / 2  # of the whole loss, and then of a quarter
    assert all("reward" not in logs for logs in trained.logs[:3]) and "reward" in trained.logs[3]


@pytest.mark.parametrize("version", [2, 4])
def test_a_run_that_is_broken_off_goes_on_bit_by_bit(
    version: int, policy_folder: Path, tmp_path: Path, whole: tuple[Path, Trained, torch.Tensor]
) -> None:
    folder, _, expected = whole
    _, found = train(policy_folder, tmp_path, checkpoint=str(folder / f"{version}.ckpt"))
    assert torch.equal(found, expected)


def test_without_a_weight_grpo_goes_on_alone(policy_folder: Path, tmp_path: Path) -> None:
    trained, _ = train(policy_folder, tmp_path, plugins=[{"sft": WARM | {"weight": 0.0}}])
    assert "ce/loss" in trained.logs[2] and torch.tensor(trained.logs[3]["ce/loss"]).isnan()
    assert len(trained.rollouts) == 18


def test_a_warm_start_is_whole_batches(policy_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rollout\.plugins sft: warm_up is 3, but a batch has 2 optimizer steps"):
        train(policy_folder, tmp_path, num_minibatches=2)
    trained, _ = train(policy_folder, tmp_path, num_minibatches=2, plugins=[{"sft": WARM | {"warm_up": 2}}])
    assert [len(batch) for batch in trained.batches.values()] == [0, 6, 6]


@pytest.mark.parametrize("lora", [False, True])
def test_examples_alone_need_no_reward_and_validation_logs_their_loss(
    lora: bool, policy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With LoRA and checkpointed gradients too; the card tells of no completions and no slots."""
    rows = [{"prompt": f"{n}+{n}=", "solution": f"{n}bcd"} for n in range(6)]
    settings: dict[str, Any] = {"lora": {"r": 4}, "gradient_checkpointing": True} if lora else {}
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[4:]))
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:4]))
    data = PromptDataModule(
        str(policy_folder),
        train=str(tmp_path / "train.jsonl"),
        validation=str(tmp_path / "held_out.jsonl"),
        batch_size=2,
    )
    module = make_module(policy_folder, rewards=[], optimizer=sgd(0.1), **settings)
    losses: list[float] = []

    class Watch(pl.Callback):
        def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            losses.append(float(trainer.callback_metrics["val/sft/loss"]))
            assert "val/reward" not in trainer.callback_metrics

    scheduler = RolloutScheduler(plugins=[{"sft": {"column": "solution", "warm_up": "all"}}])
    limits: dict[str, Any] = {"max_steps": 6, "max_epochs": -1, "val_check_interval": 1}
    trainer = make_trainer(RunSummary(), scheduler, WeightSync(), Watch(), default_root_dir=tmp_path, **limits)
    trainer.fit(module, datamodule=data)
    card = capsys.readouterr().out
    assert re.search(r"^step +2 examples, 6 updates$", card, re.M) and not re.search("completion|slot|Generator", card)
    assert len(losses) == 6 and losses[-1] < losses[0]
    own, number = 0.0, 0
    for example in scheduler.session.plugins["sft"]._held_out:  # pyrefly: ignore[missing-attribute]
        ids = torch.tensor([*example.prompt_ids, *example.answer_ids_T.tolist()])
        with torch.no_grad():
            logprobs_TV = module.policy.eval()(input_ids=ids[None]).logits[0].log_softmax(-1)
        answer = ids[len(example.prompt_ids) :]
        own -= float(logprobs_TV[len(example.prompt_ids) - 1 : -1].gather(-1, answer[:, None]).sum())
        number += len(answer)
    assert losses[-1] == pytest.approx(own / number, rel=1e-5)
