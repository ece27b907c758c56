import json
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
import torch
import transformers
from conftest import random_policy, save_tokenizer

from lit_grpo.policy.architecture.support import check_policy
from lit_grpo.policy.loading import as_loaded, load_config, load_policy, load_tokenizer
from lit_grpo.policy.named import NAMED, TINY, resolve_policy

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 40}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("Qwen3", {"attention_dropout": 0.5}),
        ("GPT2", {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}),
        ("OPT", {"dropout": 0.5, "attention_dropout": 0.5, "layerdrop": 0.5, "word_embed_proj_dim": 32}),
        ("Falcon", {"hidden_dropout": 0.5, "attention_dropout": 0.5}),
        ("Mixtral", {"router_jitter_noise": 0.5, "num_local_experts": 2}),
        ("Phimoe", {"router_jitter_noise": 0.5, "input_jitter_noise": 0.5, "num_local_experts": 2}),
        ("Bloom", {"hidden_dropout": 0.5, "attention_dropout": 0.5, "seq_length": 64}),
    ],
)
def test_dropout_of_a_model_is_off(kind: str, settings: dict[str, Any], tmp_path: Path) -> None:
    config = getattr(transformers, f"{kind}Config")(**SIZES, bos_token_id=1, eos_token_id=1, **settings)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = load_policy(str(tmp_path)).train()
    check_policy(model)
    ids = torch.tensor([[3, 4, 5, 6]])
    torch.testing.assert_close(model(input_ids=ids).logits, model(input_ids=ids).logits, rtol=0, atol=0)


def edited(folder: Path, **changes: Any) -> str:
    """Save a random policy whose config says something else as well."""
    cast(Any, random_policy()).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return str(folder)


def test_code_of_a_policy_is_neither_run_nor_asked_about(tmp_path: Path) -> None:
    code = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}}
    folder = edited(tmp_path, **code)
    save_tokenizer(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "mine.py").write_text(f"import pathlib; pathlib.Path({str(tmp_path / 'ran')!r}).touch()\n")
    for load in (load_policy, load_tokenizer):
        with pytest.raises(ValueError, match=r"needs code of its own, which is never run; take a model that"):
            load(folder)
    assert not (tmp_path / "ran").exists()


def test_damaged_weights_are_called_so(tmp_path: Path) -> None:
    folder = edited(tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    for damaged in (whole[:-1000], b"", b"no weights" * 9):
        (tmp_path / "model.safetensors").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"The weights of policy .* are damaged .*; save it there again\."):
            load_policy(folder)


@pytest.mark.parametrize("field", ["hidden_size", "vocab_size", "intermediate_size", "head_dim"])
def test_a_config_of_other_sizes_is_called_so_and_takes_no_memory(field: str, tmp_path: Path) -> None:
    folder = edited(tmp_path, **{field: 10**9})
    before = psutil.Process().memory_info().rss
    with pytest.raises(ValueError, match=r"with the shape .*, and its config.json describes .*000000000"):
        load_policy(folder)
    assert psutil.Process().memory_info().rss - before < 2**28


def test_the_embedded_policy_comes_again_with_the_package_where_it_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edited(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    monkeypatch.setitem(NAMED, TINY, replace(NAMED[TINY], folder=tmp_path))
    with pytest.raises(ValueError, match=r"'tiny' are damaged .*; install lit_grpo again"):
        load_policy("tiny")


def test_weights_that_are_not_there_are_not_made_up(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder, file = edited(tmp_path), tmp_path / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lack 1 of the model's weights, such as model.layers.0.mlp.up_proj.weight"):
        load_policy(folder)


@pytest.mark.parametrize("named", ["flash_attention_2", "eager", "flex_attention", "nonsense", "paged|eager"])
@pytest.mark.parametrize("key", ["_attn_implementation", "attn_implementation"])
def test_attention_is_not_chosen_by_a_policys_files(tmp_path: Path, named: str, key: str) -> None:
    assert load_policy(edited(tmp_path, **{key: named})).config._attn_implementation == "sdpa"


@pytest.mark.parametrize("shard", ["5GB", "10KB"])
def test_more_layers_than_the_files_have_weights_are_refused_before_they_are_made(tmp_path: Path, shard: str) -> None:
    random_policy().save_pretrained(tmp_path, max_shard_size=shard)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("layer_types", None)
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10_000_000}))
    with pytest.raises(
        ValueError, match=r"config\.json .* 10000000 .*num_hidden_layers.*, but its files hold \d+ weights"
    ):
        load_policy(str(tmp_path))


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    model = cast(Any, random_policy())
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = float("nan")
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"Weight model\.layers\.1\.mlp\.up_proj\.weight .* holds NaN or infinity"):
        load_policy(str(tmp_path))


@pytest.mark.parametrize("kind", ["Mamba", "Bloom"])
def test_a_model_without_a_longest_sequence_is_refused_in_words(kind: str, tmp_path: Path) -> None:
    config = getattr(transformers, f"{kind}Config")(**SIZES, bos_token_id=1, eos_token_id=1)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"config of {kind}ForCausalLM names no longest sequence; add max_position_"):
        load_policy(str(tmp_path))


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    model = random_policy()
    cast(Any, model).config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="holds no usable model"):
        load_policy(str(tmp_path))


@pytest.fixture
def unreachable_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A hub at a port that nobody listens at, with a cache of its own."""
    from huggingface_hub import constants

    with socket.socket() as held:  # bound, and not listening
        held.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{held.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield tmp_path / "cache"


@pytest.mark.parametrize("load", [load_policy, load_tokenizer])
def test_a_hub_that_does_not_answer_is_asked_once_and_named(unreachable_hub: Path, load: Any) -> None:
    with pytest.raises(ValueError, match=r"'some/model' is no folder and not in the cache, and the hub http://127\.0"):
        load("some/model")


def test_without_the_hub_a_policy_comes_from_the_cache(unreachable_hub: Path, policy_folder: Path) -> None:
    snapshot = unreachable_hub / "models--some--model" / "snapshots" / "abc"
    shutil.copytree(policy_folder, snapshot)
    refs = unreachable_hub / "models--some--model" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    assert len(load_tokenizer("some/model")) == len(load_tokenizer(str(policy_folder)))
    assert load_policy("some/model").config.vocab_size == load_policy(str(policy_folder)).config.vocab_size


def test_a_policys_folder_of_the_users_is_not_passed_over_for_a_policy_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(NAMED, "smollm2", replace(NAMED["smollm2"], folder=tmp_path / "nowhere"))
    Path("smollm2").mkdir()
    with pytest.raises(
        ValueError, match=r"^The folder ./smollm2 holds no config.json, and there is no folder of policy"
    ):
        resolve_policy("smollm2")
    random_policy().save_pretrained("smollm2")
    assert as_loaded("smollm2") == resolve_policy("smollm2") == "./smollm2"
    assert load_config("smollm2").vocab_size == random_policy().config.vocab_size  # type: ignore[union-attr]
    assert resolve_policy("tiny") == str(NAMED[TINY].folder) and as_loaded(Path("a") / "b") == "a/b"


def test_a_pair_of_a_name_and_a_tokenizer_is_refused() -> None:
    for pair in (("tiny", object()), (random_policy(),)):
        with pytest.raises(ValueError, match="give a name, a loaded model, or a pair \\(model, tokenizer\\)"):
            as_loaded(pair)


ADDED: dict[str, Callable[[Any], Any]] = {
    "unused": lambda model: setattr(model, "extra", torch.nn.Parameter(torch.ones(3))),
    "unused layer": lambda model: setattr(model.model.layers[0].mlp, "spare", torch.nn.Linear(3, 3)),
    "frozen": lambda model: setattr(model, "extra", torch.nn.Parameter(torch.ones(3), requires_grad=False)),
    "buffer": lambda model: model.register_buffer("extra", torch.ones(3)),
}


@pytest.mark.parametrize("kind", ADDED)
@pytest.mark.parametrize("hybrid", [False, True])
def test_a_weight_that_no_export_could_keep_is_refused_before_the_run(kind: str, hybrid: bool) -> None:
    model: Any = random_policy(hybrid=hybrid)
    assert load_policy((model, None)) is model
    ADDED[kind](model)
    with pytest.raises(ValueError, match=r"has the weight \S*(extra|spare)\S*, which a Qwen3\w+ made from its config"):
        load_policy((model, None))


def test_buffers_that_are_not_saved_and_resized_and_tied_models_are_no_such_weights() -> None:
    for tied in (False, True):
        model: Any = random_policy(tie_word_embeddings=tied)
        model.register_buffer("extra", torch.ones(3), persistent=False)
        model.resize_token_embeddings(99)
        assert load_policy((model, None)) is model
