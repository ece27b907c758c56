"""Ninety ways in which an engine's weights can be wrong after a sync: the proof of the sync finds each that matters.

Each corruption replaces weights in vLLM's engine after a load whose digests were right, so that only what the engine
computes can tell. What matters is its effect on what is trained on: how far it moves the log-probs of completions that
the policy samples, on average over their tokens, computed in float64. It counts where it is larger than the gap that
the first sync leaves on the same tokens, which is rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchmarks.rollouts import roll_out
from benchmarks.workloads import arithmetic_prompts, load
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.policy.weights import PolicyWeights
from lit_grpo.rollout.proof import SyncProof
from lit_grpo.rollout.vllm.engine import VLLMGenerator
from lit_grpo.rollout.weights.tensors import check_arrival
from lit_grpo.types import RolloutGroup, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Tensors = dict[str, torch.Tensor]
UPDATE = 1e-6
"""Change of each element by one small update."""


def corruptions(new: Tensors, old: Tensors) -> Iterator[tuple[str, str, Tensors]]:
    """Yield kind, tensor and all tensors of each corruption of ``new``; ``old`` is before the last update."""
    for name, tensor in new.items():
        yield "zeroed", name, new | {name: torch.zeros_like(tensor)}
        yield "rows permuted", name, new | {name: tensor.roll(1, 0)}
        yield "one update lost", name, new | {name: old[name]}
    for name, tensor in new.items():
        other = name.replace("layers.0.", "layers.1.")
        if other != name:
            yield "exchanged between layers", name, new | {name: new[other], other: tensor}
    for layer in ("layers.0.", "layers.1."):
        yield "a layer's update lost", layer, new | {name: old[name] for name in new if layer in name}
    yield "every update lost", "all", old
    half = dict(list(new.items())[: len(new) // 2])
    yield "half of the tensors lost an update", "first half", new | {name: old[name] for name in half}
    for name in ("model.norm.weight", "model.embed_tokens.weight", "model.layers.1.self_attn.k_norm.weight"):
        yield "one element zeroed", name, new | {name: _one_zeroed(new[name])}


@pytest.mark.nightly
def test_the_proof_of_a_sync_finds_every_corruption_that_moves_logprobs_by_more_than_rounding() -> None:
    policy, tokenizer = load("tiny", "cpu")
    prompts = arithmetic_prompts(tokenizer, 8)
    generator = VLLMGenerator(32, kv_memory="32MiB", engine_args={"max_model_len": 320, "block_size": 32})
    generator.start(PolicySpec(policy, tokenizer))
    proof = SyncProof(tokenizer, max_gap=0.1, max_growth=1.3)
    old = {name: tensor.clone() for name, tensor in PolicyWeights(policy)}
    _update(policy)
    new = {name: tensor.clone() for name, tensor in PolicyWeights(policy)}
    _sync(generator, policy, 0)
    assert proof.accepts(proof.measure(generator, policy))
    groups, _ = roll_out(generator, prompts, 8, SamplingParams(max_tokens=32))
    sampled_N = torch.cat([rollout.completion.logprobs_T for group in groups for rollout in group.rollouts])
    exact = copy.deepcopy(policy).double().eval()
    exact_N = _logprobs(exact, groups)
    rounding = float((sampled_N - exact_N).abs().mean())
    with_effect, missed = 0, list[tuple[str, str, float]]()
    for number, (kind, name, tensors) in enumerate(corruptions(new, old)):
        _sync(generator, policy, number + 1)
        assert proof.accepts(proof.measure(generator, policy))
        generator._load(iter(tensors.items()), number + 1)
        found = not proof.accepts(proof.measure(generator, policy))
        exact.load_state_dict(tensors, strict=False)
        effect = float((_logprobs(exact, groups) - exact_N).abs().mean())
        with_effect += effect > rounding
        if effect > rounding and not found:
            missed.append((kind, name, effect))
    assert with_effect >= 60 and missed == []


def _sync(generator: VLLMGenerator, policy: PreTrainedModel, version: int) -> None:
    weights = generator.weights()
    check_arrival(weights.digests, generator.load_weights(weights, version).digests)


def _update(policy: PreTrainedModel) -> None:
    """Change every element by about as much as a small learning rate does."""
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += UPDATE * torch.randn(parameter.shape, generator=draw).sign()


@torch.no_grad()
def _logprobs(policy: PreTrainedModel, groups: list[RolloutGroup]) -> torch.Tensor:
    """The log-probs of all tokens of the groups' completions, shape N."""
    logprobs: list[torch.Tensor] = []
    for group in groups:
        start = len(group.prompt.token_ids)
        for completion in (rollout.completion for rollout in group.rollouts):
            ids_T = torch.cat([torch.tensor(group.prompt.token_ids), completion.token_ids_T])
            logits_TV: Any = policy(input_ids=ids_T[None], use_cache=False).logits[0, start - 1 : -1]
            logprobs.append(logits_TV.log_softmax(-1).gather(-1, completion.token_ids_T[:, None]).squeeze(-1))
    return torch.cat(logprobs)


def _one_zeroed(tensor: torch.Tensor) -> torch.Tensor:
    changed = tensor.clone()
    changed.view(-1)[0] = 0.0
    return changed
