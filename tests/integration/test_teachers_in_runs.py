"""Runs that learn from a teacher alone: with all weights and with adapters, broken off and gone on with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hand_made import sgd
from sampled_runs import Trained, train_on_sums

from lit_grpo.policy.adapters import LoraSettings
from lit_grpo.policy.loading import load_policy, load_tokenizer
from lit_grpo.rewards import RewardSpec
from lit_grpo.update.logprobs.teacher import TeacherSettings

pytestmark = pytest.mark.filterwarnings("ignore")
SIZES: dict[str, Any] = {"num_prompts": 4, "batch_size": 2, "max_steps": 4, "num_generations": 2, "rewards": []}


def letters(completion: str) -> float:
    return float(sum(map(ord, completion)) % 3)


def train(policy_folder: Path, folder: Path, teacher: TeacherSettings, **settings: Any) -> tuple[Trained, torch.Tensor]:
    """Train; return what was learned from, and the final weights."""
    trained, own = Trained(), SIZES | {"plugins": [{"distill": {"top_k": 4}}], "teacher": teacher} | settings
    module, _, _ = train_on_sums(policy_folder, folder, trained, **own)
    return trained, torch.cat([parameter.detach().flatten() for parameter in module.policy.parameters()])


@pytest.mark.parametrize("lora", [None, LoraSettings(r=2)], ids=["all weights", "adapters"])
def test_a_moving_average_teaches_and_a_run_that_is_broken_off_goes_on_bit_by_bit(
    lora: LoraSettings | None, policy_folder: Path, tmp_path: Path
) -> None:
    teacher, rewards = TeacherSettings("average", average_rate=0.5), [RewardSpec(f"{__file__}:letters")]
    trained, whole = train(policy_folder, tmp_path / "whole", teacher, lora=lora, rewards=rewards)
    losses = [logs["token_loss"] for logs in trained.logs]
    assert losses[0] < 1e-5 < losses[-1]  # at first it is the policy, and then it is behind
    started = tmp_path / "whole" / "2.ckpt"
    options: dict[str, Any] = {"lora": lora, "rewards": rewards, "checkpoint": str(started)}
    _, resumed = train(policy_folder, tmp_path / "resumed", teacher, **options)
    assert torch.equal(resumed, whole)


def test_the_policy_comes_nearer_to_another_model(policy_folder: Path, tmp_path: Path, other_folder: Path) -> None:
    """Without a reward: the reverse KL over all tokens falls, whether sampled or likely tokens are scored."""
    teacher: Any = load_policy(str(other_folder))
    ids = torch.randint(2, 30, (8, 24), generator=torch.Generator().manual_seed(0))

    @torch.no_grad()
    def divergence(policy: Any) -> float:
        own, its = (model(input_ids=ids).logits.log_softmax(-1) for model in (policy, teacher))
        return float((own.exp() * (own - its)).sum(-1).mean())

    before = divergence(load_policy(str(policy_folder)))
    for dtype, top_k in (("float32", 0), ("bfloat16", 8)):
        settings: dict[str, Any] = {"max_steps": 12, "num_prompts": 24, "num_generations": 8, "optimizer": sgd(0.1)}
        told = TeacherSettings(str(other_folder), dtype=dtype)
        plugins = [{"distill": {"top_k": top_k}}]
        module, _, _ = train_on_sums(
            policy_folder, tmp_path / dtype, Trained(), **(SIZES | settings), plugins=plugins, teacher=told
        )
        assert divergence(module.policy) < 0.8 * before


@pytest.fixture(scope="module")
def other_folder(policy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy with the same tokenizer and other weights."""
    folder = tmp_path_factory.mktemp("other")
    model, generator = load_policy(str(policy_folder)), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.03 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder)
    load_tokenizer(str(policy_folder)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"teacher": None}, r"rollout\.plugins Distill learns from a teacher; set model\.teacher\.policy"),
        ({"plugins": [], "rewards": [RewardSpec(f"{__file__}:letters")]}, r"model\.teacher has no effect, because no"),
        ({"plugins": []}, r"model\.rewards is empty; name at least one"),
        ({"teacher": TeacherSettings("nowhere")}, "nowhere"),
    ],
)
def test_what_lacks_is_named_before_a_rollout(
    settings: dict[str, Any], message: str, policy_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        train(policy_folder, tmp_path, **({"teacher": TeacherSettings("base")} | settings))
