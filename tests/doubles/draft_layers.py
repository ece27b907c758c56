"""Layers of multi-token prediction in the files of small policies, named as the families name them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

BLOCK = ("input_layernorm.weight", "self_attn.q_proj.weight", "mlp.down_proj.weight")
BEYOND = (*BLOCK, "eh_proj.weight", "enorm.weight", "shared_head.head.weight", "mlp.experts.0.gate_proj.weight")
"""Some of a layer after the last one, which has its own embeddings and head too."""
HEADS: dict[str, tuple[str, tuple[str, ...], dict[str, int]]] = {
    **{
        family: ("mtp.", ("fc.weight", "norm.weight", *(f"layers.0.{name}" for name in BLOCK)), counted)
        for family, counted in {
            "qwen3_5_text": {"mtp_num_hidden_layers": 1},
            "qwen3_5_moe_text": {"mtp_num_hidden_layers": 1},
            "qwen4_exp_text": {"mtp_num_hidden_layers": 1},
            "qwen3_next": {},
            "olmo_hybrid": {},
            "exaone_moe": {"num_nextn_predict_layers": 1},
            "nemotron_h": {"num_nextn_predict_layers": 1},
            "minimax_m3_vl_text": {"num_mtp_modules": 1},
            "deepseek_v4": {"num_nextn_predict_layers": 1},
        }.items()
    },
    **{
        family: ("model.layers.2.", BEYOND, {"num_nextn_predict_layers": 1})
        for family in ("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "hy_v3")
    },
    **{
        family: ("model.mtp.", ("norm.weight", *(f"layers.0.{name}" for name in BLOCK)), counted)
        for family, counted in {
            "longcat_flash": {"num_nextn_predict_layers": 1},
            "mimo_v2_flash": {},
            "inkling_text": {"num_mtp_layers": 1},
        }.items()
    },
    "hy_v4": ("model.mtp_layers.0.", BEYOND, {"num_nextn_predict_layers": 1}),
    "ernie4_5_moe": (
        "model.mtp_",
        ("emb_norm.0.weight", "linear_proj.0.weight", *(f"block.0.{name}" for name in BLOCK)),
        {"num_nextn_predict_layers": 1},
    ),
}
"""By family: how the names begin, how they go on, and the fields of the config that count the layers."""


def add_tensors(folder: Path, tensors: Mapping[str, torch.Tensor], **fields: Any) -> dict[str, torch.Tensor]:
    """Add tensors to a policy's only file, and fields to its config; return the tensors."""
    path = folder / "model.safetensors"
    save_file({**load_file(path), **tensors}, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    return dict(tensors)


def add_heads(folder: Path, family: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Add such layers to the policy of a family; return their tensors."""
    begin, names, counted = HEADS[family]
    drawn = torch.Generator().manual_seed(0)
    return add_tensors(
        folder, {f"{begin}{name}": torch.randn(4, 6, generator=drawn).to(dtype) for name in names}, **counted
    )


def add_layer(folder: Path, number: int, scale: float = 0.3) -> dict[str, torch.Tensor]:
    """Add a random layer of multi-token prediction, built like the policy's own layer of a number, to its files."""
    own = load_file(folder / "model.safetensors")
    of_layer, size = f"model.layers.{number}.", own["model.norm.weight"]
    like = {name.replace(of_layer, "mtp.layers.0."): one for name, one in own.items() if name.startswith(of_layer)}
    like |= {f"mtp.{name}.weight": size for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")}
    like["mtp.fc.weight"] = torch.empty(len(size), 2 * len(size))
    drawn = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(one.shape, generator=drawn) * scale for name, one in like.items()}
    return add_tensors(folder, tensors, mtp_num_hidden_layers=1)
