"""The harder task: its puzzles, their workings, its splits and its lengths, and the policy that comes with it."""

from __future__ import annotations

import random
from itertools import product

import pytest

from lit_grpo.rewards.builtin import ExactMatch
from lit_grpo.tasks.knights import (
    ANSWER_PATTERN,
    CHARACTERS,
    LONGEST_WORKING,
    Claim,
    KnightsRows,
    Puzzle,
    demonstration,
    draw_puzzle,
    working,
)


def read(prompt: str) -> Puzzle:
    """The puzzle of a prompt."""
    claims = (prompt[at : at + 4] for at in range(0, len(prompt) - 1, 4))
    return Puzzle(tuple(Claim(*text) for text in claims))


def draw(count: int, seed: int = 0) -> list[Puzzle]:
    rng = random.Random(seed)
    return [draw_puzzle(rng, "train") for _ in range(count)]


def true(claim: str, knights: set[str]) -> bool:
    """Whether a claim is, said anew."""
    first, second = claim[2] in knights, claim[3] in knights
    kinds = {"&": first and second, "|": first or second, "=": first is second}
    kinds |= {"/": not kinds["&"], "-": not kinds["|"], "^": not kinds["="]}
    return kinds[claim[1]]


def solved(prompt: str) -> list[str]:
    """All that make knights' claims true and knaves' false, by trying every set of knights."""
    claims = [prompt[at : at + 4] for at in range(0, len(prompt) - 1, 4)]
    letters = sorted(claim[0] for claim in claims)
    found = []
    for chosen in product((True, False), repeat=len(letters)):
        knights = {letter for letter, knight in zip(letters, chosen, strict=True) if knight}
        if all(true(claim, knights) == (claim[0] in knights) for claim in claims):
            found.append("".join(letter if letter in knights else letter.lower() for letter in letters))
    return found


def renamed(puzzle: Puzzle, rng: random.Random) -> Puzzle:
    """The same puzzle by other names, those that a claim is about in another order."""
    letters = CHARACTERS[: puzzle.num_characters]
    names: dict[str, str] = dict(zip(letters, rng.sample(letters, len(letters)), strict=True))
    claims = []
    for claim in puzzle.claims:
        about = rng.sample([names[claim.first], names[claim.second]], 2)
        claims.append(Claim(names[claim.speaker], claim.kind, *about))
    return Puzzle(tuple(sorted(claims, key=lambda claim: (claim.judged_at, claim.speaker))))


def test_every_line_that_a_working_gives_up_breaks_the_claim_that_it_names_last() -> None:
    for puzzle in draw(200):
        for part in working(puzzle).split("!")[:-1]:
            knights: set[str] = {letter for letter in CHARACTERS if part.rfind(letter) > part.rfind(letter.lower())}
            (claim,) = [claim.text for claim in puzzle.claims if claim.speaker == part[-4].upper()]
            assert true(claim, knights) != (claim[0] in knights)


def test_every_row_has_exactly_one_solution_which_is_its_answer_and_its_workings() -> None:
    for split in ("train", "validation"):
        for row in KnightsRows(300, split).rows():
            assert solved(row["prompt"]) == [row["answer"]]
            assert row["num_characters"] == len(row["answer"]) == (len(row["prompt"]) - 1) // 4
            text = working(read(row["prompt"]))
            assert text.endswith("." + row["answer"]) and len(text) <= LONGEST_WORKING


def test_rows_are_the_same_each_time_and_differ_by_seed_and_none_is_twice() -> None:
    rows = list(KnightsRows(num_rows=200, seed=3).rows())
    assert rows == list(KnightsRows(num_rows=200, seed=3).rows())
    assert rows != list(KnightsRows(num_rows=200, seed=4).rows())
    assert len({row["prompt"] for row in rows}) == 200
    assert {row["num_characters"] for row in rows} == {3, 4, 5, 6, 7}


def test_a_puzzle_by_other_names_is_in_the_same_split() -> None:
    rng = random.Random(0)
    puzzles = [*draw(100), *(draw_puzzle(rng, "validation") for _ in range(100))]
    assert {puzzle.split for puzzle in puzzles} == {"train", "validation"}
    assert all(renamed(puzzle, rng).split == puzzle.split for puzzle in puzzles for _ in range(5))


def test_the_reward_pattern_reads_what_stands_behind_the_full_stop() -> None:
    exact = ExactMatch(pattern=ANSWER_PATTERN)
    assert exact("ABCACB!ABc.ABc", answer="ABc") == exact("ABc", answer="ABc") == 1.0
    assert exact("ABCA!ABcABc", answer="ABc") == exact("ABc.", answer="ABc") == exact(".ABC", answer="ABc") == 0.0


def test_the_hasty_guess_where_there_are_three_characters() -> None:
    rng, puzzles = random.Random(0), draw(600)
    answers = [(puzzle, demonstration(puzzle, rng, hasty=0.8)) for puzzle in puzzles]
    small = [answer.startswith(".") for puzzle, answer in answers if puzzle.num_characters == 3]
    assert 0.74 < sum(small) / len(small) < 0.86
    assert all(answer == working(puzzle) or puzzle.num_characters == 3 for puzzle, answer in answers)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"min_characters": 5, "max_characters": 4}, "max_characters must be from 5 to 7, not 4"),
        ({"num_rows": 14937, "max_characters": 3}, "the train split has only 14936 puzzles with max_characters=3"),
    ],
)
def test_bad_arguments_are_refused_in_one_sentence(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KnightsRows(**arguments)  # pyrefly: ignore[bad-argument-type]
