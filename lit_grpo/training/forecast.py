"""An estimate of the memory that a run takes on a device, from the policy's config; no weights are loaded."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, Any

from lit_grpo.policy.architecture.decoder import RUN_FAILURES, decoder_of
from lit_grpo.policy.architecture.outline import bare_model
from lit_grpo.policy.architecture.states import state_bytes
from lit_grpo.policy.architecture.vision import Vision, give_vision, small_image, tower_parameters
from lit_grpo.policy.loading import load_config, load_tokenizer, mutual_of
from lit_grpo.policy.named import resolve_policy
from lit_grpo.process.terminal import first_line
from lit_grpo.process.urls import is_url
from lit_grpo.rollout.vllm.arguments import dtype_of
from lit_grpo.scheduling.layouts import piece_sizes, prompt_room
from lit_grpo.types import Pictures
from lit_grpo.update.logprobs.checkpointing import checkpoint_layers
from lit_grpo.update.micro_batch_size import kept_bytes, kept_of_image, tower_depth

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

LARGE = 1024  # a hidden state of more numbers; layers of such models take seconds to make
SLOTS, VLLM = "SlotGenerator", "VLLMGenerator"
SEVERAL = 2  # blocks of logits in memory at a time
HEAD_BLOCK = {"cpu": 2**21, "cuda": 2**25}
MOMENTS = {"AdamW": (8.0, 8.0), "AdamW8bit": (2.1, 2.1), "SGD": (0.0, 0.0), "MuonAdamW": (4.0, 8.0)}
"""Bytes of optimizer state for each trained weight in float32: of layers, and outside of them."""
TEMPORARIES = 4.0
"""Bytes for each trained weight in float32 that a step of AdamW takes on a GPU if it is not fused."""
CONTEXT = {"cpu": 0.0, "cuda": 0.65 * 2**30}
"""Memory that a device takes for itself: on a GPU the CUDA context, which torch's allocator does not see (an estimate).
"""
WORKSPACES = {"cpu": 0.0, "cuda": 3 * 2**25}
"""Memory of cuBLAS, 32 MiB on a GPU of sm_90 for each stream or thread: decoding, recorded graphs, backward passes."""
LOGITS = 3
"""Float32 numbers for each row and token of the vocabulary while a token is sampled: logits, log-probs, probabilities.
"""
ENGINE_WORK = {"cpu": 0.0, "cuda": 1.5 * 2**30}
"""Memory of a vLLM engine besides weights and KV cache: CUDA graphs and activations (an estimate)."""
ENGINE_BLOCK = 16  # tokens


@dataclass(frozen=True)
class Tower:
    """The figures of a vision tower, and of what projects its features, that decide its memory.

    Args:
        parameters: Number of its parameters.
        features: Inputs plus outputs of its linear layers.
        kept_bytes: Bytes that a token of an image leaves for the backward pass, if the tower is trained.
        passing_bytes: Bytes of such a token that are taken while images go through without a backward pass.
    """

    parameters: int = 0
    features: int = 0
    kept_bytes: float = 0.0
    passing_bytes: float = 0.0

    @classmethod
    def of(cls, settings: Mapping[str, Any], demand: Demand) -> Tower:
        """Measure towers of one layer and of two, with random weights, on white images; a run may have none."""
        import torch

        if settings["vision"] == "none":
            return cls()
        policy = settings["policy"]
        config, tokenizer = load_config(policy), load_tokenizer(policy)
        outline = bare_model(config, vision=True)
        weights = {id(weight) for weight in tower_parameters(outline)}
        linear = [
            each for each in outline.modules() if isinstance(each, torch.nn.Linear) and id(each.weight) in weights
        ]
        vision = Vision(outline, tokenizer, resolve_policy(policy), mutual_of(outline))
        (one, whole), (two, _) = (_of_towers(config, vision, depth, demand) for depth in (1, 2))
        text, image = config.get_text_config(), small_image()
        head = 0 if _ties_head(text) else text.vocab_size * text.hidden_size  # which Sizes has
        pixels = sum(each.nbytes for each in vision.pixels(Pictures((image,), b"")).values())
        return cls(
            parameters=outline.num_parameters() - decoder_of(outline).num_parameters() - head,
            features=sum(each.in_features + each.out_features for each in linear),
            kept_bytes=one + (tower_depth(config) - 1) * (two - one) + demand.checkpointing * whole,
            passing_bytes=whole + pixels / vision.tokens_of(image).count(vision.feature_token),
        )


def _ties_head(text: Any) -> bool:
    """Return whether a text model of this configuration alone has a tied head; Qwen2.5-VL's says nothing about it."""
    return bool(getattr(text, "tie_word_embeddings", False))


def _of_towers(config: Any, vision: Vision, depth: int, demand: Demand) -> tuple[float, float]:
    """Return the bytes that a tower of so many layers keeps of an image's token, and those without checkpointing."""
    import torch
    from transformers import AutoModelForImageTextToText

    own = copy.deepcopy(config)
    text, sizes = own.get_text_config(), own.vision_config
    text.num_hidden_layers, text.vocab_size, text.pad_token_id = 0, VOCABULARY, None
    if getattr(text, "layer_types", None):
        text.layer_types = []
    setattr(sizes, "depth" if hasattr(sizes, "depth") else "num_hidden_layers", depth)
    for name in [name for name in vars(sizes) if name.endswith("_indexes")]:  # layers that are read, or attend to all
        setattr(sizes, name, [depth - 1])
    dtype = torch.bfloat16 if demand.weight_bytes == 2 else torch.float32
    with torch.random.fork_rng(devices=[]):
        model: Any = AutoModelForImageTextToText.from_config(own, dtype=dtype).train()
    give_vision(model, vision, trained=True)
    checkpoint_layers(model, demand.checkpointing)
    with torch.autocast("cpu", torch.bfloat16, enabled=demand.mixed, cache_enabled=False):
        return kept_of_image(model), kept_of_image(model.eval())


@dataclass(frozen=True)
class Sizes:
    """The figures of a policy that decide its memory: those of a layer, in mean, and those of everything else.

    Args:
        num_layers: The number of layers.
        layer_parameters: Parameters of a layer.
        layer_features: Inputs plus outputs of a layer's linear layers; times a LoRA rank, the parameters of adapters.
        other_parameters: Parameters outside the layers.
        hidden: Numbers of a hidden state.
        kv_values: Numbers of a token's keys and values in a layer.
        layer_kept_bytes: Bytes that a token leaves in a layer for the backward pass, in the precision of the run.
        other_kept_bytes: Bytes that it leaves outside the layers.
        state_bytes: Bytes of a sequence's recurrent and convolution states in all layers.
        largest_kept_bytes: ``layer_kept_bytes`` of the layer that keeps most, 0 where all are alike.
        vocabulary: Tokens of the vocabulary.
        tower: The vision tower, if the policy has one.
    """

    num_layers: int
    layer_parameters: float
    layer_features: float
    other_parameters: int
    hidden: int
    kv_values: float
    layer_kept_bytes: float
    other_kept_bytes: float
    state_bytes: float = 0.0
    largest_kept_bytes: float = 0.0
    vocabulary: int = 0
    tower: Tower = Tower()

    @classmethod
    def of(cls, config: PreTrainedConfig, mixed: bool = False, weight_bytes: int = 4) -> Sizes:
        """Measure small models, one with a layer of each kind and others with one more, with random weights.

        Args:
            config: Configuration of the policy, with the sizes of its layers.
            mixed: Whether the policy computes in bfloat16 with weights in float32.
            weight_bytes: Bytes of a weight: 4, or 2 for bfloat16.
        """
        text = config.get_text_config()
        name = text.attribute_map.get("layer_types", "layer_types")
        computed = isinstance(getattr(type(text), name, None), property)  # from the number of layers
        types = None if computed else getattr(text, "layer_types", None)
        kinds: Mapping[str, int] = Counter(types or ()) or {"": text.num_hidden_layers}
        least = _measure(text, [*kinds], mixed, weight_bytes)
        layers = {kind: _measure(text, [*kinds, kind], mixed, weight_bytes) - least for kind in kinds}
        total = sum((layer * kinds[kind] for kind, layer in layers.items()), start=_Measured())
        other = least - sum(layers.values(), start=_Measured())
        heads = getattr(text, "num_key_value_heads", None) or getattr(text, "num_attention_heads", None) or 1
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // getattr(text, "num_attention_heads", heads)
        key_size, value_size = (getattr(text, name, None) or head_dim for name in ("qk_head_dim", "v_head_dim"))
        tables = 1 if _ties_head(text) else 2
        added_rows = tables * (text.vocab_size - VOCABULARY) * text.hidden_size
        return cls(
            num_layers=text.num_hidden_layers,
            layer_parameters=total.parameters / text.num_hidden_layers,
            layer_features=total.features / text.num_hidden_layers,
            other_parameters=int(other.parameters) + added_rows,
            hidden=text.hidden_size,
            kv_values=heads * (key_size + value_size) * _kv_share(text),
            layer_kept_bytes=total.kept_bytes / text.num_hidden_layers,
            other_kept_bytes=other.kept_bytes,
            state_bytes=total.state_bytes,
            largest_kept_bytes=max(layer.kept_bytes for layer in layers.values()),
            vocabulary=text.vocab_size,
        )

    @property
    def parameters(self) -> int:
        return round(self.num_layers * self.layer_parameters) + self.other_parameters + self.tower.parameters


VOCABULARY = 16


@dataclass(frozen=True)
class _Measured:
    """Of layers: their parameters, the bytes that a token leaves for backward, linear features and bytes of states."""

    parameters: float = 0
    kept_bytes: float = 0
    features: float = 0
    state_bytes: float = 0

    def __add__(self, other: _Measured) -> _Measured:
        return _Measured(*(one + two for one, two in zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, count: float) -> _Measured:
        return _Measured(*(one * count for one in astuple(self)))

    def __sub__(self, other: _Measured) -> _Measured:
        return self + other * -1


def _measure(text: Any, kinds: Sequence[str], mixed: bool, weight_bytes: int) -> _Measured:
    """Make a model with layers of these kinds and a tiny vocabulary, with random weights, and measure it."""
    import torch
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(text)
    config.num_hidden_layers, config.vocab_size = len(kinds), VOCABULARY
    if all(kinds):
        config.layer_types = [*kinds]
    config.pad_token_id = config.bos_token_id = config.eos_token_id = None
    dtype = torch.bfloat16 if weight_bytes == 2 else torch.float32
    with torch.random.fork_rng(devices=[]):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
    layers: Any = decoder_of(model).layers
    linear = [each for each in layers.modules() if isinstance(each, torch.nn.Linear)]
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed, cache_enabled=False):
        kept, states = kept_bytes(model, shares_prefix=False).of_token, state_bytes(model)
    features = sum(each.in_features + each.out_features for each in linear)
    return _Measured(model.num_parameters(), kept, features, states)


def _kv_share(text: Any) -> float:
    """Return the share of layers that keep keys and values, by the cache that transformers makes for the config."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    try:
        layers = DynamicCache(config=text).layers
    except RUN_FAILURES:  # layers of kinds that have no cache
        return 1.0
    return sum(isinstance(layer, DynamicLayer) for layer in layers) / len(layers) if layers else 1.0


@dataclass(frozen=True)
class Demand:
    """The settings of a run that decide its memory.

    Args:
        num_slots: Completions that are decoded at a time.
        group_size: Completions of a prompt.
        prompt_tokens: Tokens of the longest prompt.
        max_tokens: The most tokens of a completion.
        micro_batch_tokens: Tokens of a micro-batch.
        device: Kind of the device, ``cpu`` or ``cuda``.
        mixed: Whether the policy computes in bfloat16 with weights in float32.
        weight_bytes: Bytes of a weight: 4, or 2 for bfloat16.
        optimizer: A name of ``MOMENTS``.
        fused: Whether AdamW takes its step on a GPU in one kernel, without temporaries.
        lora_rank: The rank of the adapters; 0 trains all weights.
        nf4: Whether frozen layers are in four bits.
        checkpointing: Whether the backward pass computes activations again.
        reference: Whether a copy of the weights for the KL term is on the device.
        engine_bytes: Bytes of a weight in a vLLM engine on the same device; 0 where the policy itself decodes.
        engine_sleeps: Whether the engine gives its memory back while the policy is updated.
        packed: Whether the policy decodes from packed copies of its weights.
        teacher_bytes: Bytes of a teacher's weights on the device; -1 for those of the policy.
        trains_tower: Whether a vision tower is trained.
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
    fused: bool = True
    lora_rank: int = 0
    nf4: bool = False
    checkpointing: bool = False
    reference: bool = False
    engine_bytes: int = 0
    engine_sleeps: bool = True
    packed: bool = False
    teacher_bytes: float = 0.0
    trains_tower: bool = False

    @property
    def image_tokens(self) -> int:
        """The most tokens of images in a micro-batch: of its prompts, each with a group of the longest completions."""
        prompts = -(-self.micro_batch_tokens // (self.prompt_tokens + self.group_size * self.max_tokens))
        return min(self.micro_batch_tokens, prompts * self.prompt_tokens)


NF4_BYTES = 0.5 + 4 / 64
"""Of a weight in four bits, with its share of a float32 constant for every 64 weights."""


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
    total, tower = sizes.parameters, sizes.tower
    frozen = 0 if demand.trains_tower else tower.parameters
    features = sizes.num_layers * sizes.layer_features + demand.trains_tower * tower.features
    adapters = demand.lora_rank * features
    trained = adapters if demand.lora_rank else total - frozen
    in_layers, outside = MOMENTS[demand.optimizer]
    num_outside = 0 if demand.lora_rank else sizes.other_parameters
    frozen_layers = sizes.num_layers * sizes.layer_parameters
    weights = (total + adapters) * demand.weight_bytes
    if demand.nf4:
        others = sizes.other_parameters + tower.parameters + adapters
        weights = frozen_layers * NF4_BYTES + others * demand.weight_bytes
    resident = {
        "weights": weights,
        "optimizer": ((trained - num_outside) * in_layers + num_outside * outside) * demand.weight_bytes / 4,
        "device": CONTEXT[demand.device],
        "workspaces": WORKSPACES[demand.device],
    }
    if demand.reference and not demand.lora_rank:
        resident["reference"] = weights
    if demand.teacher_bytes > 0:
        resident["teacher"] = demand.teacher_bytes
    elif demand.teacher_bytes and not demand.lora_rank:
        resident["teacher"] = weights
    rollout = _rollout(sizes, demand)
    passing = {"images": demand.prompt_tokens * tower.passing_bytes} if tower.parameters else {}
    rollout |= passing
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
        kept = sizes.num_layers * sizes.hidden * demand.weight_bytes
        kept += max(sizes.layer_kept_bytes, sizes.largest_kept_bytes)
    gradients = float(trained * demand.weight_bytes)
    update = {
        "gradients": gradients,
        "activations": demand.micro_batch_tokens * (kept + sizes.other_kept_bytes),
        "head": float(SEVERAL * 4 * HEAD_BLOCK[demand.device]),
        **({"images": demand.image_tokens * tower.kept_bytes} if demand.trains_tower else passing),
    }
    if demand.mixed:  # with checkpointing, of one layer at a time
        layers = 1 if demand.checkpointing else sizes.num_layers
        update["bfloat16 copies"] = 2.0 * (layers * sizes.layer_parameters + sizes.other_parameters + tower.parameters)
    step = {"gradients": gradients}
    if demand.device == "cuda" and demand.optimizer == "AdamW" and not demand.fused:
        step["temporaries"] = trained * TEMPORARIES * demand.weight_bytes / 4
    return Forecast(resident, rollout, update, step)


def _rollout(sizes: Sizes, demand: Demand) -> dict[str, float]:
    """Return the bytes of a rollout in which all slots have come to the longest completions."""
    num_prompts = -(-demand.num_slots // demand.group_size) + 1
    states = {"states": (demand.num_slots + num_prompts) * sizes.state_bytes} if sizes.state_bytes else {}
    if demand.engine_bytes:
        tokens = demand.num_slots * (demand.max_tokens + ENGINE_BLOCK) + num_prompts * (
            demand.prompt_tokens + ENGINE_BLOCK
        )
        return {
            "engine's weights": float(sizes.parameters * demand.engine_bytes),
            "engine's work": ENGINE_WORK[demand.device],
            "keys and values": float(tokens * sizes.num_layers * sizes.kv_values * demand.engine_bytes),
            **states,
        }
    tokens = demand.num_slots * sum(piece_sizes(demand.max_tokens)) + num_prompts * prompt_room(demand.prompt_tokens)
    kv_bytes = 2 if demand.mixed else demand.weight_bytes
    return {
        "keys and values": float(tokens * sizes.num_layers * sizes.kv_values * kv_bytes),
        "logits": float(LOGITS * 4 * demand.num_slots * sizes.vocabulary),
        **states,
    }


def demand_of(settings: Mapping[str, Any], device: str) -> Demand:
    """Read the figures that decide memory from the settings of ``fit``.

    Raises:
        ValueError: The size of the optimizer's state is not known, or the generator decodes in other processes.
    """
    model, data = settings["model"], settings["data"]
    generator, optimizer = model["generator"], model["optimizer"]
    name = optimizer["class_path"].rsplit(".", 1)[-1]
    if name not in MOMENTS:
        raise ValueError(f"model.optimizer is {name}, whose state is not known here; known are {', '.join(MOMENTS)}.")
    kind = generator["class_path"].rsplit(".", 1)[-1]
    if kind not in (SLOTS, VLLM):
        raise ValueError(
            f"model.generator is {kind}, which decodes in processes of its own; add --model.generator slots to see "
            "what the update takes."
        )
    lora, tokens = model["lora"], model["max_tokens_per_micro_batch"]
    weight_bytes = 2 if model["dtype"] == "bfloat16" else 4
    arguments = optimizer.get("init_args") or {}
    engine = generator["init_args"] if kind == VLLM else None
    return Demand(
        num_slots=generator["init_args"]["num_slots"],
        group_size=model["num_generations"],
        prompt_tokens=data["max_prompt_tokens"],
        max_tokens=model["sampling"]["max_tokens"],
        micro_batch_tokens=8192 if tokens == "auto" else tokens,
        device=device,
        mixed=settings["trainer"]["precision"] == "bf16-mixed",
        weight_bytes=weight_bytes,
        optimizer=name,
        fused=not arguments.get("foreach") and arguments.get("fused") is not False,
        lora_rank=0 if lora is None else lora["r"],
        nf4=lora is not None and lora["base"] == "nf4",
        checkpointing=bool(model["gradient_checkpointing"]),
        reference=model["objective"]["kl"]["beta"] > 0 and not model["reference"]["offload"],
        engine_bytes=0 if engine is None else _engine_bytes(engine["engine_args"] or {}, weight_bytes),
        engine_sleeps=engine is not None and engine["sleep_level"] > 0 and device == "cuda",
        packed=bool(generator["init_args"].get("packed_weights")),
        teacher_bytes=_teacher_bytes(model["teacher"]),
        trains_tower=model["vision"] == "trained",
    )


def _teacher_bytes(teacher: Mapping[str, Any] | None) -> float:
    """Return the bytes of a teacher's weights on the device; -1 for a copy of the policy's."""
    if teacher is None or teacher["offload"] or teacher["policy"] == "live" or is_url(teacher["policy"]):
        return 0.0
    if teacher["policy"] in ("base", "average"):
        return -1.0
    sizes = Sizes.of(load_config(teacher["policy"]))
    if teacher["dtype"] == "nf4":
        return sizes.num_layers * sizes.layer_parameters * NF4_BYTES + sizes.other_parameters * 2
    return sizes.parameters * (4 if teacher["dtype"] == "float32" else 2)


def _engine_bytes(arguments: Mapping[str, Any], weight_bytes: int) -> int:
    """Return the bytes of a weight in an engine; without a ``dtype`` of its own it is the policy's."""
    dtype = dtype_of(arguments)
    return weight_bytes if dtype is None else dtype.itemsize


def expected_bytes(settings: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Return the bytes that a run will take by phase and part, or the reason ``why`` they cannot be estimated.

    Layers of large models are measured without memory, which may count a fifth more activations than ``fit-check``. The
    state of random numbers stays as it is.

    Args:
        settings: All settings of ``fit``.
        device: Kind of the device, ``cpu`` or ``cuda``.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    if device not in CONTEXT:
        return {"why": f"fit-check knows cpu and cuda, not {device}"}
    try:
        with torch.random.fork_rng(devices=[]):
            demand, config = demand_of(settings, device), load_config(settings["model"]["policy"])
            large = config.get_text_config().hidden_size > LARGE
            with FakeTensorMode() if large else nullcontext():
                sizes = Sizes.of(config, demand.mixed, demand.weight_bytes)
            sizes = replace(sizes, tower=Tower.of(settings["model"], demand))
    except (ValueError, OSError, *RUN_FAILURES) as error:
        return {"why": first_line(error)}
    taken = forecast(sizes, demand)
    update = max(taken.update, taken.step, key=lambda parts: sum(parts.values()))
    return {"rollout": taken.resident | taken.rollout, "update": taken.resident | update}


def largest(sizes: Sizes, demand: Demand, field: str, limit: float, most: int = 2**20) -> int:
    """Find the largest value of a field with which the peak stays within ``limit`` bytes; 0 if none does."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        change: dict[str, Any] = {field: middle}
        fits = forecast(sizes, replace(demand, **change)).peak <= limit
        low, high = (middle, high) if fits else (low, middle - 1)
    return low
