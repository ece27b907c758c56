"""SlotGenerator with drafts: the same completions, in fewer steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import random_policy

from lit_grpo.policy.loading import SHIPPED, load_tokenizer
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.rollout.generator import Observation
from lit_grpo.rollout.loop import RolloutLoop
from lit_grpo.rollout.slots import SlotGenerator
from lit_grpo.rollout.slots import drafts as drafts_module
from lit_grpo.rollout.slots.queries import Queries
from lit_grpo.rollout.slots.rows import TokenRows
from lit_grpo.tasks import ArithmeticRows
from lit_grpo.types import Completion, Key, Prompt, Request, SamplingParams, Trajectory

PROMPTS = [Prompt("a", (2, 3, 4, 2, 3), ""), Prompt("b", tuple(range(2, 30)), ""), Prompt("c", (5,), "")]
WARM = SamplingParams(temperature=0.5, max_tokens=100)
"""At this temperature a random policy repeats itself, so that drafts are often right, and often not."""


@pytest.fixture(scope="module")
def policies(policy_folder: Path) -> dict[str, PolicySpec]:
    from transformers import AutoModelForCausalLM

    tokenizer = load_tokenizer(str(policy_folder))
    shipped: Any = AutoModelForCausalLM.from_pretrained(SHIPPED)
    random: Any = random_policy()
    return {
        "random": PolicySpec(random, tokenizer),
        "tiny": PolicySpec(shipped, load_tokenizer(str(SHIPPED))),
    }


@pytest.fixture
def make(policies: dict[str, PolicySpec]) -> Callable[..., SlotGenerator]:
    def make_generator(speculate: int, num_slots: int = 48, policy: str = "random", **options: Any) -> SlotGenerator:
        generator = SlotGenerator(num_slots, speculate=speculate, **options)
        generator.start(policies[policy])
        generator.load_weights(generator.policy.named_parameters(), 0)
        return generator

    return make_generator


def requests(sampling: SamplingParams, count: int = 4, prompts: Sequence[Prompt] = PROMPTS) -> list[Request]:
    return [Request(prompt, (sample,), sampling) for prompt in prompts for sample in range(count)]


class Decoded:
    """All that a generator reports until it is empty."""

    def __init__(self, generator: SlotGenerator, todo: Sequence[Request], steps: int | None = None) -> None:
        self.completions: dict[Key, Completion] = {}
        self.observations: list[Observation] = []
        self.num_steps = self.num_drafted = self.num_tokens = self.num_active = 0
        generator.submit(todo)
        while generator.capacity().free_slots < generator.num_slots and self.num_steps != steps:
            events = generator.step()
            self.num_steps += 1
            self.num_drafted += events.num_drafted
            self.num_tokens += events.num_tokens
            self.num_active += events.num_active
            assert events.num_active + events.num_drafted <= generator.num_slots
            assert events.num_active <= events.num_tokens <= events.num_active + events.num_drafted
            self.observations += events.observations
            self.completions |= {completion.request.key: completion for completion in events.finished}

    @property
    def num_accepted(self) -> int:
        return self.num_tokens - self.num_active


def check_same(drafted: dict[Key, Completion], plain: dict[Key, Completion]) -> None:
    assert drafted.keys() == plain.keys()
    for key, completion in drafted.items():
        other = plain[key]
        assert completion.token_ids_T.tolist() == other.token_ids_T.tolist()
        assert (completion.text, completion.finish_reason) == (other.text, other.finish_reason)
        assert torch.allclose(completion.logprobs_T, other.logprobs_T, atol=1e-5)
        assert completion.entropy == pytest.approx(other.entropy, abs=1e-5)
        assert torch.equal(completion.versions_T, other.versions_T)


@pytest.mark.parametrize("speculate", [1, 3, 16])
@pytest.mark.parametrize("num_slots", [16, 48])
@pytest.mark.parametrize(
    "sampling", [WARM, SamplingParams(temperature=0, max_tokens=70), SamplingParams(max_tokens=40, stop=("a", "bc"))]
)
def test_drafts_change_no_token(make: Any, speculate: int, num_slots: int, sampling: SamplingParams) -> None:
    plain = Decoded(make(0, num_slots), requests(sampling))
    drafted = Decoded(make(speculate, num_slots), requests(sampling))
    check_same(drafted.completions, plain.completions)
    assert plain.num_drafted == plain.num_accepted == 0
    assert drafted.num_tokens == plain.num_tokens and drafted.num_steps <= plain.num_steps


def test_drafts_that_are_right_save_steps(make: Any) -> None:
    plain, drafted = Decoded(make(0), requests(WARM)), Decoded(make(3), requests(WARM))
    assert 0 < drafted.num_accepted < drafted.num_drafted  # some were wrong, and were written over
    assert drafted.num_steps < plain.num_steps


def test_the_demos_policy_saves_a_quarter_of_the_steps_where_slots_are_free(make: Any) -> None:
    tokenizer = load_tokenizer(str(SHIPPED))
    rows = [row["prompt"] for row in ArithmeticRows(6, max_divisor=19).rows()]
    prompts = [Prompt(text, tuple(tokenizer.encode(text)), text) for text in rows]
    todo = requests(SamplingParams(max_tokens=128), 8, prompts)
    plain, drafted = (Decoded(make(most, 128, "tiny"), todo) for most in (0, 4))
    check_same(drafted.completions, plain.completions)
    assert drafted.num_steps <= 0.75 * plain.num_steps


def test_what_is_observed_is_the_same(make: Any) -> None:
    found = []
    for most in (0, 3):
        generator = make(most)
        generator.feature_points = (0, 8, 9, 32)
        decoded = Decoded(generator, requests(WARM))
        assert bool(decoded.num_accepted) == bool(most)
        of_key = {}
        for observation in decoded.observations:
            pairs = zip(observation.keys, observation.features, strict=True)
            of_key |= {(key, observation.num_tokens): features for key, features in pairs}
        found.append(of_key)
    plain, drafted = found
    assert drafted.keys() == plain.keys() and {points for _, points in plain} == {0, 8, 9, 32}
    for key, features in drafted.items():
        assert np.allclose(features, plain[key], atol=1e-4)


@pytest.mark.parametrize("in_flight", ["abort", "keep", "recompute"])
def test_rows_that_leave_or_get_new_weights_go_on_with_drafts(make: Any, in_flight: Any) -> None:
    """The steps after which this happens have fewer tokens behind them without drafts, so beginnings are compared."""
    plain = Decoded(make(0), requests(WARM)).completions
    generator = make(3)
    first = Decoded(generator, requests(WARM), steps=20)
    assert first.num_accepted
    if in_flight == "abort":
        stopped = generator.abort([request.key for request in requests(WARM)[::2]])
    else:
        stopped = []
        generator.load_weights(generator.policy.named_parameters(), 1, in_flight)
    second = Decoded(generator, stopped)
    done = first.completions | second.completions
    assert second.num_accepted and done.keys() == plain.keys()
    for key, completion in done.items():
        assert completion.token_ids_T.tolist() == plain[key].token_ids_T.tolist()
    versions = {version for completion in second.completions.values() for version in completion.versions_T.tolist()}
    assert versions == ({0} if in_flight == "abort" else {0, 1})


def test_whoever_waits_comes_before_drafts(make: Any) -> None:
    generator = make(8, num_slots=6)
    decoded = RolloutLoop(generator).collect(PROMPTS, 4, WARM, seed=0)[0]
    plain = RolloutLoop(make(0, num_slots=6)).collect(PROMPTS, 4, WARM, seed=0)[0]
    for group, other in zip(decoded, plain, strict=True):
        for rollout, expected in zip(group.rollouts, other.rollouts, strict=True):
            assert rollout.completion.token_ids_T.tolist() == expected.completion.token_ids_T.tolist()


def test_a_second_visit_drafts_from_the_first(make: Any) -> None:
    """Greedy completions of the second visit are those of the first: all of their drafts are right.

    The loop lets go of a prompt as soon as its last completion has a slot, before anything is drafted.
    """
    loop, found = RolloutLoop(make(4, num_slots=10)), []
    for visit in range(3):
        prompts = [Prompt("a", PROMPTS[0].token_ids, "", visit=visit)]
        found.append(loop.collect(prompts, 1, SamplingParams(temperature=0, max_tokens=30), seed=0)[1])
    first, second, third = found
    assert first.num_tokens == second.num_tokens > 20
    assert second.num_steps == third.num_steps < first.num_steps and second.num_steps < 30 / 3
    assert third.num_accepted == third.num_drafted


def test_no_more_completions_are_kept_than_may_be(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts_module, "MOST_TOKENS", 150)
    generator = make(4)
    plain = Decoded(make(0), requests(WARM)).completions
    check_same(Decoded(generator, requests(WARM)).completions, plain)
    drafts = generator._drafts
    kept = [len(each.token_ids) for completions in drafts._ended.values() for each in completions]
    assert sum(kept) == drafts._num_kept <= 150
    assert not drafts._num_read


def rows_of(*counts: int) -> TokenRows:
    rows = TokenRows(len(counts), 20)
    for sample, count in enumerate(counts):
        prefix = Trajectory(np.arange(count), np.zeros(count), np.zeros(count, dtype=int))
        rows.admit([Request(PROMPTS[0], (sample,), SamplingParams(max_tokens=20), 0, prefix)], 0)
    return rows


def test_queries_lead_on_along_what_was_drafted_right() -> None:
    queries = Queries.of(rows_of(3, 1, 4), [[7, 8], [], [9]])
    assert queries.tokens_N.tolist() == [2, 0, 3, 7, 8, 9]
    assert queries.rows_N.tolist() == [0, 1, 2, 0, 0, 2] and queries.ahead_N.tolist() == [0, 0, 0, 1, 2, 1]
    assert queries.num_drafted == 3
    assert queries.next_right(np.array([0, 1, 2]), np.array([7, 7, 9])).tolist() == [3, 5]
    assert queries.next_right(np.array([0, 1, 2]), np.array([8, 9, 8])).tolist() == []
    assert queries.next_right(np.array([3, 5]), np.array([8, 9])).tolist() == [4]  # 9 is the last of the third row
    assert queries.next_right(np.array([4]), np.array([9])).tolist() == []  # that is a draft of another row


def test_a_negative_number_of_drafts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"speculate must be at least 0, which tries nothing ahead, not -1\."):
        SlotGenerator(speculate=-1)
