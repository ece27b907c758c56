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
from test_running_ahead import (  # pyright: ignore[reportMissingImports]
    NUM_SEEDS,
    Case,
    Result,
    small_pieces,
)

from lit_grpo.rollout.rules import SYNCHRONOUS
from lit_grpo.rollout.sampling import request_key, sample_tokens, uniform
from lit_grpo.rollout.slots.drafts import suffix
from lit_grpo.rollout.slots.rows import TokenRows
from lit_grpo.types import Completion, Key, SamplingParams

QUICK_SEEDS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 84)
EOS, VOCAB_SIZE = 1, 35
__all__ = ["small_pieces"]


class Guesses:
    """Drafts what completions of another run had next, right or wrong; of those that it had not, anything."""

    def __init__(self, most_tokens: int, known: dict[Key, list[int]], seed: int) -> None:
        self.most_tokens, self.known, self.draw = most_tokens, known, random.Random(seed)
        self.took_part: list[tuple[int, int]] = []

    def most(self, rows: TokenRows, num_rows: int, room: int) -> np.ndarray:
        """Sometimes nothing, so that a step may be launched ahead; and what may not be tried."""
        most = 0 if self.draw.random() < 0.3 else self.most_tokens + 3
        return np.full(num_rows, most)

    def draft(self, rows: TokenRows, most_B: np.ndarray, *_: Any) -> list[list[int]]:
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

    def took(self, rows: TokenRows, step: Any, accepted_B: np.ndarray) -> None:
        """Check that the places are those of the last tokens."""
        bits_N = torch.cat(step.arriving, 1).numpy()[0].view(np.int32)
        assert bits_N[step.places].tolist() == [rows.token_ids(row)[-1] for row in range(len(rows.requests))]
        self.took_part.append((0 if step.draft is None else step.draft.num_tokens, int(accepted_B.sum())))

    def left(self, rows: TokenRows, row: int, ended: bool) -> None: ...

    def release(self, groups: Any) -> None: ...


def check_sampled(completion: Completion, policies: Sequence[Any], sampling: SamplingParams) -> None:
    """Check each sampled token against the model's own forward, and the number of its position.

    A token that a fork has from its parent is drawn by the parent's numbers.
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
        assert is_right_T[its_T].all(), (completion, version)
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
    assert bool(guesses) == (case.kind != "hybrid")
    check_same_samples(case, actual, expected)
    updated = [copy.deepcopy(policy) for _ in range(2)]
    with torch.no_grad():
        for weight in updated[1].parameters():
            weight.mul_(1.02)
    for completion in actual.completions:
        check_sampled(completion, updated, case.sampling)


def check_same_samples(case: Case, actual: Result, expected: Result) -> None:
    """Check that what does not depend on which step it is decided in is equal."""
    mine, others = ({each.request.key: each for each in result.completions} for result in (actual, expected))
    if case.rule is SYNCHRONOUS and case.listens not in ("drops", "divides"):
        assert mine.keys() == others.keys()
    elif case.listens in ("drops", "divides") or case.rule.leftovers == "keep":
        return
    for key in mine.keys() & others.keys():
        one, other = mine[key], others[key]
        assert (one.finish_reason, one.text) == (other.finish_reason, other.text)
        for name in ("token_ids_T", "versions_T", "trained_T"):
            assert getattr(one, name).tolist() == getattr(other, name).tolist()
        assert torch.allclose(one.logprobs_T, other.logprobs_T, atol=2e-5)
        assert one.entropy == pytest.approx(other.entropy, abs=1e-4)
