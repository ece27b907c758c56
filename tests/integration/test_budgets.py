"""Methods in real runs: sizes by history, further rounds, prompts that are passed over; all of it resumes exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import table_rows
from sampled_runs import Trained, check_log_probs, describe, train_on_sums

from lit_grpo.data.module import PromptDataModule
from lit_grpo.module import GRPOModule
from lit_grpo.rewards import RewardSpec
from lit_grpo.rollout.slots.generator import SlotGenerator

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
    "drpo": {"plugins": ["drpo"]},
    "poise": {"plugins": ["poise:at=4"]},
    "majority vote": {"plugins": [{"majority_vote": {"pattern": "^(.)"}}]},
    "copo": {"plugins": [{"copo": {"pattern": "^(.)", "rho": 0.9}}]},
    "norm test": {"plugins": ["norm_test:eta=0.3,most=6,warm_up=2,smoothing=0.2"]},
}


def rarely(completion: str, prompt: str) -> float:
    """A reward that some prompts earn always, some never, and the others now and then."""
    kind = int(prompt[0]) % 3
    return float(kind == 0 or (kind == 1 and sum(map(ord, completion)) % 3 == 0))


def train(
    policy_folder: Path, rule: dict[str, Any], folder: Path, checkpoint: str | None = None, updates: int = UPDATES
) -> tuple[Trained, GRPOModule, PromptDataModule]:
    own: dict[str, Any] = {"plugins": rule.get("plugins"), "rewards": [RewardSpec(f"{__file__}:rarely")]}
    sizes: dict[str, Any] = {
        "num_prompts": NUM_PROMPTS,
        "batch_size": BATCH,
        "max_steps": updates,
        "num_generations": GROUP,
    }
    own |= {"generator": SlotGenerator(7), "checkpoint": checkpoint}
    module, data, _ = train_on_sums(policy_folder, folder, trained := Trained(), **own, **sizes)
    return trained, module, data


@pytest.mark.parametrize("name", table_rows(RULES, ("greso, balanced, PODS",)))
def test_a_run_with_a_budget_resumes_exactly(policy_folder: Path, tmp_path: Path, name: str) -> None:
    updates = 7
    trained, module, data = train(policy_folder, RULES[name], tmp_path / "whole", updates=updates)
    check_log_probs(trained)
    history = module.learner.history
    visits = sum(record.num_visits for record in history.records.values())
    assert visits == BATCH * updates or name == "norm test"
    for version in (4, 5):  # in the middle of an epoch, and not
        checkpoint = str(tmp_path / "whole" / f"{version}.ckpt")
        folder = tmp_path / f"from-{version}"
        again, resumed, resumed_data = train(policy_folder, RULES[name], folder, checkpoint, updates)
        assert list(again.batches) == list(range(version, updates))
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


def test_what_is_mastered_or_hopeless_is_passed_over(policy_folder: Path, tmp_path: Path) -> None:
    trained, _, data = train(policy_folder, {"plugins": ["greso:begin_at=0.05,step=0.01"]}, tmp_path)
    asked = [key for batch in trained.batches.values() for key in {r.completion.request.group for r in batch}]
    taken = data.state_dict()["prompts_consumed"]
    skipped = sum(log["prompts/skipped"] for log in trained.logs)
    assert len(asked) == BATCH * UPDATES and taken == len(asked) + skipped and skipped > 0
    late = [kind(name) for name, _ in asked[4 * BATCH :]]
    assert late.count(1) > len(late) / 2


PLAIN = ["dps:candidates=1", "xrpo:base=4", "novelty:weight=0", "prompt_gdro:exploration=1", "rollout_gdro:bins=1"]
"""Settings at which a method is plain GRPO."""


@pytest.mark.nightly
def test_at_some_settings_methods_are_plain_grpo(policy_folder: Path, tmp_path: Path) -> None:
    _, expected, _ = train(policy_folder, {}, tmp_path / "plain")
    for number, plugin in enumerate(PLAIN):
        _, module, _ = train(policy_folder, {"plugins": [plugin]}, tmp_path / str(number))
        for mine, theirs in zip(module.policy.parameters(), expected.policy.parameters(), strict=True):
            assert torch.equal(mine, theirs), plugin


def test_batches_grow_by_the_norm_test(policy_folder: Path, tmp_path: Path) -> None:
    trained, _, _ = train(policy_folder, RULES["norm test"], tmp_path)
    prompts = [len(counts) for counts in sizes(trained)]
    assert prompts[0] == BATCH and prompts == sorted(prompts) and prompts[-1] > BATCH
    assert prompts == [log["noise/prompts"] for log in trained.logs]
    assert [log["noise/step_scale"] ** 2 * BATCH for log in trained.logs] == pytest.approx(prompts)
