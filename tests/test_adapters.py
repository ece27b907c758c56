"""LoRA: what is trained, what the reference is, what is exported, and what decodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import random_policy
from hand_made import fit, full_logprobs, make_module, random_groups, sgd

from lit_grpo.adapters import LoraSettings, add_adapters
from lit_grpo.policy import load_policy, load_tokenizer
from lit_grpo.rollout.controller import RolloutController
from lit_grpo.rollout.slots import SlotGenerator
from lit_grpo.types import Prompt, SamplingParams
from lit_grpo.update.kl import KLTerm
from lit_grpo.update.microbatch import make_micro_batch
from lit_grpo.update.objective import Objective
from lit_grpo.update.reference import AdapterFreeReference, micro_batch_logprobs

REWARDS = [[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.2, 0.5]]


@pytest.fixture
def trained(policy_folder: Path) -> Any:
    """A module after two updates of its adapters, with a KL term."""
    groups = random_groups(random_policy(), REWARDS)
    torch.manual_seed(0)  # peft draws the adapters
    objective = Objective(kl=KLTerm(0.1))
    module = make_module(policy_folder, lora=LoraSettings(r=4), optimizer=sgd(2.0), objective=objective)
    recorder = fit(module, groups, groups)
    assert recorder.logs[0]["kl"] == pytest.approx(0, abs=1e-6) and recorder.logs[1]["kl"] > 1e-6
    return module


def test_only_adapters_are_trained(trained: Any) -> None:
    before = dict(random_policy().named_parameters())
    learnt = [name for name, parameter in trained.policy.named_parameters() if parameter.requires_grad]
    assert len(learnt) == 2 * 7 * 2 and all(".lora_" in name for name in learnt)
    assert any(bool(parameter.any()) for name, parameter in trained.policy.named_parameters() if "lora_B" in name)
    for name, parameter in trained.policy.named_parameters():
        if name not in learnt:
            assert torch.equal(parameter, before[name.replace(".base_layer.", ".")])


def test_the_reference_is_the_policy_without_them(trained: Any) -> None:
    (rollout, *_), *_ = (group.rollouts for group in random_groups(random_policy(), REWARDS))
    with AdapterFreeReference(trained.policy).lend() as reference, torch.no_grad():
        reference_T, _ = micro_batch_logprobs(reference, make_micro_batch([rollout], [0.0]), 1.0)
    assert torch.allclose(reference_T, full_logprobs(random_policy(), rollout), atol=1e-5)
    assert not torch.allclose(reference_T, full_logprobs(trained.policy, rollout), atol=1e-3)


def test_the_export_loads_without_peft_and_computes_the_same(trained: Any, tmp_path: Path) -> None:
    trained.export(tmp_path / "policy")
    loaded = load_policy(str(tmp_path / "policy")).eval()
    assert not any("lora" in name for name, _ in loaded.named_parameters())
    ids = torch.arange(2, 20)[None]
    assert torch.allclose(loaded(ids).logits, trained.policy.eval()(ids).logits, atol=1e-4)
    assert {path.name for path in (tmp_path / "policy" / "adapter").iterdir()} >= {"adapter_model.safetensors"}
    load_tokenizer(str(tmp_path / "policy"))


def test_the_slots_decode_with_them(trained: Any) -> None:
    generator = SlotGenerator(4)
    generator.start(trained.policy, trained.tokenizer)
    generator.load_weights(trained.policy.named_parameters(), 2)
    prompts = [Prompt("a", (2, 3, 4), ""), Prompt("b", (9,), "")]
    groups, _ = RolloutController(generator).collect(prompts, 3, SamplingParams(max_tokens=12), seed=0)
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        assert torch.allclose(rollout.completion.logprobs_T, full_logprobs(trained.policy, rollout), atol=1e-5)


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match=r"lora\.r must be at least 1, not 0"):
        LoraSettings(r=0)
    with pytest.raises(ValueError, match=r"lora\.alpha must be above 0"):
        LoraSettings(alpha=0)
    with pytest.raises(ValueError, match=r"lora\.base must be nf4 or left out, not 'int4'"):
        LoraSettings(base="int4")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="q_prok"):
        add_adapters(random_policy(), LoraSettings(target_modules=["q_prok"]))  # pyright: ignore[reportArgumentType]


def test_without_peft_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_grpo.adapters.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"install the extra lit_grpo\[lora\]"):
        add_adapters(random_policy(), LoraSettings())  # pyright: ignore[reportArgumentType]
