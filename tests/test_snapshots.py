"""Log-probs at the version that sampled a token, against policies that are kept whole."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import random_policy
from hand_made import relative_error
from test_buffer import ended
from test_learner import make_learner, member
from test_off_policy import clipped, formula

from lit_grpo.methods.snapshots import Snapshots
from lit_grpo.plugins import GroupBatch, fresh
from lit_grpo.ranks import Ranks
from lit_grpo.rollout.buffer import RolloutBuffer
from lit_grpo.rollout.rules import ReleaseRule
from lit_grpo.types import Completion, PassRule, Prompt, Request, RolloutGroup, SamplingParams, Trajectory
from lit_grpo.update.metrics import TokenMetrics
from lit_grpo.update.objective.corrections import Correction
from lit_grpo.update.objective.objective import Objective
from lit_grpo.update.plugin import TrainingRun

OBJECTIVE = Objective("grpo", correction=Correction("token_truncate", high=1.3))


def moved(policy: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in policy.parameters():
            weight += 0.05 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)


def batch(versions: Sequence[int]) -> list[RolloutGroup]:
    """Two groups whose completions have tokens of these versions, the oldest first."""
    groups = []
    for number, rewards in enumerate([[1.0, 0.0, 0.2, 0.0], [0.0, 1.0, 0.4]]):
        prompt, lengths = Prompt(f"train/{number}", (3, 4, 5)[: 3 - number], ""), [5, 8, 3, 6]
        members = []
        for sample, reward in enumerate(rewards):
            own = sorted(versions[(t + sample) % len(versions)] for t in range(lengths[sample]))
            members.append(member(prompt, sample, own, [True] * lengths[sample], reward))
        groups.append(RolloutGroup(prompt, members))
    return groups


def snapshots_of(policy: Any, snapshot_gib: float | None = None, updates_per_batch: int = 1) -> Snapshots:
    """Snapshots of a run that trains a policy."""
    plugin = fresh(Snapshots(snapshot_gib))
    plugin.on_train_start(TrainingRun(policy, None, 0, updates_per_batch, Ranks()))
    return plugin


def learner_with_policies(**options: Any) -> tuple[Any, Any, dict[int, Any]]:
    """A learner at version 3 that has kept versions 0, 2 and 3, and all policies whole."""
    policy: Any = random_policy()
    snapshots = snapshots_of(policy)
    learner, steps = make_learner(policy=policy, objective=OBJECTIVE, plugins=[snapshots], **options)
    policies = {}
    for version in range(4):
        policies[version] = copy.deepcopy(learner.policy)
        if version != 1:
            snapshots.hold(version)
        if version < 3:
            moved(learner.policy, version)
    steps.policy_version = 3
    return learner, steps, policies


def old_logprobs(policies: dict[int, Any], groups: list[RolloutGroup]) -> list[torch.Tensor]:
    """Each completion's tokens under the policy that sampled each, by whole forward passes of all policies."""
    under: dict[int, list[torch.Tensor]] = {}
    for version, policy in policies.items():
        seen: list[torch.Tensor] = under.setdefault(version, [])

        def note(now_T: torch.Tensor, *_: Any, seen: list[torch.Tensor] = seen) -> torch.Tensor:
            seen.append(now_T.detach())
            return now_T

        formula(copy.deepcopy(policy), groups, note)
    completions = [rollout.completion for group in groups for rollout in group.rollouts]
    return [
        torch.stack([under[int(version)][number][place] for place, version in enumerate(completion.versions_T)])
        for number, completion in enumerate(completions)
    ]


@pytest.mark.parametrize("num_iterations", [1, 2])
def test_both_factors_are_of_the_version_that_sampled_each_token(num_iterations: int) -> None:
    groups = batch([0, 2, 3])
    learner, steps, policies = learner_with_policies(num_iterations=num_iterations)
    logs = learner.learn(groups)
    now, old = policies[3], old_logprobs(policies, groups)
    measured, factors = iter(old), list[tuple[torch.Tensor, torch.Tensor]]()

    def losses(now_T: torch.Tensor, sampled_T: torch.Tensor, _: Any, advantage: float) -> torch.Tensor:
        old_T = next(measured)
        discrepancy_T, staleness_T = (old_T - sampled_T).exp(), (now_T.detach() - old_T).exp()
        torch.testing.assert_close(discrepancy_T * staleness_T, (now_T.detach() - sampled_T).exp())
        factors.append((discrepancy_T.log().abs(), staleness_T.log().abs()))
        return discrepancy_T.clamp(max=1.3) * clipped(now_T, old_T, advantage)

    expected = formula(copy.deepcopy(now), groups, losses)
    assert relative_error(steps.gradients[0], expected) < 1e-5
    if num_iterations == 1:
        for name, parts in zip(("discrepancy", "staleness"), zip(*factors, strict=True), strict=True):
            assert logs[f"snapshots/{name}"] == pytest.approx(float(torch.cat(parts).mean()), rel=1e-4)

    def recomputed(now_T: torch.Tensor, sampled_T: torch.Tensor, _: Any, advantage: float) -> torch.Tensor:
        return -(now_T.detach() - sampled_T).exp().clamp(max=1.3) * advantage * now_T

    assert relative_error(formula(copy.deepcopy(now), groups, recomputed), expected) > 0.05


def test_measuring_leaves_the_weights_and_takes_a_pass_for_each_old_version() -> None:
    learner, _, policies = learner_with_policies()
    passes: list[tuple[int, int]] = []
    measure = learner.passes.measure

    def counted(rollouts: Any, what: Any, lend: Any = None, /) -> Any:
        passes.append((len(rollouts), lend.args[0]))
        return measure(rollouts, what, lend)

    learner.passes.measure = counted
    groups = batch([0, 3])
    groups[0].rollouts[0].trained_before = True  # it has left in an earlier part of its group
    first, *others = learner._prepare(groups, None, TokenMetrics(), is_whole=True).rollouts
    assert passes == [(6, 0)] and first.columns["old_logprob"].isnan().all()
    for rollout in others:
        old_T = rollout.columns["old_logprob"]
        assert torch.equal(old_T.isnan(), rollout.completion.versions_T == 3)
    for kept, own in zip(policies[3].parameters(), learner.policy.parameters(), strict=True):
        assert torch.equal(kept, own)
    fresh_ones = learner._prepare(batch([3]), None, TokenMetrics(), is_whole=True).rollouts
    assert not any(rollout.columns for rollout in fresh_ones)


def test_versions_that_nobody_needs_are_let_go_and_one_that_is_missing_is_told() -> None:
    learner, _, _ = learner_with_policies()
    (snapshots,) = learner.settings.plugins
    assert snapshots.versions == [0, 2, 3]
    needed: set[int] = {3, 2, 7}
    snapshots._run = replace(snapshots._run, max_staleness=3, open_versions=lambda version: needed)
    logs = snapshots.on_update_end(GroupBatch([], 4, PassRule(), lambda own: [own]))
    size = sum(weight.numel() for weight in learner.policy.parameters()) * 8 / 2**30
    assert logs == {"snapshots/versions": 3.0, "snapshots/gib": pytest.approx(3 * size)}
    assert snapshots.versions == [2, 3]
    snapshots.on_batch_start()
    assert snapshots.versions == [2, 3, 4]
    with pytest.raises(ValueError, match=r"Tokens of policy version 0 wait to be trained on, .* have not been kept"):
        learner.learn(batch([0, 3]))


def test_frozen_weights_are_not_kept_and_those_that_are_come_back_from_a_checkpoint() -> None:
    policy: Any = random_policy()
    _, *trained = policy.parameters()
    next(policy.parameters()).requires_grad_(False)
    first = [weight.detach().clone() for weight in trained]
    snapshots, resumed = snapshots_of(policy), snapshots_of(policy)
    snapshots.hold(0)
    resumed.load_state_dict(snapshots.state_dict())
    moved(policy, 1)
    snapshots.hold(0)  # it is there already
    later = [weight.detach().clone() for weight in trained]
    for kept in (snapshots, resumed):
        with pytest.raises(KeyError), kept.lend(0):
            assert all(torch.equal(*pair) for pair in zip(trained, first, strict=True))
            raise KeyError
        assert all(torch.equal(*pair) for pair in zip(trained, later, strict=True))
        assert len(kept.state_dict()["weights"][0]) == len(trained)


def test_snapshots_that_may_not_fit_are_refused() -> None:
    policy: Any = random_policy()
    one = snapshots_of(policy).one_gib
    for limit_gib in (3.01 * one, None):
        snapshots_of(policy, limit_gib, updates_per_batch=4).check_memory(8)
    run = TrainingRun(policy, None, 0, 1, Ranks(), max_staleness=8, open_versions=lambda version: {version})
    message = r"weights of 9 versions at a time \(max_staleness 8, 1 updates a batch\).* its snapshot_gib allows"
    with pytest.raises(ValueError, match=message):
        fresh(Snapshots(8.9 * one)).on_train_start(run)
    resumed = replace(run, version=4, open_versions=lambda version: {version, 2})
    with pytest.raises(ValueError, match=r"Tokens of policy version 2 wait to be trained on, .* have not been kept"):
        fresh(Snapshots()).on_train_start(resumed)


def trajectory(*versions: int) -> Trajectory:
    return Trajectory([5] * len(versions), [-1.0] * len(versions), versions)


@pytest.mark.parametrize(("leftovers", "expected"), [("keep", {2, 4, 5}), ("discard", {4})])
def test_a_buffer_tells_the_versions_that_may_yet_be_trained_on(leftovers: Any, expected: set[int]) -> None:
    """A prefix goes on or not, what has ended waits, and what is too old is sampled anew."""
    prompt, sampling = Prompt("train/0", (3,), ""), SamplingParams()
    buffer = RolloutBuffer(ReleaseRule(num_groups=1, leftovers=leftovers, max_staleness=3))
    requests = [Request(prompt, (sample,), sampling) for sample in range(3)]
    buffer.open(requests)
    buffer.ask(requests[1].after(trajectory(2, 5)))
    buffer.ask(requests[2].after(trajectory(1)))
    ended(buffer, Completion(requests[0], [5], [-1.0], [4], "stop"))
    assert buffer.versions(5) == expected
