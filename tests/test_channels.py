"""Two channels in one loss: advantages (rl) and weights of the negative log-likelihood (ce)."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hand_made import meet
from test_learner import make_learner, member, ragged_groups
from torch import distributed

from lit_grpo.methods.nat import Uniform
from lit_grpo.methods.seco import SeCO
from lit_grpo.plugins import Plugin, requirement_of
from lit_grpo.types import OBSERVED, Prompt, RolloutGroup
from lit_grpo.update.learner_settings import check_arriving
from lit_grpo.update.plugin import Batch
from lit_grpo.update.step import Step

pytestmark = pytest.mark.usefixtures("exact_norms")


@dataclass
class Imitated(Plugin):
    """Gives weights to about two thirds of all tokens, observed ones among them."""

    writes = frozenset({"ce_weight"})

    def on_batch(self, batch: Batch) -> None:
        for rollout in batch.rollouts:
            numbers = range(rollout.completion.num_tokens)
            batch.set("ce_weight", rollout, [(0.5 + token) * (token % 3 > 0) for token in numbers])


def groups_with_trees() -> list[RolloutGroup]:
    """Ragged groups, and one whose completions begin with the same 40 tokens, some of them observed."""
    prompt, groups = Prompt("t", (5, 4), ""), ragged_groups()
    versions = [0] * 20 + [OBSERVED] * 10 + [0] * 14
    tree = [member(prompt, sample, versions, [True] * 44, float(sample % 2)) for sample in range(4)]
    for rollout in tree[1:]:
        token_ids_T = rollout.completion.token_ids_T
        token_ids_T[:40] = tree[0].completion.token_ids_T[:40]
        rollout.completion.token_ids_T = token_ids_T
    return [*groups, RolloutGroup(prompt, tree)]


def gradient(groups: Sequence[RolloutGroup], has_rl: bool, has_ce: bool, **changes: Any) -> torch.Tensor:
    if not has_rl:
        for rollout in (rollout for group in groups for rollout in group.rollouts):
            rollout.reward, rollout.rewards = math.nan, {"exact": None}
    plugins = [*changes.pop("plugins", []), *([Imitated()] if has_ce else [])]
    learner, steps = make_learner(plugins=plugins, **changes)
    logs = learner.learn(groups)
    assert ("ce/loss" in logs) == has_ce
    return steps.gradients[0]


def assert_mixed_is_the_sum(parts: Sequence[torch.Tensor]) -> None:
    both, rl, ce = parts
    assert float((both - rl - ce).abs().max()) < 1e-10
    assert min(float(rl.norm()), float(ce.norm())) > 1e-3


SPLITS: dict[str, dict[str, Any]] = {
    "one row": {},
    "micro-batches": {"max_tokens_per_micro_batch": 60},
    "padded": {"shares_prefix": False},
    "chunks": {"plugins": [SeCO(7)]},
    "a random part of the tokens": {"plugins": [Uniform(0.5)]},
}


@pytest.mark.parametrize("name", SPLITS)
def test_the_gradient_of_both_channels_is_the_sum_of_those_apart(name: str) -> None:
    channels = (True, True), (True, False), (False, True)
    assert_mixed_is_the_sum([gradient(groups_with_trees(), *which, **dict(SPLITS[name])) for which in channels])


def test_the_gradient_of_ce_is_that_of_the_mean_negative_log_likelihood() -> None:
    """However it is split; computed by the model's own forward, a completion at a time."""
    groups = groups_with_trees()
    policy: Any = make_learner()[0].policy
    total, number = torch.zeros(()), 0
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        prompt, ids_T = rollout.prompt.token_ids, rollout.completion.token_ids_T
        logits_TV = policy(input_ids=torch.cat([torch.tensor(prompt), ids_T])[None]).logits[0, len(prompt) - 1 : -1]
        weights_T = torch.tensor([(0.5 + token) * (token % 3 > 0) for token in range(len(ids_T))]).double()
        total = total - (weights_T * logits_TV.log_softmax(-1).gather(-1, ids_T[:, None]).squeeze(-1)).sum()
        number += int(weights_T.count_nonzero())
    (total / number).backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])
    for changes in ({}, {"max_tokens_per_micro_batch": 60}, {"shares_prefix": False}):
        found = gradient(groups_with_trees(), False, True, **changes)
        assert float((found - expected).norm() / expected.norm()) < 1e-6


def on_a_rank(rank: int, folder: str) -> None:
    meet(rank, folder)
    parts = []
    for which in ((True, True), (True, False), (False, True)):
        own = gradient(groups_with_trees()[rank::2], *which)
        distributed.all_reduce(own)
        parts.append(own)
    if rank == 0:
        torch.save(parts, f"{folder}/parts.pt")
    distributed.destroy_process_group()


def test_and_over_two_ranks(tmp_path: Path) -> None:
    """Each has half of the groups, and the denominators are of both."""
    ranks = [multiprocessing.get_context("fork").Process(target=on_a_rank, args=(n, str(tmp_path))) for n in (0, 1)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    parts = torch.load(tmp_path / "parts.pt")
    assert_mixed_is_the_sum(parts)
    alone = gradient(groups_with_trees(), True, True)
    assert float((parts[0] - alone).abs().max()) < 1e-10


def test_weights_that_are_not_one_finite_number_per_token_are_refused() -> None:
    class Short(Plugin):
        writes = frozenset({"ce_weight"})

        def on_batch(self, batch: Batch) -> None:
            batch.set("ce_weight", batch.rollouts[0], [1.0])

    learner, _ = make_learner(plugins=[Short()])
    with pytest.raises(ValueError, match=r"Short\.on_batch gives sample .* the ce_weight .*number for each of its 6"):
        learner.learn(ragged_groups())


@dataclass
class Masked(Plugin):
    """Trains on all tokens but the first of each completion."""

    writes = frozenset({"mask"})

    def on_minibatch(self, step: Step) -> None:
        for rollout in step.rollouts:
            step.set("mask", rollout, torch.arange(rollout.completion.num_trained) > 0)


@pytest.mark.parametrize("plugin", [Imitated(), Masked()], ids=repr)
def test_a_second_denominator_needs_the_whole_batch_beforehand(plugin: Plugin) -> None:
    with pytest.raises(ValueError, match=f"{type(plugin).__name__} needs the whole batch"):
        check_arriving(make_learner()[0].settings, 1, plugins=[requirement_of(plugin, type(plugin).__name__)])
