"""Writes a policy's folder as a GGUF file for llama.cpp, with the writer of the package gguf."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFValueType, LlamaFileType
from safetensors import safe_open
from safetensors.torch import load_file

from lit_grpo.policy.architecture.unread import drafting
from lit_grpo.policy.gguf import ROPE_FACTORS
from lit_grpo.policy.loading import load_config, load_tokenizer
from lit_grpo.tools.finishing.families import find_family, in_pairs, rope, rope_factors
from lit_grpo.tools.finishing.vocabulary import DEFAULT_TEMPLATE, Vocabulary, describe

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

KINDS = {
    "f32": (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
    "f16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    "bf16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    "q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
}
"""The kinds of files: the type of their matrices, and the type that the file says it has. Vectors are float32."""
_EMBEDDING = "model.embed_tokens.weight"

Shapes = Mapping[str, tuple[int, ...]]
"""The shapes of a policy's weights by their names, rows first."""


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor of the file.

    Args:
        name: Name of the tensor in GGUF.
        source: The name of the weight in the policy's folder.
        shape: Shape of the tensor, rows first.
        num_heads: The number of heads whose rows are put into llama.cpp's order; 0 for none.
        kind: The type of its numbers in the file.
    """

    name: str
    source: str
    shape: tuple[int, ...]
    num_heads: int
    kind: GGMLQuantizationType

    @property
    def stored(self) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """The dtype and the shape of the array that the file holds; blocks of quantized numbers are bytes."""
        if self.kind == GGMLQuantizationType.F32:
            return np.dtype(np.float32), self.shape
        if self.kind == GGMLQuantizationType.F16:
            return np.dtype(np.float16), self.shape
        return np.dtype(np.uint8), gguf.quant_shape_to_byte_shape(self.shape, self.kind)

    @property
    def num_bytes(self) -> int:
        dtype, shape = self.stored
        return math.prod(shape) * dtype.itemsize


def planned_bytes(config: PreTrainedConfig, shapes: Shapes, tokenizer: PreTrainedTokenizerBase, kind: str) -> int:
    """Return about how large a GGUF file of a kind of :data:`KINDS` will be.

    Raises:
        ValueError: The family, the tokenizer or a weight has no form in GGUF.
    """
    tensors = _tensors(config, shapes, KINDS[kind][0])  # refuses a family before anything is asked of its weights
    vocabulary = describe(tokenizer, shapes[_EMBEDDING][0])
    texts = (*vocabulary.tokens, *vocabulary.merges, *vocabulary.templates.values())
    return sum(16 + len(text.encode()) for text in texts) + sum(tensor.num_bytes for tensor in tensors)


def write_gguf(folder: Path, path: Path, kind: str, name: str, license: str | None = None) -> Vocabulary:
    """Write a policy's folder as a GGUF file, and return the tokenizer in it; one tensor at a time is in memory.

    Raises:
        ValueError: The family, the tokenizer or a weight has no form in GGUF.
        OSError: The file cannot be written.
    """
    config, (matrices, file_type) = load_config(str(folder)), KINDS[kind]
    files = _files(folder)
    for draft in drafting(config, files):  # the architectures have no place for them
        del files[draft]
    shapes = {source: shape for source, (_, shape) in files.items()}
    tensors, num_rows = _tensors(config, shapes, matrices), shapes[_EMBEDDING][0]
    writer = _Writer(path, find_family(config).architecture)
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(name)
    if license is not None:
        writer.add_license(license)
    writer.add_file_type(file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _add_sizes(writer, config, num_rows)
    vocabulary = describe(load_tokenizer(str(folder)), num_rows, _end_ids(folder))
    _add_vocabulary(writer, vocabulary)
    factors = rope_factors(config)
    if factors is not None:
        writer.add_tensor_info(ROPE_FACTORS, factors.shape, factors.dtype, factors.nbytes)
    for tensor in tensors:
        dtype, shape = tensor.stored
        writer.add_tensor_info(tensor.name, shape, dtype, tensor.num_bytes, raw_dtype=tensor.kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if factors is not None:
            writer.write_tensor_data(factors)
        for tensor in tensors:
            with safe_open(files[tensor.source][0], "pt") as file:
                weight = file.get_tensor(tensor.source).to(torch.float32).numpy()
            weight = in_pairs(weight, tensor.num_heads) if tensor.num_heads else weight
            writer.write_tensor_data(gguf.quantize(weight, tensor.kind))
    finally:
        writer.close()
    return vocabulary


def write_adapter(folder: Path, path: Path, name: str, license: str | None = None) -> None:
    """Write the LoRA adapter of a policy's folder alone, as the file that llama.cpp adds to a GGUF file of the base.

    A layer's matrices are ``NAME.lora_a``, (rank, in), and ``NAME.lora_b``, (out, rank), in float32. llama.cpp scales
    their product by ``adapter.lora.alpha / rank``; an adapter that is scaled in another way has the rest in its B.

    Raises:
        ValueError: The adapter is also one of the embedding or the head, or has whole modules.
        OSError: The file cannot be written.
    """
    config, place = load_config(str(folder)), folder / "adapter"
    settings = json.loads((place / "adapter_config.json").read_text())
    state = {key: one for file in sorted(place.glob("*.safetensors")) for key, one in load_file(file).items()}
    layer = re.compile(r"base_model\.model\.(.+\.layers\.\d+\..+)\.lora_[AB]\.weight")
    found = {key: layer.fullmatch(key) for key in state}
    if odd := next((key for key, one in found.items() if one is None), None):
        raise ValueError(
            f"The adapter alone has no GGUF file, because it holds {odd.removeprefix('base_model.model.')}, and only "
            "adapters of layers are written; the other files have it merged."
        )
    names = dict.fromkeys(one[1] for one in found.values() if one is not None)
    pairs = {
        one: [state[f"base_model.model.{one}.lora_{kind}.weight"].float().numpy() for kind in "AB"] for one in names
    }
    shapes = {f"{one}.weight": (len(b), a.shape[1]) for one, (a, b) in pairs.items()}
    alpha, writer = float(settings["lora_alpha"]), _Writer(path, find_family(config).architecture)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_name(name)
    if license is not None:
        writer.add_license(license)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
    for tensor in _tensors(config, shapes, GGMLQuantizationType.F32):
        a, b = pairs[module := tensor.source.removesuffix(".weight")]
        patterns = (settings.get("alpha_pattern") or {}).items()  # as peft matches them
        own = next((float(one) for key, one in patterns if re.fullmatch(rf"(.*\.)?({key})", module)), alpha)
        b = b * np.float32(own / alpha * (math.sqrt(len(a)) if settings.get("use_rslora") else 1))
        writer.add_tensor(f"{tensor.name}.lora_a", a)
        writer.add_tensor(f"{tensor.name}.lora_b", in_pairs(b, tensor.num_heads) if tensor.num_heads else b)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _files(folder: Path) -> dict[str, tuple[Path, tuple[int, ...]]]:
    """Return the file and the shape of each weight of a folder."""
    found: dict[str, tuple[Path, tuple[int, ...]]] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: (path, tuple(file.get_slice(name).get_shape())) for name in file.keys()}  # noqa: SIM118
    return found


def _end_ids(folder: Path) -> list[int]:
    """Return the ids that end a sequence by the generation config."""
    from transformers import GenerationConfig

    if not (folder / "generation_config.json").is_file():
        return []
    told = GenerationConfig.from_pretrained(folder).eos_token_id
    return [told] if isinstance(told, int) else told or []


def _tensors(config: PreTrainedConfig, shapes: Shapes, matrices: GGMLQuantizationType) -> list[GGUFTensor]:
    """Return the tensors of a file.

    Raises:
        ValueError: The family has no form in GGUF, or GGUF has no name for a weight in this architecture.
    """
    family = find_family(config)
    (architecture,) = (key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == family.architecture)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads} if family.pairs else {}
    block = gguf.GGML_QUANT_SIZES[matrices][0]
    found = []
    for source, shape in shapes.items():
        name = names.get_name(source, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise ValueError(
                f"The policy has the weight {source}, which a GGUF file of the architecture {family.architecture} has "
                "no place for; leave GGUF out with --gguf none."
            )
        kind = GGMLQuantizationType.F32
        if len(shape) > 1:  # a row that no number of blocks fills keeps more of its bits
            kind = matrices if shape[-1] % block == 0 else GGMLQuantizationType.F16
        found.append(GGUFTensor(name, source, shape, heads.get(source.split(".")[-2], 0), kind))
    return found


def _add_sizes(writer: gguf.GGUFWriter, config: PreTrainedConfig, num_rows: int) -> None:
    """Add the fields that a reader builds the model from."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_vocab_size(num_rows)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope(config)["rope_theta"])


def _add_vocabulary(writer: gguf.GGUFWriter, vocabulary: Vocabulary) -> None:
    """Add the tokenizer."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    writer.add_key_value(gguf.Keys.Tokenizer.MERGES, vocabulary.merges, GGUFValueType.ARRAY, GGUFValueType.STRING)
    for kind, row in vocabulary.ids.items():
        getattr(writer, f"add_{kind}_token_id")(row)
    for kind, added in vocabulary.adds.items():
        getattr(writer, f"add_add_{kind}_token")(added)
    for template, text in vocabulary.templates.items():
        is_default = template == DEFAULT_TEMPLATE
        key = gguf.Keys.Tokenizer.CHAT_TEMPLATE_N.format(name=template)
        writer.add_string(gguf.Keys.Tokenizer.CHAT_TEMPLATE if is_default else key, text)
    named = [template for template in vocabulary.templates if template != DEFAULT_TEMPLATE]
    if named:
        writer.add_array(gguf.Keys.Tokenizer.CHAT_TEMPLATES, named)


class _Writer(gguf.GGUFWriter):
    """Writes an empty list of merges too, which llama.cpp asks a tokenizer of whole words for."""

    def _pack_val(
        self, val: Any, vtype: GGUFValueType, add_vtype: bool, sub_type: GGUFValueType | None = None
    ) -> bytes:
        if vtype != GGUFValueType.ARRAY or len(val) or sub_type is None:
            return super()._pack_val(val, vtype, add_vtype, sub_type)
        return b"".join((self._pack("I", vtype), self._pack("I", sub_type), self._pack("Q", 0)))
