"""QLoRA: adapters on weights in four bits, that train, decode, resume and are exported as numbers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import random_policy, save_policy, save_tokenizer
from hand_made import Batches, Checkpoints, make_module, make_trainer, random_groups, sgd
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from lit_grpo.policy.adapters import LoraSettings, add_adapters
from lit_grpo.policy.loading import load_policy
from lit_grpo.policy.nf4 import dequantized, without_quant_states
from lit_grpo.update.objective.kl import KLTerm
from lit_grpo.update.objective.objective import Objective
from tests.doubles.draft_layers import add_heads

REWARDS = [[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.2, 0.5]]


WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.15}
"""Blocks of 64 weights, which packing wants."""


@pytest.fixture(scope="module", params=[False, True], ids=["plain CPU", "CPU with avx512_bf16"], autouse=True)
def _packs(request: pytest.FixtureRequest) -> Iterator[None]:
    """What bitsandbytes is told of this CPU: with avx512_bf16 it would pack weights in ``eval()``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: request.param)
        yield


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved random policy whose weights can be packed."""
    return save_policy(tmp_path_factory.mktemp("wide"), **WIDE)


def run(policy_folder: Path, checkpoints: Path, ckpt_path: Path | None = None) -> Any:
    """A module after four updates of its adapters, with a KL term."""
    lora, objective = LoraSettings(r=4, base="nf4"), Objective(kl=KLTerm(0.1))
    module = make_module(policy_folder, lora=lora, optimizer=sgd(0.1), objective=objective)
    groups = random_groups(random_policy(**WIDE), REWARDS)
    torch.manual_seed(0)  # peft draws the adapters
    make_trainer(Checkpoints(checkpoints)).fit(module, Batches([groups] * 4), ckpt_path=ckpt_path)
    assert module.policy_version == 4
    return module


@pytest.fixture(scope="module")
def trained(_packs: None, wide_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """That module, and the folder of its checkpoints."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return run(wide_folder, folder), folder


def test_linear_layers_take_four_bits_and_only_adapters_learn(trained: Any) -> None:
    module, _ = trained
    before = load_policy(module.policy_name, nf4=True)
    first = dict(random_policy(**WIDE).named_parameters())
    for name, parameter in before.named_parameters():
        packed = parameter.dtype == torch.uint8
        assert packed == ("_proj" in name)
        assert not packed or parameter.numel() == first[name].numel() / 2
        assert torch.allclose(dequantized(parameter), first[name], atol=0.2 * float(first[name].detach().abs().max()))
    for name, parameter in module.policy.named_parameters():
        assert parameter.requires_grad == (".lora_" in name)
        if not parameter.requires_grad:
            assert torch.equal(parameter, dict(before.named_parameters())[name.replace(".base_layer.", ".")])


def test_a_run_goes_on_exactly_from_a_checkpoint(trained: Any, wide_folder: Path, tmp_path: Path) -> None:
    whole, checkpoints = trained
    resumed = run(wide_folder, tmp_path, checkpoints / "2.ckpt")
    for actual, expected in zip(resumed.policy.parameters(), whole.policy.parameters(), strict=True):
        assert torch.equal(actual, expected)


def test_the_export_is_numbers_and_computes_the_same(trained: Any, tmp_path: Path) -> None:
    module, _ = trained
    module.export(tmp_path)
    loaded = load_policy(str(tmp_path)).eval()
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    ids = torch.arange(2, 20)[None]
    assert torch.allclose(loaded(ids).logits, module.policy.eval()(ids).logits, atol=1e-4)


def quantized(tmp_path: Path, **bits: Any) -> Path:
    """A saved hybrid whose files are quantized, with layers that draft, which are not."""
    random_policy(hybrid=True, **WIDE).save_pretrained(tmp_path / "whole")
    config = BitsAndBytesConfig(**bits)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", quantization_config=config)
    model.save_pretrained(tmp_path / "base")
    save_tokenizer(tmp_path / "base")
    add_heads(tmp_path / "base", "qwen3_5_text")
    return tmp_path / "base"


def test_of_files_in_four_bits_adapters_are_trained_and_the_export_is_numbers(tmp_path: Path) -> None:
    base = quantized(tmp_path, load_in_4bit=True, bnb_4bit_quant_type="nf4")
    with pytest.raises(ValueError, match=r"files of model\.policy .* in four bits, .* set model\.lora, or take"):
        make_module(base).configure_model()
    module = make_module(base, lora=LoraSettings(r=2))
    module.configure_model()
    with torch.no_grad():
        for weight in module.policy.parameters():
            if weight.requires_grad:
                weight.add_(torch.ones_like(weight), alpha=0.05)
    compared = module.export(tmp_path / "policy")
    assert compared is not None and compared.gap is not None and compared.num_carried > 3
    after, before = (load_file(tmp_path / name / "model.safetensors") for name in ("policy", "whole"))
    assert after.keys() == before.keys() | {name for name in after if name.startswith("mtp.")}
    assert "quantization_config" not in (tmp_path / "policy" / "config.json").read_text()


def test_files_in_eight_bits_are_refused(tmp_path: Path) -> None:
    base = quantized(tmp_path, load_in_8bit=True)
    with pytest.raises(ValueError, match=r"quantized \(bitsandbytes: .* is torch\.int8\), .* take the model without"):
        load_policy(str(base))


def test_evaluation_changes_neither_the_numbers_nor_the_gradient(wide_folder: Path) -> None:
    torch.manual_seed(0)
    policy = load_policy(str(wide_folder), nf4=True)
    add_adapters(policy, LoraSettings(r=4, base="nf4"))
    before = {name: dequantized(parameter).clone() for name, parameter in policy.named_parameters()}
    ids = torch.arange(2, 20)[None]
    with torch.no_grad():
        in_evaluation = policy.eval()(ids, labels=ids).loss
        assert torch.equal(policy.train()(ids, labels=ids).loss, in_evaluation)
    for name, parameter in policy.named_parameters():
        assert torch.equal(dequantized(parameter), before[name])
    weights = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    gradient = torch.autograd.grad(policy(ids, labels=ids).loss, weights)
    norm = torch.cat([part.flatten() for part in gradient]).norm()
    values = []
    for step in (1e-2, -2e-2):  # forth along the gradient, and back beyond the start
        with torch.no_grad():
            for weight, part in zip(weights, gradient, strict=True):
                weight.add_(part / norm, alpha=step)
            values.append(float(policy(ids, labels=ids).loss))
    assert (values[0] - values[1]) / 2e-2 == pytest.approx(float(norm), rel=0.01)


def test_what_a_checkpoint_keeps() -> None:
    kept, left = ["a.weight", "a.bias", "a.parametrizations.weight.original0"], ["absmax", "quant_map", "nested_absmax"]
    left = [f"a.weight.{name}" for name in [*left, "nested_quant_map", "quant_state.bitsandbytes__nf4"]]
    assert list(without_quant_states(dict.fromkeys([*kept, *left], torch.zeros(1)))) == kept
