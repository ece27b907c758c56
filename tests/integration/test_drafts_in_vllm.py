"""A real vLLM engine loads an export with the layers of multi-token prediction that the base had."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
from conftest import save_tokenizer, table_rows
from safetensors.torch import load_file
from torch.nn.functional import scaled_dot_product_attention

from lit_grpo.policy.architecture.heads import prediction_head
from lit_grpo.policy.loading import load_policy, load_tokenizer
from lit_grpo.policy.saving import export
from lit_grpo.rollout.vllm.arguments import server_environment
from tests.doubles.draft_layers import add_layer, add_tensors
from tests.doubles.small_models import small_model

LINEAR_SIZES = ("linear_key_head_dim", "linear_value_head_dim")
TESTS = Path(__file__).parents[1]
FAMILIES: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "exaone_moe": ({"layer_types": ["full_attention"] * 2}, 0, {"num_nextn_predict_layers": 1}),
    "qwen3_5_text": ({"layer_types": ["linear_attention", "full_attention"]}, 1, {"mtp_num_hidden_layers": 1}),
}
"""Changes of the small model, its layer that those which draft are built like, and the fields that count these."""


def base_of(family: str, folder: Path) -> dict[str, torch.Tensor]:
    """Save a policy whose last layer is also one that drafts; return the tensors of that."""
    changes, number, counted = FAMILIES[family]
    model = small_model(family, changes, width=4)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    hidden, own = model.config.hidden_size, load_file(folder / "model.safetensors")
    drawn = torch.Generator().manual_seed(0)
    of_layer = f"model.layers.{number}."
    like = {name.replace(of_layer, "mtp.layers.0."): one for name, one in own.items() if name.startswith(of_layer)}
    norms = ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")
    like |= {f"mtp.{name}.weight": own["model.norm.weight"] for name in norms}
    like["mtp.fc.weight"] = torch.empty(hidden, 2 * hidden)
    return add_tensors(folder, {name: torch.randn(one.shape, generator=drawn) for name, one in like.items()}, **counted)


@pytest.mark.parametrize("family", table_rows(FAMILIES, []))
def test_an_export_drafts_with_what_the_base_drafted_with(family: str, tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    if family == "qwen3_5_text":
        pytest.importorskip("torchvision", reason="vLLM's model of this family imports torchvision")
    heads = base_of(family, tmp_path / "base")
    policy = load_policy(str(tmp_path / "base"))
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(0.01)
    export(policy, load_tokenizer(str(tmp_path / "base")), tmp_path / "out")
    environment = os.environ | server_environment() | {"OMP_NUM_THREADS": "1"}
    own = [str(TESTS), str(TESTS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(own)
    process = forks.run([sys.executable, __file__, str(tmp_path / "out")], 300, env=environment, cwd=tmp_path)
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]
    drafts = json.loads(process.stdout.splitlines()[-1])
    flat = {name.replace("mtp.", "model."): one for name, one in heads.items() if one.ndim == 1}
    assert drafts.keys() >= flat.keys() and len(flat) > 4
    for name, tensor in flat.items():
        assert torch.allclose(torch.tensor(drafts[name]), tensor.bfloat16().float())


def test_our_layer_of_multi_token_prediction_computes_what_vllms_does(tmp_path: Path) -> None:
    """Also for further tokens, and where what was drafted is written over, in bfloat16."""
    pytest.importorskip("vllm")
    pytest.importorskip("torchvision", reason="vLLM's model of this family imports torchvision")
    changes = {"layer_types": ["linear_attention", "full_attention"]} | dict.fromkeys(LINEAR_SIZES, 128)
    small_model("qwen3_5_text", changes, width=4).save_pretrained(tmp_path / "base")
    save_tokenizer(tmp_path / "base")
    add_layer(tmp_path / "base", 1)
    environment = os.environ | server_environment() | {"OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    own = [str(TESTS), str(TESTS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(own)
    command = [sys.executable, __file__, str(tmp_path / "base"), str(tmp_path / "calls.pt")]
    process = forks.run(command, 300, env=environment, cwd=tmp_path)
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]
    compare_calls(tmp_path / "base", torch.load(tmp_path / "calls.pt"))


@torch.no_grad()
def compare_calls(folder: Path, calls: list[tuple[torch.Tensor, ...]]) -> None:
    """Compare vLLM's layer, call by call, with ours over all that is in its cache then."""
    policy = load_policy(str(folder))
    layer, embeddings = prediction_head(policy), policy.get_input_embeddings()
    for weight in (*layer.parameters(), *embeddings.parameters()):
        weight.copy_(weight.bfloat16())

    def causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)

    hidden_TD, tokens_T, again = torch.empty(0, policy.config.hidden_size), torch.empty(0, dtype=torch.int64), 0
    for ids, positions, hidden, expected in calls:
        begin = int(positions.flatten()[0])
        again += begin < len(tokens_T)
        hidden_TD = torch.cat([hidden_TD[:begin], hidden.float()])
        tokens_T = torch.cat([tokens_T[:begin], ids.long()])
        actual = layer(hidden_TD[None], tokens_T[None], 1 + torch.arange(len(tokens_T))[None], causal)[0, begin:]
        assert float((actual - expected.float()).norm() / expected.float().norm()) < 0.02
    assert len(calls) > 6 and again > 2


def record_calls(folder: str, path: str) -> None:
    """Decode with two drafted tokens a step; save what the drafter's layer gets and returns."""
    from vllm import LLM, SamplingParams
    from vllm.model_executor.models.qwen3_5_mtp import Qwen3_5MTP

    calls, forward = list[tuple[torch.Tensor, ...]](), Qwen3_5MTP.forward

    def recorded(self: Any, input_ids: Any, positions: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        returned: Any = forward(self, input_ids, positions, hidden_states, *args, **kwargs)
        calls.append(tuple(each.clone() for each in (input_ids, positions, hidden_states, returned)))
        return returned

    Qwen3_5MTP.forward = recorded
    llm = LLM(
        folder,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=64,
        max_num_seqs=2,
        kv_cache_memory_bytes=2**26,
        enable_prefix_caching=False,
        speculative_config={"method": "mtp", "num_speculative_tokens": 2},
    )
    calls.clear()
    prompt: Any = {"prompt_token_ids": [5, 9, 17, 33, 4, 60, 71, 8, 22, 41, 13]}
    llm.generate([prompt], SamplingParams(temperature=0, max_tokens=6, detokenize=False))
    torch.save(calls, path)


def main(folder: str) -> None:
    """Start an engine that drafts, and print the vectors that its drafter holds; matrices are packed on a CPU."""
    from vllm import LLM

    llm = LLM(
        folder,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=64,
        max_num_seqs=2,
        kv_cache_memory_bytes=2**26,
        speculative_config={"method": "mtp", "num_speculative_tokens": 1},
    )
    engine: Any = llm.llm_engine.engine_core
    runner = engine.engine_core.model_executor.driver_worker.worker.model_runner
    drafts = {name: one.float().tolist() for name, one in runner.drafter.model.named_parameters() if one.ndim == 1}
    print(json.dumps(drafts))


if __name__ == "__main__":
    main(sys.argv[1]) if len(sys.argv) == 2 else record_calls(*sys.argv[1:])
