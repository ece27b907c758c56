"""Each benchmark in its quick form, and what it writes."""

from __future__ import annotations

import datetime
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import random_policy, save_tokenizer
from forks import VLLM
from quick_runs import check_result, run_quick

from benchmarks import report
from benchmarks.learning import to_level
from benchmarks.learning_callbacks import StaleSlots
from benchmarks.learning_runs import Curves
from benchmarks.report import Claim, Options, finish, need
from benchmarks.teachers import solved
from benchmarks.vllm_plan import Sizes, _simulated
from lit_grpo.policy import load_tokenizer
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.policy.weights import digest
from lit_grpo.tasks import WordProblemRows
from lit_grpo.types import Prompt


@pytest.mark.parametrize(
    ("value", "relation", "limit", "holds"),
    [(1.0, "<=", 1.05, True), (1.06, "<=", 1.05, False), (2.0, ">=", 2.0, True), (1.9, ">=", 2.0, False),
     (math.nan, "<=", 1.05, False), (math.nan, ">=", 2.0, False)],
)  # fmt: skip
def test_a_claim_holds_on_the_right_side_of_its_bound(value: float, relation: Any, limit: float, holds: bool) -> None:
    assert Claim("faster", value, relation, limit).holds == holds


def options(**changes: Any) -> Options:
    usual: dict[str, Any] = {"quick": False, "device": "cpu", "policy": None, "output": None}
    return Options(**(usual | changes))


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


def test_the_simulation_of_vllm_plan_gives_the_steps_of_the_engine() -> None:
    prompts = [Prompt(f"train/{number}", (2, 3), "") for number in range(24)]
    epoch = _simulated(prompts, Sizes(), seed=1)
    assert (epoch.fewest, epoch.own_steps) == (292, 425)


def test_a_peer_that_is_not_installed_is_named_before_anything_is_measured() -> None:
    need("torch")
    with pytest.raises(SystemExit, match=r"compares with no_such_peer, which is not installed; `make install`"):
        need("no_such_peer")


def test_a_level_is_reached_where_a_seed_first_comes_to_it() -> None:
    def curves(*exact: float) -> Curves:
        exact_U, unknown_U = np.array(exact), np.full(len(exact), math.nan)
        numbers_U, unknown = np.arange(len(exact), dtype=float), (unknown_U, unknown_U, unknown_U, unknown_U)
        return Curves(exact_U, unknown_U, 2 * numbers_U, 10 * numbers_U, numbers_U, 3 * numbers_U, *unknown)

    row = to_level(0.95, [curves(0.5, 0.94, 0.95, 0.9), curves(0.5, math.nan, math.nan, 0.96)])
    assert (row["updates_to_0.95"], row["updates_to_0.95_least"], row["updates_to_0.95_most"]) == (2.5, 2, 3)
    assert (row["tokens_to_0.95"], row["cpu_s_to_0.95"]) == (25, 7.5)
    row = to_level(0.95, [curves(0.5, 0.9), curves(0.5, 0.96)])
    assert math.isnan(float(row["tokens_to_0.95"])) and row["tokens_to_0.95_least"] == 10 and row["seeds_to_0.95"] == 1


def test_solved_word_problems_are_solved() -> None:
    rows = [solved(row) for row in WordProblemRows(20, seed=1).rows()]
    for row in rows:
        first, sign, second, _, answer = row["solution"].split()
        assert int(answer) == int(first) + int(second) * (1 if sign == "+" else -1)
        words = row["prompt"][-1]["content"].split()
        assert words.index(first) < words.index(second) and ("more." in words) == (sign == "+")
    assert {row["solution"].split()[1] for row in rows} == {"+", "-"}


WITHOUT_VLLM = (
    *("beside_commit", "decode_throughput"),
    *("decode_throughput decode_efficiency", "demo", "draft_steps", "drafts_gate", "first_update", "gguf_logprobs"),
    *(
        "group_size_memory",
        "heads",
        "host_cost",
        "host_cost host_cost_drafts",
        "infinite_sampling",
        "kv_memory",
        "learning budgets",
    ),
    "learning catch_credit",
    *(
        "learning sorted_learning",
        "learning stability",
        "learning_per_hour",
        "learning_per_hour shapes_vs_trl",
        "methods",
        "mixture",
        "nf4_gap",
        "optimizers",
        "planner_cost",
        "plans",
        "same_curves",
        "shapes",
        "sequence_parallel",
        "shared_prefix",
    ),
    *(
        "published_figures",
        "teachers distill_vs_trl",
        "teachers taught_by_larger",
        "teachers taught_demo",
        "turns",
        "update_memory",
        "update_vs_trl",
    ),
)
WITH_VLLM = ("architectures_vllm", "learning vllm_learning", "modes", "vllm_plan", "weight_sync")
EXACT = (
    "differ when it is run again",
    "difference to the validation",
    "completions that differ between systems",
    "gradients that differ by",
)
"""What claims say that hold at any size."""


@pytest.mark.nightly
@pytest.mark.parametrize("name", WITHOUT_VLLM + WITH_VLLM)
def test_a_benchmark_runs_in_its_quick_form(name: str, tmp_path: Path) -> None:
    earlier = name == "beside_commit"  # whose process imports another lit_grpo than the forks' parent has
    imports = VLLM if name in WITH_VLLM else ()
    result, printed = run_quick(name, tmp_path / "result.json", imports=imports, forks=not earlier)
    check_result(result, name)
    assert result["rows"] and ("not judged in a quick run" in printed or not result["claims"])
    exact = [claim for claim in result["claims"] if any(text in claim["text"] for text in EXACT)]
    assert all(claim["holds"] for claim in exact), exact
    picture = tmp_path / "result.svg"
    assert not picture.exists() or picture.read_text().startswith("<?xml")


def test_a_stale_generator_samples_with_the_weights_of_so_many_updates_ago(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    policy: Any = random_policy()
    generator = StaleSlots(lag=2)
    generator.start(PolicySpec(policy, load_tokenizer(str(tmp_path))))
    sampled, sent = [], []
    for version in range(5):
        with torch.no_grad():
            next(policy.parameters()).fill_(version)
        report = generator.load_weights(generator.weights(), version)
        assert generator.version == version
        sent.append(report.digests == {name: digest(tensor) for name, tensor in policy.named_parameters()})
        sampled.append(float(next(generator.policy.parameters()).detach().flatten()[0]))
    assert all(sent) and sampled == [0, 0, 0, 1, 2]


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
