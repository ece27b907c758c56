"""Tensors of a policy's files that transformers passes over: layers that draft are carried, others named."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import random_policy, save_policy, save_tokenizer, table_rows
from hand_made import Batches, Checkpoints, make_module, make_trainer, nudge, random_groups, sgd
from safetensors.torch import load_file

import lit_grpo.policy.saving as saving
from lit_grpo.policy.adapters import LoraSettings, add_adapters
from lit_grpo.policy.architecture.unread import counted_drafts, known_unread
from lit_grpo.policy.loading import files_note, load_config, load_policy, load_tokenizer
from lit_grpo.policy.saving import Comparison, export
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.tools.commands.export import main as export_checkpoint
from tests.doubles.draft_layers import HEADS, add_heads, add_tensors
from tests.doubles.small_models import small_model

QWEN = "qwen3_5_text"


def saved(family: str, folder: Path, **changes: Any) -> Path:
    small_model(family, changes).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder's own files."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        found |= load_file(path)
    return found


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return all(found[name].dtype == one.dtype and torch.equal(found[name], one) for name, one in expected.items())


def fields(folder: Path) -> dict[str, Any]:
    """Return the config of a folder as far as layers that draft are concerned."""
    config = json.loads((folder / "config.json").read_text())
    return {name: value for name, value in config.items() if "mtp" in name or "nextn" in name}


def exported(base: Path, folder: Path, lora: bool = False) -> tuple[Any, Comparison]:
    policy = load_policy(str(base))
    if lora:
        add_adapters(policy, LoraSettings(r=2))
    nudge(policy)
    compared = export(policy, load_tokenizer(str(base)), folder)
    assert compared is not None
    return policy, compared


@pytest.mark.parametrize("family", table_rows(HEADS, [QWEN, "deepseek_v3", "ernie4_5_moe"]))
def test_layers_that_draft_are_carried_on_every_way_out(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = saved(family, tmp_path / "base")
    heads = add_heads(base, family)
    before = tensors(base)
    policy, compared = exported(base, tmp_path / "full")
    assert compared.num_carried == len(heads) and f"{len(heads)} more are the base's" in str(compared)
    assert f"multi-token prediction ({len(heads)} tensors, such as " in files_note(str(base), "float32", policy)
    monkeypatch.setattr(saving, "_SHARD_BYTES", 4_000)
    exported(base, tmp_path / "adapted", lora=True)
    assert len(list((tmp_path / "adapted").glob("model-*.safetensors"))) > 2
    exported(tmp_path / "adapted", tmp_path / "again")
    for name in ("full", "adapted", "again"):
        after = tensors(tmp_path / name)
        assert after.keys() == before.keys() and same(after, heads)
        assert fields(base).items() <= fields(tmp_path / name).items()
        assert not same(after, before)  # those of the model are what was trained
    alone = load_file(tmp_path / "adapted" / "adapter" / "adapter_model.safetensors")
    assert not any(HEADS[family][0] in name for name in alone)
    spec = PolicySpec(policy, load_tokenizer(str(base)))
    spec.save_skeleton(tmp_path / "skeleton")
    assert heads.keys().isdisjoint(spec.weights().names)  # an engine's model has no place for them either
    assert counted_drafts(load_config(str(tmp_path / "skeleton"))) == counted_drafts(load_config(str(base)))


def test_the_language_model_of_one_with_images_leaves_the_images_out(tmp_path: Path) -> None:
    base = saved(QWEN, tmp_path / "base")
    own = {name.replace("model.", "model.language_model."): one for name, one in tensors(base).items()}
    heads, text = add_heads(base, QWEN), json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(
        json.dumps({"model_type": "qwen3_5", "text_config": text, "vision_config": {"depth": 2}})
    )
    from safetensors.torch import save_file

    visual = {"model.visual.blocks.0.norm1.weight": torch.ones(4), "model.visual.pos_embed.weight": torch.ones(4)}
    save_file(own | heads | visual, base / "model.safetensors", {"format": "pt"})
    policy, compared = exported(base, tmp_path / "out")
    assert compared.num_carried == len(heads)
    after = tensors(tmp_path / "out")
    assert same(after, heads) and visual.keys().isdisjoint(after)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "vision_config" not in config and config["mtp_num_hidden_layers"] == 1
    assert files_note(str(base), "float32", policy).endswith(
        "Qwen3_5ForCausalLM has no place for 2 tensors, such as model.visual.blocks.0.norm1.weight of the files: "
        "exports leave them out"
    )


LEFT_OUT: dict[str, tuple[str, str, dict[str, Any]]] = {
    "a mask that the model computes": ("gpt2", "transformer.h.0.attn.bias", {}),
    "one of another age": ("gpt_neox", "gpt_neox.layers.0.attention.masked_bias", {}),
    "frequencies": ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq", {}),
    "a critic's head": ("qwen3", "v_head.summary.weight", {}),
    "a head of a family without any": ("qwen3", "mtp.fc.weight", {}),
    "one of another stack": ("deepseek_v3", "vision.layers.2.norm.weight", {"num_nextn_predict_layers": 1}),
    "eight bits": (QWEN, "mtp.fc.weight", {"mtp_num_hidden_layers": 1}),
}  # fmt: skip


@pytest.mark.parametrize("why", table_rows(LEFT_OUT, ["a critic's head", "eight bits", "one of another stack"]))
def test_what_nothing_reads_is_left_out_in_a_sentence_and_the_config_counts_no_layers(why: str, tmp_path: Path) -> None:
    family, name, counted = LEFT_OUT[why]
    base = saved(family, tmp_path / "base")
    own = tensors(base).keys()
    dtype = torch.float8_e4m3fn if why == "eight bits" else torch.float32
    add_tensors(base, {name: torch.ones(4, 4).to(dtype)}, **counted)
    policy, compared = exported(base, tmp_path / "out")
    assert compared.num_carried == 0 and tensors(tmp_path / "out").keys() == own
    assert f"has no place for the tensor {name} of the files: exports leave it out" in known_unread(policy).sentence(
        "X"
    )
    assert set(fields(tmp_path / "out").values()) <= {0}
    assert counted_drafts(load_config(str(tmp_path / "out"))) == 0


PAST = [("deepseek_v3", 2, 0), ("glm4_moe", 3, 1)]


@pytest.mark.parametrize(("family", "layer", "counted"), table_rows(PAST, PAST[1:]))
def test_a_layer_past_those_that_the_config_counts_is_refused(
    family: str, layer: int, counted: int, tmp_path: Path
) -> None:
    name = f"model.layers.{layer}.norm.weight"
    base = saved(family, tmp_path / "base")
    add_tensors(base, {name: torch.ones(4, 4)}, num_nextn_predict_layers=counted)
    with pytest.raises(ValueError, match=f"hold 1 weights of layers that .* lacks, such as {name}; put the config of"):
        load_policy(str(base))


def test_a_config_that_counts_layers_which_the_files_lack_is_put_right(tmp_path: Path) -> None:
    base = saved(QWEN, tmp_path / "base")
    add_tensors(base, {}, mtp_num_hidden_layers=1)
    policy, _ = exported(base, tmp_path / "out")
    assert "counts 1 layer of multi-token prediction, and the files hold none" in known_unread(policy).sentence("X")
    assert fields(tmp_path / "out") == {"mtp_num_hidden_layers": 0}


def test_a_policy_without_such_tensors_has_no_sentence(policy_folder: Path) -> None:
    assert files_note(str(policy_folder), "float32", load_policy(str(policy_folder))) == ""


def test_of_a_base_that_is_gone_when_the_run_ends_nothing_is_claimed(tmp_path: Path) -> None:
    base = saved("qwen3_next", tmp_path / "base")  # whose config counts nothing
    add_heads(base, "qwen3_next")
    policy, tokenizer = load_policy(str(base)), load_tokenizer(str(base))
    shutil.rmtree(base)
    with pytest.warns(UserWarning, match=r"base does not hold mtp\.fc\.weight any more, .* is without multi-token"):
        compared = export(policy, tokenizer, tmp_path / "out")
    assert compared is not None and compared.num_carried == 0
    assert not any(name.startswith("mtp.") for name in tensors(tmp_path / "out"))


def test_a_model_that_was_loaded_in_python_carries_them_too(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    base = saved(QWEN, tmp_path / "base")
    heads = add_heads(base, QWEN)
    policy = load_policy((AutoModelForCausalLM.from_pretrained(base), None))
    export(policy, load_tokenizer(str(base)), tmp_path / "out")
    assert same(tensors(tmp_path / "out"), heads)
    made: Any = random_policy()
    assert files_note((made, None), "float32", load_policy((made, None))) == ""


def test_runs_checkpoints_and_what_is_resumed_carry_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_policy(tmp_path / "base", hybrid=True)
    heads = add_heads(tmp_path / "base", QWEN)
    groups = random_groups(random_policy(), [[1.0, 0.0, 0.0, 1.0]])
    for name, start in (("first", None), ("second", tmp_path / "first" / "1.ckpt")):
        module = make_module(tmp_path / "base", optimizer=sgd(0.5))
        make_trainer(Checkpoints(tmp_path / name)).fit(module, Batches([groups] * 2), ckpt_path=start)
        module.export(tmp_path / name / "policy")
    export_checkpoint([str(tmp_path / "second" / "2.ckpt"), str(tmp_path / "exported")])
    assert f"{len(heads)} more are the base's, for multi-token prediction" in capsys.readouterr().out
    first = tensors(tmp_path / "first" / "policy")
    for folder in (tmp_path / "second" / "policy", tmp_path / "exported"):
        after = tensors(folder)
        assert after.keys() == first.keys() and same(after, first) and same(after, heads)
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(SystemExit):
        export_checkpoint([str(tmp_path / "second" / "2.ckpt"), str(tmp_path / "other")])
    assert "There is no policy folder" in capsys.readouterr().err
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        moved = ["--policy", str(tmp_path / "moved")]
        export_checkpoint([str(tmp_path / "second" / "2.ckpt"), str(tmp_path / "other"), *moved])
    assert same(tensors(tmp_path / "other"), first)
