"""Benchmarks of the update phase and of weights on their way, in their quick form."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import random_policy
from forks import VLLM
from quick_runs import check_result, run_quick

pytestmark = pytest.mark.integration

WITH_VLLM = (
    "weight_sync",
    "sync_proof",
    "learning vllm_learning",
    "modes",
    "architectures_vllm",
)


@pytest.mark.nightly
def test_update_vs_trl_has_both_sides_compute_every_layer_twice(tmp_path: Path) -> None:
    result, _ = run_quick("update_vs_trl", tmp_path / "result.json")
    check_result(result, "update_vs_trl")
    assert [(row["system"], row["micro-batch"], row["checkpointing"]) for row in result["rows"]] == [
        ("lit_grpo", "4096 tokens", "yes"), ("TRL, GPU path of its head", "4 rows", "yes")
    ]  # fmt: skip
    assert [row["layer_runs"] for row in result["rows"]] == [2, 2]  # one micro-batch each
    assert all(row["tokens_per_s"] > 0 and row["peak_mib"] > 0 for row in result["rows"])
    assert [claim["bound"] for claim in result["claims"]] == [">= 2", "<= 1", "<= 0.5"]
    assert all(row["share_of_matmul_rate"] > 0 for row in result["rows"])
    assert result["settings"]["threads"] == 1


@pytest.mark.filterwarnings("ignore")
def test_the_gpu_path_of_trls_head_computes_the_same_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its row would be faster for doing other work."""
    utils = pytest.importorskip("trl.trainer.utils")
    tokens = torch.tensor([[5, 3, 4, 2, 6, 7]])
    labels = torch.tensor([[-100, -100, -100, 2, 6, 7]])
    logprobs, gradients = [], []
    for gpu_path in (False, True):
        monkeypatch.setattr(utils, "_use_triton", lambda device, gpu_path=gpu_path: gpu_path)
        model = random_policy()
        utils.add_fused_lm_head(model)
        logprobs.append(model(input_ids=tokens, labels=labels, fused_lm_head=True).log_probs)
        logprobs[-1].sum().backward()
        gradients.append(torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]))
    assert gradients[0].abs().sum() > 0
    torch.testing.assert_close(logprobs[0], logprobs[1])
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name",
    [
        "update_memory",
        "shared_prefix",
        "weight_sync",
        "sync_proof",
        "learning vllm_learning",
        "modes",
        "architectures_vllm",
        "beside_commit",
        "same_curves",
    ],
)
def test_the_other_benchmarks_run(name: str, tmp_path: Path) -> None:
    imports = VLLM if name in WITH_VLLM else ()
    result, printed = run_quick(name, tmp_path / "result.json", imports=imports)
    check_result(result, name)
    assert result["claims"] and "not judged in a quick run" in printed
