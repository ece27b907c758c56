"""Small random models of every causal language model that the installed transformers knows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

VOCABULARY, HIDDEN, HEADS, KV_HEADS, HEAD_SIZE, LAYERS = 96, 32, 4, 2, 8, 2
WINDOW = 6

SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "type_vocab_size"), VOCABULARY),
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "embedding_size", "embedding_dim", "word_embed_proj_dim"), HIDDEN
    ),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size", "n_inner", "dim_ff",
         "dff", "intermediate_size_mlp", "dense_intermediate_size", "feed_forward_size", "d_inner"),
        48,
    ),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size",
         "shared_intermediate_size", "moe_shared_expert_intermediate_size"),
        24,
    ),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers",
         "num_encoder_layers", "num_decoder_layers", "num_blocks", "num_layers_per_stack"),
        LAYERS,
    ),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads",
         "num_encoder_attention_heads", "num_decoder_attention_heads", "attention_heads", "swa_num_attention_heads",
         "linear_num_value_heads", "linear_num_heads"),
        HEADS,
    ),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "num_query_groups", "swa_num_key_value_heads",
                     "linear_num_key_heads"), KV_HEADS),
    **dict.fromkeys(("head_dim", "dim_head", "attention_head_dim", "attention_head_size", "kv_channels", "d_head",
                     "swa_head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "linear_key_head_dim", "index_head_dim",
                     "linear_value_head_dim", "linear_head_dim", "mamba_head_dim", "mamba_d_head", "mamba_headdim",
                     "v_head_dim", "rotary_dim"), HEAD_SIZE),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length",
                     "max_target_positions", "model_max_length"), 128),
    **dict.fromkeys(("sliding_window", "window_size", "attention_window_size", "sliding_window_size", "local_attention",
                     "attention_chunk_size"), WINDOW),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "n_shared_experts", "num_shared_experts",
                     "moe_num_shared_experts"), 1),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "o_lora_rank"), 16),
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state"), 8),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size"), 4),
    **dict.fromkeys(("hidden_size_per_layer_input", "laurel_rank"), 8),
    **dict.fromkeys(("num_dense_layers", "first_k_dense_replace", "moe_layer_start_index"), 1),
    "query_pre_attn_scalar": HEAD_SIZE,
    "index_n_heads": 2,
    "index_topk": 256,
    "initializer_range": 0.15,
    "init_std": 0.15,
    "pad_token_id": 3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_kv_shared_layers": 0,
    "num_nextn_predict_layers": 0,
}  # fmt: skip
"""What a field of these names is set to, in whichever config it stands."""

WIDTHS = {name for name, value in SIZES.items() if value in (HIDDEN, 48, 24, 16, HEAD_SIZE)} - {
    *("state_size", "ssm_state_size", "mamba_d_state"),
} | {"mamba_d_ssm", "global_head_dim", "emb_dim", "input_embedding_size", "output_embedding_size", "mlp_dim",
     "output_channels", "dim_model_base"}  # fmt: skip
"""The fields that are widths: of hidden states, heads and feed-forward layers."""

QWEN4_EXP: dict[str, Any] = {
    "layer_types": ["linear_attention", "indexed_attention"],
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": HEAD_SIZE,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
    "ple_layer_ids": [1],
    "ngram_vocab_size_base": 200,
}
"""Gated DeltaNet with embeddings of n-grams, and attention to the tokens that an index has chosen."""

FAMILIES: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 8, "mamba_expand": 2, "attn_layer_indices": [1]},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_expand": 2, "layer_types": ["mamba", "attention"]},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "lm_head_multiplier": 0.5},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granite": {"logits_scaling": 8.0},
    "granitemoe": {"logits_scaling": 8.0},
    "granitemoeshared": {"logits_scaling": 8.0},
    "granite_swa": {"logits_scaling": 8.0, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma4_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "global_head_dim": 16,
        "initializer_range": 0.08,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 2,
    },
    "gemma4_unified_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "global_head_dim": 16,
        "initializer_range": 0.08,
        "num_global_key_value_heads": 1,
        "num_kv_shared_layers": 0,
    },
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    # smaller random weights, for rounding alone is 1e-5 of a nat with larger ones
    "gemma4": {"text_config": {"initializer_range": 0.06}},
    "gemma4_unified": {"text_config": {"initializer_range": 0.08}},
    **{
        name: {"text_config": {"initializer_range": 0.08, "layer_types": ["linear_attention", "full_attention"]}}
        for name in ("qwen3_5", "qwen3_5_moe")
    },
    "hyperclovax": {"logits_scaling": 0.5},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"], "full_attn_idxs": None},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "max_position_embeddings": 128},
    "minicpm3": {"dim_model_base": 8},
    "mistral": {"sliding_window": WINDOW},
    "mimo_v2_flash": {"layer_types": ["sliding_attention", "full_attention"]},
    "qwen4_exp_text": QWEN4_EXP,
    "qwen4_exp": {"text_config": QWEN4_EXP},
    "got_ocr2": {
        "text_config": {
            "model_type": "qwen2",
            "hidden_size": HIDDEN,
            "vocab_size": VOCABULARY,
            "intermediate_size": 48,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "max_position_embeddings": 128,
            "pad_token_id": 3,
            "initializer_range": 0.15,
        },
        "vision_config": {
            "hidden_size": HIDDEN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "output_channels": HIDDEN,
            "mlp_dim": 48,
        },
    },
    # the least step of Mamba 2: transformers applies it to several tokens at once, not to one after a state
    "nemotron_h": {"time_step_min": 1e-9},
    "xlm": {"emb_dim": HIDDEN},
    "reformer": {
        "is_decoder": True,
        "axial_pos_embds": False,
        "hidden_dropout_prob": 0.0,
        "local_attention_probs_dropout_prob": 0.0,
        "lsh_attention_probs_dropout_prob": 0.0,
        "num_hidden_layers": 2,
        "attn_layers": ["local", "local"],
    },
    **{
        name: {"max_position_embeddings": 128}
        for name in ("bloom", "cpmant", "mamba", "falcon_mamba", "xlstm", "whisper")
    },
    "recurrent_gemma": {"num_hidden_layers": 3, "max_position_embeddings": 128},
    "rembert": {"input_embedding_size": HIDDEN, "output_embedding_size": HIDDEN},
    "roc_bert": {"pronunciation_vocab_size": 20, "shape_vocab_size": 20},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "hybrid", "hybrid"],  # one attention, whose weights all hybrid layers have
        "attention_head_dim": 16,
    },
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"],
        "hybrid_layer_ids": [1],
        "use_shared_attention_adapter": False,
        "time_step_min": 1e-9,
    },
    "zaya": {"num_experts_per_tok": 1},
}
"""Additional config fields of a family, by its ``model_type``."""


def families() -> list[str]:
    """Return the ``model_type`` of every causal language model, in alphabetical order."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def small_config(family: str, changes: Mapping[str, Any] = {}, width: int = 1) -> PreTrainedConfig:
    """Return a config of few parameters.

    Args:
        family: The ``model_type``.
        changes: Fields that are to have other values than by default.
        width: What every width is multiplied by. With 4, heads have 32 dimensions, the fewest that vLLM knows on CPUs.
    """
    sizes: dict[str, Any] = _sizes(CONFIG_MAPPING[family])
    for more in (_layers(family), FAMILIES.get(family, {})):
        sizes = _merged(sizes, more)
    return CONFIG_MAPPING[family](**_merged(_widened(sizes, width), changes))


def _widened(sizes: Mapping[str, Any], width: int) -> dict[str, Any]:
    """Return ``sizes`` with all widths, those of parts of a model too, multiplied; random weights shrink with them."""
    wide: dict[str, Any] = {}
    for name, value in sizes.items():
        if isinstance(value, Mapping):
            wide[name] = _widened(value, width)
        elif name in WIDTHS:
            wide[name] = value * width
        else:
            wide[name] = value / width**0.5 if name in ("initializer_range", "init_std") else value
    return wide


def _merged(sizes: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``sizes`` with the fields of ``more``, those of parts of a model within their parts."""
    inner = {
        name: _merged(sizes[name], value)
        for name, value in more.items()
        if isinstance(value, Mapping) and isinstance(sizes.get(name), Mapping)
    }
    return {**sizes, **more, **inner}


def _sizes(config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    names = _names(config_class)
    sizes = {name: SIZES[name] for name in names if name in SIZES}
    if "kv_lora_rank" in names:  # multi-head latent attention has keys for every head
        sizes["num_key_value_heads"] = HEADS
    for name, part in config_class.sub_configs.items():
        if isinstance(part, type) and part.__name__ != "AutoConfig":
            sizes[name] = _sizes(part) | {"model_type": part.model_type}
    return sizes


def _names(config_class):
    return {field.name for field in fields(config_class)}


def _layers(family: str) -> dict[str, Any]:
    """Layers of all kinds that the family has by default, as few as there have to be."""
    if "layer_types" not in _names(CONFIG_MAPPING[family]):
        return {}
    default = CONFIG_MAPPING[family]()
    kinds = list(dict.fromkeys(getattr(default, "layer_types", None) or ()))
    if len(kinds) < 2:
        return {}
    num_layers = LAYERS if len(kinds) == 2 else 4
    return {"layer_types": (kinds * num_layers)[:num_layers], "num_hidden_layers": num_layers}


def small_model(family: str, changes: Mapping[str, Any] = {}, seed: int = 0, width: int = 1) -> PreTrainedModel:
    """Return a random model in evaluation mode; no weight of it is 0 or 1 for all that is random, such as biases."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(small_config(family, changes, width), dtype=torch.float32)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn(weight.shape), alpha=0.02)
        for name, buffer in model.named_buffers():
            if buffer.is_floating_point() and name in model.state_dict():
                buffer.add_(torch.rand(buffer.shape), alpha=0.1)
    return model.eval()
