"""LoRA: what is trained, what the reference is, what is exported, and what decodes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from conftest import random_policy, table_rows
from hand_made import check_slots_decode_with, fit, full_logprobs, make_micro_batch, make_module, random_groups, sgd
from transformers import AutoConfig, AutoModelForCausalLM

from lit_grpo.policy.adapters import LoraSettings, add_adapters, go_on_with
from lit_grpo.policy.loading import load_policy, load_tokenizer
from lit_grpo.policy.saving import export
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.policy.weights import find_adapters, lora_layers
from lit_grpo.rollout.vllm.arguments import adapter_arguments
from lit_grpo.rollout.vllm.engine import VLLMGenerator
from lit_grpo.rollout.vllm.server import VLLMServerGenerator
from lit_grpo.rollout.weights.adapters import AdapterWeights, adapter_folder, apart, share_of_elements
from lit_grpo.rollout.weights.tensors import WeightSyncError
from lit_grpo.update.logprobs.forward import micro_batch_logprobs
from lit_grpo.update.logprobs.reference import AdapterFreeReference
from lit_grpo.update.objective.kl import KLTerm
from lit_grpo.update.objective.objective import Objective
from tests.doubles.small_models import small_model

REWARDS = [[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.2, 0.5]]


@pytest.fixture
def trained(policy_folder: Path) -> Any:
    """A module after two updates of its adapters, with a KL term."""
    groups = random_groups(random_policy(), REWARDS)
    torch.manual_seed(0)  # peft draws the adapters
    objective = Objective(kl=KLTerm(0.1))
    module = make_module(policy_folder, lora=LoraSettings(r=4), optimizer=sgd(2.0), objective=objective)
    with torch.random.fork_rng():
        torch.manual_seed(0)  # of the adapters; a large step can lead where float32 is coarser than the tests ask
        recorder = fit(module, groups, groups)
    assert recorder.logs[0]["kl"] == pytest.approx(0, abs=1e-6) and recorder.logs[1]["kl"] > 1e-6
    return module


def test_only_adapters_are_trained(trained: Any) -> None:
    before = dict(random_policy().named_parameters())
    names = [name for name, parameter in trained.policy.named_parameters() if parameter.requires_grad]
    assert len(names) == 2 * 7 * 2 and all(".lora_" in name for name in names)
    assert any(bool(parameter.any()) for name, parameter in trained.policy.named_parameters() if "lora_B" in name)
    for name, parameter in trained.policy.named_parameters():
        if name not in names:
            assert torch.equal(parameter, before[name.replace(".base_layer.", ".")])


def test_the_reference_is_the_policy_without_them(trained: Any) -> None:
    (rollout, *_), *_ = (group.rollouts for group in random_groups(random_policy(), REWARDS))
    with AdapterFreeReference(trained.policy).lend() as reference, torch.no_grad():
        reference_T, _ = micro_batch_logprobs(reference, make_micro_batch([rollout], [0.0]), 1.0)
    assert torch.allclose(reference_T, full_logprobs(random_policy(), rollout), atol=1e-5)
    assert not torch.allclose(reference_T, full_logprobs(trained.policy, rollout), atol=1e-3)


def test_the_slots_decode_with_them(trained: Any) -> None:
    check_slots_decode_with(trained)


def with_adapters(r: int = 3, target_modules: list[str] | str = "all-linear", rslora: bool = False) -> Any:
    """A policy whose adapters change what it computes."""
    policy: Any = random_policy()
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        add_adapters(policy, LoraSettings(r, 5.0, target_modules, rslora))
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    return policy


@pytest.mark.parametrize("rslora", [False, True])
def test_adapters_alone_are_a_folder_that_peft_loads(rslora: bool) -> None:
    policy, bare = with_adapters(rslora=rslora), random_policy()
    ids = torch.arange(2, 20)[None]
    expected = policy(ids).logits
    assert not torch.allclose(bare(ids).logits, expected, atol=1e-3)
    weights = AdapterWeights(policy, with_base=False)
    adapters = dict(weights)
    assert list(adapters) == weights.names == list(weights.digests) and len(adapters) == 2 * 7 * 2
    with adapter_folder(adapters, policy) as folder:
        loaded: Any = peft.PeftModel.from_pretrained(bare, str(folder))
        assert torch.allclose(loaded(ids).logits, expected, atol=1e-5)
    assert not folder.exists()


def test_base_weights_follow_adapters_where_they_are_asked_for() -> None:
    policy = with_adapters()
    adapters, base = apart(AdapterWeights(policy, with_base=True), policy)
    assert base is not None and list(adapters) == AdapterWeights(policy, with_base=False).names
    for (name, tensor), (expected_name, expected) in zip(base, random_policy().named_parameters(), strict=True):
        assert name == expected_name and torch.equal(tensor, expected)
    assert share_of_elements(adapters, policy) == pytest.approx(0.12, abs=0.02)
    assert apart(AdapterWeights(policy, with_base=False), policy)[1] is None
    with pytest.raises(WeightSyncError, match="1 of 28 weights did not arrive"):
        apart(list(AdapterWeights(policy, with_base=False))[1:], policy)
    with pytest.raises(WeightSyncError, match="1 of 25 weights did not arrive"):
        list(apart(list(AdapterWeights(policy, with_base=True))[:-1], policy)[1] or ())


def test_adapters_travel_in_the_type_of_the_policy() -> None:
    policy = with_adapters().to(torch.bfloat16)
    policy.model.layers[0].self_attn.q_proj.lora_A.to(torch.float32)
    assert {tensor.dtype for _, tensor in AdapterWeights(policy, with_base=True)} == {torch.bfloat16}


@pytest.mark.parametrize(
    "settings, given, said",
    [
        ({"r": 9}, {"max_lora_rank": 8}, "max_lora_rank among vLLM's arguments is 8, but model.lora.r is 9"),
        ({"r": 513}, {}, "model.lora.r is 513 and vLLM takes at most 512"),
        ({"target_modules": ["lm_head", "q_proj"]}, {}, "model.lora trains 'lm_head'"),
        ({"target_modules": ["embed_tokens"]}, {}, "model.lora trains 'model.embed_tokens'"),
        ({}, {"max_loras": 2}, "argument max_loras is set by adapters: alone"),
    ],
)
def test_adapters_that_vllm_does_not_take_are_refused(settings: Any, given: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        adapter_arguments(find_adapters(with_adapters(**settings)), given)


def test_a_head_that_is_trained_whole_is_refused() -> None:
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    policy: Any = peft.get_peft_model(random_policy(), config)
    with pytest.raises(ValueError, match=r"model\.lora trains '.*modules_to_save"):
        adapter_arguments(find_adapters(policy), {})


@pytest.mark.parametrize("make", [VLLMGenerator, VLLMServerGenerator])
def test_adapters_alone_of_a_policy_without_any_are_refused_before_vllm_starts(make: Any, policy_folder: Path) -> None:
    with pytest.raises(ValueError, match=r"adapters is alone, but the policy has none; set model\.lora"):
        make(adapters="alone").start(PolicySpec(random_policy(), load_tokenizer(str(policy_folder))))


def test_what_does_not_go_with_adapters_alone_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"adapters alone needs weights that an engine keeps .* sleep_level 2 drops them; take sleep_level 1",
    ):
        VLLMGenerator(adapters="alone", sleep_level=2)
    with pytest.raises(
        ValueError,
        match="transfer changes needs weights that are sent at every sync, but adapters alone sends them once",
    ):
        VLLMServerGenerator(adapters="alone", transfer="changes")


@pytest.mark.parametrize(
    ("generator", "lora", "alone"),
    [
        (VLLMGenerator(), LoraSettings(r=4), True),
        (VLLMServerGenerator(), LoraSettings(r=4), True),
        (VLLMGenerator(), None, False),
        (VLLMGenerator(adapters="merged"), LoraSettings(r=4), False),
        (VLLMGenerator(sleep_level=2), LoraSettings(r=4), False),
        (VLLMServerGenerator(transfer="changes"), LoraSettings(r=4), False),
        (VLLMServerGenerator(urls=["http://a:1"]), LoraSettings(r=4), False),
        (VLLMGenerator(), LoraSettings(r=1000), False),  # vLLM takes at most 512
        (VLLMGenerator(), LoraSettings(r=4, target_modules=["embed_tokens"]), False),
    ],
)
def test_adapters_travel_alone_where_that_can_be(
    generator: Any, lora: LoraSettings | None, alone: bool, policy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy: Any = random_policy()
    if lora is not None:
        add_adapters(policy, lora)
    spec = PolicySpec(policy, load_tokenizer(str(policy_folder)))
    assert generator._adapter_arguments(spec) == {}  # on a CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert bool(generator._adapter_arguments(spec)) == alone
    assert generator._adapter_arguments(replace(spec, keeps_kv=True)) == {}


def test_a_layer_name_that_no_layer_has_is_refused_though_another_one_fits() -> None:
    settings = LoraSettings(r=4, target_modules=["q_proj", "v_porj"])
    with pytest.raises(ValueError) as caught:
        add_adapters(random_policy(), settings)
    assert str(caught.value) == (
        "lora.target_modules names 'v_porj', which no layer of Qwen3ForCausalLM is called; its linear layers are "
        "down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj."
    )


def test_the_default_layers_of_peft_are_those_of_the_policys_family() -> None:
    theirs, ours = random_policy(), random_policy()
    peft.get_peft_model(theirs, peft.LoraConfig(r=2, task_type="CAUSAL_LM"))
    add_adapters(ours, LoraSettings(r=2, target_modules="peft-default"))
    names = {name for name, _ in ours.named_modules() if name.endswith("lora_A")}
    assert names == {name for name, _ in theirs.named_modules() if name.endswith("lora_A")} and names
    ours = random_policy()
    ours.config.model_type = "unheard_of"  # type: ignore[union-attr]
    with pytest.raises(
        ValueError, match="peft has no default for the family unheard_of; name layers, or take all-linear"
    ):
        add_adapters(ours, LoraSettings(target_modules="peft-default"))


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
STATES = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]


@pytest.mark.parametrize(
    ("name", "targets", "layers"),
    [
        ("tiny", "all-linear", {*ATTENTION, *MLP}),
        ("tiny", "peft-default", {"q_proj", "v_proj"}),
        ("tiny", r".*\.(q_proj|up_proj)", {"q_proj", "up_proj"}),
        ("tiny", "down_proj", {"down_proj"}),
        ("tiny", ["embed_tokens", "lm_head"], {"embed_tokens", "lm_head"}),
        ("tiny_hybrid", "all-linear", {*ATTENTION, *MLP, *STATES}),
        ("tiny_hybrid", [*ATTENTION, "in_proj_qkv"], {*ATTENTION, "in_proj_qkv"}),
        ("tiny_hybrid", r".*linear_attn\.(in_proj_.*|out_proj)", {*STATES}),
    ],
)
def test_each_form_of_targets_trains_adapters_that_are_sampled_with_and_exported(
    name: str, targets: list[str] | str, layers: set[str], tmp_path: Path
) -> None:
    policy: Any = load_policy(name, "float32").eval()
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        add_adapters(policy, LoraSettings(r=2, target_modules=targets))
        trained = {weight_name: weight for weight_name, weight in policy.named_parameters() if weight.requires_grad}
        for weight in trained.values():
            weight.normal_(0, 0.1)
    assert {path.rpartition(".")[2] for path, _ in lora_layers(policy)} == layers
    ids = torch.arange(2, 14)[None]
    policy(input_ids=ids, labels=ids).loss.backward()
    assert not [weight_name for weight_name, weight in trained.items() if weight.grad is None or not weight.grad.any()]
    check_slots_decode_with(SimpleNamespace(policy=policy, tokenizer=load_tokenizer(name)), atol=1e-4)
    compared = export(policy, load_tokenizer(name), tmp_path / "policy")  # raises an error if it is not the policy
    assert compared is not None


STATE_SPACES: dict[str, dict[str, Any]] = {
    "falcon_h1": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64, "mamba_d_state": 16},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mlp"],
        "num_hidden_layers": 3,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 1,
    },
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 16, "n_groups": 1},
    "mamba": {"state_size": 8},
    "falcon_mamba": {"state_size": 8},
}


@pytest.mark.parametrize("kind", table_rows(STATE_SPACES, ["falcon_h1", "mamba2"]))
def test_all_linear_leaves_out_what_peft_forbids_and_says_so(kind: str, tmp_path: Path) -> None:
    """peft forbids ``out_proj`` in these families, whose fused kernels read its weight."""
    sizes = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, **STATE_SPACES[kind]}
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, eos_token_id=1))
    with pytest.warns(UserWarning, match=r"all-linear leaves out out_proj, which peft gives \w+ no adapters for"):
        add_adapters(model, LoraSettings(r=4))
    adapted = {path.rpartition(".")[2] for path, _ in lora_layers(model)}
    assert "in_proj" in adapted and not adapted & {"out_proj", "lm_head", "conv1d"}
    ids = torch.arange(2, 14)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    trained = [weight for name, weight in model.named_parameters() if weight.requires_grad and "lora_B" in name]
    assert trained and all(weight.grad.any() for weight in trained)
    go_on_with(model, LoraSettings(r=4))  # the same adapter
    with pytest.raises(ValueError, match="'out_proj' is incompatible with Mamba-based models"):
        add_adapters(model.__class__(model.config), LoraSettings(r=4, target_modules=["in_proj", "out_proj"]))


@pytest.mark.parametrize("targets", [["conv1d"], ["q_proj", "conv1d"]])
def test_a_convolution_whose_weight_is_read_without_a_call_gets_no_adapter(targets: list[str]) -> None:
    """The forward pass of a layer with states would not see the adapter, and an export would have it merged."""
    with pytest.raises(
        ValueError, match=r"layers\.0\.linear_attn\.conv1d is a Conv1d, and adapters .*; leave it out of"
    ):
        add_adapters(load_policy("tiny_hybrid", "float32"), LoraSettings(r=2, target_modules=targets))


def test_no_target_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="target_modules is empty; name layers, or take all-linear"):
        LoraSettings(target_modules=[])


def test_adapters_of_a_weight_that_several_layers_have_are_refused() -> None:
    model = small_model("zamba")
    with pytest.raises(ValueError, match=r"layers\.2\.shared_transf\.self_attn\.q_proj have one weight"):
        add_adapters(model, LoraSettings(r=2))
    named = small_model("zamba")
    add_adapters(named, LoraSettings(r=2, target_modules=["in_proj"]))
    assert find_adapters(named)
