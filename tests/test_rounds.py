"""Groups of their own sizes, and further rounds by what the first have earned."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from test_loop import FakeGenerator, prompts

from lit_grpo.budgets.allocation import Allocation, Balanced, HardMore, make_allocation
from lit_grpo.budgets.history import PromptHistory, Record
from lit_grpo.budgets.prompts import Greso, PromptChooser
from lit_grpo.ranks import Ranks
from lit_grpo.rewards import RewardRunner, load_rewards
from lit_grpo.rollout.generator import StepEvents
from lit_grpo.rollout.loop import RolloutLoop
from lit_grpo.rollout.rounds import Budget, Rounds
from lit_grpo.rollout.rules import MODES, make_mode
from lit_grpo.types import RolloutGroup, SamplingParams

SAMPLING = SamplingParams(max_tokens=40)
PASSES = {"a": "1" * 16, "b": "0" * 16, "c": "0001" + "0100" + "1" * 8, "d": "0111" + "0" * 12}
"""Which samples of a prompt pass, in their order."""


class Marked(FakeGenerator):
    """Its completions say whether they pass; a step takes ``step_s``."""

    step_s = 0.0

    def step(self) -> StepEvents:
        time.sleep(self.step_s)
        events = super().step()
        for each in events.finished:
            each.text = PASSES[each.request.key[0]][each.request.path[0]]
        return events


def mark(completion: str) -> float | None:
    return None if completion == "-" else float(completion)


@pytest.fixture
def runner() -> Iterator[RewardRunner]:
    runner = RewardRunner(load_rewards([mark], 10.0))
    yield runner
    runner.close()


def collect(
    allocation: Allocation, runner: RewardRunner, names: str = "abcd", slots: int = 5, lengths: Any = None
) -> tuple[dict[str, RolloutGroup], Rounds, Marked]:
    lengths = {name: [3 + sample % 7 for sample in range(40)] for name in names} | (lengths or {})
    generator, rounds = Marked(slots, lengths), Rounds(runner, allocation, 1.0)
    loop = RolloutLoop(generator, listeners=[rounds])
    groups, stats = loop.collect(prompts(*names), 4, SAMPLING, seed=0)
    assert sum(stats.lengths) == sum(each.completion.num_tokens for group in groups for each in group.rollouts)
    assert not generator.remaining
    return {group.prompt.prompt_id: group for group in groups}, rounds, generator


def test_prompts_get_rounds_until_both_kinds_are_there(runner: RewardRunner) -> None:
    groups, rounds, _ = collect(Balanced(rounds=3, passed=2, failed=1), runner)
    assert {name: len(group.rollouts) for name, group in groups.items()} == {"a": 12, "b": 12, "c": 8, "d": 4}
    for name, group in groups.items():
        assert [each.completion.request.path for each in group.rollouts] == [(n,) for n in range(len(group.rollouts))]
        assert [each.reward for each in group.rollouts] == [float(mark) for mark in PASSES[name][: len(group.rollouts)]]
    assert rounds.metrics() == {"budget/further_completions": 20.0, "budget/frac_flat_first": 0.5}


def test_dars_gives_hard_prompts_a_second_round_alone(runner: RewardRunner) -> None:
    groups, _, _ = collect(HardMore(most=10), runner)
    # p = 1/4: S = 3/8, (2 - 4 S) / S = 4/3; none: p = 1/8, S = 7/32, (2 - 7/8) / (7/32) = 5.1
    assert {name: len(group.rollouts) for name, group in groups.items()} == {"a": 4, "b": 10, "c": 6, "d": 4}


def test_others_decode_while_a_prompt_waits_for_its_next_round(
    runner: RewardRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Marked, "step_s", 0.02)
    lengths = {"a": [30] * 4, "b": [2] * 16}
    groups, _, generator = collect(Balanced(rounds=4, passed=1, failed=0), runner, "ab", 8, lengths)
    assert {name: len(group.rollouts) for name, group in groups.items()} == {"a": 4, "b": 16}
    submitted = [keys for what, keys in generator.log if what == "submit"]
    assert len(submitted) == 4 and generator.num_steps == 30  # three more rounds of b, beside the first of a


def test_what_is_sampled_does_not_depend_on_how_long_rewards_take(runner: RewardRunner) -> None:
    go_on = threading.Event()

    def slow(completion: str) -> float:
        go_on.wait(0.02)
        return float(completion)

    quick, _, _ = collect(Balanced(rounds=3, passed=2, failed=1), runner)
    waiting = RewardRunner(load_rewards([slow], 10.0))
    late, _, _ = collect(Balanced(rounds=3, passed=2, failed=1), waiting)
    waiting.close()
    keys = [[each.completion.request.key for each in group.rollouts] for group in quick.values()]
    assert keys == [[each.completion.request.key for each in group.rollouts] for group in late.values()]


def test_a_prompt_without_a_reward_gets_no_more(runner: RewardRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PASSES, "d", "----")
    groups, _, _ = collect(Balanced(), runner, "d")
    assert len(groups["d"].rollouts) == 4


def test_an_interrupt_leaves_nothing_behind(runner: RewardRunner) -> None:
    generator = Marked(5, {name: [3] * 40 for name in "abcd"})
    rounds = Rounds(runner, Balanced(), 1.0)
    loop = RolloutLoop(generator, listeners=[rounds])
    generator.fail_at_step = 5
    with pytest.raises(KeyboardInterrupt):
        loop.collect(prompts(*"abcd"), 4, SAMPLING, seed=0)
    assert not len(loop.buffer) and not generator.remaining
    groups, _ = loop.collect(prompts(*"ad"), 4, SAMPLING, seed=0)
    assert [len(group.rollouts) for group in groups] == [16, 8]


# ---- a run's budget ------------------------------------------------------------------------------------


def test_sizes_follow_what_is_known_of_prompts() -> None:
    budget = Budget("knapsack:least=2")
    history = PromptHistory()
    history.records = {"a": Record(1, pass_rate=1.0), "b": Record(1, pass_rate=0.3)}
    budget.begin(history, None, make_mode("synchronous"))
    sizes = budget.sizes(prompts("a", "b", "c"), 6)
    assert sizes == [2, 10, 6]
    assert budget.metrics(0) == {"budget/smallest_group": 2.0, "budget/largest_group": 10.0}


def test_who_is_asked_is_learnt_from_every_batch() -> None:
    budget, chooser = Budget("uniform"), PromptChooser(Greso(), 0)
    history = PromptHistory()
    budget.begin(history, chooser, make_mode("synchronous"))
    history.records = {"a": Record(1, num_flat=1)}
    assert chooser.history is history
    budget.learn([RolloutGroup(prompts("a")[0], [])], Ranks())
    assert budget.metrics(3) == {"prompts/easy": 0.51, "prompts/hard": 0.49, "prompts/skipped": 3.0}


@pytest.mark.parametrize("mode", [name for name in MODES if name != "synchronous"])
def test_rounds_need_a_mode_that_waits_for_them(mode: str) -> None:
    turns = make_mode(mode)
    with pytest.raises(ValueError, match=f"balanced asks for more .* rollout_scheduler.mode {mode} does not"):
        Budget("balanced").check(mode, turns, 4, 8)
    Budget("knapsack").check(mode, turns, 4, 8)


def test_what_is_asked_by_whole_visits_needs_whole_groups() -> None:
    budget, turns = Budget("uniform"), make_mode("sortedrl")
    with pytest.raises(ValueError, match=r"data\.ask goes by the rewards of a prompt's whole visit"):
        budget.begin(PromptHistory(), PromptChooser(Greso(), 0), turns)
    budget.begin(PromptHistory(), None, turns)
    budget.begin(PromptHistory(), PromptChooser(Greso(), 0), replace(turns, unit="group"))


def test_a_budget_that_does_not_suffice_names_its_field() -> None:
    with pytest.raises(ValueError, match=r"^rollout_scheduler\.allocation knapsack:budget=7: budget is 7 completions"):
        Budget("knapsack:budget=7").check("synchronous", make_mode("synchronous"), 4, 8)
    Budget("knapsack:budget=7").check("synchronous", make_mode("synchronous"), None, 8)
    assert make_allocation("knapsack:budget=8").check(4, 8) is None
