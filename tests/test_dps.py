"""What a hidden Markov model expects of a prompt, against all sequences of states; and who is asked by it."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from test_data import draw, numbered

from lit_grpo.budgets.history import Outcome, Record, Visit
from lit_grpo.budgets.prompts import PromptChooser
from lit_grpo.data.loaders import PromptLoader
from lit_grpo.methods.dps import DynamicsPredictive, predicted
from lit_grpo.plugins import Plugin, RunNumbers
from lit_grpo.types import Prompt

SHARES = (0.0, 0.25, 1.0)
"""A share that passes in each state."""
PROMPT = Prompt("a", (1,), "")


def of_all_sequences(observed: Mapping[int, int], step: int, decay: float) -> list[float]:
    """The chance of each state at a step, from all sequences of states from step 0 on; states are seen exactly."""
    counts = [[1.0] * 3 for _ in range(3)]  # to, from
    transitions: list[list[list[float]]] = []  # of each step to the next

    def sequences(last: int) -> dict[tuple[int, ...], float]:
        weights = {}
        for states in itertools.product(range(3), repeat=last + 1):
            if all(states[at] == state for at, state in observed.items() if at <= last):
                moves = enumerate(itertools.pairwise(states))
                weights[states] = math.prod(transitions[at][to][since] for at, (since, to) in moves) / 3
        return weights

    for at in range(1, step + 1):
        transitions.append([[counts[to][f] / sum(counts[k][f] for k in range(3)) for f in range(3)] for to in range(3)])
        if at == step:
            break
        weights = sequences(at)
        whole = math.fsum(weights.values())
        counts = [[decay * each + (1 - decay) for each in row] for row in counts]
        if at in observed:
            for states, weight in weights.items():
                counts[states[-1]][states[-2]] += weight / whole
    weights = sequences(step)
    whole = math.fsum(weights.values())
    return [math.fsum(w for states, w in weights.items() if states[-1] == k) / whole for k in range(3)]


@pytest.mark.parametrize("seed", range(40))
def test_a_prediction_is_that_of_all_sequences_of_states(seed: int) -> None:
    rng = random.Random(seed)
    step, decay, first = rng.randint(2, 7), rng.choice([1.0, 0.9, 0.5, 0.1]), rng.randint(0, 20)
    observed = {1: rng.randrange(3)} | {at: rng.randrange(3) for at in range(2, step) if rng.random() < 0.6}
    outcomes = [Outcome(first + at, SHARES[state]) for at, state in observed.items()]
    expected = of_all_sequences(observed, step, decay)
    assert predicted(outcomes, first + step, decay).tolist() == pytest.approx(expected, abs=1e-12)


@dataclass
class Table(Plugin):
    """Asks by numbers of the prompts."""

    candidates: int = 3

    @property
    def numbers(self) -> RunNumbers:
        return RunNumbers(prompt_candidates=self.candidates)

    def prompt_chance(self, prompt: Prompt, record: Record, state: Any) -> float:
        return int(prompt.prompt_id.removeprefix("train/")) * 7 % 10


def test_the_largest_of_several_times_as_many_are_asked_and_the_others_come_again() -> None:
    rule = Table()
    loader = PromptLoader(numbered(10), 2, seed=5, chooser=PromptChooser(rule, 0))
    whole = [place for step in draw(PromptLoader(numbered(10), 1, seed=5), 60) for place in step]
    for number, step in enumerate(draw(loader, 10)):
        due = whole[6 * number : 6 * number + 6]
        once = [place for at, place in enumerate(due) if place[0] not in [name for name, _ in due[:at]]]
        best = sorted(once, key=lambda place: -rule.prompt_chance(Prompt(place[0], (1,), ""), Record(), {}))[:2]
        assert sorted(step) == sorted(best) and step == [place for place in due if place in best]
    assert loader.take_skipped() == 40 and loader.state_dict()["prompts_consumed"] == 60


def test_ranks_share_the_largest_and_replacements_are_the_largest_of_those_that_follow() -> None:
    one = draw(PromptLoader(numbered(30), 4, chooser=PromptChooser(Table(), 0)), 6)
    ranks = [draw(PromptLoader(numbered(30), 2, rank, 2, chooser=PromptChooser(Table(), 0)), 6) for rank in (0, 1)]
    assert [first + second for first, second in zip(*ranks, strict=True)] == one
    loader = PromptLoader(numbered(30), 2, chooser=PromptChooser(Table(), 0))
    whole = [place for step in draw(PromptLoader(numbered(30), 1), 30) for place in step]
    next(iter(loader))
    follow = [drawn_one(prompt) for prompt in loader.further(2)]
    best = [max(due, key=lambda place: int(place[0][6:]) * 7 % 10) for due in (whole[6:9], whole[9:12])]
    assert follow == best


def drawn_one(prompt: Prompt) -> tuple[str, int]:
    return prompt.prompt_id, prompt.visit


def test_prompts_that_are_passed_in_part_are_asked_first_and_others_come_again() -> None:
    """Ten prompts: n0 to n4 are never passed, n5 to n9 in part."""
    chooser = PromptChooser(DynamicsPredictive(candidates=5), 0, numbered(10))
    loader = PromptLoader(numbered(10), 1, chooser=chooser)
    asked: list[str] = []
    for version in range(60):
        batch = next(iter(loader))
        (name,) = [prompt.prompt_id for prompt in batch.prompts]
        passed = 2 if int(name.removeprefix("train/")) >= 5 else 0
        chooser.history.note([Visit(name, batch.prompts[0].visit, [1.0] * 4, passed, 40, version)])
        chooser.history.commit()
        chooser.learn([name])
        asked.append(name)
    mixed = [int(name.removeprefix("train/")) >= 5 for name in asked]
    assert sum(mixed[10:]) / 50 > 0.9 and len({*asked}) > 5
    assert chooser.state["trained_version"] == 59.0 and chooser.state["partly_passed"] == float(mixed[-1])
    assert chooser.metrics()["prompts/partly_expected"] > 0.3


def test_what_was_expected_is_of_before_the_visit() -> None:
    rule = DynamicsPredictive()
    recent = (Outcome(0, 0.5), Outcome(1, 0.5), Outcome(2, 1.0))
    state = rule.prompt_state([PROMPT], [Record(3, recent=recent)], {"trained_version": 1.0})
    assert state["partly_expected"] == pytest.approx(predicted(recent[:2], 2, 0.5)[1]) and not state["partly_passed"]
    assert rule.prompt_state([], [], state) == state
