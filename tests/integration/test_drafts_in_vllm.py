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

from lit_grpo.policy.loading import load_policy, load_tokenizer
from lit_grpo.policy.saving import export
from lit_grpo.rollout.vllm.arguments import server_environment
from tests.doubles.draft_layers import add_tensors
from tests.doubles.small_models import small_model

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
    main(sys.argv[1])
