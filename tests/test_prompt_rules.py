"""Who is asked, and what is known of whom."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hand_made import plugin

from lit_grpo.budgets.history import LengthMoments, PromptHistory, Record, Visit
from lit_grpo.budgets.prompts import PromptChooser
from lit_grpo.methods.curriculum import Curriculum
from lit_grpo.methods.greso import Greso
from lit_grpo.methods.near_half import NearHalf
from lit_grpo.methods.sgpo import PhasedPrompts
from lit_grpo.plugins import Plugin
from lit_grpo.types import Prompt

NAN = math.nan
PROMPT = Prompt("a", (1,), "")


def visit(rewards: list[float], number: int = 0, name: str = "a", threshold: float = 1.0) -> Visit:
    passed = sum(reward >= threshold for reward in rewards)
    return Visit(name, number, rewards, passed, 10 * len(rewards), number)


def history_of(*visits: list[float]) -> PromptHistory:
    history = PromptHistory()
    for number, rewards in enumerate(visits):
        history.note([visit(rewards, number)])
        history.commit()
    return history


# ---- what is known -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("visits", "easy", "hard"),
    [
        ([[0.0] * 4, [0.0] * 4, [NAN] * 4, [0.0] * 3], 0, 3),  # a visit without rewards does not count
        ([[0.0] * 4, [0.0, 1.0], [1.0] * 2], 1, 0),
        ([[1.0] * 4, [1.0] * 4, [0.0] * 4], 0, 1),  # an easy prompt that is hard now is at its first hard visit
        ([[0.0] * 4, [0.5, 0.2, 0.0]], 0, 2),  # rewards that differ, of completions that all fail
        ([[1.0] + [0.0] * 9], 0, 1),
        ([[1.0] + [0.0] * 8], 0, 0),  # 1 of 9 is above 0.11
        ([[1.0] * 49 + [0.0], [1.0] * 50 + [0.5]], 2, 0),
    ],
)
def test_easy_and_hard_visits_are_counted_apart(visits: list[list[float]], easy: int, hard: int) -> None:
    record = history_of(*visits)["a"]
    assert (record.num_easy, record.num_hard) == (easy, hard)


def test_a_visit_that_is_noted_twice_counts_once_and_only_when_it_is_committed() -> None:
    history = PromptHistory()
    history.note([visit([1.0, 0.0])])
    assert history.records == {}
    history.note([visit([1.0, 1.0])])
    history.note_lengths("a", LengthMoments(2, 3.0, 0.5))
    history.note_lengths("c", LengthMoments(0, 0.0, 0.0))
    history.commit(lambda own: [own, [visit([0.0], name="b")]])  # of two ranks
    assert not history.lengths(["a"]).any()
    history.commit_lengths(lambda own: [own, [("b", LengthMoments(4, 1.0, 0.0))]])
    assert history["a"].mean == 1.0 and history["b"].mean == 0.0
    assert history.lengths(["b", "a", "c"]).tolist() == [[4, 1.0, 0.0], [2, 3.0, 0.5], [0, 0, 0]]
    assert "c" not in history.records  # of which nothing has come
    history.commit()
    assert history["a"].num_visits == 1


# ---- chances -------------------------------------------------------------------------------------------


GRESO = [  # pass rates of visits, and what easy_ and hard_probabilistic_skip leave of a chance with p 0.6 and 0.4
    ([1, 1, 1], 0.216),
    ([0.2, 1], 0.6),
    ([1, 0.5], 1.0),
    ([0.1, 0.1], 0.16),
    ([1, 0.1, 0.1, 0.0125], 0.064),
    ([0.1, 0.1, 1], 0.6),
    ([1, 0.1], 0.4),
    ([0.1] * 12, 0.01),
    ([0.5], 1.0),
    ([], 1.0),
]
"""Printed by the paper's code (Infini-AI-Lab/GRESO at b277843, presampling_selector.py)."""


@pytest.mark.parametrize(("rates", "chance"), GRESO)
def test_greso_asks_as_often_as_its_code(rates: list[float], chance: float) -> None:
    history = PromptHistory()
    for number, rate in enumerate(rates):
        passed = round(80 * rate)
        history.note([Visit("a", number, [1.0] * passed + [0.0] * (80 - passed), passed, 80, number)])
        history.commit()
    assert Greso().prompt_chance(PROMPT, history["a"], {"easy": 0.6, "hard": 0.4}) == pytest.approx(chance, abs=1e-12)


def test_greso_explores_less_where_too_many_prompts_are_easy_or_hard_from_the_second_epoch_on() -> None:
    easy, hard, mixed = Record(2, last_pass_rate=1.0), Record(2), Record(2, last_pass_rate=0.1)
    rule = Greso(target=0.24)  # 8% easy, 16% hard
    begun = rule.prompt_state([])
    assert rule.prompt_state([], [Record(1)] * 10, begun) == begun == {"easy": 0.5, "hard": 0.5}
    assert rule.prompt_state([], [easy] * 9 + [hard] * 15 + [mixed] * 76, begun) == {"easy": 0.49, "hard": 0.51}
    assert rule.prompt_state([], [easy] * 7 + [hard] * 17 + [mixed] * 76, begun) == {"easy": 0.51, "hard": 0.49}
    assert Greso(target=0.75).prompt_state([], [easy, hard, hard, mixed], begun)["easy"] == 0.49
    state = begun
    for _ in range(100):
        state = rule.prompt_state([], [easy] * 10, state)
    assert state == {"easy": 0.05, "hard": 0.95}
    with pytest.raises(ValueError, match=r"least must be at most most, 0\.5, not 0\.6"):
        Greso(least=0.6, most=0.5)


def test_a_prompt_near_a_half_is_asked_most() -> None:
    rule = NearHalf(least=0.2)
    chances = [rule.prompt_chance(PROMPT, Record(1, pass_rate=rate), {}) for rate in (0.0, 0.25, 0.5, 0.75, 1.0)]
    assert chances == pytest.approx([0.2, 0.75, 1.0, 0.75, 0.2])
    assert rule.prompt_chance(PROMPT, Record(), {}) == 1.0


def test_the_odds_of_near_half_are_those_of_the_softmax_of_dots_down_to_the_least() -> None:
    """DOTS: softmax(-|p - 0.5| / tau), tau 0.001; torch.softmax gives 0.70538, 0.25950, 0.03512, 0 for these."""
    rule = plugin("near_half:temperature=0.001,least=0.00001")
    chances = [rule.prompt_chance(PROMPT, Record(1, pass_rate=rate), {}) for rate in (0.5, 0.501, 0.497, 0.625)]
    assert chances[-1] == 0.00001 and rule.prompt_chance(PROMPT, Record(), {}) == 1.0
    odds = [chance / sum(chances[:3]) for chance in chances[:3]]
    assert odds == pytest.approx([0.70538, 0.25950, 0.03512], abs=1e-5)


RATES = (0.0, 0.01, 0.1, 0.124, 0.125, 0.2, 0.25, 0.3, 0.49, 0.5, 0.6, 0.75, 0.76, 1.0)


def phase_of_paper(rate: float) -> int | None:
    """sGPO: above 0.75 dropped, none passed apart, else the power-of-two bucket of 1 / rate within 2 and 8."""
    if rate > 0.75 or rate == 0:
        return None
    return min(max(2 ** math.ceil(math.log2(1 / rate)), 2), 8)


@pytest.mark.parametrize("phase", [2, 4, 8])
@pytest.mark.parametrize("rate", RATES)
def test_a_phase_asks_those_of_its_bucket_and_a_share_of_those_nobody_passed(phase: int, rate: float) -> None:
    chance = PhasedPrompts().prompt_chance(
        PROMPT, Record(3, pass_rate=rate), {"phase": float(phase), "phase_batches": 0.0}
    )
    assert chance == (0.1 if rate == 0 else 1.0 if phase_of_paper(rate) == phase else 0.01)
    assert PhasedPrompts().prompt_chance(PROMPT, Record(), {"phase": float(phase), "phase_batches": 0.0}) == 1.0


def test_phases_go_from_easy_to_hard_by_batches_once_prompts_are_profiled() -> None:
    rule, profile = PhasedPrompts(batches=3), [Record(1, pass_rate=0.6)] * 2
    state = rule.prompt_state([])
    for _ in range(5):
        state = rule.prompt_state([], profile + [Record(2, pass_rate=0.6)] * 2, state)  # half on their first visit
    assert state == rule.prompt_state([]) == {"phase": 2.0, "phase_batches": 0.0}
    asked = [Record(2, pass_rate=rate) for rate in (0.6, 0.3, 0.1)]
    phases = []
    for _ in range(12):
        phases.append(state["phase"])
        state = rule.prompt_state([], asked, state)
    assert phases == [2.0] * 3 + [4.0] * 3 + [8.0] * 3 + [2.0] * 3
    assert rule.prompt_state([], [], state) == state


def at_levels(*rows: tuple[str, int]) -> list[Prompt]:
    """Prompts of tasks and levels, named by their places."""
    columns = [{"task": task, "level": level} for task, level in rows]
    return [Prompt(f"p{place}", (1,), "", each) for place, each in enumerate(columns)]


LEVELS = at_levels(("gcd", 1), ("gcd", 2), ("gcd", 3), ("lcm", 0), ("lcm", 1))


def visited(chooser: PromptChooser, prompts: list[Prompt], pass_rate: float) -> None:
    """Learn from a batch of these prompts, of which this share has passed."""
    chooser.history.records |= {each.prompt_id: Record(1, last_pass_rate=pass_rate) for each in prompts}
    chooser.learn([each.prompt_id for each in prompts])


def test_a_curriculum_asks_each_task_at_a_level_that_rises_and_falls_by_what_passes() -> None:
    chooser = PromptChooser(Curriculum(batches=2, raise_at=0.5, lower_at=0.1), 0, LEVELS)
    assert [chooser.asks(prompt) for prompt in LEVELS] == [True, False, False, True, False]
    visited(chooser, [LEVELS[0]], 0.4)
    assert (chooser.state["level/gcd"], chooser.state["level_pass_rate/gcd"]) == (1, 0.4)
    visited(chooser, [LEVELS[0]], 0.6)  # 0.5 on average
    assert [chooser.asks(prompt) for prompt in LEVELS] == [False, True, False, True, False]
    visited(chooser, [LEVELS[0]], 1.0)  # asked before the level rose: says nothing of this level
    assert chooser.state["level_batches/gcd"] == 0
    levels = []
    for rate in (1.0, 1.0, 0.2, 0.0, 0.2, 0.3, 1.0, 0.0):
        level = int(chooser.state["level/gcd"])
        visited(chooser, [LEVELS[level - 1]], rate)
        levels.append(chooser.state["level/gcd"])
    assert levels == [2, 3, 3, 2, 2, 2, 2, 3]
    assert chooser.state["level/lcm"] == 0


def test_a_curriculum_goes_on_from_a_checkpoint_and_is_logged() -> None:
    chooser, again = (PromptChooser(Curriculum(batches=3), 0, LEVELS) for _ in range(2))
    visited(chooser, [LEVELS[0]], 0.25)
    again.load_state_dict(chooser.state_dict())
    assert again.metrics() == chooser.metrics() != PromptChooser(Curriculum(batches=3), 0, LEVELS).metrics()
    assert chooser.metrics()["prompts/level_pass_rate/gcd"] == 0.25


@pytest.mark.parametrize(
    ("prompts", "sentence"),
    [
        ([Prompt("p", (1,), "")], "curriculum needs the column 'level', a whole number, and p has None; give the rows"),
        (at_levels(("gcd", 0), ("gcd", 2)), "the prompts of gcd have the levels 0, 2; give rows of the levels between"),
    ],
)
def test_rows_that_a_curriculum_cannot_go_by_are_told(prompts: list[Prompt], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        PromptChooser(Curriculum(), 0, prompts)


@dataclass
class Mine(Plugin):
    value: float = 2.0

    def prompt_chance(self, prompt: object, record: object, state: object) -> float:
        return self.value


def test_a_chance_that_is_none_is_told_with_its_prompt() -> None:
    with pytest.raises(ValueError, match=r"Mine.prompt_chance of prompt 'a' must be from 0 to 1, not 2.0"):
        PromptChooser(Mine(), 0).asks(Prompt("a", (1,), ""))
