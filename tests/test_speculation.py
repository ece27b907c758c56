"""Drafts from completions of the same prompt, and the steps that they would save."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from lit_grpo.scheduling.drafting import ROOT, SHORTEST_MATCH, Drafts, SuffixAutomaton
from lit_grpo.tools.simulation.known import lengths_of
from lit_grpo.tools.simulation.simulator import Engine, Schedule, simulate
from lit_grpo.tools.simulation.speculation import Speculation, SpeculativeReplay
from lit_grpo.tools.simulation.traces import Trace

PROMPT = (70, 80)


def what_followed(texts: Sequence[Sequence[int]], context: Sequence[int]) -> tuple[int, Counter[int]]:
    """Brute force: the length of the longest end of ``context`` that has been followed, and by what how often."""
    for length in range(len(context), 0, -1):
        end = list(context[-length:])
        followed = Counter(
            text[at + length]
            for text in texts
            for at in range(len(text) - length)
            if list(text[at : at + length]) == end
        )
        if followed:
            return length, followed
    return 0, Counter()


@pytest.mark.parametrize("seed", range(40))
def test_a_draft_is_what_has_most_often_followed_the_longest_end_that_came_before(seed: int) -> None:
    rng = random.Random(seed)
    automaton, num_texts = SuffixAutomaton(), rng.randint(1, 4)
    texts: list[list[int]] = [[] for _ in range(num_texts)]
    states = [ROOT] * num_texts
    for _ in range(rng.randint(10, 60)):
        which, token = rng.randrange(num_texts), rng.randrange(rng.choice((2, 3)))
        states[which] = automaton.extend(states[which], token)
        texts[which].append(token)
        for text, state in zip(texts, states, strict=True):
            length, followed = what_followed(texts, text)
            draft = automaton.draft(state, 1)
            if length < SHORTEST_MATCH:
                assert draft == []
            else:
                assert len(draft) == 1 and followed[draft[0]] == max(followed.values())


def test_a_draft_goes_on_as_a_sibling_has() -> None:
    drafts = Drafts()
    drafts.begin("a", "p", [*PROMPT, 1, 2, 3, 4, 5, 6])
    drafts.begin("b", "p", PROMPT)
    assert drafts.draft("b", 3) == [1, 2, 3]
    drafts.extend("b", [1, 2, 9])
    assert drafts.draft("b", 3) == []  # 9 has never come
    drafts.extend("b", [3, 4])
    assert drafts.draft("b", 9) == [5, 6]
    drafts.end("a")
    assert drafts.draft("b", 1) == [5]
    drafts.begin("c", "another prompt", PROMPT)
    assert drafts.draft("c", 3) == []


def trace_of(*texts: Sequence[int], limit: int = 20, visit: int = 0) -> Trace:
    lengths = np.array([len(text) for text in texts])
    return Trace(
        "made by hand",
        [("p", visit, (sample,)) for sample in range(len(texts))],
        np.zeros(len(texts), dtype=np.int64),
        np.full(len(texts), len(PROMPT)),
        lengths,
        np.full(len(texts), limit),
        texts=[(PROMPT, text) for text in texts],
    )


def run(trace: Trace, num_slots: int, speculation: Speculation, plan: str = "fcfs") -> tuple[Schedule, list[int]]:
    engine = Engine(num_slots)
    generator = SpeculativeReplay(engine, trace, speculation)
    schedule = simulate(trace, plan, engine, lengths_of(trace, 0.0), generator=generator)
    return schedule, generator.positions


def test_a_sibling_that_goes_the_same_way_takes_fewer_steps() -> None:
    first, second = [1, 2, 3, 4, 5, 6, 7, 9], [1, 2, 3, 4, 5, 6, 7, 8, 8]
    speculation = Speculation(3)
    schedule, positions = run(trace_of(first, second), 1, speculation)
    # With one slot none is free for drafts; each takes a step a token.
    assert schedule.steps == 17 and set(positions) == {1} and speculation.num_drafted == 0
    speculation = Speculation(3)
    schedule, positions = run(trace_of(first), 4, speculation)
    assert schedule.steps == 8
    # The second visit knows the first: twice three are right, with one sampled behind them; what follows 8 is new.
    schedule, positions = run(trace_of(second, visit=1), 4, speculation)
    assert schedule.steps == 3 and positions == [4, 4, 1]
    assert (speculation.num_drafted, speculation.num_accepted) == (6, 6)
    schedule, positions = run(trace_of([1, 2, 4, 4], visit=2), 4, speculation)
    assert schedule.steps == 2 and positions == [4, 1]  # two of three were right, and a 4 behind a 2 is new
    assert (speculation.num_drafted, speculation.num_accepted) == (9, 8)


@pytest.mark.parametrize("plan", ["fcfs", "lpt", "short_last", "balanced"])
@pytest.mark.parametrize("seed", range(4))
def test_all_tokens_are_decoded_and_no_step_is_wider_than_the_slots(plan: str, seed: int) -> None:
    rng = random.Random(seed)
    words = [[rng.randrange(6) for _ in range(5)] for _ in range(3)]
    texts = [[token for _ in range(rng.randint(1, 6)) for token in rng.choice(words)] for _ in range(9)]
    trace, speculation = trace_of(*texts, limit=40), Speculation(3)
    schedule, positions = run(trace, 4, speculation, plan)
    plain = simulate(trace, plan, Engine(4), lengths_of(trace, 0.0))
    assert max(positions) <= 4 and len(positions) == schedule.steps <= plain.steps
    tokens = sum(map(len, texts))
    active = int((schedule.segments[:, 2] * (schedule.segments[:, 1] - schedule.segments[:, 0])).sum())
    assert active + speculation.num_accepted >= tokens  # a last token that was drafted needs no other behind it
    assert active <= tokens and speculation.num_accepted <= speculation.num_drafted == sum(positions) - active
