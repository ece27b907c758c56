"""An estimate of the memory that a run takes on a device, from the policy's config; no weights are loaded."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from lit_grpo.policy.architecture.decoder import decoder_of
from lit_grpo.scheduling.layouts import piece_sizes, prompt_room
from lit_grpo.update.micro_batch_size import kept_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

SEVERAL = 2  # blocks of logits in memory at a time
HEAD_BLOCK = {"cpu": 2**21, "cuda": 2**25}
MOMENTS = {"AdamW": 8.0, "AdamW8bit": 2.1, "SGD": 0.0}
"""Bytes of optimizer state for each trained weight in float32."""
TEMPORARIES = {"AdamW": 4.0, "AdamW8bit": 0.0, "SGD": 0.0}
"""Bytes for each trained weight in float32 that a step takes on a GPU, where torch updates all weights at once."""
CONTEXT = {"cpu": 0.0, "cuda": 0.75 * 2**30}
"""Memory that a device takes for itself: on a GPU the CUDA context and workspaces of matrix products (an estimate)."""
ENGINE_WORK = {"cpu": 0.0, "cuda": 1.5 * 2**30}
"""Memory of a vLLM engine besides weights and KV cache: CUDA graphs and activations (an estimate)."""
ENGINE_BLOCK = 16  # tokens


@dataclass(frozen=True)
class Sizes:
    """The figures of a policy that decide its memory: those of one layer, and those of everything else.

    Args:
        num_layers: The number of layers.
        layer_parameters: Parameters of a layer.
        layer_features: Inputs plus outputs of a layer's linear layers; times a LoRA rank, the parameters of adapters.
        other_parameters: Parameters outside the layers.
        hidden: Numbers of a hidden state.
        kv_values: Numbers of a token's keys and values in a layer.
        layer_kept_bytes: Bytes that a token leaves in a layer for the backward pass, in the precision of the run.
        other_kept_bytes: Bytes that it leaves outside the layers.
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
    def of(cls, config: PreTrainedConfig, mixed: bool = False, weight_bytes: int = 4) -> Sizes:
        """Measure models of one and of two layers of this config, with random weights and next to no vocabulary.

        Args:
            config: The policy's config.
            mixed: Whether the policy computes in bfloat16 with weights in float32.
            weight_bytes: Bytes of a weight: 4, or 2 for bfloat16.
        """
        text = config.get_text_config()
        one, two = (_measure(text, layers, mixed, weight_bytes) for layers in (1, 2))
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        tables = 1 if text.tie_word_embeddings else 2
        added_rows = tables * (text.vocab_size - VOCABULARY) * text.hidden_size
        return cls(
            num_layers=text.num_hidden_layers,
            layer_parameters=two.parameters - one.parameters,
            layer_features=one.layer_features,
            other_parameters=2 * one.parameters - two.parameters + added_rows,
            hidden=text.hidden_size,
            kv_values=2 * heads * head_dim,
            layer_kept_bytes=two.kept_bytes - one.kept_bytes,
            other_kept_bytes=2 * one.kept_bytes - two.kept_bytes,
        )

    @property
    def parameters(self) -> int:
        """The parameters of the whole policy."""
        return self.num_layers * self.layer_parameters + self.other_parameters


VOCABULARY = 16


class _Measured(NamedTuple):
    """The parameters of a small model, the bytes that a token leaves for backward, and ``Sizes.layer_features``."""

    parameters: int
    kept_bytes: float
    layer_features: int


def _measure(text: Any, num_layers: int, mixed: bool, weight_bytes: int) -> _Measured:
    """Make a model of so many layers and a tiny vocabulary, with random weights, and measure it."""
    import torch
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(text)
    config.num_hidden_layers, config.vocab_size = num_layers, VOCABULARY
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_layers]
    config.pad_token_id = config.bos_token_id = config.eos_token_id = None
    dtype = torch.bfloat16 if weight_bytes == 2 else torch.float32
    with torch.random.fork_rng(devices=[]):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
    layers: Any = decoder_of(model).layers
    layer = layers[0]
    features = sum(one.in_features + one.out_features for one in layer.modules() if isinstance(one, torch.nn.Linear))
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed, cache_enabled=False):
        kept = kept_bytes(model, shares_prefix=False).of_token
    return _Measured(model.num_parameters(), kept, features)


@dataclass(frozen=True)
class Demand:
    """The settings of a run that decide its memory.

    Args:
        num_slots: Completions that are decoded at a time.
        group_size: Completions of a prompt.
        prompt_tokens: Tokens of the longest prompt.
        max_tokens: The most tokens of a completion.
        micro_batch_tokens: Tokens of a micro-batch.
        device: ``cpu`` or ``cuda``.
        mixed: Whether the policy computes in bfloat16 with weights in float32.
        weight_bytes: Bytes of a weight: 4, or 2 for bfloat16.
        optimizer: A name of ``MOMENTS``.
        lora_rank: The rank of the adapters; 0 trains all weights.
        nf4: Whether frozen layers are in four bits.
        checkpointing: Whether the backward pass computes activations again.
        reference: Whether a copy of the weights for the KL term is on the device.
        engine_bytes: Bytes of a weight in a vLLM engine on the same device; 0 where the policy itself decodes.
        engine_sleeps: Whether the engine gives its memory back while the policy is updated.
        packed: Whether the policy decodes from packed copies of its weights.
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
    engine_bytes: int = 0
    engine_sleeps: bool = True
    packed: bool = False


@dataclass(frozen=True)
class Forecast:
    """Bytes by part: ``resident`` ones are taken all the time, the others only in a phase.

    ``update`` are those of the forward and backward passes, ``step`` those while the optimizer changes the weights.
    """

    resident: dict[str, float]
    rollout: dict[str, float]
    update: dict[str, float]
    step: dict[str, float]

    @property
    def peak(self) -> float:
        """The bytes of the phase that takes most."""
        return sum(self.resident.values()) + max(
            sum(phase.values()) for phase in (self.rollout, self.update, self.step)
        )


def forecast(sizes: Sizes, demand: Demand) -> Forecast:
    """Estimate the memory of a run after its first update."""
    total = sizes.parameters
    adapters = demand.lora_rank * sizes.num_layers * sizes.layer_features
    trained = adapters if demand.lora_rank else total
    frozen_layers = sizes.num_layers * sizes.layer_parameters
    weights = (total + adapters) * demand.weight_bytes
    if demand.nf4:  # four bits a weight, and a float32 constant for every 64 weights
        weights = frozen_layers * (0.5 + 4 / 64) + (sizes.other_parameters + adapters) * demand.weight_bytes
    resident = {
        "weights": weights,
        "optimizer": trained * MOMENTS[demand.optimizer] * demand.weight_bytes / 4,
        "device": CONTEXT[demand.device],
    }
    if demand.reference and not demand.lora_rank:
        resident["reference"] = weights
    rollout = _rollout(sizes, demand)
    if demand.mixed and demand.device == "cuda" and not demand.engine_bytes:  # recorded CUDA graphs read them
        resident["bfloat16 copies to decode with"] = 2.0 * total
    elif demand.mixed and not demand.engine_bytes:
        rollout["bfloat16 copies"] = 2.0 * total
    if demand.packed:
        rollout["packed copies"] = 4.0 * total
    if demand.engine_bytes and not demand.engine_sleeps:
        resident, rollout = resident | rollout, {}
    kept = sizes.num_layers * sizes.layer_kept_bytes
    if demand.checkpointing:  # what layers begin from is in the weights' precision, under autocast too
        kept = sizes.num_layers * sizes.hidden * demand.weight_bytes + sizes.layer_kept_bytes
    gradients = float(trained * demand.weight_bytes)
    update = {
        "gradients": gradients,
        "activations": demand.micro_batch_tokens * (kept + sizes.other_kept_bytes),
        "head": float(SEVERAL * 4 * HEAD_BLOCK[demand.device]),
    }
    if demand.mixed:  # with checkpointing, of one layer at a time
        layers = 1 if demand.checkpointing else sizes.num_layers
        update["bfloat16 copies"] = 2.0 * (layers * sizes.layer_parameters + sizes.other_parameters)
    step = {"gradients": gradients}
    if demand.device == "cuda":
        step["temporaries"] = trained * TEMPORARIES[demand.optimizer] * demand.weight_bytes / 4
    return Forecast(resident, rollout, update, step)


def _rollout(sizes: Sizes, demand: Demand) -> dict[str, float]:
    """Return the bytes of a rollout in which all slots have come to the longest completions."""
    num_prompts = -(-demand.num_slots // demand.group_size) + 1
    if demand.engine_bytes:
        tokens = demand.num_slots * (demand.max_tokens + ENGINE_BLOCK) + num_prompts * (
            demand.prompt_tokens + ENGINE_BLOCK
        )
        return {
            "engine's weights": float(sizes.parameters * demand.engine_bytes),
            "engine's work": ENGINE_WORK[demand.device],
            "keys and values": float(tokens * sizes.num_layers * sizes.kv_values * demand.engine_bytes),
        }
    tokens = demand.num_slots * sum(piece_sizes(demand.max_tokens)) + num_prompts * prompt_room(demand.prompt_tokens)
    kv_bytes = 2 if demand.mixed else demand.weight_bytes
    return {"keys and values": float(tokens * sizes.num_layers * sizes.kv_values * kv_bytes)}


def largest(sizes: Sizes, demand: Demand, field: str, limit: float, most: int = 2**20) -> int:
    """Find the largest value of a field with which the peak stays within ``limit`` bytes; 0 if none does."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        fits = forecast(sizes, replace(demand, **{field: middle})).peak <= limit
        low, high = (middle, high) if fits else (low, middle - 1)
    return low
