"""Slots of models whose layers have states: what rows keep, copy and give back, beside plain forwards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from conftest import table_rows
from hand_made import full_logprobs

from lit_grpo.policy.spec import PolicySpec
from lit_grpo.rollout.slots.generator import SlotGenerator
from lit_grpo.types import Completion, Key, Prompt, Request, Rollout, SamplingParams
from scripts.make_tiny import make_tokenizer
from tests.doubles.small_models import small_model

FAMILIES = ("qwen3_5_text", "lfm2", "falcon_h1", "mamba")  # the last goes on from a state by one token alone
QUICK = ("qwen3_5_text", "mamba")
LENGTHS = {"a": 2, "b": 9, "c": 21}
PROMPTS = [Prompt(name, tuple(4 + i * 7 % 80 for i in range(length)), "") for name, length in LENGTHS.items()]
SAMPLING = SamplingParams(max_tokens=40)


def make(family: str, num_slots: int = 4, **options: Any) -> SlotGenerator:
    """A generator whose completions end at their limit alone."""
    model = small_model(family)
    generator = SlotGenerator(num_slots, **options)
    generator.start(PolicySpec(model, make_tokenizer()))
    generator.load_weights(model.named_parameters(), 0)
    generator._eos_ids = generator._eos_ids[:0]
    return generator


def requests(count: int) -> list[Request]:
    return [Request(prompt, (sample,), SAMPLING) for prompt in PROMPTS for sample in range(count)]


def decode(generator: SlotGenerator, waiting: Iterable[Request]) -> dict[Key, Completion]:
    """Refill free slots at every step; what runs out of memory goes on later."""
    queue, finished = list(waiting), {}
    while queue or generator.capacity().free_slots < generator.num_slots:
        free_slots = generator.capacity().free_slots
        now, queue = queue[:free_slots], queue[free_slots:]
        generator.submit(now)
        events = generator.step()
        queue += events.preempted
        finished |= {completion.request.key: completion for completion in events.finished}
    return finished


def check(generator: SlotGenerator, done: dict[Key, Completion], count: int) -> None:
    """All have come to an end, with the log-probs of plain forwards."""
    assert len(done) == count
    for completion in done.values():
        expected_T = full_logprobs(generator.policy, Rollout(completion.request.prompt, completion))
        assert torch.allclose(completion.logprobs_T, expected_T, atol=3e-5)


@pytest.mark.parametrize("family", table_rows(FAMILIES, QUICK))
@pytest.mark.parametrize("kept", [True, False])
def test_what_is_set_aside_goes_on_as_if_it_had_not_been(family: str, kept: bool) -> None:
    undisturbed = decode(make(family), requests(2))
    generator, todo = make(family), requests(2)
    generator.submit(todo[:4])
    for _ in range(13):
        generator.step()
    stopped = generator.abort([request.key for request in todo[:3]])
    assert generator._kept.num_tokens > 0
    if not kept:
        generator._kept.fit(0)
    done = decode(generator, [*todo[4:], *stopped])
    check(generator, done, 6)
    assert {key: each.token_ids_T.tolist() for key, each in done.items()} == {
        key: each.token_ids_T.tolist() for key, each in undisturbed.items()
    }
    assert generator._cache.num_rows == generator._cache._state_room == 0


@pytest.mark.parametrize("family", table_rows(FAMILIES, QUICK))
def test_forks_begin_from_the_state_at_their_beginning_or_compute_it(family: str) -> None:
    generator = make(family, 6)
    parent, *children = [Request(PROMPTS[1], (sample,), SAMPLING) for sample in range(4)]
    generator.submit([parent])
    for _ in range(30):
        generator.step()
    (stopped,) = generator.abort([parent.key])
    forks = [child.after(stopped.prefix.until(end)) for child, end in zip(children, (30, 30, 19), strict=True)]
    done = decode(generator, [*forks, stopped])
    check(generator, done, 4)
    told = {key: completion.token_ids_T.tolist() for key, completion in done.items()}
    assert len({tuple(ids) for ids in told.values()}) == 4
    for child, end in zip(children, (30, 30, 19), strict=True):
        assert told[child.key][:end] == told[parent.key][:end]


def test_where_memory_is_short_rows_wait_and_states_count_in_it() -> None:
    roomy = make("qwen3_5_text")
    shape = roomy._shape
    assert shape.states is not None and shape.pieces.state == -(-shape.states.num_bytes // shape.bytes_per_token)
    assert shape.pieces.prompt(9) == 16 + shape.pieces.state
    tight = make("qwen3_5_text", kv_memory="24KiB")  # of two rows and two prompts
    assert tight.budget is not None
    most, finished, queue = 0, dict[Key, Completion](), requests(2)
    while queue or tight.capacity().free_slots < tight.num_slots:
        now, queue = (queue[:1], queue[1:]) if len(tight._rows.requests) < 2 else ([], queue)
        tight.submit(now)
        events = tight.step()
        most = max(most, tight.capacity().kv_tokens_in_use)
        queue += events.preempted
        finished |= {completion.request.key: completion for completion in events.finished}
    check(tight, finished, 6)
    assert 0 < most <= tight.budget.granted_tokens


def test_rows_that_come_and_go_keep_their_states() -> None:
    generator = make("lfm2", 3)
    check(generator, decode(generator, requests(5)), 15)
    cache = generator._cache
    assert cache.states is not None and not cache.num_rows and cache._state_room == 0
    generator.release(PROMPTS)
    assert cache.allocated_tokens == 0
