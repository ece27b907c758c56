"""Which rank gets which prompts, beside all ways to deal them."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from lit_grpo.budgets.history import PromptHistory, Visit
from lit_grpo.budgets.spreading import spread
from lit_grpo.data.loaders import PromptLoader
from lit_grpo.types import Prompt


@pytest.mark.parametrize(("num_ranks", "each"), [(1, 5), (2, 1), (2, 4), (3, 2), (8, 16), (64, 8)])
def test_each_rank_gets_equally_many_and_every_prompt_is_dealt_once(num_ranks: int, each: int) -> None:
    work = np.random.default_rng(0).lognormal(5, 1, num_ranks * each)
    dealt = spread(work.tolist(), num_ranks)
    assert [len(places) for places in dealt] == [each] * num_ranks
    assert sorted(place for places in dealt for place in places) == list(range(len(work)))
    assert all(places == sorted(places) for places in dealt)


def test_of_two_ranks_the_slower_has_little_more_to_do_than_in_the_best_of_all_ways() -> None:
    worst = []
    for seed in range(50):
        work = np.random.default_rng(seed).lognormal(5, 1, 10)
        ways = [list(places) for places in combinations(range(10), 5)]
        best = min(max(work[places].sum(), work.sum() - work[places].sum()) for places in ways)
        worst.append(max(work[places].sum() for places in spread(work.tolist(), 2)) / best)
    assert min(worst) > 1 - 1e-9 and max(worst) < 1.05 and np.mean(worst) < 1.01


def prompts(number: int) -> list[Prompt]:
    return [Prompt(f"train/{place}", (1, 2), "") for place in range(number)]


def history(num_tokens: list[int]) -> PromptHistory:
    """Of prompts that have been visited once, with two completions each."""
    known = PromptHistory()
    known.note([Visit(f"train/{place}", 0, (0.0, 1.0), 1, 2 * tokens, 0) for place, tokens in enumerate(num_tokens)])
    known.commit()
    return known


def taken(loaders: list[PromptLoader]) -> list[list[str]]:
    return [[prompt.prompt_id for prompt in next(iter(loader)).prompts] for loader in loaders]


def test_ranks_get_prompts_in_order_until_lengths_are_known_and_then_by_these() -> None:
    loaders = [PromptLoader(prompts(8), 4, rank, 2, shuffle=False) for rank in range(2)]
    for loader in loaders:
        loader.use_history(PromptHistory())
    assert taken(loaders) == [[f"train/{place}" for place in places] for places in (range(4), range(4, 8))]
    for loader in loaders:
        loader.use_history(history([100, 90, 80, 70, 10, 10, 10, 10]))
    first, second = taken(loaders)
    assert sorted(first + second) == [f"train/{place}" for place in range(8)]
    tokens = {f"train/{place}": length for place, length in enumerate([100, 90, 80, 70, 10, 10, 10, 10])}
    assert sum(tokens[name] for name in first) == sum(tokens[name] for name in second) == 190


def test_ranks_that_are_asked_for_no_prompts_get_none() -> None:
    """A rollout mode whose groups are all carried over asks for no further prompts."""
    assert spread([], 2) == [[], []]
