"""Successes of earlier visits that take part in a prompt's group again."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from conftest import random_policy
from hand_made import alone, make_rollout, plugin
from test_learner import make_learner, member

from lit_grpo.methods import make_plugins
from lit_grpo.methods.replay import Replay
from lit_grpo.plugins import GroupBatch, fresh
from lit_grpo.rollout.session import RolloutSession
from lit_grpo.types import (
    OBSERVED,
    Completion,
    PassRule,
    Prompt,
    Rollout,
    RolloutGroup,
    SamplingParams,
)
from lit_grpo.update.objective.corrections import Correction
from lit_grpo.update.objective.objective import Objective

EXACT = PassRule("exact")
FIRST, SECOND = Prompt("train/0", (3, 4, 5), ""), Prompt("train/1", (7,), "")


def sampled(prompt: Prompt, path: int, tokens: Sequence[int], reward: float, version: int = 0) -> Rollout:
    rollout = make_rollout(prompt.token_ids, tokens, reward, None, prompt.prompt_id, path, version=version)
    request = replace(rollout.completion.request, prompt=prompt)
    completion = Completion.of(request, rollout.completion, "stop", f"text of {path}")
    return Rollout(prompt, completion, {"exact": None if math.isnan(reward) else reward}, reward)


def group(prompt: Prompt, rewards: Sequence[float], version: int = 0, visit: int = 0) -> RolloutGroup:
    """Members with tokens of their own."""
    prompt = replace(prompt, visit=visit)
    members = [sampled(prompt, path, [9, 2 + visit, 2 + path], reward, version) for path, reward in enumerate(rewards)]
    return RolloutGroup(prompt, members)


def remembering(spec: str, *groups: RolloutGroup, version: int = 1) -> Replay:
    memory = fresh(plugin(spec))
    for each in groups:
        memory.on_update_end(GroupBatch([each], version, EXACT, alone))
    return memory


def joined(memory: Replay, group: RolloutGroup, version: int) -> list[Rollout]:
    memory.add_members(GroupBatch([group], version, EXACT, alone))
    return [rollout for rollout in group.rollouts if rollout.replayed]


def sources(replayed: Sequence[Rollout]) -> list[tuple[int, int]]:
    """Visit and path of what is replayed, as :func:`group` has written them into its tokens."""
    return [tuple(int(token) - 2 for token in each.completion.token_ids_T[1:]) for each in replayed]  # pyrefly: ignore[bad-return]


# ---- which, and how many -------------------------------------------------------------------------------


def test_the_most_recent_join_with_all_that_they_were_sampled_with() -> None:
    memory = remembering("rlep:choice=recent", group(FIRST, [1, 0, 1]), group(FIRST, [0, 1, 1], 2, visit=1), version=3)
    failed = group(FIRST, [0, 0, 0, 0], 7, visit=2)
    replayed = joined(memory, failed, 7)
    assert sources(replayed) == [(1, 2), (1, 1)]
    assert [each.completion.request.key for each in replayed] == [("train/0", 2, (-1,)), ("train/0", 2, (-2,))]
    assert all(each.prompt is failed.prompt and each.reward == 1.0 and each.kept for each in replayed)
    assert replayed[0].completion.versions_T.tolist() == [2, 2, 2] and replayed[0].completion.text == "text of 2"
    assert replayed[0].completion.logprobs_T.tolist() == group(FIRST, [1]).rollouts[0].completion.logprobs_T.tolist()
    assert failed.fresh == failed.rollouts[:4]
    assert memory.metrics(alone) == {
        "replay/members": 2 / 6,
        "replay/age": 5.0,
        "replay/frac_revived": 1.0,
        "replay/prompts": 1.0,
    }


def test_the_highest_rewards_join_and_of_equals_the_most_recent() -> None:
    earlier = [group(FIRST, [1.5, 3, 1, 0]), group(FIRST, [2, 0, 1.5, 1.5], 1, visit=1)]
    memory = remembering("repo:members=4", *earlier, version=2)
    assert sources(joined(memory, group(FIRST, [0] * 4, 2, 2), 2)) == [(0, 1), (1, 0), (1, 3), (1, 2)]


def test_random_ones_are_drawn_by_a_hash_of_the_visit_and_each_as_often() -> None:
    counts = [0] * 4
    for visit in range(1, 401):
        again = [remembering("rlep:members=1", group(FIRST, [1] * 4)) for _ in range(2 if visit < 100 else 1)]
        one, *other = (sources(joined(memory, group(FIRST, [0, 0], 1, visit), 1))[0] for memory in again)
        assert other in ([], [one])
        counts[one[1]] += 1
    assert sum(counts) == 400 and all(70 < count < 130 for count in counts)  # 100 each, 3.5 standard deviations


@pytest.mark.parametrize("share", [0.1, 0.2, 0.25, 1 / 3, 0.5, 0.9])
def test_no_more_join_than_the_share_allows(share: float) -> None:
    rule = Replay(members=50, share=share)
    for number in range(1, 30):
        most = max(count for count in range(51) if count <= share * (number + count) + 1e-9)
        assert rule.most(number) == most
    assert Replay(members=3, share=0.5).most(10) == 3
    memory = remembering("rlep:members=5,share=0.25", group(FIRST, [1] * 6))
    assert len(joined(memory, group(FIRST, [0] * 8, 1, 1), 1)) == 2
    assert not joined(memory, group(FIRST, [0, 0, math.nan, math.nan], 1, 2), 1)  # of two that have a reward


def test_nothing_is_replayed_that_is_too_old_or_too_long_or_of_another_prompt() -> None:
    memory = remembering("rlep:max_age=3", group(FIRST, [1, 1], 4), version=5)
    assert len(joined(memory, group(FIRST, [0] * 4, 7, 1), 7)) == 2
    assert not joined(memory, group(FIRST, [0] * 4, 8, 2), 8)
    assert not joined(memory, group(SECOND, [0] * 4, 7, 1), 7)
    assert not joined(memory, group(replace(FIRST, token_ids=(3, 4, 6)), [0] * 4, 7, 1), 7)  # other data, the same id
    short = group(FIRST, [0] * 4, 7, 3)
    for rollout in short.rollouts:
        rollout.completion.request = replace(rollout.completion.request, sampling=SamplingParams(max_tokens=2))
    assert not joined(memory, short, 7)


def test_groups_that_would_show_no_difference_or_are_not_trained_on_get_none() -> None:
    memory = remembering("rlep", group(FIRST, [1, 1, 0]))
    passed, nothing = group(FIRST, [1, 1, 1], 1, 1), group(FIRST, [math.nan] * 3, 1, 2)
    left_out, differs = group(FIRST, [0, 0, 0], 1, 3), group(FIRST, [0, 1, 1], 1, 4)
    for rollout in left_out.rollouts:
        rollout.kept = False
    memory.add_members(
        GroupBatch([passed, nothing, left_out, differs, RolloutGroup(replace(FIRST, visit=5), [])], 1, EXACT, alone)
    )
    assert [len(each.rollouts) for each in (passed, nothing, left_out, differs)] == [3, 3, 3, 5]
    assert (
        memory.metrics(alone)["replay/members"] == 2 / (3 + 3 + 2) and memory.metrics(alone)["replay/frac_revived"] == 0
    )


def test_groups_that_arrive_one_after_another_are_joined_as_they_come() -> None:
    session = RolloutSession(make_plugins(["rlep"]))
    memory = cast(Replay, session.plugins["rlep"])
    memory.on_update_end(GroupBatch([group(FIRST, [1, 0])], 1, EXACT, alone))
    groups = [group(SECOND, [0, 0], 1, 1), group(FIRST, [0, 0], 1, 1)]
    run: Any = SimpleNamespace(policy_version=1, pass_rule=EXACT, ranks=SimpleNamespace(gather=alone))
    arriving = session._with_members(run, iter([each] for each in groups))
    arrived = [[len(each.rollouts) for each in some] for some in arriving]
    assert arrived == [[2], [3]] and memory.metrics(alone)["replay/members"] == 1 / 5


# ---- what is remembered --------------------------------------------------------------------------------


def test_successes_alone_are_remembered_and_each_once() -> None:
    memory = fresh(plugin("rlep:members=9,share=0.9,choice=recent"))
    batch = group(FIRST, [1, 0.9, math.nan, 1, 1, 2, 1])
    batch.rollouts[3].completion.finish_reason = "abort"
    batch.rollouts[4].trained_before = True  # in an earlier part
    batch.rollouts[5].kept = False  # by a selection: it has passed all the same
    batch.rollouts[6] = member(FIRST, 6, [OBSERVED] * 3, [True] * 3, 1.0)  # nothing to learn from
    memory.on_update_end(GroupBatch([batch], 1, EXACT, alone))
    again = group(FIRST, [0, 0], 1, 1)
    assert sources(joined(memory, again, 1)) == [(0, 5), (0, 0)]
    memory.on_update_end(GroupBatch([again], 2, EXACT, alone))  # what was replayed is not remembered as of this visit
    assert memory.metrics(alone)["replay/members"] == 0  # of the next batch, so far
    third = joined(memory, group(FIRST, [0, 0], 2, 2), 2)
    assert sources(third) == [(0, 5), (0, 0)] and memory.metrics(alone)["replay/age"] == 2


def test_the_memory_is_bounded_and_forgets_what_is_too_old() -> None:
    memory = fresh(plugin("rlep:kept=3,max_age=5,members=9,share=0.9,choice=recent"))
    for visit in range(4):
        memory.on_update_end(
            GroupBatch(
                [group(FIRST, [1, 1], visit, visit), group(SECOND, [0, 0], visit, visit)], visit + 1, EXACT, alone
            )
        )
    assert len(memory.state_dict()["path"]) == 3
    assert sources(joined(memory, group(FIRST, [0] * 4, 4, 4), 4)) == [(3, 1), (3, 0), (2, 1)]
    memory.on_update_end(GroupBatch([], 8, EXACT, alone))
    assert len(memory.state_dict()["path"]) == 2 and memory.metrics(alone)["replay/prompts"] == 1
    memory.on_update_end(GroupBatch([], 9, EXACT, alone))
    assert not memory.state_dict()["path"] and memory.metrics(alone)["replay/prompts"] == 0


# ---- what is learned from it --------------------------------------------------------------------------


def trained_groups(logprobs: str = "recomputed") -> tuple[Replay, list[RolloutGroup]]:
    """A memory of two prompts, and groups of their next visits: one of failures alone."""
    first = [member(FIRST, 0, [0] * 6, [True] * 6, 1.0), member(FIRST, 1, [0, 0, 1, 1], [True] * 4, 1.0)]
    second = [member(SECOND, 0, [1, 1, OBSERVED, 1, 1], [True] * 5, 1.0)]
    groups = RolloutGroup(FIRST, first), RolloutGroup(SECOND, second)
    memory = remembering(f"rlep:logprobs={logprobs}", *groups, version=2)
    again = [replace(FIRST, visit=1), replace(SECOND, visit=1)]
    return memory, [
        RolloutGroup(again[0], [member(again[0], 5 + n, [4] * (3 + n), [True] * (3 + n), 0.0) for n in range(3)]),
        RolloutGroup(again[1], [member(again[1], 5 + n, [4] * 4, [True] * 4, float(n == 1)) for n in range(4)]),
    ]


def formula(groups: Sequence[RolloutGroup], corrected: bool, recomputed: bool = False) -> torch.Tensor:
    """The gradient of DAPO's loss, one token after another in float64, of groups with all their members.

    With ``recomputed``, replayed members have the log-probs of the policy itself, as after RLEP's ``compute_log_prob``.
    """
    policy: Any = random_policy().double()
    scored: list[tuple[Rollout, float]] = []
    for each in groups:
        rewards = [rollout.reward for rollout in each.rollouts]
        scale = statistics.stdev(rewards) + 1e-4
        scored += [(rollout, (rollout.reward - statistics.fmean(rewards)) / scale) for rollout in each.rollouts]
    num_tokens = sum(int(rollout.completion.trained_T.sum()) for rollout, _ in scored)
    for rollout, advantage in scored:
        prompt, tokens_T = rollout.prompt.token_ids, rollout.completion.token_ids_T
        input_ids = torch.cat([torch.tensor(prompt), tokens_T])[None]
        logprobs_TV = policy(input_ids=input_ids, use_cache=False).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        losses = []
        for t in range(len(tokens_T)):
            if not rollout.completion.trained_T[t]:
                continue
            logprob, before = logprobs_TV[t, tokens_T[t]], float(rollout.completion.logprobs_T[t])
            if recomputed and rollout.replayed:
                before = float(logprob.detach())
            if corrected:  # the only step on the batch: proximal is the policy itself
                losses.append(-min(math.exp(float(logprob.detach()) - before), 1.2) * advantage * logprob)
            else:
                ratio = (logprob - before).exp()
                losses.append(-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage))
        (torch.stack(losses).sum() / num_tokens).backward()
    return torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])


@pytest.mark.parametrize("logprobs", ["recomputed", "sampled"])
@pytest.mark.parametrize("corrected", [False, True])
def test_replayed_members_are_trained_on_as_members_given_by_hand(corrected: bool, logprobs: str) -> None:
    memory, groups = trained_groups(logprobs)
    memory.add_members(GroupBatch(groups, 4, EXACT, alone))
    recomputed = logprobs == "recomputed"
    stored = [rollout.completion.logprobs_T.clone() for each in groups for rollout in each.rollouts]
    assert [len(each.rollouts) for each in groups] == [5, 5]
    objective = Objective(
        epsilon=0.2,
        epsilon_high=0.28,
        correction=Correction("token_truncate", high=1.2) if corrected else Correction(),
    )
    learner, steps = make_learner(objective=objective, max_tokens_per_micro_batch=16)
    steps.policy_version = 4
    expected = formula(groups, corrected, recomputed)
    learner.learn(groups)
    now = [rollout for each in groups for rollout in each.rollouts]
    for was_T, rollout in zip(stored, now, strict=True):
        changes = recomputed and rollout.replayed
        assert torch.equal(was_T, rollout.completion.logprobs_T) == (not changes)
        assert rollout.completion.newest_version == 4 or not changes
    assert memory.state_dict()["versions"].tolist() == [0] * 6 + [0, 0, 1, 1, 1, 1, -1, 1, 1]  # as they were
    assert float((steps.gradients[0] - expected).norm() / expected.norm()) < 1e-6
    without = formula([RolloutGroup(each.prompt, each.fresh) for each in groups[1:]], corrected)
    assert float((expected - without).norm() / expected.norm()) > 0.1
    by_hand = [
        RolloutGroup(each.prompt, [replace(rollout, replayed=False) for rollout in each.rollouts]) for each in groups
    ]
    learner, others = make_learner(objective=objective, max_tokens_per_micro_batch=16)
    others.policy_version = 4
    learner.learn(by_hand)
    assert torch.equal(steps.gradients[0], others.gradients[0])


def test_a_group_of_failures_gets_its_difference_from_them() -> None:
    memory, groups = trained_groups()
    learner, steps = make_learner()
    learner.learn(groups[:1])
    assert not steps.gradients[0].any()
    memory.add_members(GroupBatch(groups, 4, EXACT, alone))
    learner.learn(groups[:1])
    advantages = [rollout.advantage for rollout in groups[0].rollouts]
    assert all(advantage < 0 for advantage in advantages[:3]) and all(advantage > 0 for advantage in advantages[3:])
    assert steps.gradients[1].any()
