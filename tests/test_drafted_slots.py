"""Slots that try tokens ahead, beside slots that do not: whatever is drafted, the samples are the same.

Cases are those of ``test_running_ahead``: models and ways of decoding, plans, points, memory, carried requests, forks,
environments. What is drafted are the tokens of a run without drafts, some of them changed, and tokens beyond its ends.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import random_policy, table_rows
from test_running_ahead import (
    NUM_SEEDS,
    PROMPTS,
    REQUESTS,
    Case,
    Result,
    decode,
    interrupt,
    make,
    small_pieces,
)

from lit_grpo.policy.spec import PolicySpec
from lit_grpo.rollout.loop import RolloutLoop
from lit_grpo.rollout.rules import SYNCHRONOUS
from lit_grpo.rollout.sampling import request_key, sample_tokens, uniform
from lit_grpo.rollout.slots.drafts import Draft, Drafter, suffix
from lit_grpo.rollout.slots.generator import SlotGenerator
from lit_grpo.rollout.slots.kv.cache import SlotCache
from lit_grpo.rollout.slots.rows import TokenRows
from lit_grpo.types import Completion, Key, Prompt, SamplingParams

QUICK_SEEDS = (0, 2, 5, 6, 10, 84)
EOS, VOCAB_SIZE = 1, 35
__all__ = ["small_pieces"]


class Guesses(Drafter):
    """Drafts what completions of another run had next, right or wrong; of those that it had not, anything."""

    def __init__(self, most_tokens: int, known: dict[Key, list[int]], seed: int) -> None:
        self.most_tokens, self.known, self.draw = most_tokens, known, random.Random(seed)
        self.took_part: list[tuple[int, int]] = []

    def most(self, rows: TokenRows, num_rows: int, room: int) -> np.ndarray:
        """Sometimes nothing, so that a step may be launched ahead; and what may not be tried."""
        most = 0 if self.draw.random() < 0.3 else self.most_tokens + 3
        return np.full(num_rows, most)

    def draft(self, rows: TokenRows, most_B: np.ndarray, cache: Any, sampling: Any) -> list[list[int]]:
        """Draft for each row, also for those that may try nothing."""
        drafted = []
        for row in range(len(most_B)):
            known = self.known.get(rows.requests[row].key, [])[len(rows.token_ids(row)) :]
            known += [self.draw.randrange(VOCAB_SIZE) for _ in range(self.most_tokens + 3)]
            wrong = self.draw.choice([len(known), len(known), 0, 1, 2, 5])
            if wrong < len(known):
                known[wrong] = self.draw.choice([EOS, 7])
            drafted.append(known[: self.draw.choice([0, 2, 99])])
        return drafted

    def took(self, rows: TokenRows, step: Any, accepted_B: np.ndarray) -> dict[str, int]:
        """Check that the places are those of the last tokens."""
        bits_N = torch.cat(step.arriving, 1).numpy()[0].view(np.int32)
        assert bits_N[step.places].tolist() == [rows.token_ids(row)[-1] for row in range(len(rows.requests))]
        self.took_part.append((0 if step.draft is None else step.draft.num_tokens, int(accepted_B.sum())))
        return {}


def check_sampled(
    completion: Completion, policies: Sequence[Any], sampling: SamplingParams, num_given: int = 0
) -> None:
    """Check each sampled token against the model's own forward, and the number of its position.

    A token that a fork has from its parent is drawn by the parent's numbers; of each version ``num_given`` tokens are
    another likely token with which a fork begins.
    """
    request, token_ids = completion.request, completion.token_ids_T
    prompt_ids = request.prompt.token_ids
    paths = [request.path[:length] for length in range(1, len(request.path) + 1)]
    keys = np.array([request_key(replace(request, path=path)) for path in paths], dtype=np.uint64)
    uniform_KT = uniform(keys[:, None], np.arange(len(token_ids)))
    for version in sorted({*completion.versions_T[completion.trained_T].tolist()} - {-1}):
        input_ids_1T = torch.tensor([[*prompt_ids, *token_ids.tolist()]])
        with torch.no_grad():
            logits_TV = policies[version](input_ids_1T).logits[0, len(prompt_ids) - 1 : -1]
        drawn = [sample_tokens(logits_TV, sampling, torch.from_numpy(each)) for each in uniform_KT]
        its_T = (completion.versions_T == version) & completion.trained_T
        is_right_T = torch.stack([tokens_T == token_ids for tokens_T, _, _ in drawn]).any(0)
        assert (~is_right_T[its_T]).sum() <= num_given, (completion, version)
        own_T = its_T & (drawn[-1][0] == token_ids)
        assert torch.allclose(drawn[-1][1][own_T], completion.logprobs_T[own_T], atol=2e-5)


@pytest.fixture(scope="module")
def policies() -> dict[bool, Any]:
    return {hybrid: random_policy(hybrid=hybrid) for hybrid in (False, True)}


@pytest.mark.parametrize("seed", table_rows(range(NUM_SEEDS), QUICK_SEEDS))
def test_whatever_is_drafted_the_samples_are_those_without(
    seed: int, policies: dict[bool, Any], tokenizer: Any, small_pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, draw = Case(seed), random.Random(f"drafts/{seed}")
    policy, guesses = policies[case.kind == "hybrid"], list[Guesses]()
    expected = case.run(policy, tokenizer, ahead=False)
    known = {each.request.key: each.token_ids_T.tolist() for each in expected.completions}

    def make_drafter(most_tokens: int) -> Guesses:
        guesses.append(Guesses(most_tokens, known, seed))
        return guesses[0]

    monkeypatch.setattr(suffix, "SuffixDrafter", make_drafter)
    actual = case.run(policy, tokenizer, ahead=draw.random() < 0.5, drafts=draw.randint(1, 6))
    assert actual.most_held <= max(actual.budget, expected.most_held)
    assert guesses
    check_same_samples(case, actual, expected)
    updated = [copy.deepcopy(policy) for _ in range(2)]
    with torch.no_grad():
        for weight in updated[1].parameters():
            weight.mul_(1.02)
    for completion in actual.completions:
        check_sampled(completion, updated, case.sampling, (len(completion.request.path) - 1) * (case.listens == "latr"))


def check_same_samples(case: Case, actual: Result, expected: Result) -> None:
    """Check that what does not depend on which step it is decided in is equal."""
    mine, others = ({each.request.key: each for each in result.completions} for result in (actual, expected))
    if case.rule is SYNCHRONOUS and case.listens not in ("drops", "divides"):
        assert mine.keys() == others.keys()
    elif case.listens in ("drops", "divides") or case.rule.leftovers == "keep":
        return
    if case.rule is SYNCHRONOUS:
        assert actual.seen.keys() == expected.seen.keys()
        for place, features in actual.seen.items():
            assert np.allclose(features, expected.seen[place], atol=1e-3)
    for key in mine.keys() & others.keys():
        one, other = mine[key], others[key]
        assert (one.finish_reason, one.text) == (other.finish_reason, other.text)
        for name in ("token_ids_T", "versions_T", "trained_T"):
            assert getattr(one, name).tolist() == getattr(other, name).tolist()
        assert torch.allclose(one.logprobs_T, other.logprobs_T, atol=2e-5)
        assert one.entropy == pytest.approx(other.entropy, abs=1e-4)


# ---- what may happen in a step ----------------------------------------------------------------------


@pytest.fixture
def generator(policies: dict[bool, Any], tokenizer: Any) -> SlotGenerator:
    """One whose drafts are tokens of a run without, every fifth of them wrong."""
    known = decode(make(policies[False], tokenizer, ahead=False), REQUESTS)
    generator = make(policies[False], tokenizer, ahead=False, drafts=4)
    generator._drafter = Guesses(4, {key: [*ids[:4], 7, *ids[5:]] for key, ids in known.items()}, 0)
    return generator


def test_memory_that_runs_out_in_a_drafted_step_sets_aside_what_was_told(
    generator: SlotGenerator, policies: dict[bool, Any], tokenizer: Any
) -> None:
    expected = decode(make(policies[False], tokenizer, ahead=False), REQUESTS)
    real, num_failed = generator._decode, 0

    def failing(entering: Any, before: Any, draft: Any) -> Any:
        nonlocal num_failed
        if draft is not None and num_failed < 2:
            num_failed += 1
            raise torch.OutOfMemoryError
        return real(entering, before, draft)

    generator._decode = failing  # pyrefly: ignore[bad-assignment]
    assert decode(generator, REQUESTS) == expected
    assert num_failed == 2


@pytest.mark.parametrize("call", table_rows([2, 6], [6]))
@pytest.mark.parametrize(("owner", "name"), [(Guesses, "draft"), (SlotCache, "roll_back"), (TokenRows, "take_drafted")])
def test_an_interrupt_in_a_drafted_step_leaves_nothing_in_flight(
    owner: Any, name: str, call: int, generator: SlotGenerator, policies: dict[bool, Any], tokenizer: Any
) -> None:
    interrupt(generator, owner, name, call)
    assert generator.capacity().kv_tokens_in_use == 0 and generator.capacity().free_slots == 4
    assert decode(generator, REQUESTS) == decode(make(policies[False], tokenizer, ahead=False), REQUESTS)


@pytest.mark.parametrize("token", [-1, VOCAB_SIZE])
def test_a_drafted_token_outside_of_the_vocabulary_is_refused_in_a_sentence(
    token: int, generator: SlotGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Guesses, "draft", lambda self, rows, most_B, *_: [[3, token]] * len(most_B))
    message = (
        rf"^A drafter proposes token {token}, but the policy's vocabulary has tokens 0 to 34; mend the drafter, or "
    )
    with pytest.raises(ValueError, match=message + r"set model\.generator\.drafts to off\.$"):
        decode(generator, REQUESTS)
    assert generator.capacity().kv_tokens_in_use == 0


def test_drafts_are_a_number_auto_or_off() -> None:
    for drafts in ("on", 0, 33, 1.5):
        with pytest.raises(ValueError, match=r"^drafts must be"):
            SlotGenerator(4, drafts=drafts)  # pyrefly: ignore[bad-argument-type]
    assert SlotGenerator(4, drafts=False).drafts == "off"  # as YAML reads it


def test_rows_of_a_draft_stand_after_the_rows_last_tokens() -> None:
    draft = Draft.of([[7, 8, 9], [], [5]], np.array([2, 4, 4]), 10)
    assert draft is not None and draft.num_tokens == 3
    assert draft.tokens_BK.tolist() == [[7, 8], [-1, -1], [5, -1]]
    assert draft.rows_N.tolist() == [0, 1, 2, 0, 0, 2] and draft.ahead_N.tolist() == [0, 0, 0, 1, 2, 1]
    assert draft.first_B.tolist()[0] == 3 and draft.first_B.tolist()[2] == 5
    assert Draft.of([[7], []], np.array([0, 4]), 10) is None


def test_text_that_came_before_is_drafted_and_saves_steps(policies: dict[bool, Any], tokenizer: Any) -> None:
    """At a low temperature a random policy repeats itself. The second visit of a prompt drafts from the first one."""
    sampling, found = SamplingParams(max_tokens=60, temperature=0.3), list[Any]()
    for drafts in ("off", 3):
        generator = SlotGenerator(8, drafts=drafts)
        generator.start(PolicySpec(policies[False], tokenizer))
        generator.load_weights(policies[False].named_parameters(), 0)
        for visit in range(2):
            prompts = [Prompt(prompt.prompt_id, prompt.token_ids, "", visit=visit) for prompt in PROMPTS]
            groups, stats = RolloutLoop(generator).collect(prompts, 2, sampling, seed=0)
            metrics = stats.metrics()
            assert ("rollout/drafted_tokens" in metrics) == (drafts != "off")
            ids = [rollout.completion.token_ids_T.tolist() for group in groups for rollout in group.rollouts]
            found.append((ids, stats.num_steps, stats.num_tokens, metrics))
        if drafts != "off":
            drafter: Any = generator._drafter
            assert not drafter._groups  # nothing of the rollouts but completions is kept
    for (ids, steps, tokens, _), (its_ids, its_steps, its_tokens, metrics) in zip(found[:2], found[2:], strict=True):
        assert ids == its_ids and tokens == its_tokens and its_steps < 0.9 * steps
        assert metrics["rollout/accepted_tokens"] < metrics["rollout/drafted_tokens"]
        assert 1 < metrics["rollout/tokens_per_step"] < 4
