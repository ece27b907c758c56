"""Checkpoints of adapters, which leave out the frozen weights and tell them by a fingerprint."""

from __future__ import annotations

import json
from importlib import util
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import random_policy, save_policy
from hand_made import Batches, Checkpoints, make_module, make_trainer, random_groups
from safetensors.torch import load_file, save_file

from lit_grpo.checkpoints import read_state
from lit_grpo.module import GRPOModule
from lit_grpo.policy.adapters import LoraSettings
from lit_grpo.policy.frozen import fingerprint
from lit_grpo.policy.loading import load_policy
from lit_grpo.tools.commands.export import main as export

REWARDS = [[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.2, 0.5]]
LORA = LoraSettings(r=1, target_modules=["q_proj"])


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def run(policy: Any, checkpoints: Path, ckpt_path: Path | None = None, **options: Any) -> GRPOModule:
    """A module after three updates, with a checkpoint of each."""
    module = make_module("tiny", lora=LORA, optimizer=adamw, **options)
    module.policy_name = policy if isinstance(policy, tuple) else str(policy)
    groups = random_groups(random_policy(), REWARDS)
    torch.manual_seed(0)  # peft draws the adapters
    make_trainer(Checkpoints(checkpoints)).fit(module, Batches([groups] * 3), ckpt_path=ckpt_path)
    return module


@pytest.fixture(scope="module")
def trained(policy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[GRPOModule, Path]:
    """That module, and the folder of its checkpoints."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return run(policy_folder, folder), folder


def saved_as(folder: Path, **changes: Any) -> Path:
    save_policy(folder, **changes)
    return folder


def with_adapters(policy: Any) -> GRPOModule:
    module: GRPOModule = make_module(policy, lora=LORA)
    module.configure_model()
    return module


def test_a_checkpoint_has_what_is_trained_and_none_of_the_rest(trained: tuple[GRPOModule, Path]) -> None:
    module, folder = trained
    saved = read_state(folder / "3.ckpt")
    weights = {f"policy.{name}": weight for name, weight in module.policy.named_parameters() if weight.requires_grad}
    assert saved["state_dict"].keys() == weights.keys() and len(weights) == 4
    assert all(torch.equal(saved["state_dict"][name], weight) for name, weight in weights.items())
    num_bytes = sum(weight.nbytes for weight in saved["state_dict"].values())
    assert num_bytes < 0.02 * sum(weight.nbytes for weight in module.policy.parameters())
    assert (folder / "3.ckpt").stat().st_size < 0.5 * sum(weight.nbytes for weight in module.policy.parameters())


def test_a_run_goes_on_bit_for_bit(trained: tuple[GRPOModule, Path], policy_folder: Path, tmp_path: Path) -> None:
    whole, folder = trained
    resumed = run(policy_folder, tmp_path, folder / "1.ckpt")
    assert resumed.policy_version == 3
    for actual, expected in zip(resumed.policy.parameters(), whole.policy.parameters(), strict=True):
        assert torch.equal(actual, expected)
    first, second = read_state(folder / "1.ckpt")["state_dict"], read_state(folder / "3.ckpt")["state_dict"]
    assert all(not torch.equal(first[name], second[name]) for name in first)


def test_a_loaded_model_leaves_checkpoints_that_are_exported_like_the_run(
    trained: tuple[GRPOModule, Path], policy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = run((load_policy(str(policy_folder)), None), tmp_path)
    module.export(tmp_path / "own")
    export([str(tmp_path / "3.ckpt"), str(tmp_path / "exported")])
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("own", "exported"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    saved = torch.load(tmp_path / "3.ckpt", weights_only=True)
    saved["hyper_parameters"]["policy"] = ""  # of a model that was made
    torch.save(saved, tmp_path / "made.ckpt")
    with pytest.raises(SystemExit, match="2"):
        export([str(tmp_path / "made.ckpt"), str(tmp_path / "made")])
    assert "give the folder as --policy" in capsys.readouterr().err
    export([str(tmp_path / "made.ckpt"), str(tmp_path / "made"), "--policy", str(policy_folder)])


def test_another_base_is_refused(trained: tuple[GRPOModule, Path], policy_folder: Path, tmp_path: Path) -> None:
    saved = read_state(trained[1] / "3.ckpt")
    with_adapters(policy_folder).on_load_checkpoint(dict(saved))
    other = saved_as(tmp_path / "other", seed=1)
    with pytest.raises(ValueError) as caught:
        with_adapters(other).on_load_checkpoint(dict(saved))
    assert str(caught.value) == (
        f"The checkpoint has adapters alone, trained on policy {str(policy_folder)!r} in float32 as it was then, and "
        f"the frozen weights of {str(other)!r} in float32 are others; let model.policy (of export: --policy), "
        "model.dtype and model.lora.base be what the run had."
    )
    rounded: GRPOModule = make_module(policy_folder, lora=LORA, dtype="bfloat16")
    rounded.configure_model()
    with pytest.raises(ValueError, match="in bfloat16 are others"):
        rounded.on_load_checkpoint(dict(saved))


def test_a_checkpoint_that_lacks_a_trained_weight_or_has_one_more_is_refused(
    trained: tuple[GRPOModule, Path], policy_folder: Path
) -> None:
    saved, module = read_state(trained[1] / "3.ckpt"), with_adapters(policy_folder)
    name = next(iter(saved["state_dict"]))
    lacking = {key: weight for key, weight in saved["state_dict"].items() if key != name}
    for weights in (lacking, saved["state_dict"] | {"policy.lora_C": torch.ones(1)}, {}):
        with pytest.raises(ValueError, match=r"of another policy: the shape of policy\..*lora_"):
            module.on_load_checkpoint(saved | {"state_dict": weights})
    bare: GRPOModule = make_module(policy_folder)
    bare.configure_model()
    with pytest.raises(ValueError, match=r"set model\.policy and model\.lora to what it was trained with"):
        bare.on_load_checkpoint(dict(saved))


@pytest.mark.skipif(util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
def test_of_weights_in_four_bits_the_files_count_and_not_the_bits(tmp_path: Path) -> None:
    folder = saved_as(tmp_path / "policy", hidden_size=64, intermediate_size=128)
    policy = load_policy(str(folder), nf4=True)
    first = fingerprint(policy, str(folder))
    packed = next(weight for weight in policy.parameters() if weight.dtype == torch.uint8)
    packed.data.zero_()  # as of a machine that packs them in a way of its own
    assert fingerprint(policy, str(folder)) == first
    whole = load_file(folder / "model.safetensors")
    parts = {"a.safetensors": list(whole)[:5], "b.safetensors": list(whole)[5:]}
    for file, names in parts.items():
        save_file({name: whole[name] for name in names}, folder / file, {"format": "pt"})
    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {name: file for file, names in parts.items() for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert fingerprint(policy, str(folder)) == first
    next(tensor for name, tensor in whole.items() if "_proj" in name)[0, 0] += 1e-3
    save_file(whole, folder / "model.safetensors", {"format": "pt"})
    assert fingerprint(policy, str(folder)) != first
