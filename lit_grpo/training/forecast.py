"""What a run will take of a device's memory, from the policy's config alone: no weights are loaded."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lit_grpo.policy.architecture.decoder import decoder_of
from lit_grpo.scheduling.layouts import piece_sizes, prompt_room
from lit_grpo.update.budget import kept_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

SEVERAL = 2  # blocks of logits that the head has at a time
HEAD_BLOCK = {"cpu": 2**21, "cuda": 2**25}
MOMENTS = {"AdamW": 8.0, "AdamW8bit": 2.1, "SGD": 0.0}
"""Bytes of an optimizer's state for each trained weight in float32."""


@dataclass(frozen=True)
class Sizes:
    """What of a policy decides its memory: a layer's figures, and those of all the rest.

    ``kept_bytes`` are what a token leaves for the backward pass where the weights are in float32.
    """

    num_layers: int
    layer_parameters: int
    layer_features: int
    other_parameters: int
    hidden: int
    kv_values: int
    layer_kept_bytes: float
    other_kept_bytes: float

    @classmethod
    def of(cls, config: PreTrainedConfig) -> Sizes:
        """Measure models of one and of two layers of this config, with random weights and next to no vocabulary."""
        text = config.get_text_config()
        (one, kept_one, features), (two, kept_two, _) = (_measure(text, layers) for layers in (1, 2))
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        tables = 1 if text.tie_word_embeddings else 2
        return cls(
            text.num_hidden_layers,
            two - one,
            features,
            2 * one - two + tables * (text.vocab_size - VOCABULARY) * text.hidden_size,
            text.hidden_size,
            2 * heads * head_dim,
            kept_two - kept_one,
            2 * kept_one - kept_two,
        )

    @property
    def parameters(self) -> int:
        """Of the whole policy."""
        return self.num_layers * self.layer_parameters + self.other_parameters


VOCABULARY = 16


def _measure(text: Any, num_layers: int) -> tuple[int, float, int]:
    """Parameters, bytes that a token leaves for the backward pass, and inputs and outputs of a layer's matrices."""
    import torch
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(text)
    config.num_hidden_layers, config.vocab_size = num_layers, VOCABULARY
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_layers]
    config.pad_token_id = config.bos_token_id = config.eos_token_id = None
    with torch.random.fork_rng(devices=[]):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    layers: Any = decoder_of(model).layers
    layer = layers[0]
    features = sum(one.in_features + one.out_features for one in layer.modules() if isinstance(one, torch.nn.Linear))
    return model.num_parameters(), kept_bytes(model, shares_prefix=False), features


@dataclass(frozen=True)
class Demand:
    """The settings of a run that decide its memory.

    Args:
        num_slots: Completions that are decoded at a time.
        group_size: Completions of a prompt.
        prompt_tokens: Of the longest prompt.
        max_tokens: The most tokens of a completion.
        micro_batch_tokens: Tokens that go through the policy at once.
        device: ``cpu`` or ``cuda``.
        mixed: Computes in bfloat16 over float32 weights.
        weight_bytes: Of a weight: 4, or 2 for bfloat16.
        optimizer: A name of ``MOMENTS``.
        lora_rank: Of adapters; 0 trains all weights.
        nf4: Frozen layers in four bits.
        checkpointing: Activations are computed again.
        reference: A copy of the weights for the KL term is on the device.
    """

    num_slots: int
    group_size: int
    prompt_tokens: int
    max_tokens: int
    micro_batch_tokens: int
    device: str = "cpu"
    mixed: bool = False
    weight_bytes: int = 4
    optimizer: str = "AdamW"
    lora_rank: int = 0
    nf4: bool = False
    checkpointing: bool = False
    reference: bool = False


@dataclass(frozen=True)
class Forecast:
    """Bytes by part. What is ``resident`` is there in both phases; the others come and go with theirs."""

    resident: dict[str, float]
    rollout: dict[str, float]
    update: dict[str, float]

    @property
    def peak(self) -> float:
        """Of the phase that takes more."""
        return sum(self.resident.values()) + max(sum(self.rollout.values()), sum(self.update.values()))


def forecast(sizes: Sizes, demand: Demand) -> Forecast:
    """Compute what a run takes after its first update."""
    total = sizes.parameters
    adapters = demand.lora_rank * sizes.num_layers * sizes.layer_features
    trained = adapters if demand.lora_rank else total
    frozen_layers = sizes.num_layers * sizes.layer_parameters
    weights = (total + adapters) * demand.weight_bytes
    if demand.nf4:  # four bits, and a float32 constant for 64 of them
        weights = frozen_layers * (0.5 + 4 / 64) + (sizes.other_parameters + adapters) * demand.weight_bytes
    shrink = (2 if demand.mixed else demand.weight_bytes) / 4
    resident = {"weights": weights, "optimizer": trained * MOMENTS[demand.optimizer] * demand.weight_bytes / 4}
    if demand.reference and not demand.lora_rank:
        resident["reference"] = weights
    kv_token = sizes.num_layers * sizes.kv_values * 4 * shrink
    num_prompts = -(-demand.num_slots // demand.group_size) + 1
    slots = demand.num_slots * sum(piece_sizes(demand.max_tokens)) + num_prompts * prompt_room(demand.prompt_tokens)
    kept = sizes.num_layers * sizes.layer_kept_bytes
    if demand.checkpointing:
        kept = sizes.num_layers * sizes.hidden * 4 + sizes.layer_kept_bytes
    update = {
        "gradients": float(trained * demand.weight_bytes),
        "activations": demand.micro_batch_tokens * (kept + sizes.other_kept_bytes) * shrink,
        "head": float(SEVERAL * 4 * HEAD_BLOCK.get(demand.device, 2**21)),
    }
    if demand.mixed:
        update["bfloat16 copies"] = 2.0 * total
    return Forecast(resident, {"keys and values": slots * kv_token}, update)


def largest(sizes: Sizes, demand: Demand, field: str, limit: float, most: int = 2**20) -> int:
    """Find the largest value of a field with which the peak stays within ``limit`` bytes; 0 where none does."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        fits = forecast(sizes, replace(demand, **{field: middle})).peak <= limit
        low, high = (middle, high) if fits else (low, middle - 1)
    return low
