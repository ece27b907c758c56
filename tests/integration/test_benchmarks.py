"""Each benchmark in its quick form, and what it writes."""

from __future__ import annotations

import datetime
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import VLLM
from quick_runs import check_result, run_quick

from benchmarks import report
from benchmarks.baseline_plans import FIXED_SLOT, MICRO_ROUNDS
from benchmarks.one_prompt import SYSTEMS
from benchmarks.report import Claim, Options, finish, need, parse_options
from benchmarks.vllm_plan import Sizes, _simulated
from benchmarks.workloads import long_tailed
from lit_grpo.memory import PeakMemory
from lit_grpo.methods.plans import shipped_plans
from lit_grpo.types import Prompt

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]


@pytest.mark.nightly
def test_group_size_memory_measures_every_case_in_both_phases(tmp_path: Path) -> None:
    result, printed = run_quick("group_size_memory", tmp_path / "result.json")
    check_result(result, "group_size_memory")
    assert [(row["system"], row["G"]) for row in result["rows"]] == [("lit_grpo", 2), ("lit_grpo", 4), ("generate", 4)]
    for row in result["rows"]:
        assert row["rollout_mib"] > 1 and row["update_mib"] > 60  # keys and values; gradients and AdamW's moments
        assert row["tokens"] >= row["G"]
    assert [claim["bound"] for claim in result["claims"]] == ["<= 1.05", "<= 1.05"]
    assert "peak memory of the update" in printed


@pytest.mark.nightly
def test_the_demo_is_measured_by_update_and_run_again(tmp_path: Path) -> None:
    result, _ = run_quick("demo", tmp_path / "result.json")
    check_result(result, "demo")
    (row,) = result["rows"]
    assert row["seed"] == 0 and {"at 0", "at 2", "mean_length"} <= row.keys()
    differences = result["claims"][-1]
    assert differences["value"] == 0 and "differ when it is run again" in differences["text"]


@pytest.mark.parametrize(
    ("value", "relation", "limit", "holds"),
    [(1.0, "<=", 1.05, True), (1.06, "<=", 1.05, False), (2.0, ">=", 2.0, True), (1.9, ">=", 2.0, False),
     (math.nan, "<=", 1.05, False), (math.nan, ">=", 2.0, False)],
)  # fmt: skip
def test_a_claim_holds_on_the_right_side_of_its_bound(value: float, relation: Any, limit: float, holds: bool) -> None:
    assert Claim("faster", value, relation, limit).holds == holds


def options(**changes: Any) -> Options:
    return Options(**({"quick": False, "device": "cpu", "policy": None, "output": None} | changes))


def test_a_claim_that_fails_is_the_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    good, bad = Claim("good", 3.0, ">=", 2.0), Claim("bad", 1.0, ">=", 2.0)
    assert finish("example", options(), {"repeats": 3}, [{"rate": 3.0}], [good]) == 0
    assert finish("example", options(), {"repeats": 3}, [{"rate": 3.0}], [good, bad]) == 1
    path = tmp_path / f"example-{datetime.date.today().isoformat()}.json"
    assert list(tmp_path.iterdir()) == [path]
    result = json.loads(path.read_text())
    assert result["command"] == "python -m benchmarks.example --device cpu"
    assert result["rows"] == [{"rate": 3.0}] and result["settings"] == {"repeats": 3}
    assert result["claims"][1] == {"text": "bad", "value": 1.0, "bound": ">= 2", "holds": False}


def test_a_quick_run_judges_no_claim_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    assert finish("example", options(quick=True), {}, [], [Claim("bad", 1.0, ">=", 2.0)]) == 0
    assert finish("example", options(quick=True), {}, [], [Claim("broken", math.nan, ">=", 2.0)]) == 1
    assert list(tmp_path.iterdir()) == []


def test_the_command_names_a_hub_id_but_no_folder(tmp_path: Path) -> None:
    for policy, named in [(str(tmp_path), "FOLDER"), ("some/model", "some/model")]:
        output = tmp_path / "result.json"
        finish("example", options(policy=policy, output=output), {}, [], [])
        assert (
            json.loads(output.read_text())["command"] == f"python -m benchmarks.example --policy {named} --device cpu"
        )


def test_current_memory_is_what_is_held_now() -> None:
    memory = PeakMemory(torch.device("cpu"))
    before = memory.current_gib()
    block = torch.ones(64 * 2**20)  # 256 MiB
    held = memory.current_gib()
    del block
    assert 0.2 < held - before < 0.3
    assert memory.current_gib() - before < 0.05


def test_the_command_line_is_shared() -> None:
    assert parse_options("What it measures.", []) == options()
    assert parse_options("", ["--quick", "--device", "cuda", "--output", "x.json", "--policy", "tiny"]) == options(
        quick=True, device="cuda", output=Path("x.json"), policy="tiny"
    )


@pytest.mark.nightly
def test_infinite_sampling_decodes_the_same_by_every_system(tmp_path: Path) -> None:
    result, _ = run_quick("infinite_sampling", tmp_path / "result.json")
    check_result(result, "infinite_sampling")
    for task in ("announcing", "demo"):
        assert {row["system"] for row in result["rows"] if row["task"] == task} >= {each.name for each in SYSTEMS}
    same = [claim for claim in result["claims"] if "differ" in claim["text"]]
    assert len(same) == 4 and all(claim["holds"] for claim in same)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["plans", "planner_cost"])
def test_planning_benchmarks_measure_every_plan(name: str, tmp_path: Path) -> None:
    result, _ = run_quick(name, tmp_path / "result.json")
    check_result(result, name)
    measured = {row["plan"] for row in result["rows"]} if name == "planner_cost" else result["rows"][0].keys()
    assert {MICRO_ROUNDS, FIXED_SLOT, *shipped_plans()} <= measured


@pytest.mark.nightly
def test_ranks_that_share_rows_are_measured_beside_one(tmp_path: Path) -> None:
    result, _ = run_quick("sequence_parallel", tmp_path / "result.json")
    check_result(result, "sequence_parallel")
    assert [(row["completion tokens"], row["ranks"]) for row in result["rows"]] == [(16, 1), (16, 2), (32, 1), (32, 2)]
    assert all(row["peak_mib"] > 0 and row["seconds_a_row"] > 0 for row in result["rows"])


@pytest.mark.nightly
def test_kv_memory_tells_what_is_allocated_for_long_tailed_lengths_from_what_is_used(tmp_path: Path) -> None:
    result, _ = run_quick("kv_memory", tmp_path / "result.json")
    check_result(result, "kv_memory")
    tailed = [row for row in result["rows"] if row["lengths"] == "long-tailed"]
    assert [(row["G"], row["limit"]) for row in tailed] == [(16, 64)]
    for row in result["rows"]:
        assert row["allocated_tokens"] >= row["used_tokens"] > row["prompt"]
        assert row["kv_mib"] >= row["used_mib"] > 0
    (claim,) = [claim for claim in result["claims"] if "long-tailed" in claim["text"]]
    assert claim["value"] == max(row["allocated_tokens"] / row["used_tokens"] for row in tailed)


def test_long_tailed_means_the_same_in_all_benchmarks() -> None:
    lengths = long_tailed([Prompt("train/0", (2,), "")], 256, 1024)
    assert lengths["train/0", 0, (0,)] == 139
    assert max(lengths.values()) == 1024 and sum(length < 123 for length in lengths.values()) in range(115, 141)


@pytest.mark.nightly
def test_vllm_plan_tells_mean_and_spread_of_several_seeds(tmp_path: Path) -> None:
    result, _ = run_quick("vllm_plan", tmp_path / "result.json", imports=VLLM)
    check_result(result, "vllm_plan")
    assert [(row["workload"], row["epoch"], row["seeds"]) for row in result["rows"]] == [
        ("demo", 0, 1), ("demo", 1, 1), ("per_prompt", 0, 2), ("per_prompt", 1, 2), ("per_prompt, simulated", 1, 2)
    ]  # fmt: skip
    for row in result["rows"]:
        assert row["steps_ratio_least"] <= row["steps_ratio"] <= row["steps_ratio_most"]
    assert ["mean over 2 seeds" in claim["text"] for claim in result["claims"]] == [True] * 4


def test_the_simulation_of_vllm_plan_gives_the_steps_of_the_engine() -> None:
    prompts = [Prompt(f"train/{number}", (2, 3), "") for number in range(24)]
    epoch = _simulated(prompts, Sizes(), seed=1)
    assert (epoch.fewest, epoch.own_steps) == (292, 425)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name",
    [
        "decode_throughput",
        "decode_throughput decode_efficiency",
        "turns",
        "conversation_tokens",
    ],
)
def test_the_other_benchmarks_run(name: str, tmp_path: Path) -> None:
    result, printed = run_quick(name, tmp_path / "result.json")
    check_result(result, name)
    assert result["claims"] and "not judged in a quick run" in printed


def test_a_peer_that_is_not_installed_is_named_before_anything_is_measured() -> None:
    need("torch")
    with pytest.raises(SystemExit, match=r"compares with no_such_peer, which is not installed; `make install`"):
        need("no_such_peer")
