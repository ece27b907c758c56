"""What an export has is what was trained: of any architecture, any adapter, and of policies that are adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from conftest import random_policy, save_policy, save_tokenizer, table_rows
from hand_made import Batches, Checkpoints, fit, full_logprobs, make_module, make_trainer, random_groups, sgd
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import lit_grpo.policy.saving as saving
from lit_grpo.checkpoints import read_state
from lit_grpo.policy.adapters import LoraSettings, add_adapters, check_can_be_shards
from lit_grpo.policy.loading import as_loaded, load_policy, load_tokenizer
from lit_grpo.policy.saving import BrokenPolicyError, ExportError, export
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.policy.weights import PolicyWeights, lora_layers
from lit_grpo.tools.commands.export import main as export_checkpoint
from lit_grpo.update.logprobs.reference import InitialAdapterReference
from lit_grpo.update.objective.kl import KLTerm
from lit_grpo.update.objective.objective import Objective
from tests.doubles.small_models import small_model

REWARDS = [[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.2, 0.5]]
SIZES: dict[str, Any] = {
    **{"vocab_size": 35, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "initializer_range": 0.3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256},
    **{"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0},
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT: dict[str, Any] = {
    **{"kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16},
    **{"first_k_dense_replace": 1, "n_shared_experts": 1, "num_key_value_heads": 4},
}
OWN_SCALES: dict[str, Any] = {
    **{"sliding_window": 8, "num_global_key_value_heads": 2, "global_head_dim": 8, "num_kv_shared_layers": 0},
    **{"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 35},
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "gemma4_text": OWN_SCALES,
    "apertus": {},
    "qwen3_moe": {**EXPERTS, "decoder_sparse_step": 1},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": LATENT,
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 0},
}
TARGETS: tuple[list[str] | str | None, ...] = (None, "all-linear", ["q_proj", "embed_tokens"], ["lm_head"], ["experts"])


def made(kind: str, folder: Path) -> Path:
    """Save a random model whose buffers are not what the architecture begins with."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **KINDS[kind]}))
        weights = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        for name, buffer in model.state_dict().items():
            if name not in weights:
                buffer.uniform_(0.2, 0.6)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def change(policy: Any, by: float = 0.1) -> None:
    """Change all that is trained."""
    drawn = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in policy.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn(weight.shape, generator=drawn), alpha=by)


def logits(policy: Any) -> torch.Tensor:
    with torch.no_grad():
        return policy.eval()(torch.arange(2, 20)[None]).logits


@pytest.mark.parametrize("kind", table_rows(KINDS, ["llama", "qwen3_moe", "gpt_oss"]))
def test_an_export_computes_what_was_trained(kind: str, tmp_path: Path) -> None:
    folder = made(kind, tmp_path / "policy")
    before = logits(load_policy(str(folder)))
    for number, targets in enumerate(TARGETS):
        if targets == ["experts"] and "num_experts_per_tok" not in KINDS[kind] and "moe_k" not in KINDS[kind]:
            continue
        policy: Any = load_policy(str(folder))
        with torch.random.fork_rng():
            torch.manual_seed(0)
            if targets is not None:
                add_adapters(policy, LoraSettings(r=2, target_modules=targets))
        assert torch.allclose(logits(policy), before, atol=1e-4)
        change(policy)
        compared = export(policy, load_tokenizer(str(folder)), tmp_path / f"{number}")
        opened: Any = AutoModelForCausalLM.from_pretrained(tmp_path / f"{number}", output_loading_info=True)
        loaded, report = opened
        assert not report["missing_keys"] and not report["unexpected_keys"]
        assert torch.allclose(logits(loaded), logits(policy), atol=1e-3)
        assert not torch.allclose(logits(policy), before, atol=0.05)
        files = load_file(tmp_path / f"{number}" / "model.safetensors")
        assert compared is not None and compared.num_tensors == len(files) and compared.gap is not None
        if targets in (None, "all-linear"):  # as transformers names and shapes them
            assert {name: one.shape for name, one in files.items()} == {
                name: one.shape for name, one in load_file(folder / "model.safetensors").items()
            }
        outline = PolicyWeights(policy).outline
        assert {name: (one.shape, one.dtype) for name, one in files.items()} == {
            name: (one.shape, one.dtype) for name, one in outline.items()
        }


def test_a_layer_that_only_derives_from_a_linear_one_has_no_adapter(tmp_path: Path) -> None:
    policy: Any = load_policy(str(made("phimoe", tmp_path / "policy")))
    with pytest.raises(ValueError, match=r"lora\.target_modules names 'router', but .*router is a PhimoeTopKRouter"):
        add_adapters(policy, LoraSettings(target_modules=["q_proj", "router"]))


@pytest.mark.parametrize(("kind", "layer"), [("jamba", "dt_proj"), ("longcat_flash", "classifier")])
def test_a_layer_that_no_forward_pass_calls_has_no_adapter(kind: str, layer: str, tmp_path: Path) -> None:
    """Its weight is read elsewhere: an adapter there would be merged into exports and compute nothing."""
    policy: Any = small_model(kind)
    with pytest.raises(ValueError, match=rf"lora\.target_modules names '{layer}', but .* without calling it"):
        add_adapters(policy, LoraSettings(target_modules=[layer]))
    add_adapters(policy, LoraSettings(r=2))
    adapted = {name.rpartition(".")[2] for name, _ in lora_layers(policy)}
    assert layer not in adapted and len(adapted) > 2


def test_experts_with_adapters_cannot_be_shards(tmp_path: Path) -> None:
    policy: Any = load_policy(str(made("qwen3_moe", tmp_path / "policy")))
    add_adapters(policy, LoraSettings(r=2, target_modules=["experts"]))
    with pytest.raises(ValueError, match=r"model\.lora on .*experts\.(down|gate_up)_proj.* trainer\.strategy fsdp2"):
        check_can_be_shards(policy)


def test_an_export_that_is_not_what_was_trained_is_refused_and_not_left(
    policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, tokenizer = load_policy(str(policy_folder)), load_tokenizer(str(policy_folder))
    add_adapters(policy, LoraSettings(r=4))
    change(policy)
    export(policy, tokenizer, tmp_path / "good")
    for where, replacement, said in (
        ("lit_grpo.policy.weights.active_adapters", lambda layer: [], "log-probs differ from the trained policy's"),
        ("lit_grpo.policy.saving._in_own_storage", lambda tensor: tensor.clone() + 2**-20, "on the disk differs from"),
        ("lit_grpo.policy.weights.persistent_buffers", lambda _: iter([("x", torch.ones(1))]), "has no place for x"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(where, replacement)
            with pytest.raises(ExportError, match=f"opened again and is not what was trained: .*{said}"):
                export(policy, tokenizer, tmp_path / "bad")
        assert not (tmp_path / "bad").exists()
    export(policy, tokenizer, tmp_path / "bad")


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_policy_that_computes_nothing_is_not_exported(policy_folder: Path, tmp_path: Path, number: float) -> None:
    policy, tokenizer = load_policy(str(policy_folder)), load_tokenizer(str(policy_folder))
    export(policy, tokenizer, tmp_path / "policy")
    before = (tmp_path / "policy" / "model.safetensors").read_bytes()
    with torch.no_grad():
        next(policy.parameters())[-1, -1] = number
    with pytest.raises(BrokenPolicyError, match=r"The policy collapsed: .* not been exported .*; lower the"):
        export(policy, tokenizer, tmp_path / "policy")
    assert (tmp_path / "policy" / "model.safetensors").read_bytes() == before


def test_without_memory_for_a_second_model_tensors_and_their_places_are_compared(
    policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, tokenizer = load_policy(str(policy_folder)), load_tokenizer(str(policy_folder))
    monkeypatch.setattr(saving, "free_bytes", lambda device: 1000)
    monkeypatch.setattr(saving, "_SHARD_BYTES", 40_000)
    compared = export(policy, tokenizer, tmp_path / "policy")
    assert compared is not None and compared.gap is None and "finds each of them a place" in str(compared)
    assert len(list((tmp_path / "policy").glob("model-*.safetensors"))) > 2
    assert torch.equal(logits(load_policy(str(tmp_path / "policy"))), logits(policy))
    monkeypatch.setattr(saving, "_SHARD_BYTES", 10**9)
    export(policy, tokenizer, tmp_path / "policy")  # in one file, where several were
    assert [path.name for path in (tmp_path / "policy").glob("model*")] == ["model.safetensors"]
    monkeypatch.setattr("lit_grpo.policy.weights.persistent_buffers", lambda module: iter([("x", torch.ones(1))]))
    with pytest.raises(ExportError, match="has no place for x"):
        export(policy, tokenizer, tmp_path / "other")


def test_how_a_policy_wants_to_be_sampled_is_kept_as_it_came(policy_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "policy"
    save_policy(folder)
    wanted = {"temperature": 0.6, "top_p": 0.9, "eos_token_id": 1}
    (folder / "generation_config.json").write_text(json.dumps(wanted))
    for lora in (None, LoraSettings(r=2)):
        module: Any = make_module(folder, lora=lora)
        module.configure_model()
        module.export(tmp_path / "exported")
        PolicySpec(module.policy, module.tokenizer).save_skeleton(tmp_path / "skeleton")
        for place in ("exported", "skeleton"):
            told = json.loads((tmp_path / place / "generation_config.json").read_text())
            assert told.items() >= wanted.items() and "do_sample" not in told


# ---- policies that are adapters -----------------------------------------------------------------------


@pytest.fixture
def adapter(policy_folder: Path, tmp_path: Path) -> Path:
    """An adapter of supervised training, as peft saves it, without a tokenizer of its own."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
        tuned: Any = peft.get_peft_model(load_policy(str(policy_folder)), config)
        change(tuned)
        tuned.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def run(policy: Any, checkpoints: Path, ckpt_path: Path | None = None, **options: Any) -> Any:
    module = make_module("tiny", objective=Objective(kl=KLTerm(0.1)), optimizer=sgd(2.0), **options)
    module.policy_name = policy
    groups = random_groups(random_policy(), REWARDS)
    make_trainer(Checkpoints(checkpoints)).fit(module, Batches([groups] * 3), ckpt_path=ckpt_path)
    return module


def tuned_by(adapter: Path, policy_folder: Path) -> Any:
    return peft.PeftModel.from_pretrained(load_policy(str(policy_folder)), str(adapter))


def test_an_adapter_is_trained_on_as_it_is(adapter: Path, policy_folder: Path, tmp_path: Path) -> None:
    module = run(str(adapter), tmp_path / "checkpoints")
    weights = {name: weight for name, weight in module.policy.named_parameters() if weight.requires_grad}
    assert len(weights) == 2 * 2 * 2 and {min(weight.shape) for weight in weights.values()} == {3}
    assert set(read_state(tmp_path / "checkpoints" / "3.ckpt")["state_dict"]) == {f"policy.{name}" for name in weights}
    (rollout, *_), *_ = (group.rollouts for group in random_groups(random_policy(), REWARDS))
    first = full_logprobs(tuned_by(adapter, policy_folder).eval(), rollout)
    with module.learner.reference.lend() as reference:
        assert isinstance(module.learner.reference, InitialAdapterReference)
        assert torch.allclose(full_logprobs(reference, rollout), first, atol=1e-5)
    now = full_logprobs(module.policy, rollout)
    assert not torch.allclose(now, first, atol=1e-3)
    module.export(tmp_path / "policy")
    assert torch.allclose(full_logprobs(load_policy(str(tmp_path / "policy")).eval(), rollout), now, atol=1e-4)
    alone = tuned_by(tmp_path / "policy" / "adapter", policy_folder)
    assert torch.allclose(full_logprobs(alone.eval(), rollout), now, atol=1e-4)
    export_checkpoint([str(tmp_path / "checkpoints" / "3.ckpt"), str(tmp_path / "exported")])
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("policy", "exported"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_run_of_an_adapter_goes_on_bit_for_bit(adapter: Path, tmp_path: Path) -> None:
    whole = run(str(adapter), tmp_path / "checkpoints")
    resumed = run(str(adapter), tmp_path / "again", tmp_path / "checkpoints" / "1.ckpt")
    for actual, expected in zip(resumed.policy.parameters(), whole.policy.parameters(), strict=True):
        assert torch.equal(actual, expected)
    weights = load_file(adapter / "adapter_model.safetensors")
    next(iter(weights.values()))[0] += 1e-3
    save_file(weights, adapter / "adapter_model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"frozen weights of .* are others"):  # nor would the reference be the same
        run(str(adapter), tmp_path / "other", tmp_path / "checkpoints" / "1.ckpt")


def test_a_loaded_peft_model_is_trained_like_its_folder(adapter: Path, policy_folder: Path, tmp_path: Path) -> None:
    by_name = run(str(adapter), tmp_path / "checkpoints")
    given = run(as_loaded((tuned_by(adapter, policy_folder), None)), tmp_path / "given")
    for actual, expected in zip(given.policy.parameters(), by_name.policy.parameters(), strict=True):
        assert torch.equal(actual, expected) and actual.requires_grad == expected.requires_grad
    assert given.policy.training
    given.export(tmp_path / "policy")


def test_lora_settings_beside_an_adapter_are_its_own_or_refused(adapter: Path) -> None:
    same: Any = make_module(adapter, lora=LoraSettings(r=3, alpha=6, target_modules=["v_proj", "q_proj"]))
    same.configure_model()
    other: Any = make_module(adapter, lora=LoraSettings(r=4, alpha=6))
    with pytest.raises(ValueError) as caught:
        other.configure_model()
    assert str(caught.value) == (
        "model.policy is an adapter with r 3, target_modules ['q_proj', 'v_proj'], but model.lora asks for lora.r 4, "
        "lora.target_modules all-linear; leave model.lora out to go on training the adapter that is there, or merge it "
        "into its base (peft's merge_and_unload), save that, and give the folder as model.policy for a new adapter."
    )


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"base_model_name_or_path": None}, "names no base_model_name_or_path"),
        ({"base_model_name_or_path": "/no/such/base"}, "There is no policy folder '/no/such/base'"),
        ({"use_dora": True}, r"is an adapter with use_dora True, which cannot be merged .* merge_and_unload"),
        ({"trainable_token_indices": [5, 6]}, r"with trainable_token_indices \[5, 6\], which cannot be merged"),
        ({"lora_bias": True}, "with lora_bias True, which cannot be merged"),
        ({"layer_replication": [[0, 2], [1, 2]]}, r"with layer_replication .* without layer_replication"),
        ({"peft_type": "IA3"}, "an adapter of peft_type IA3, and only LORA can be trained; merge it"),
        ({"r": 5}, "adapter that"),
        ({"target_modules": ["q_proj", "k_proj", "v_proj"]}, "does not fit its base"),
    ],
)
def test_an_adapter_that_cannot_be_trained_on_is_refused(adapter: Path, settings: Any, said: str) -> None:
    config = json.loads((adapter / "adapter_config.json").read_text()) | settings
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    module: Any = make_module(adapter)
    with pytest.raises(ValueError, match=said):
        module.configure_model()


def test_a_module_that_an_adapter_keeps_a_copy_of_is_exported(policy_folder: Path, tmp_path: Path) -> None:
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    tuned: Any = peft.get_peft_model(load_policy(str(policy_folder)), config)
    module: Any = make_module("tiny", optimizer=sgd(0.1))
    module.policy_name = as_loaded((tuned, load_tokenizer(str(policy_folder))))
    fit(module, random_groups(random_policy(), REWARDS))
    change(module.policy)
    module.export(tmp_path / "policy")
    assert torch.allclose(logits(load_policy(str(tmp_path / "policy"))), logits(module.policy), atol=1e-4)
