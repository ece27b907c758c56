"""What a first GPU is asked is rehearsed without one, and what is asked of a GPU is counted."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from quick_runs import check_result, run_quick

from benchmarks import gpu
from benchmarks.gpu_stages import STAGES, WAYS, kernel_class
from benchmarks.report import Options, Row


def wait_until(holds: Callable[[], bool]) -> None:
    for _ in range(200):
        if holds():
            return
        time.sleep(0.05)
    raise AssertionError("it never came true")


def check_rehearsal(found: dict[tuple[str, str, str], float], outcomes: dict[str, str]) -> None:
    assert all(outcome == "ran" for outcome in outcomes.values()), outcomes
    assert found["slots alive", "with graphs", "same_completions"] == 1
    assert found["slots alive", "with graphs", "gap_to_forward"] < 0.05
    assert found["update alive", "rows", "gradient_off"] < 0.05
    cases = {case for stage, case, _ in found if stage == "decode step"}
    num_kernels = {case: found["decode step", case, "kernels_a_step"] for case in cases}
    for way in WAYS:
        assert {f"2 rows{way}: {kind}" for kind in ("products", "sampling", "copies")} <= cases
        of_classes = [number for case, number in num_kernels.items() if case.startswith(f"2 rows{way}: ")]
        assert sum(of_classes) == pytest.approx(num_kernels[f"2 rows{way}"])
    assert num_kernels["2 rows"] != num_kernels["2 rows, by operations"]  # traced on the CPU, where both are operations
    pair = {case for stage, case, _ in found if stage == "the paper's pair"}
    assert pair == {f"G = 4, {name}" for name in ("ours", "full group", "naive", "ours over the others")}


@pytest.mark.nightly
def test_all_stages_for_a_gpu_run_at_a_tiny_size(tmp_path: Path) -> None:
    """Those of kernels under the pretended GPU; TRL, vLLM and a resumed fit on the CPU."""
    result, printed = run_quick("gpu", tmp_path / "result.json")
    check_result(result, "gpu")
    outcomes = {row["stage"]: row["case"] for row in result["rows"] if "figure" not in row}
    found = {(row["stage"], row["case"], row["figure"]): row["value"] for row in result["rows"] if "figure" in row}
    assert list(outcomes) == list(STAGES) and "the paper's pair: ran" in printed
    check_rehearsal(found, outcomes)
    updates = [case for stage, case, figure in found if stage.startswith("fit") and figure == "time/update_s"]
    assert updates == ["begun, update 1", "begun, update 2", "resumed, update 3"]
    systems = [case.split(", ")[0] for stage, case, figure in found if stage.endswith("TRL") and figure == "seconds"]
    assert systems == ["lit_grpo", "TRL"]
    assert ("vLLM", "4 rows, vLLM", "tokens_per_s") in found and ("vLLM", "4 rows, slots", "tokens_per_s") in found


@pytest.mark.nightly
def test_stages_of_kernels_run_at_a_tiny_size_under_the_pretended_gpu() -> None:
    found: dict[tuple[str, str, str], float] = {}
    outcomes: dict[str, str] = {}
    for name, stage in STAGES.items():
        if stage.pretended:
            rows: list[Row] = []
            outcomes[name] = gpu.run_stage(name, True, rows.append)
            by_figure = [one for row in rows for one in gpu._by_figure(name, row)]
            found |= {(name, str(one["case"]), str(one["figure"])): float(one["value"]) for one in by_figure}
    check_rehearsal(found, outcomes)


def test_all_stages_take_nine_minutes_at_most() -> None:
    assert sum(stage.limit_s for stage in STAGES.values()) <= 540


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("_attend", "attention"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>", "attention"),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64_cublas", "products"),
        ("void gemv2T_kernel_val<int, int, __nv_bfloat16>", "products"),
        ("triton_red_fused_add_mean_mul_rsqrt_0", "compiled"),
        ("void (anonymous namespace)::softmax_warp_forward<float, float, float, 10>", "sampling"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        (
            "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<direct_copy_kernel>>",
            "copies",
        ),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, MeanOps>>", "sums"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", "by number"),
    ],
)
def test_a_kernel_has_a_class_by_its_name(name: str, kind: str) -> None:
    assert kernel_class(name) == kind


def test_a_stage_that_fails_or_hangs_ends_alone(tmp_path: Path) -> None:
    """With all that it has started; rows that it has printed are taken at once."""
    printed = (
        """print('{"row": {"case": "one", "s": 1.0}}', flush=True); print("a package says something", flush=True);"""
    )
    child = "import subprocess, sys, time; " + printed
    rows: list[Row] = []
    hangs = "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
    left = tmp_path / "pid"
    note = f"open({str(left)!r}, 'w').write(str(child.pid)); time.sleep(600)"
    assert gpu.in_time([sys.executable, "-c", child + hangs + note], 20, rows.append) == "took longer than 20 s"
    assert rows == [{"case": "one", "s": 1.0}]
    pid = int(left.read_text())
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    assert gpu.in_time([sys.executable, "-c", child + "sys.exit('out of memory')"], 60, rows.append) == (
        "failed: out of memory"
    )
    assert len(rows) == 2


def test_what_each_row_has_found_is_written_before_the_next(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written: list[int] = []
    write = gpu.write

    def run_stage(name: str, rehearsed: bool, take: Any) -> str:
        take({"case": "one", "s": 1.0})
        return "took longer than 1 s" if name == "vLLM" else "ran"

    def writing(*args: Any) -> Any:
        written.append(len(args[3]))
        return write(*args)

    monkeypatch.setattr(gpu, "run_stage", run_stage)
    monkeypatch.setattr(gpu, "write", writing)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a GPU")
    assert gpu.main(Options(False, "cuda", None, tmp_path / "result.json")) == 1
    assert written == [*range(1, 2 * len(STAGES) + 1)]


@pytest.mark.nightly
def test_counts_are_within_their_budgets(tmp_path: Path) -> None:
    result, _ = run_quick("device_counts", tmp_path / "result.json", forks=False)
    check_result(result, "device_counts")
    assert len(result["claims"]) == 24 and all(claim["holds"] for claim in result["claims"])
