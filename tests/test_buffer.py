"""Groups between their prompts and the update, and the rules that they are released by."""

from __future__ import annotations

import io
import math

import pytest
import torch

from lit_grpo.rollout.buffer import Renewal, RolloutBuffer, group_requests
from lit_grpo.rollout.rules import SYNCHRONOUS, ReleaseRule
from lit_grpo.types import Completion, Prompt, Request, RolloutGroup, SamplingParams, Trajectory

SAMPLING = SamplingParams(max_tokens=9, stop=("#",))
A, B = Prompt("a", (2, 3), "a?", {"answer": "4", "level": 2}), Prompt("b", (5,), "b?", visit=1)
KEEP = ReleaseRule(num_groups=1, leftovers="keep", max_staleness=2)


def open_buffer(rule: ReleaseRule = SYNCHRONOUS, num_samples: int = 2) -> tuple[RolloutBuffer, list[Request]]:
    buffer, requests = RolloutBuffer(rule), group_requests([A, B], num_samples, SAMPLING, seed=7)
    buffer.open(requests)
    return buffer, requests


def tokens(*ids: int, version: int = 3) -> Trajectory:
    return Trajectory(ids, [-0.5] * len(ids), [version] * len(ids), entropy=0.25)


def ended(buffer: RolloutBuffer, completion: Completion) -> RolloutGroup | None:
    """End a completion as a rollout does; return its group if it is whole now."""
    buffer.ledger.remove(completion.request.key)
    buffer.finish(completion)
    return buffer.make_due(completion.request.group)


def dropped(buffer: RolloutBuffer, request: Request) -> RolloutGroup | None:
    """Leave a request out of its group; return that if it is whole now."""
    buffer.ledger.remove(request.key)
    return buffer.make_due(request.group)


def test_a_group_comes_out_once_its_last_member_has_ended_and_in_the_order_of_arrival() -> None:
    buffer, (a0, a1, b0, b1) = open_buffer()
    for request in (b1, b0, a1):
        group = ended(buffer, request.after(tokens(4, 1)).ended("stop"))
        assert (group is not None) == (request is b0)
    assert not buffer.ready() and buffer.unfinished == [a0] and buffer.take()[0].key == ("b", 1)
    ended(buffer, a0.after(tokens(1)).ended("stop"))
    assert buffer.ready()
    (group,) = buffer.take()
    assert [rollout.completion.request.path for rollout in group.rollouts] == [(0,), (1,)]
    assert len(buffer) == 0 and buffer.ready()


def test_a_group_may_lose_members_and_all_of_them() -> None:
    buffer, (a0, a1, b0, b1) = open_buffer()
    assert dropped(buffer, a0) is None
    ended(buffer, a1.after(tokens(1)).ended("stop"))
    assert dropped(buffer, b0) is None
    empty = dropped(buffer, b1)
    assert empty is not None and empty.rollouts == []
    assert [len(group.rollouts) for group in buffer.take()] == [1, 0]


def test_a_group_that_has_lost_all_members_is_released_after_a_resume_too() -> None:
    buffer, requests = open_buffer(KEEP)
    for request in requests[:2]:
        dropped(buffer, request)
    resumed = RolloutBuffer(KEEP)
    resumed.load_state_dict(buffer.state_dict())
    assert resumed.ready() and resumed.num_waiting == 1
    assert [(group.key, group.rollouts) for group in resumed.take()] == [(("a", 0), [])]


def test_a_rule_says_how_many_groups_are_released() -> None:
    buffer, requests = open_buffer(KEEP)
    for request in requests[2:]:
        ended(buffer, request.after(tokens(1)).ended("stop"))
    assert buffer.ready()
    assert [group.key for group in buffer.take()] == [("b", 1)] and len(buffer) == 2
    buffer.end_update()
    assert len(buffer) == 1


@pytest.mark.parametrize("rule", [SYNCHRONOUS, ReleaseRule(1, leftovers="discard"), KEEP])
def test_prefixes_that_are_too_old_begin_anew(rule: ReleaseRule) -> None:
    buffer, (a0, a1, *_) = open_buffer(rule)
    old, young = a0.after(tokens(4, version=3).followed_by([5], [-1.0], version=5)), a1.after(tokens(6, version=4))
    buffer.ask(old)
    buffer.ask(young)
    assert buffer.renew(version=6) == (Renewal(2, 1) if rule is KEEP else Renewal(3, 0))
    assert [request.prefix.num_tokens for request in buffer.unfinished] == [0, 1 if rule is KEEP else 0, 0, 0]


def test_a_prefix_of_a_version_that_is_yet_to_come_is_refused() -> None:
    buffer, (a0, *_) = open_buffer(KEEP)
    buffer.ask(a0.after(tokens(4, version=9)))
    with pytest.raises(ValueError, match=r"tokens of policy version 9, which this run, at version 8"):
        buffer.renew(version=8)


def test_a_checkpoint_keeps_what_has_ended_and_what_has_begun() -> None:
    buffer, (a0, a1, b0, b1) = open_buffer(KEEP)
    ended(buffer, a0.after(tokens(4, 1)).ended("stop", "4"))
    buffer.ask(a1.after(tokens(4, 5).followed_by([6])))
    for request in (b0, b1):
        group = ended(buffer, request.after(tokens(1)).ended("length"))
    assert group is not None
    group.rollouts[1].extra.update({"feedback/right": "no sum", "poise/value": 0.25, "judge": [1, "a"], "by": object()})
    group.rollouts[1].rewards, group.rollouts[1].reward, group.rollouts[1].kept = {"right": 1.0, "x": None}, 0.5, False
    file = io.BytesIO()
    torch.save(buffer.state_dict(), file)
    file.seek(0)
    other = RolloutBuffer(KEEP)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert describe(other) == describe(buffer)
    (group,) = other.take()
    assert group.key == ("b", 1) and group.rollouts[1].rewards == {"right": 1.0, "x": None}
    assert math.isnan(group.rollouts[0].reward) and not group.rollouts[1].kept
    assert [rollout.feedback for rollout in group.rollouts] == ["", "no sum"]
    assert group.rollouts[1].extra == {"feedback/right": "no sum", "poise/value": 0.25, "judge": [1, "a"]}
    (rest,) = other.unfinished
    assert rest == a1 and rest.prefix.segments == ((2, 3, True), (1, None, False)) and rest.prefix.entropy == 0.25
    whole = ended(other, rest.after(rest.prefix.followed_by([1], [-0.1], 3)).ended("stop"))
    assert whole is not None and whole.prompt == A
    assert [r.completion.token_ids_T.tolist() for r in whole.rollouts] == [[4, 1], [4, 5, 6, 1]]


def describe(buffer: RolloutBuffer) -> str:
    return repr(buffer.state_dict())


def test_a_group_without_a_member_is_refused() -> None:
    with pytest.raises(ValueError, match="A group of 0 samples has no member; give num_generations of 1 or more"):
        group_requests([A], 0, SAMPLING, seed=0)


def test_a_further_sample_needs_an_open_group() -> None:
    buffer, _ = open_buffer()
    buffer.ask(Request(A, (2,), SAMPLING))
    assert [request.path for request in buffer.unfinished] == [(0,), (1,), (2,), (0,), (1,)]
    with pytest.raises(ValueError, match=r"No group of \('c', 0\) is open"):
        buffer.ask(Request(Prompt("c", (1,), ""), (0,), SAMPLING))
