"""LoRA with vLLM servers: adapters that are merged into bfloat16 weights, beside adapters that travel alone.

A Qwen3 of 100 million random parameters in bfloat16 learns with adapters in float32, from one batch of given sequences
with given advantages. After some updates both kinds of server are brought up to date and score the same tokens. How far
their log-probs have moved since the first sync is fitted to how far the policy's have, computed in float32: a slope of
1 says that all of the updates' effect has arrived. The same is told of the policy's own forward pass in bfloat16.
Beside that stand the time and the bytes of a sync, and what a server decodes.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.random_policies import Sizes, random_qwen3
from benchmarks.report import Claim, Options, Row, finish, note, parse_options
from benchmarks.rollouts import roll_out
from benchmarks.workloads import load
from lit_grpo.policy.adapters import LoraSettings, add_adapters
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.policy.weights import PolicyWeights
from lit_grpo.rollout.vllm.server import VLLMServerGenerator
from lit_grpo.rollout.weights.tensors import check_arrival
from lit_grpo.types import Prompt, SamplingParams

WAYS = ("merged", "alone")
POLICY = "the policy itself"
SERVER = {"max_model_len": 256, "block_size": 32, "kv_cache_memory_bytes": 512 * 2**20}
LEARNING_RATE = 1e-5


def main(options: Options) -> int:
    """Learn, sync, score and decode."""
    _, tokenizer = load(options.policy or "tiny", options.device)
    sizes = Sizes(2, 64, 256, 1, 1, 64) if options.quick else Sizes(12, 768, 3072, 12, 6, 64)
    policy: Any = random_qwen3(sizes, options.device, torch.bfloat16)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        add_adapters(policy, LoraSettings(r=16))
    generators = {way: VLLMServerGenerator(16, adapters=way, server_args=SERVER) for way in WAYS}
    for generator in generators.values():
        generator.start(PolicySpec(policy, tokenizer))
    given = _sequences(policy.config.vocab_size, 4 if options.quick else 16)
    updates = (1, 4) if options.quick else (1, 4, 16, 64)
    rows = list(_synced(policy, generators, given, _learn(policy, given, updates)))
    rates = _decode(generators, policy.config.vocab_size, *((1, 16) if options.quick else (3, 32)))
    rows += [{"adapters": way, "tokens_per_s": statistics.median(rates[way])} for way in WAYS]
    for generator in generators.values():
        generator.close()
    settings: Row = {"learning_rate": LEARNING_RATE, "rank": 16, "parameters": policy.num_parameters()}
    return finish("lora_sync", options, settings, rows, _claims(rows, rates))


def _claims(rows: list[Row], rates: dict[str, list[float]]) -> list[Claim]:
    of = {way: [row for row in rows if row["adapters"] == way and "sync_s" in row] for way in WAYS}
    seconds = {way: [float(row["sync_s"]) for row in of[way]] for way in WAYS}
    own = float(next(row["arrived"] for row in rows if row["adapters"] == POLICY))
    arrived = float(of["alone"][0]["arrived"])
    return [
        Claim("effect of one update with adapters alone over that in the policy's own pass", arrived / own, ">=", 0.8),
        Claim("a sync of adapters alone over one of merged weights, in time", _ratio(seconds), "<=", 0.5),
        Claim("tokens/s with adapters alone over merged", _ratio(rates), ">=", 0.8),
    ]


def _ratio(figures: dict[str, list[float]]) -> float:
    return statistics.median(one / other for one, other in zip(figures["alone"], figures["merged"], strict=True))


def _sequences(vocabulary: int, number: int) -> torch.Tensor:
    return torch.randint(vocabulary, (number, 65), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def _logprobs(policy: Any, given_BT: torch.Tensor) -> torch.Tensor:
    """Those of the given tokens."""
    logits_BTV = policy(given_BT.to(policy.device)).logits[:, :-1].float()
    return logits_BTV.log_softmax(-1).gather(-1, given_BT[:, 1:, None].to(policy.device)).flatten().cpu().double()


def _learn(policy: Any, given_BT: torch.Tensor, stops: tuple[int, ...]) -> Iterator[int]:
    """Take updates, and stop after some."""
    advantages_B = torch.randn(len(given_BT), generator=torch.Generator().manual_seed(2))
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0)
    for update in range(1, stops[-1] + 1):
        logits_BTV = policy(given_BT).logits[:, :-1].float()
        logprobs_BT = logits_BTV.log_softmax(-1).gather(-1, given_BT[:, 1:, None]).squeeze(-1)
        optimizer.zero_grad()
        (-(advantages_B[:, None] * logprobs_BT).mean()).backward()
        optimizer.step()
        if update in stops:
            yield update


def _synced(
    policy: Any, generators: dict[str, VLLMServerGenerator], given: torch.Tensor, learning: Iterator[int]
) -> Iterator[Row]:
    """Bring both servers up to date after some updates, and compare how far log-probs have moved."""
    begun = {way: _scored(_sync(generator, 0), given) for way, generator in generators.items()}
    before, own_before = _logprobs(copy.deepcopy(policy).float(), given), _logprobs(policy, given)
    for number in learning:
        moved, own = _logprobs(copy.deepcopy(policy).float(), given) - before, _logprobs(policy, given) - own_before
        effect = float(moved.abs().mean())
        yield {"adapters": POLICY, "updates": number, "effect": effect, "arrived": _slope(own, moved)}
        for way, generator in generators.items():
            start = time.perf_counter()
            _sync(generator, number)
            row: Row = {"adapters": way, "updates": number, "sync_s": time.perf_counter() - start}
            row["sync_mib"] = generator.load_weights(generator.weights(), number).num_bytes / 2**20
            row |= {"effect": effect, "arrived": _slope(_scored(generator, given) - begun[way], moved)}
            row["lost_in_weights"] = _lost(policy) if way == "merged" else 0.0
            note(str(row))
            yield row


def _slope(values: torch.Tensor, over: torch.Tensor) -> float:
    return float(values @ over / (over @ over))


def _sync(generator: VLLMServerGenerator, version: int) -> VLLMServerGenerator:
    weights = generator.weights()
    check_arrival(weights.digests, generator.load_weights(weights, version).digests)
    return generator


def _scored(generator: VLLMServerGenerator, given_BT: torch.Tensor) -> torch.Tensor:
    (scored,) = generator.score([row.tolist() for row in given_BT]).values()
    return scored.double()


@torch.no_grad()
def _lost(policy: Any) -> float:
    """The norm of what rounding takes from the adapters' change of the weights, over the norm of that change."""
    merged, lost, whole = dict(PolicyWeights(policy)), 0.0, 0.0
    for name, layer in policy.named_modules():
        if hasattr(layer, "base_layer") and hasattr(layer, "get_delta_weight"):
            change = layer.get_delta_weight("default").double()
            base = layer.get_base_layer().weight
            weight = merged[f"{name.replace('base_model.model.', '')}.weight"]
            lost += float((weight.double() - base.double() - change).square().sum())
            whole += float(change.square().sum())
    return (lost / whole) ** 0.5


def _decode(
    generators: dict[str, VLLMServerGenerator], vocabulary: int, repeats: int, tokens: int
) -> dict[str, list[float]]:
    """Tokens/s of the same requests, in turn."""
    draw = np.random.default_rng(0)
    prompts = [Prompt(f"p{i}", tuple(map(int, draw.integers(vocabulary, size=32))), "") for i in range(4)]
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(repeats + 1):
        for way, generator in generators.items():
            start = time.perf_counter()
            groups, _ = roll_out(generator, prompts, 8, SamplingParams(max_tokens=tokens))
            number = sum(len(rollout.completion.token_ids_T) for group in groups for rollout in group.rollouts)
            rates[way].append(number / (time.perf_counter() - start))
    return {way: values[1:] for way, values in rates.items()}


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(main(parse_options(__doc__)))
