"""Budgets in real runs: sizes by history, further rounds, prompts that are passed over; all of it resumes exactly."""

from __future__ import annotations

import csv
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import table_rows
from sampled_runs import Trained, check_log_probs, describe, train_on_sums

from lit_grpo.cli.command_line import run
from lit_grpo.data.module import PromptDataModule
from lit_grpo.module import GRPOModule
from lit_grpo.rewards import RewardSpec
from lit_grpo.rollout.slots.generator import SlotGenerator

pytestmark = pytest.mark.integration

NUM_PROMPTS, BATCH, GROUP, UPDATES = 6, 3, 4, 9
RULES: dict[str, dict[str, Any]] = {
    "greso, balanced, PODS": {
        "plugins": [
            "greso:begin_at=0.3",
            "balanced:rounds=3,passed=1,failed=1",
            {"pods": {"keep": 3, "statistics": "group"}},
        ],
    },
    "near a half, knapsack, D3S": {
        "plugins": [
            "near_half",
            "knapsack:budget=15",
            {"d3s": {"keep": 3, "first_keep": 2, "tokens": 0.9, "first_tokens": 0.3}},
        ],
    },
    "entropies while prompts stay open": {
        "plugins": ["april:max_staleness=3", "max_entropy:keep=2"],
    },
    "dars": {"plugins": ["dars_equal:most=9"]},
    "tokens": {"plugins": ["variance:tokens=200"]},
    "xrpo with novelty": {"plugins": ["xrpo:base=2,phases=2", "novelty"]},
    "gdro": {"plugins": ["prompt_gdro:bins=3,smoothing=0.5", "rollout_gdro"]},
    "noise scale": {"plugins": ["noise_scale"]},
    "dps": {"plugins": ["dps:candidates=2,decay=0.9"]},
    "random prefixes while prompts stay open": {"plugins": ["april:max_staleness=3", "nat:share=0.4"]},
    "chunks": {"plugins": ["spaco:chunk=7,share=0.6"]},
    "variance while prompts stay open": {"plugins": ["april:max_staleness=3", "greso", "variance"]},
}


def rarely(completion: str, prompt: str) -> float:
    """A reward that some prompts earn always, some never, and the others now and then."""
    kind = int(prompt[0]) % 3
    return float(kind == 0 or (kind == 1 and sum(map(ord, completion)) % 3 == 0))


def train(
    policy_folder: Path, rule: dict[str, Any], folder: Path, checkpoint: str | None = None
) -> tuple[Trained, GRPOModule, PromptDataModule]:
    own: dict[str, Any] = {"plugins": rule.get("plugins"), "rewards": [RewardSpec(f"{__file__}:rarely")]}
    sizes: dict[str, Any] = {
        "num_prompts": NUM_PROMPTS,
        "batch_size": BATCH,
        "max_steps": UPDATES,
        "num_generations": GROUP,
    }
    own |= {"generator": SlotGenerator(7), "checkpoint": checkpoint}
    module, data, _ = train_on_sums(policy_folder, folder, trained := Trained(), **own, **sizes)
    return trained, module, data


@pytest.mark.parametrize("name", table_rows(RULES, ("greso, balanced, PODS",)))
def test_a_run_with_a_budget_resumes_exactly(policy_folder: Path, tmp_path: Path, name: str) -> None:
    trained, module, data = train(policy_folder, RULES[name], tmp_path / "whole")
    check_log_probs(trained)
    history = module.learner.history
    assert history.records and sum(record.num_visits for record in history.records.values()) == BATCH * UPDATES
    for version in (4, 5):  # in the middle of an epoch, and not
        checkpoint = str(tmp_path / "whole" / f"{version}.ckpt")
        again, resumed, resumed_data = train(policy_folder, RULES[name], tmp_path / f"from-{version}", checkpoint)
        assert list(again.batches) == list(range(version, UPDATES))
        for number, batch in again.batches.items():
            assert describe(batch) == describe(trained.batches[number])
        for one, other in zip(module.policy.parameters(), resumed.policy.parameters(), strict=True):
            assert torch.equal(one, other)
        assert resumed.learner.history.records == history.records
        assert resumed_data.state_dict() == data.state_dict()


def sizes(trained: Trained) -> list[dict[str, int]]:
    """How many rollouts each prompt had, by update."""
    counts: list[dict[str, int]] = []
    for batch in trained.batches.values():
        counts.append({})
        for rollout in batch:
            counts[-1][rollout.prompt.prompt_id] = counts[-1].get(rollout.prompt.prompt_id, 0) + 1
    return counts


def kind(prompt_id: str) -> int:
    return int(prompt_id.removeprefix("train/")) % 3


def test_rounds_go_to_prompts_without_a_difference(policy_folder: Path, tmp_path: Path) -> None:
    trained, _, _ = train(policy_folder, {"plugins": ["balanced:rounds=3,passed=1,failed=1"]}, tmp_path)
    for counts, log in zip(sizes(trained), trained.logs, strict=True):
        assert all(size == 3 * GROUP for name, size in counts.items() if kind(name) != 1)  # which never differ
        assert all(size % GROUP == 0 and size <= 3 * GROUP for size in counts.values())
        assert log["budget/further_completions"] == sum(counts.values()) - GROUP * len(counts)
        assert log["budget/frac_flat_first"] >= log["frac_reward_zero_std"]
    assert any(size < 3 * GROUP for counts in sizes(trained) for name, size in counts.items() if kind(name) == 1)


@pytest.mark.nightly
def test_a_budget_of_tokens_sets_what_an_update_samples(policy_folder: Path, tmp_path: Path) -> None:
    trained, _, _ = train(policy_folder, {"plugins": ["uniform:tokens=400"]}, tmp_path)
    first, *others = sizes(trained)
    assert set(first.values()) == {GROUP}  # nothing is known of any length
    tokens = [sum(rollout.completion.num_tokens for rollout in batch) for batch in trained.batches.values()]
    assert tokens[0] < 300
    assert sum(tokens[1:]) / len(others) == pytest.approx(400, rel=0.15)


def test_a_plug_in_says_how_many_of_each_group_are_learnt_from(policy_folder: Path, tmp_path: Path) -> None:
    for plugins, most in ((["pods:keep=2"], 2), ([], GROUP)):
        trained, _, _ = train(policy_folder, {"plugins": plugins}, tmp_path / str(most))
        for batch in trained.batches.values():
            learnt = Counter(r.completion.request.group for r in batch if not math.isnan(r.advantage))
            assert set(learnt.values()) == {most} and len(learnt) == BATCH


def test_the_knapsack_spends_its_budget_on_prompts_that_differ(policy_folder: Path, tmp_path: Path) -> None:
    trained, _, _ = train(policy_folder, {"plugins": ["knapsack:budget=18"]}, tmp_path)
    first, second, *others = sizes(trained)
    assert set(first.values()) == set(second.values()) == {6}  # nothing is known of anybody
    for counts in others:
        assert sum(counts.values()) == 18
        assert all(size == 2 for name, size in counts.items() if kind(name) == 0 and any(map(differs, counts)))
    assert max(size for counts in others for size in counts.values()) > 6


def differs(prompt_id: str) -> bool:
    return kind(prompt_id) == 1


def test_what_is_mastered_or_hopeless_is_passed_over(policy_folder: Path, tmp_path: Path) -> None:
    trained, _, data = train(policy_folder, {"plugins": ["greso:begin_at=0.05,step=0.01"]}, tmp_path)
    asked = [key for batch in trained.batches.values() for key in {r.completion.request.group for r in batch}]
    taken = data.state_dict()["prompts_consumed"]
    skipped = sum(log["prompts/skipped"] for log in trained.logs)
    assert len(asked) == BATCH * UPDATES and taken == len(asked) + skipped and skipped > 0
    late = [kind(name) for name, _ in asked[4 * BATCH :]]
    assert late.count(1) > len(late) / 2


def test_the_demo_with_a_budget_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    small = [
        "--data.batch_size",
        "4",
        "--data.train.init_args.num_rows",
        "8",
        "--data.validation.init_args.num_rows",
        "8",
    ]
    run(["fit", "--config", "budget", *small, "--trainer.max_steps", "5", "--trainer.val_check_interval", "5"])
    with (tmp_path / "runs" / "budget" / "metrics.csv").open(newline="") as file:
        logged = [row for row in csv.DictReader(file) if row["reward"]]
    assert len(logged) == 5 and all(float(row["budget/further_completions"]) >= 0 for row in logged)
    assert {row["prompts/skipped"] for row in logged[:2]} == {"0.0"}  # of the first epoch
