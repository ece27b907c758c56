"""Price of a decode step, and which drafts are worth it, beside all choices that there are."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import astuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import random_policy

from lit_grpo.policy import PolicySpec, load_tokenizer
from lit_grpo.rollout.generator import StepEvents
from lit_grpo.rollout.loop import RolloutLoop, RolloutStats
from lit_grpo.rollout.slots import SlotGenerator
from lit_grpo.rollout.slots.drafts.price import PricedDrafter, StepCost, TrialDrafter, choose_drafts
from lit_grpo.rollout.slots.drafts.suffix import NOTHING, Proposal, SuffixDrafter
from lit_grpo.types import Prompt, Request, SamplingParams


def columns(rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    return np.stack([np.ones(len(rows)), rows, tokens], axis=1)


def test_a_fit_recovers_the_cost_of_steps_without_error() -> None:
    rng = np.random.default_rng(0)
    rows, tokens = rng.integers(1, 65, 50), rng.integers(10, 50_000, 50)
    fitted = StepCost.fit(columns(rows, tokens), 0.02 + 0.001 * rows + 3e-7 * tokens)
    assert (fitted.step_s, fitted.row_s, fitted.token_s) == pytest.approx((0.02, 0.001, 3e-7))
    assert fitted.wait_s == fitted.wait_row_s == 0
    drafted, completions = rng.integers(0, 2, 50), rng.integers(1, 9, 50)
    drafted_columns = np.column_stack([columns(rows, tokens), drafted, drafted * completions])
    fitted = StepCost.fit(drafted_columns, drafted_columns @ [4e-3, 1e-4, 2e-7, 5e-4, 6e-5])
    parts = (fitted.step_s, fitted.row_s, fitted.token_s, fitted.wait_s, fitted.wait_row_s)
    assert parts == pytest.approx((4e-3, 1e-4, 2e-7, 5e-4, 6e-5))


def test_a_fit_is_the_best_of_all_that_are_not_negative() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        rows, tokens = rng.integers(1, 9, 12), rng.integers(1, 100, 12)
        seconds = rng.random(12) * 5
        fitted = StepCost.fit(columns(rows, tokens), seconds)
        least = np.square(columns(rows, tokens) @ [fitted.step_s, fitted.row_s, fitted.token_s] - seconds).sum()
        others = rng.random((500, 3)) * [3.0, 0.6, 0.06]
        assert least <= np.square(others @ columns(rows, tokens).T - seconds).sum(axis=1).min() + 1e-9


def test_a_negative_cost_and_no_steps_are_told_in_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"^The cost of a step is \(1\.0, -2\.0, 0\.0\) in s: give three times"):
        StepCost(1.0, -2.0, 0.0)
    with pytest.raises(ValueError, match=r"^There are 0 measured steps"):
        StepCost.fit(np.zeros((0, 3)), np.array([]))


def mean_tokens(rate: float, tried: int) -> float:
    return sum(rate**power for power in range(tried + 1))


@pytest.mark.parametrize("is_tail", [False, True])
def test_what_is_chosen_is_the_best_of_all_choices(is_tail: bool) -> None:
    """Of choices that try equally much in each row; in the tail of all, and nearly."""
    rng = np.random.default_rng(is_tail)
    num_drafting, over = 0, []
    for _ in range(150):
        rows, most, rate = int(rng.integers(1, 5)), int(rng.integers(0, 4)), rng.uniform(0.01, 0.95)
        tokens = rng.integers(1, 900, rows)
        left = rng.integers(1, 200, rows) if is_tail else np.ones(rows)
        cost = StepCost(*(rng.random(5) * [4e-3, 5e-4, 5e-7, 1e-3, 1e-4]))

        def seconds(tried: tuple[int, ...]) -> float:
            """Seconds until the last one ends, or of a step for each token that its rows get."""
            own = cost.row_s + cost.token_s * tokens  # noqa: B023
            means = np.array([mean_tokens(rate, number) for number in tried])  # noqa: B023
            waits = (cost.wait_s + cost.wait_row_s * rows) * any(tried)  # noqa: B023
            if not is_tail:
                return (cost.step_s + waits + sum(own * (1 + np.array(tried)))) / sum(means)  # noqa: B023
            steps = left / means  # noqa: B023
            return (cost.step_s + waits) * max(steps) + sum(own * (1 + np.array(tried)) * steps)  # noqa: B023

        chosen = choose_drafts(cost, rate, most, tokens, left)
        choices = [*itertools.product(range(most + 1), repeat=rows)]
        choices = choices if is_tail else [tried for tried in choices if len({*tried}) == 1]
        assert tuple(chosen) in choices
        over.append(seconds(tuple(chosen.tolist())) / min(map(seconds, choices)))
        num_drafting += bool(chosen.any())
    assert 30 < num_drafting < 150
    assert np.mean(over) < 1.002 and max(over) < 1.2 if is_tail else np.allclose(over, 1), (np.mean(over), max(over))


def test_in_the_tail_the_longest_try_the_most_and_the_short_nothing() -> None:
    cost = StepCost(4e-3, 2e-5)  # 200 rows cost as much as a step
    tokens, left = np.full(4, 300), np.array([400, 390, 200, 20])
    chosen = choose_drafts(cost, 0.5, 8, tokens, left)
    assert chosen[0] >= chosen[1] > chosen[2] == chosen[3] == 0
    expensive = StepCost(1e-4, 5e-3)  # as on a CPU, where a query costs what a row costs
    assert not choose_drafts(expensive, 0.5, 8, tokens, left).any()
    assert not choose_drafts(expensive, 0.9, 8, tokens, np.ones(4)).any()


class Rows:
    """Rows that all have read 300 tokens."""

    def __init__(self, num_rows: int) -> None:
        sampling = SamplingParams(max_tokens=400)
        self.requests = [Request(Prompt("a", (7,) * 200, ""), (row,), sampling) for row in range(num_rows)]
        self.counts = self.sampled = np.full(num_rows, 100)


def known(num_slots: int, cost: StepCost, found: list[Proposal], monkeypatch: pytest.MonkeyPatch) -> PricedDrafter:
    """Return a drafter whose rows are given proposals, if they may propose."""

    def draft(self: SuffixDrafter, rows: Any, most_B: np.ndarray, *_: Any) -> None:
        self.tried = [each if most else NOTHING for each, most in zip(found, most_B, strict=True)]

    monkeypatch.setattr(SuffixDrafter, "draft", draft)
    return PricedDrafter(num_slots, cost, most_tokens=6)


def tried(drafter: PricedDrafter, num_rows: int) -> list[int]:
    rows: Any = Rows(num_rows)
    nothing: Any = None
    drafter.expect(rows.requests, [200.0] * num_rows)
    return [len(tokens) for tokens in drafter.draft(rows, drafter.most(rows, num_rows, 99), nothing, nothing)]


BAD, GOOD = Proposal([*range(6)], "own", 2), Proposal([*range(6)], "sibling", 8)


@pytest.mark.parametrize("num_slots", [2, 4])
def test_sources_that_are_wrong_are_tried_less_and_again_after_a_while(
    num_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = known(num_slots, StepCost(1e-3, 3e-4), [BAD, GOOD], monkeypatch)
    rows: Any = Rows(2)
    step: Any = None
    assert drafter.rate(BAD) == drafter.rate(GOOD) == 0.5
    for number in range(30):
        lengths = tried(drafter, 2)
        assert lengths[1] == 6 or number < 5
        gained = drafter.took(rows, step, np.array([0, lengths[1]]))
        assert gained == ({"sibling": lengths[1]} if lengths[1] else {})
    assert drafter.rate(BAD) < 0.35 and drafter.rate(GOOD) > 0.95
    assert drafter.rate(BAD._replace(matched=8)) == 0.5  # another length of the match, of which nothing is known
    assert tried(drafter, 2) == [0, 6]
    for _ in range(4000):
        drafter.took(rows, step, np.zeros(2, dtype=np.int64))
    assert drafter.rate(BAD) == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("num_slots", [5, 9])
def test_drafts_that_bring_little_are_not_waited_for_and_tried_again_later(
    num_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that takes half of a step has to be worth it, whatever a single proposal promises."""
    drafter = known(num_slots, StepCost(1e-3, 1e-6, wait_s=5e-4), [NOTHING] * 4 + [GOOD], monkeypatch)
    rows: Any = Rows(5)
    step: Any = None
    asked = []
    for _ in range(3000):
        asked.append(sum(tried(drafter, 5)))
        drafter.took(rows, step, np.array([0, 0, 0, 0, asked[-1] // 6]))
    assert asked[0] == 6 and sum(map(bool, asked[:100])) < 30 and 0 < sum(map(bool, asked[100:])) < 0.1 * 2900


@pytest.mark.parametrize("num_slots", [5, 9])
def test_nothing_is_proposed_where_no_rate_would_be_worth_it(num_slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tried(known(num_slots, StepCost(1e-5, 5e-3), [GOOD] * 5, monkeypatch), 5) == [0] * 5


def slots(policy_folder: Path, drafts: Any, num_slots: int = 4) -> SlotGenerator:
    policy: Any = random_policy()
    generator = SlotGenerator(num_slots, drafts=drafts)
    generator.start(PolicySpec(policy, load_tokenizer(str(policy_folder))))
    generator.load_weights(policy.named_parameters(), 0)
    return generator


def sampled(generator: SlotGenerator, seed: int = 0) -> tuple[list[list[int]], RolloutStats]:
    prompts = [Prompt(str(number), (5 + number, 9, 5 + number), "") for number in range(2)]
    sampling = SamplingParams(max_tokens=30, temperature=0.4)
    groups, stats = RolloutLoop(generator).collect(prompts, 5, sampling, seed)
    completions = [rollout.completion for group in groups for rollout in group.rollouts]
    return [completion.token_ids_T.tolist() for completion in completions], stats


@pytest.mark.parametrize("ahead", [False, True])
def test_a_price_is_measured_before_the_first_rollout_and_leaves_nothing(
    policy_folder: Path, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: on a CPU nothing is measured, and nothing drafted. By a clock that each step moves by its price."""
    plain = slots(policy_folder, "auto")
    assert plain._drafter is None
    expected, stats = sampled(plain)
    assert stats.num_drafted == 0 and not any("draft" in name or "accepted" in name for name in stats.metrics())
    generator = slots(policy_folder, "auto")
    generator._is_unpriced, generator.runs_ahead = True, ahead
    price, now_s, timed_step = StepCost(4e-3, 1e-4, 0.0, 5e-4, 6e-5), [0.0], generator.step

    def step() -> StepEvents:
        events = timed_step()
        now_s[0] += price.step_s + price.row_s * (events.num_active + events.num_drafted)
        now_s[0] += (price.wait_s + price.wait_row_s * events.num_active) * (events.num_drafted > 0)
        return events

    monkeypatch.setattr(generator, "step", step)
    monkeypatch.setattr("lit_grpo.rollout.slots.drafts.price.time", SimpleNamespace(perf_counter=lambda: now_s[0]))
    token_ids, _ = sampled(generator)
    assert token_ids == expected
    drafter = generator._drafter
    assert isinstance(drafter, PricedDrafter) and astuple(drafter.cost) == pytest.approx(astuple(price), abs=1e-9)
    assert not drafter._expected and not generator._rows.requests and not generator._released
    drafter.cost = StepCost(1e-3)
    token_ids, stats = sampled(generator, seed=1)
    assert token_ids == sampled(plain, seed=1)[0] and 0 < stats.accepted.total() < stats.num_drafted
    metrics = stats.metrics()
    by_source = {name: value for name, value in metrics.items() if name.startswith("rollout/accepted_per_step/")}
    assert set(by_source) <= {f"rollout/accepted_per_step/{source}" for source in ("own", "sibling", "visit")}
    assert 1 + sum(by_source.values()) == pytest.approx(metrics["rollout/tokens_per_step"])
    assert stats.accepted.total() == metrics["rollout/accepted_tokens"]


@pytest.mark.parametrize("fails", [False, True])
def test_timed_steps_leave_alone_the_prompts_that_requests_will_come_for(
    policy_folder: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Or what is observed of prompts that go through the policy with a timed one would be told to nobody."""

    def failing(*_: Any) -> list[list[int]]:
        raise RuntimeError("no kernel for so many queries")

    if fails:
        monkeypatch.setattr(TrialDrafter, "draft", failing)
    generator, prompt = slots(policy_folder, "auto"), Prompt("expected", (2, 3, 4), "")
    generator._is_unpriced, generator.feature_points = True, (0,)
    generator.expect([prompt])
    with pytest.warns(UserWarning, match="cannot be measured") if fails else contextlib.nullcontext():
        generator.submit([])
    assert list(generator._expected.values()) == [prompt] and not generator._cache.prompts


def test_a_price_that_cannot_be_measured_is_told_in_one_line(
    policy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = sampled(slots(policy_folder, "off"))
    generator = slots(policy_folder, "auto")
    generator._is_unpriced = True

    def failing(*_: Any) -> list[list[int]]:
        raise RuntimeError("no kernel for so many queries")

    monkeypatch.setattr(TrialDrafter, "draft", failing)
    with pytest.warns(UserWarning, match=r"^The price of a decode step cannot be measured \(.*no kernel for so many"):
        token_ids, stats = sampled(generator)
    assert token_ids == expected and stats.num_drafted == 0


def test_completions_that_end_at_once_leave_no_price(policy_folder: Path) -> None:
    generator = slots(policy_folder, "auto")
    generator._is_unpriced, generator._eos_ids = True, np.arange(generator.policy.config.vocab_size)
    with pytest.warns(UserWarning, match="cannot be measured .*: completions ended before a step with drafts"):
        assert all(len(token_ids) == 1 for token_ids in sampled(generator)[0])


def test_a_device_that_fails_or_runs_out_of_memory_is_no_price(
    policy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> list[list[int]]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(TrialDrafter, "draft", failing)
    generator = slots(policy_folder, "auto")
    generator._is_unpriced = True
    with pytest.raises(RuntimeError, match="CUDA error"):
        sampled(generator)
