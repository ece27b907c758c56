"""Weights in oneDNN's layout while a policy decodes on a CPU: what they compute, and that they come and go."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from conftest import random_policy
from hand_made import full_logprobs
from test_slots import PROMPTS, decode, requests

from lit_grpo.policy.spec import PolicySpec
from lit_grpo.rollout.slots import copies
from lit_grpo.rollout.slots.generator import SlotGenerator
from lit_grpo.types import Completion, Key, Rollout, SamplingParams

SAMPLING = SamplingParams(max_tokens=12)

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


@pytest.fixture
def policy() -> Any:
    """One layer, whose query, output, gate, up and down projections are large enough."""
    sizes: dict[str, Any] = {"hidden_size": 384, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 48}
    return random_policy(num_hidden_layers=1, initializer_range=0.06, **sizes)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each product that oneDNN is asked for."""
    found, multiply = list[int](), torch.ops.mkldnn._linear_pointwise

    def counted(hidden: torch.Tensor, *more: Any) -> torch.Tensor:
        found.append(hidden.numel() // hidden.shape[-1])
        return multiply(hidden, *more)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", counted)
    return found


def started(policy: Any, tokenizer: Any) -> SlotGenerator:
    generator = SlotGenerator(4, packed_weights=True)
    generator.start(PolicySpec(policy, tokenizer))
    generator.load_weights(policy.named_parameters(), 0)
    return generator


def check_logprobs(policy: Any, done: dict[Key, Completion]) -> None:
    """Those sampled are those of the model's own forward."""
    for completion in done.values():
        expected = full_logprobs(policy, Rollout(completion.request.prompt, completion))
        torch.testing.assert_close(torch.as_tensor(completion.logprobs_T), expected, atol=2e-5, rtol=0)


def test_a_policy_decodes_from_packed_copies_and_keeps_its_own_weights(
    policy: Any, tokenizer: Any, products: list[int]
) -> None:
    own = {name: (parameter.data_ptr(), parameter.detach().clone()) for name, parameter in policy.named_parameters()}
    done = decode(started(policy, tokenizer), requests(PROMPTS[:2], 6, SAMPLING))
    assert max(products) >= 4 and min(products) >= 2  # one row reads the weights as they are
    for name, parameter in policy.named_parameters():
        assert type(parameter) is torch.nn.Parameter and parameter.data_ptr() == own[name][0]
        assert torch.equal(parameter, own[name][1])
    check_logprobs(policy, done)


def test_new_weights_are_packed_anew(policy: Any, tokenizer: Any, products: list[int]) -> None:
    generator = started(policy, tokenizer)
    todo = requests(PROMPTS[:1], 4, SAMPLING)
    generator.submit(todo)
    generator.step()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.1)
    todo = generator.abort([request.key for request in todo])
    generator.load_weights(policy.named_parameters(), 1)
    generator.submit(todo)
    del products[:]
    done: dict[Key, Completion] = {}
    while generator.capacity().free_slots < 4:
        done |= {completion.request.key: completion for completion in generator.step().finished}
    assert products and len(done) == 4
    for completion in done.values():
        expected = full_logprobs(policy, Rollout(completion.request.prompt, completion))[1:]
        torch.testing.assert_close(torch.as_tensor(completion.logprobs_T)[1:], expected, atol=2e-5, rtol=0)


def test_small_and_foreign_weights_are_left_alone(policy: Any) -> None:
    def packed(model: Any) -> set[str]:
        layers = {id(layer) for layer in copies.PackedWeights(model).layers}
        return {name.rpartition(".")[2] for name, module in model.named_modules() if id(module) in layers}

    assert packed(policy) == {"q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}  # the others are small
    assert packed(policy.requires_grad_(False)) == {"q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}

    class Own(torch.nn.Linear): ...

    policy.model.layers[0].mlp.up_proj = Own(384, 512, bias=False)
    assert "up_proj" not in packed(policy)


def test_a_policy_of_another_kind_is_refused_and_autocast_takes_its_own_copies(policy: Any, tokenizer: Any) -> None:
    spec = PolicySpec(copy.deepcopy(policy).bfloat16(), tokenizer)
    with pytest.raises(
        ValueError, match="is for float32 policies on a CPU, and this one is bfloat16 on cpu; set it to"
    ):
        SlotGenerator(4, packed_weights=True).start(spec)
    generator = started(policy, tokenizer)
    with torch.autocast("cpu", torch.bfloat16):
        generator.submit(requests(PROMPTS[:1], 2, SAMPLING))
    assert generator._mode is not None and generator._mode._lowered is not None and generator._mode._packed is None
    generator.close()
    plain = SlotGenerator(4)
    plain.start(PolicySpec(policy, tokenizer))
    plain.load_weights(policy.named_parameters(), 0)
    plain.submit(requests(PROMPTS[:1], 2, SAMPLING))
    assert plain._mode is not None and plain._mode._packed is None
    plain.close()


def test_copies_are_let_go_when_nothing_is_in_flight(policy: Any, tokenizer: Any) -> None:
    generator = started(policy, tokenizer)
    generator.submit(requests(PROMPTS[:1], 2, SAMPLING))
    generator.step()
    mode = generator._mode
    assert mode is not None and mode._packed is not None and mode._packed.layers
    generator.abort([request.key for request in requests(PROMPTS[:1], 2, SAMPLING)])
    assert mode._packed is None
