"""Decoding in a thread: what is given out, while it goes on, and what is left at a stop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hand_made import plugin

from lit_grpo.faults import Phases
from lit_grpo.policy.loading import load_policy, load_tokenizer
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.rewards import RewardRunner, load_rewards
from lit_grpo.rollout.buffer import RolloutBuffer, group_requests
from lit_grpo.rollout.loop import RolloutLoop
from lit_grpo.rollout.pump import RolloutPump
from lit_grpo.rollout.rules import SYNCHRONOUS, ReleaseRule
from lit_grpo.rollout.slots.generator import SlotGenerator
from lit_grpo.types import Prompt, PromptBatch, SamplingParams

PROMPTS = [Prompt(name, (2, 3, 4 + number), "") for number, name in enumerate("abcdef")]
SAMPLING = SamplingParams(max_tokens=24)


def length(completion: str) -> float:
    return float(len(completion))


@pytest.fixture
def rewards() -> Iterator[RewardRunner]:
    runner = RewardRunner(load_rewards([length], 10.0))
    yield runner
    runner.close()


@pytest.fixture
def generator(policy_folder: Path) -> SlotGenerator:
    generator = SlotGenerator(4)
    policy = load_policy(str(policy_folder))
    generator.start(PolicySpec(policy, load_tokenizer(str(policy_folder))))
    generator.load_weights(policy.named_parameters(), 0)
    return generator


def begin(pump: RolloutPump, generator: SlotGenerator, rewards: RewardRunner, rule: ReleaseRule) -> RolloutBuffer:
    buffer = RolloutBuffer(rule)
    buffer.open(group_requests(PROMPTS, 3, SAMPLING, seed=0))
    pump.start(RolloutLoop(generator, buffer, listeners=[pump]))
    return buffer


def nothing() -> None:
    pass


def test_batches_are_given_out_while_the_rest_is_decoded(generator: SlotGenerator, rewards: RewardRunner) -> None:
    pump = RolloutPump(rewards)
    buffer = begin(pump, generator, rewards, plugin("asynchronous").rule(2, 3))
    first = pump.take(nothing)
    assert len(first) == 2 and all(rollout.rewards for group in first for rollout in group.rollouts)
    stats = pump.stop()
    assert stats is not None and stats.num_tokens >= sum(r.completion.num_tokens for g in first for r in g.rollouts)
    assert not pump.runs and generator.capacity().free_slots == 4
    assert len(buffer) == 6  # what is given out stays until it has been trained on
    buffer.end_update()
    seen = {group.key for group in first}
    for _ in range(2):  # it goes on from where it stopped, and rests once all have ended
        pump.start(RolloutLoop(generator, buffer, listeners=[pump]))
        groups = pump.take(nothing)
        assert len(groups) == 2 and not seen & {group.key for group in groups}
        seen |= {group.key for group in groups}
        pump.stop()
        buffer.end_update()
    assert len(buffer) == 0 and len(seen) == 6


def test_groups_arrive_one_after_another_until_all_are_there(generator: SlotGenerator, rewards: RewardRunner) -> None:
    pump = RolloutPump(rewards)
    buffer = begin(pump, generator, rewards, SYNCHRONOUS)
    batch = PromptBatch(PROMPTS)
    arrivals = list(pump.arriving(batch, Phases()))
    assert len(arrivals) > 1 and len(buffer) == 0
    groups = [group for groups in arrivals for group in groups]
    assert [group.key for group in batch.groups] == [(prompt.prompt_id, 0) for prompt in PROMPTS]
    assert sorted(group.key for group in groups) == [group.key for group in batch.groups]
    assert all(len(group.rollouts) == 3 and rollout.reward > 0 for group in groups for rollout in group.rollouts)
    stats = pump.stop()
    assert stats is not None and pump.metrics(stats)["time/generation_s"] > 0


def test_a_drained_stop_lets_what_is_decoded_end(generator: SlotGenerator, rewards: RewardRunner) -> None:
    pump = RolloutPump(rewards, drains=True)
    buffer = begin(pump, generator, rewards, plugin("asynchronous").rule(1, 3))
    pump.take(nothing)
    pump.stop()
    assert all(request.prefix.num_tokens == 0 for request in buffer.unfinished)
    assert generator.capacity().free_slots == 4


def test_more_can_be_opened_between_two_steps(generator: SlotGenerator, rewards: RewardRunner) -> None:
    pump = RolloutPump(rewards)
    buffer = begin(pump, generator, rewards, plugin("asynchronous").rule(6, 3))
    assert len(pump.take(nothing)) == 6
    with pump._between_steps():
        assert threading.current_thread() is threading.main_thread() and not buffer.asks
    pump.stop()


def test_a_failure_in_the_thread_takes_no_rewards_from_what_has_been_given_out(
    generator: SlotGenerator, rewards: RewardRunner
) -> None:
    (group, *_), _ = RolloutLoop(generator).collect(PROMPTS, 3, SAMPLING, seed=0)
    rewards.submit(group)
    RolloutPump(rewards).on_rollout_end(failed=True)
    rewards.gather([group])
    assert all(rollout.rewards for rollout in group.rollouts)


@pytest.mark.parametrize("wants", ["take", "arriving", "stop"])
def test_what_fails_in_the_thread_is_raised_where_it_is_waited_for(
    generator: SlotGenerator, rewards: RewardRunner, monkeypatch: pytest.MonkeyPatch, wants: str
) -> None:
    pump, failed = RolloutPump(rewards), threading.Event()

    def fails() -> Any:
        failed.set()
        raise RuntimeError("no light")

    monkeypatch.setattr(generator, "step", fails)
    begin(pump, generator, rewards, SYNCHRONOUS)
    failed.wait(120)
    ways: dict[str, Callable[[], Any]] = {"take": lambda: pump.take(nothing), "stop": pump.stop}
    ways["arriving"] = lambda: list(pump.arriving(PromptBatch(PROMPTS), Phases()))
    with pytest.raises(RuntimeError, match="no light"):
        ways[wants]()
    assert pump.stop() is None  # it is raised once
    assert generator.capacity().free_slots == 4
