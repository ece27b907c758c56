"""Modes as data, and what a buffer does for them."""

from __future__ import annotations

import pytest
from hand_made import plugin
from test_buffer import SAMPLING, A, B, ended, tokens

from lit_grpo.compatibility import Requirement
from lit_grpo.plugins import RunFacts
from lit_grpo.rollout.buffer import Renewal, RolloutBuffer, group_requests
from lit_grpo.rollout.rules import SYNCHRONOUS, ReleaseRule, RolloutMode
from lit_grpo.types import Prompt


def test_synchronous_is_the_default_and_carries_nothing() -> None:
    mode = RolloutMode()
    assert not mode.carries and mode.requirement("mode") == Requirement("mode")
    assert mode.rule(8, 4) == SYNCHRONOUS


def test_fields_of_a_mode_are_set_behind_its_name() -> None:
    mode = plugin("april:batches_in_work=1.5,max_staleness=4")
    assert mode == RolloutMode(1.5, leftovers="keep", max_staleness=4)
    assert mode.rule(4, 8) == ReleaseRule(4, None, None, "keep", 4, 3)
    assert plugin("sortedrl").rule(4, 8) == ReleaseRule(None, 32, None, "discard", 0, 3)
    assert plugin("chunked:tokens_per_update=5").rule(4, 8).num_steps == 5


def test_a_mode_of_your_own_is_the_class_with_other_values() -> None:
    mode = plugin("lit_grpo.rollout.rules.RolloutMode:leftovers=keep,max_staleness=5,unit=completion")
    assert mode == RolloutMode(leftovers="keep", max_staleness=5, unit="completion")
    assert mode.carries and mode.num_wanted(num_open=7, num_prompts=2) == 5 and mode.rule(2, 8).num_completions == 16


@pytest.mark.parametrize(
    ("mode", "num_open", "wanted"),
    [("april", 0, 8), ("april", 5, 3), ("april", 9, 0), ("sortedrl", 0, 16), ("sortedrl", 1, 0)],
)
def test_a_mode_says_how_many_prompts_it_wants(mode: str, num_open: int, wanted: int) -> None:
    assert plugin(mode).num_wanted(num_open, 4) == wanted


def test_a_mode_has_to_go_with_the_updates() -> None:
    plugin("april:max_staleness=4").check(RunFacts(2, 2, 16, 4))
    with pytest.raises(ValueError, match="max_staleness is 3, and every batch takes 4 optimizer steps"):
        plugin("april:max_staleness=3").check(RunFacts(2, 2, 16, 4))
    with pytest.raises(ValueError, match=r"tokens_per_update is 16, and sampling\.max_tokens is 16"):
        plugin("chunked:tokens_per_update=16").check(RunFacts(2, 2, 16, 1))


PACED = plugin("asynchronous:max_staleness=2").rule(1, 1)


def test_a_release_waits_for_what_would_be_too_old_after_it_and_gives_it_out_first() -> None:
    buffer, (a, b, c) = RolloutBuffer(PACED), group_requests([A, B, Prompt("c", (3,), "")], 1, SAMPLING, 7)
    buffer.open([a, b, c])
    assert PACED.max_restarts == 0
    buffer.ask(c.after(tokens(4, version=1)))  # the last of them has been begun first
    assert buffer.renew(2) == Renewal(0, 1)
    ended(buffer, b.after(tokens(5, version=2)).ended("stop"))
    assert buffer.ready()
    buffer.renew(3)
    assert not buffer.ready()  # at version 4 its oldest token would be 3 updates old
    ended(buffer, c.after(tokens(4, version=1)).ended("stop"))
    assert buffer.ready()
    assert [group.prompt.prompt_id for group in buffer.take()] == ["c"]


def test_what_a_checkpoint_has_unscored_is_whole_again() -> None:
    rule = ReleaseRule(1, leftovers="keep", max_staleness=1)
    buffer, (a0, b0) = RolloutBuffer(rule), group_requests([A, B], 1, SAMPLING, 7)
    buffer.open([a0, b0])
    scored = ended(buffer, a0.after(tokens(4)).ended("stop"))
    assert scored is not None
    scored.rollouts[0].rewards = {"right": 1.0}
    ended(buffer, b0.after(tokens(5)).ended("stop"))
    other = RolloutBuffer(rule)
    other.load_state_dict(buffer.state_dict())
    assert [group.prompt.prompt_id for group in other.renew(0).unscored] == ["b"] and other.renew(0).unscored == ()
    assert other.num_waiting == 2


PARTS = ReleaseRule(num_completions=3, leftovers="keep", max_staleness=1)


def test_a_group_leaves_in_parts_and_what_has_left_counts_in_its_statistics() -> None:
    buffer, (a0, a1, a2, b0, b1, b2) = RolloutBuffer(PARTS), group_requests([A, B], 3, SAMPLING, seed=7)
    buffer.open([a0, a1, a2, b0, b1, b2])
    for request in (b1, a2):
        assert ended(buffer, request.after(tokens(1)).ended("stop")) is None
    assert not buffer.ready()
    ended(buffer, b0.after(tokens(1)).ended("stop"))
    assert buffer.ready()
    parts = buffer.close()
    assert [[r.completion.request.path for r in part.rollouts] for part in parts] == [[(2,)], [(0,), (1,)]]
    for part in parts:
        for rollout in part.rollouts:
            rollout.reward = 1.0
    assert buffer.take() == parts and buffer.num_left == 2
    buffer.end_update()
    assert buffer.unfinished == [a0, a1, b2] and not buffer.ready()
    for request in (a0, a1, b2):
        ended(buffer, request.after(tokens(4)).ended("stop"))
    assert [len(part.rollouts) for part in buffer.close()] == [2, 1]
    a, b = buffer.take()
    assert buffer.num_left == 0
    assert [(r.completion.request.path, r.kept, r.reward) for r in a.rollouts[:1]] == [((2,), False, 1.0)]
    assert [r.completion.request.path for r in a.fresh] == [(0,), (1,)]
    assert [r.completion.request.path for r in b.fresh] == [(2,)] and len(b.rollouts) == 3
    buffer.end_update()
    assert len(buffer) == 0


def test_a_rollout_of_a_fixed_length_goes_on_until_it_has_something_to_give_out() -> None:
    for unit, num_needed in (("completion", 1), ("group", 2)):
        mode = plugin(f"chunked:unit={unit},tokens_per_update=5")
        buffer, requests = RolloutBuffer(mode.rule(1, 2)), group_requests([A, B], 2, SAMPLING, 7)
        buffer.open(requests)
        for number in range(num_needed):
            assert not buffer.ready(5)
            ended(buffer, requests[number].after(tokens(1)).ended("stop"))
        assert buffer.ready(5) and not buffer.ready(4)
        buffer.close()
        assert len(buffer.take()) == 1


def test_what_has_ended_and_waits_begins_anew_when_it_is_too_old() -> None:
    buffer, (a0, a1) = (
        RolloutBuffer(ReleaseRule(1, leftovers="keep", max_staleness=1)),
        group_requests([A], 2, SAMPLING, 7),
    )
    buffer.open([a0, a1])
    ended(buffer, a0.after(tokens(4, 5, version=3)).ended("stop"))
    buffer.ask(a1.after(tokens(6, version=4)))
    assert buffer.renew(4) == Renewal(0, 1)
    assert buffer.renew(5) == Renewal(2, 1)
    assert sorted(request.prefix.num_tokens for request in buffer.unfinished) == [0, 1]


def test_a_release_waits_for_a_group_that_has_begun_anew_too_often() -> None:
    rule = ReleaseRule(num_completions=1, leftovers="discard", max_restarts=1)
    buffer, (a0, a1) = RolloutBuffer(rule), group_requests([A], 2, SAMPLING, 7)
    buffer.open([a0, a1])
    for version in (1, 2):
        assert not buffer.ready()
        buffer.ask(a1.after(tokens(6, 7, version=version - 1)))
        assert buffer.renew(version) == Renewal(2, 0)
    ended(buffer, a0.after(tokens(4, version=2)).ended("stop"))
    assert not buffer.ready()
    ended(buffer, a1.after(tokens(4, version=2)).ended("stop"))
    assert buffer.ready()


def test_an_interrupted_rollout_leaves_the_buffer_as_it_was() -> None:
    buffer, (a0, a1) = RolloutBuffer(PARTS), group_requests([A], 2, SAMPLING, 7)
    buffer.open([a0, a1])
    buffer.ask(a1.after(tokens(6, version=0)))
    before = repr(buffer.state_dict())
    buffer.begin()
    buffer.renew(9)
    ended(buffer, a0.after(tokens(4)).ended("stop"))
    buffer.close()
    assert buffer.take() and repr(buffer.state_dict()) == before  # what a checkpoint has until it is trained on
    buffer.undo()
    assert repr(buffer.state_dict()) == before
    buffer.begin()
    ended(buffer, a0.after(tokens(4)).ended("stop"))
    buffer.close()
    buffer.take()
    buffer.end_update()
    assert repr(buffer.state_dict()) != before
