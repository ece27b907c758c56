"""What a first GPU is asked is rehearsed without one, and what is asked of a GPU is counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from quick_runs import check_result, run_quick

from benchmarks import gpu
from benchmarks.gpu_stages import STAGES
from benchmarks.report import Options


def test_the_stages_for_a_gpu_run_at_a_tiny_size_under_the_pretended_one(tmp_path: Path) -> None:
    result, printed = run_quick("gpu", tmp_path / "result.json")
    check_result(result, "gpu")
    outcomes = {row["stage"]: row["case"] for row in result["rows"] if "figure" not in row}
    assert list(outcomes) == list(STAGES)
    for name, (_, _, why_not) in STAGES.items():
        assert outcomes[name] == (f"not rehearsed: {why_not}" if why_not else "ran")
    found = {(row["stage"], row["case"], row["figure"]): row["value"] for row in result["rows"] if "figure" in row}
    assert found["slots alive", "with graphs", "same_completions"] == 1
    assert found["slots alive", "with graphs", "gap_to_forward"] < 0.05
    assert found["update alive", "rows", "gradient_off"] < 0.05
    assert {case for stage, case, _ in found if stage == "the paper's pair"} == {"ours", "full group", "naive"}
    assert "the paper's pair: ran" in printed
    assert sum(limit_s for _, limit_s, _ in STAGES.values()) < 600


def test_a_stage_that_fails_or_hangs_ends_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And what the stages before it have found is written."""
    written: list[int] = []

    def measured(name: str) -> tuple[list[Any], str]:
        return ([], "failed: out of memory") if name == "update alive" else ([{"case": "one", "s": 1.0}], "ran")

    write = gpu.write

    def writing(*args: Any) -> Any:
        written.append(len(args[3]))
        return write(*args)

    monkeypatch.setattr(gpu, "_measured", measured)
    monkeypatch.setattr(gpu, "write", writing)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a GPU")
    assert gpu.main(Options(False, "cuda", None, tmp_path / "result.json")) == 1
    assert written == [2, 3, 5, 7, 9, 11]


@pytest.mark.nightly
def test_counts_are_within_their_budgets(tmp_path: Path) -> None:
    result, _ = run_quick("device_counts", tmp_path / "result.json")
    check_result(result, "device_counts")
    assert len(result["claims"]) == 16 and all(claim["holds"] for claim in result["claims"])
