"""Writes a random policy of a few thousand weights as a GGUF file, as llama.cpp's converters do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from conftest import ALPHABET
from transformers import LlamaConfig, LlamaForCausalLM

LAYERS, HEADS, KV_HEADS = 2, 4, 2
TOKENS = ["<pad>", "<eos>", *ALPHABET.replace(" ", "Ġ"), "12"]  # Ġ is the space of byte-level tokenizers
TEMPLATE = "{% for message in messages %}={{ message['content'] }}{% endfor %}"


def random_llama(seed: int = 0) -> LlamaForCausalLM:
    """Return the policy that the file holds, before its weights are rounded."""
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


def write_gguf(
    path: Path, kind: str = "Q8_0", architecture: str = "llama", layers: int = LAYERS, parts: int | None = None
) -> LlamaForCausalLM:
    """Write the file; return the policy that it holds.

    Args:
        path: The file.
        kind: The type of its matrices, such as ``F32`` or ``Q4_0``; ``I32`` is one that no weights have.
        architecture: What it says that it is.
        layers: How many layers it says that it has.
        parts: How many files it says that it has been split into.
    """
    model = random_llama()
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_name("Random \x1b[31mllama")
    writer.add_block_count(layers)
    writer.add_context_length(256)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(len(TOKENS))
    writer.add_rope_dimension_count(8)
    if parts is not None:
        writer.add_uint16("split.count", parts)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * (len(ALPHABET) + 1))
    writer.add_token_merges(["1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    for name, weight in tensors(model):
        told = gguf.GGMLQuantizationType[kind if weight.ndim == 2 else "F32"]
        stored = weight.view(np.int32) if told == gguf.GGMLQuantizationType.I32 else gguf.quantize(weight, told)
        writer.add_tensor(name, stored, raw_dtype=told)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def tensors(model: Any) -> list[tuple[str, np.ndarray]]:
    """Return the weights by their names in GGUF; rows of queries and keys are in the order of llama.cpp's rotation."""
    state = {name: weight.detach().numpy() for name, weight in model.state_dict().items()}
    found = [
        ("token_embd.weight", state["model.embed_tokens.weight"]),
        ("output_norm.weight", state["model.norm.weight"]),
    ]
    names = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    heads = {"attn_q": HEADS, "attn_k": KV_HEADS}
    for layer in range(LAYERS):
        for theirs, ours in names.items():
            weight = state[f"model.layers.{layer}.{ours}.weight"]
            if theirs in heads:
                weight = weight.reshape(heads[theirs], 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
            found.append((f"blk.{layer}.{theirs}.weight", np.ascontiguousarray(weight)))
    return found
