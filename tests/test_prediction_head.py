"""The layer of multi-token prediction of a policy's files, beside its formula in float64."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import scaled_dot_product_attention, silu

from lit_grpo.policy.architecture.heads import prediction_head
from lit_grpo.policy.loading import load_policy
from tests.doubles.draft_layers import add_layer, add_tensors

HYBRID = Path(__file__).parents[1] / "lit_grpo" / "policy" / "tiny_hybrid"
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return Path(shutil.copytree(HYBRID, tmp_path / "base"))


def causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
    return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (1 + weight)


def rotated(x_HTS: torch.Tensor, positions_T: torch.Tensor, base: float, size: int) -> torch.Tensor:
    """Rotate the first ``size`` numbers of each head, halves against each other."""
    angles_Th = positions_T[:, None] * base ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    first, second, rest = x_HTS[..., : size // 2], x_HTS[..., size // 2 : size], x_HTS[..., size:]
    cos, sin = angles_Th.cos(), angles_Th.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def by_formula(w: Tensors, embeddings: torch.Tensor, hidden_TD: torch.Tensor, tokens_T: torch.Tensor) -> torch.Tensor:
    """``u`` of the tokens after the first of a sequence: 4 heads of 32, 2 KV heads, a quarter of each rotated."""
    embedded = norm(embeddings[tokens_T], w["pre_fc_norm_embedding.weight"])
    x = torch.cat([embedded, norm(hidden_TD, w["pre_fc_norm_hidden.weight"])], -1) @ w["fc.weight"].T
    layer = {name.removeprefix("layers.0."): one for name, one in w.items() if name.startswith("layers.0.")}
    normed, positions_T = norm(x, layer["input_layernorm.weight"]), torch.arange(len(x), dtype=torch.float64)
    query, gate = (normed @ layer["self_attn.q_proj.weight"].T).view(len(x), 4, 64).chunk(2, -1)
    key, value = ((normed @ layer[f"self_attn.{n}_proj.weight"].T).view(len(x), 2, 32) for n in "kv")
    query, key = norm(query, layer["self_attn.q_norm.weight"]), norm(key, layer["self_attn.k_norm.weight"])
    query, key = (rotated(each.transpose(0, 1), positions_T, 100.0, 8) for each in (query, key))
    scores = query @ key.repeat_interleave(2, 0).transpose(1, 2) / math.sqrt(32)
    weights = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf).softmax(-1)
    mixed = (weights @ value.transpose(0, 1).repeat_interleave(2, 0)).transpose(0, 1) * gate.sigmoid()
    x = x + mixed.flatten(1) @ layer["self_attn.o_proj.weight"].T
    normed = norm(x, layer["post_attention_layernorm.weight"])
    inner = silu(normed @ layer["mlp.gate_proj.weight"].T) * (normed @ layer["mlp.up_proj.weight"].T)
    return norm(x + inner @ layer["mlp.down_proj.weight"].T, w["norm.weight"])


def test_it_computes_the_published_formula_and_nothing_sees_the_first_token(base: Path) -> None:
    tensors = add_layer(base, 2)
    policy = load_policy(str(base))
    num_weights, attention = len([*policy.parameters()]), policy.config._attn_implementation
    head = prediction_head(policy)
    assert prediction_head(policy) is head
    assert len([*policy.parameters()]) == num_weights and policy.config._attn_implementation == attention
    drawn = torch.Generator().manual_seed(1)
    tokens_BT = torch.randint(0, 15, (2, 9), generator=drawn)
    hidden_BTD = torch.randn(2, 9, 80, generator=drawn)
    positions_BT = torch.arange(9).expand(2, -1)
    actual = head(hidden_BTD, tokens_BT, positions_BT, causal)
    double = {name.removeprefix("mtp."): one.double() for name, one in tensors.items()}
    embeddings: Any = policy.get_input_embeddings().weight
    for row in range(2):
        expected = by_formula(double, embeddings.double(), hidden_BTD[row, 1:].double(), tokens_BT[row, 1:])
        assert torch.allclose(actual[row, 1:].double(), expected, atol=2e-5)
    others_BT, changed = tokens_BT.clone(), hidden_BTD.clone()
    others_BT[:, 0], changed[:, 0] = (tokens_BT[:, 0] + 1) % 15, 3.0
    assert torch.equal(head(changed, others_BT, positions_BT, causal)[:, 1:], actual[:, 1:])
    assert head.stored().keys() == tensors.keys()
    assert all(torch.equal(one, tensors[name]) for name, one in head.stored().items())


WRONG: dict[str, tuple[Tensors, str]] = {
    "none": ({}, r"holds no layer of multi-token prediction \(mtp.fc.weight\).*take a policy that has one"),
    "other sizes": ({"mtp.fc.weight": torch.ones(4, 6)}, r"fc.weight is of shape \(4, 6\) in .* and of shape \(80"),
    "one more": ({"mtp.layers.0.mlp.router.weight": torch.ones(4)}, r"router.weight is of shape \(4,\) .* and absent"),
}  # fmt: skip


@pytest.mark.parametrize("why", WRONG)
def test_a_layer_that_does_not_fit_the_policy_is_refused_in_a_sentence(why: str, base: Path) -> None:
    tensors, message = WRONG[why]
    if tensors:
        add_layer(base, 2)
        add_tensors(base, tensors)
    with pytest.raises(ValueError, match=message):
        prediction_head(load_policy(str(base)))


def test_a_layer_that_lacks_a_tensor_is_refused(base: Path) -> None:
    from safetensors.torch import save_file

    add_layer(base, 2)
    tensors = load_file(base / "model.safetensors")
    del tensors["mtp.layers.0.mlp.up_proj.weight"]
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"mtp.layers.0.mlp.up_proj.weight is absent in .*leave the heads out"):
        prediction_head(load_policy(str(base)))
