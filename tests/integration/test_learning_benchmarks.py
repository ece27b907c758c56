"""Benchmarks of learning, in their quick form, and what their runs take along."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import random_policy, save_tokenizer
from quick_runs import check_result, run_quick

from benchmarks.learning_callbacks import StaleSlots
from benchmarks.learning_studies import STUDIES
from lit_grpo.policy import load_tokenizer
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.policy.weights import digest

pytestmark = pytest.mark.integration


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["sorted_learning", "stability", "budgets"])
def test_a_study_trains_its_systems_on_the_same_task_and_draws_them(name: str, tmp_path: Path) -> None:
    result, _ = run_quick(f"learning {name}", tmp_path / "result.json")
    check_result(result, f"learning {name}")
    study, rows = STUDIES[name], result["rows"]
    assert [row["system"] for row in rows] == list(study.quick)
    for row in rows:
        assert row["samples"] > 0 and row["tokens"] >= row["samples"] and row["wall_s"] > 0 and row["cpu_s"] > 0
        if name == "stability":
            assert row["reward_final"] <= row["reward_best"] and row["staleness"] >= 1  # as old as the run
        else:
            assert row["final_least"] <= row["final"] <= row["final_most"] and row["final"] <= row["best"]
    assert (tmp_path / "result.svg").read_text().startswith("<?xml")


@pytest.mark.nightly
def test_rules_of_credit_are_trained_beside_grpo_on_the_same_games(tmp_path: Path) -> None:
    result, _ = run_quick("learning catch_credit", tmp_path / "result.json")
    check_result(result, "learning catch_credit")
    rows, rules = result["rows"], STUDIES["catch_credit"].quick
    assert [row["system"] for row in rows] == list(rules)
    assert len({row["start"] for row in rows}) == 1  # one policy, one seed
    assert len(result["claims"]) == 2 * (len(rules) - 1)


@pytest.mark.nightly
def test_methods_are_trained_on_an_equal_budget_of_tokens(tmp_path: Path) -> None:
    result, page = run_quick("methods", tmp_path / "result.json")
    check_result(result, "methods")
    rows = result["rows"]
    assert [(row["method"], row["seed"]) for row in rows] == [("grpo", 0), ("grpo", 1), ("pods", 0), ("pods", 1)]
    assert all(600 <= row["tokens"] < 1200 and row["updates"] >= 1 and row["cpu_s"] > 0 for row in rows)
    same = ("over_run", "end", "updates", "late_length", "tokens")  # pods that keeps the whole group is plain GRPO
    assert all(rows[seed][name] == rows[seed + 2][name] for seed in (0, 1) for name in same)
    assert "| pods |" in page and "| nothing |" in page


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


@pytest.mark.nightly
def test_learning_per_hour_trains_all_systems_and_scores_them_alike(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    result, _ = run_quick("learning_per_hour", tmp_path / "result.json")
    check_result(result, "learning_per_hour")
    assert [(row["system"], row["update"]) for row in result["rows"]] == [
        (system, update)
        for system in ("lit_grpo", "lit_grpo, settings of its own", "TRL")
        for update in (0, 1, 2, "where TRL's ends")
    ]
    begins = [row for row in result["rows"] if row["update"] == 0]
    assert len({(row["greedy"], row["sampled"]) for row in begins}) == 1
    assert all(row["cpu_s"] > 0 and row["tokens"] > 0 for row in result["rows"] if row["update"] in (1, 2))
    assert (tmp_path / "result.svg").read_text().startswith("<?xml")
