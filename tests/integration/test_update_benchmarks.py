"""Benchmarks of the update phase and of weights on their way, in their quick form."""

from __future__ import annotations

from pathlib import Path

import pytest
from quick_runs import check_result, run_quick

pytestmark = pytest.mark.integration


def test_update_vs_trl_measures_ours_beside_each_size_of_trls_micro_batches(tmp_path: Path) -> None:
    result, _ = run_quick("update_vs_trl", tmp_path / "result.json")
    check_result(result, "update_vs_trl")
    assert [(row["system"], row["micro-batch"]) for row in result["rows"]] == [
        ("lit_grpo", "4096 tokens"), ("TRL", "2 rows"), ("TRL", "4 rows")
    ]  # fmt: skip
    assert all(row["tokens_per_s"] > 0 and row["peak_mib"] > 0 for row in result["rows"])
    assert [claim["bound"] for claim in result["claims"]] == [">= 1", "<= 0.5"]


@pytest.mark.parametrize("name", ["update_memory", "shared_prefix", "update_gpu", "weight_sync", "vllm_learning"])
def test_the_other_benchmarks_run(name: str, tmp_path: Path) -> None:
    result, printed = run_quick(name, tmp_path / "result.json")
    check_result(result, name)
    assert result["claims"] and "not judged in a quick run" in printed
