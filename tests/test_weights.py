"""Weights on their way: digests, merged adapters, files of changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from conftest import random_policy

from lit_grpo.policy.weights import PolicyWeights, digest
from lit_grpo.rollout.weights.files import read, write
from lit_grpo.rollout.weights.shipments import Shipment, rebuild
from lit_grpo.rollout.weights.tensors import WeightSyncError, check_arrival, complete

BASE = torch.arange(1024, dtype=torch.float32).view(32, 32).sin()


@pytest.mark.parametrize("size", [0, 1, 7, 127, 128, 129, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
def test_every_element_of_any_size_counts(size: int, dtype: torch.dtype) -> None:
    tensor = torch.arange(size).to(dtype)
    for place in {0, size // 2, size - 1} if size else set():
        changed = tensor.clone()
        changed[place] += 1
        if bool((changed != tensor).any()):
            assert digest(changed) != digest(tensor)
    assert digest(torch.cat([tensor[:1], tensor])[1:]) == digest(tensor)  # at an odd address


def test_a_tensor_is_read_once_until_it_is_written_to() -> None:
    tensor = BASE.clone()
    before = digest(tensor)
    for change in (
        lambda: tensor.add_(1),
        lambda: tensor.detach()[3].zero_(),
        lambda: tensor.view(-1)[5:6].copy_(BASE[0, :1]),
    ):
        assert digest(tensor) == before == digest(tensor.clone())
        change()
        assert digest(tensor) == digest(tensor.clone()) != before
        before = digest(tensor)
    with torch.inference_mode():
        inferred = BASE * 1
        before = digest(inferred)
        inferred.add_(1)
        assert digest(inferred) != before


def test_arrival_is_checked_by_name_and_content() -> None:
    check_arrival({"a": "1", "b": "2"}, {"b": "2", "a": "1"})
    for received, said in (
        ({"a": "1"}, "1 of 2 weights did not arrive, 'b' among them"),
        ({"a": "1", "b": "2", "c": "3"}, "bound 'c', which the policy does not have"),
        ({"a": "2", "b": "1"}, "2 of 2 weights arrived with another content than the policy's, 'a' among them"),
    ):
        with pytest.raises(WeightSyncError, match=said):
            check_arrival({"a": "1", "b": "2"}, received)
    with pytest.raises(WeightSyncError, match="1 of 2 weights did not arrive"):
        list(complete([("a", BASE)], ["a", "b"]))


def test_adapters_are_merged_one_layer_at_a_time_and_the_policy_stays_as_it_is() -> None:
    policy: Any = peft.get_peft_model(
        random_policy(),
        peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "down_proj"], init_lora_weights=False),
    )
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    weights = PolicyWeights(policy)
    sent = dict(weights)
    assert list(sent) == weights.names == [name for name, _ in random_policy().named_parameters()]
    for name, tensor in policy.state_dict().items():
        assert torch.equal(tensor, before[name])
    merged = dict(policy.merge_and_unload().named_parameters())
    for name, tensor in sent.items():
        assert torch.allclose(tensor, merged[name], atol=1e-6)
    assert not torch.equal(sent["model.layers.0.self_attn.q_proj.weight"],
                           before["base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"])  # fmt: skip


def test_weights_are_rounded_to_what_the_generator_computes_in() -> None:
    policy: Any = random_policy()
    weights = PolicyWeights(policy, dtype=torch.bfloat16)
    for name, tensor in weights:
        assert tensor.dtype == torch.bfloat16 and weights.digests[name] == digest(tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_changes_rebuild_the_weights_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    old = {"a": BASE.to(dtype), "b": torch.zeros(5, dtype=dtype), "same": BASE[0].clone().to(dtype)}
    new = {name: tensor.clone() for name, tensor in old.items()}
    new["a"][3, 4:7] += 1
    new["b"][2] = -0.0  # equal to what it was, and other bits
    held: dict[str, torch.Tensor] = {}
    full = Shipment(old.items(), held)
    write(full, tmp_path / "full")
    assert (full.num_bytes, full.changed_share) == (sum(tensor.nbytes for tensor in old.values()), 1.0)
    patch = Shipment(new.items(), held, changes=True)
    write(patch, tmp_path / "patch")
    assert patch.changed_share == 4 / sum(tensor.numel() for tensor in old.values())
    assert patch.num_bytes == 4 * (4 + dtype.itemsize)
    received: dict[str, torch.Tensor] = {}
    for path, changes in (("full", False), ("patch", True)):
        for name, tensor in rebuild(read(tmp_path / path), received, changes):
            received[name] = tensor.clone()
    for side in (held, received):
        assert {name: digest(tensor) for name, tensor in side.items()} == {
            name: digest(tensor) for name, tensor in new.items()
        }
