"""A harder task of very unequal workings: who is a knight, who is a knave.

Knights tell the truth, knaves lie. Everybody of a puzzle claims something about two, one of whom may be himself;
exactly one answer makes every knight's claim true and every knave's false. A claim is four characters, the claimant
first: ``A&BC`` is A's claim that B and C are both knights, ``|`` that at least one is, ``=`` that they are alike, ``^``
that they differ, ``-`` that both are knaves, ``/`` that at least one is::

    A=ABB/CAC|BC:    A: B and I are alike.  B: C or A is a knave.  C: B or I am a knight.

The working tries everybody in turn as a knight, a capital letter, and then as a knave, a small one. Behind each new
letter stand the claims that can now be judged, each name in it a capital or small as its bearer is taken to be. If one
does not fit, ``!`` follows: the last knight is made a knave, and the line so far is written anew. Behind a full stop is
the answer::

    ABA=ABCB/CA!ABcB/cAc|Bc!AbA=Ab!aBa=aBCB/CaC|BC.aBC

The claims of a puzzle are in the order in which the search can judge them. How many lines a search takes is hardly to
be seen beforehand: most are a few, some of seven characters several dozen.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

from lit_grpo.tasks.drawn import DrawnRows, Split, geometric, split_of

ANSWER_PATTERN = r"(?:^|\.)([A-Ga-g]+)$"
"""Group 1 of its match is the answer of a completion: what stands behind the full stop."""

CHARACTERS = "ABCDEFG"
KNIGHTS = {"&": {2}, "|": {1, 2}, "=": {0, 2}, "^": {1}, "-": {0}, "/": {0, 1}}
"""How many knights among the two make a claim of each kind true."""
ALPHABET = CHARACTERS + CHARACTERS.lower() + "".join(KNIGHTS) + ":!."
"""Every character of a prompt or of a working."""

FEWEST, MOST = 3, 7
CONTINUE = 0.4  # the chance that a puzzle has one more character
LONGEST_WORKING = 699  # puzzles that take more are left out

PUZZLES_OF_THE_FEWEST: dict[Split, int] = {"train": 14936, "validation": 3240}
"""How many puzzles of three characters there are; of four there are millions."""


@dataclass(frozen=True)
class Claim:
    """What ``speaker`` says of two, all of them capital letters."""

    speaker: str
    kind: str
    first: str
    second: str

    @property
    def text(self) -> str:
        """As in a prompt."""
        return self.speaker + self.kind + self.first + self.second

    @property
    def judged_at(self) -> str:
        """The last character that one has to know about."""
        return max(self.speaker, self.first, self.second)

    def fits(self, line: str) -> bool:
        """Whether it is true and a knight's, or false and a knave's, where everybody is what ``line`` says."""
        knights = (self.first in line) + (self.second in line)
        true = knights in KNIGHTS[self.kind]
        return true == (self.speaker in line)


@dataclass(frozen=True)
class Puzzle:
    """One puzzle: the claims, one of each character, in the order in which they can be judged."""

    claims: tuple[Claim, ...]

    @property
    def prompt(self) -> str:
        """The puzzle as text."""
        return "".join(claim.text for claim in self.claims) + ":"

    @property
    def num_characters(self) -> int:
        """How many characters it has."""
        return len(self.claims)

    @cached_property
    def solutions(self) -> tuple[str, ...]:
        """Every line that fits all claims, found by trying all."""
        pairs = [(letter, letter.lower()) for letter in CHARACTERS[: self.num_characters]]
        lines = map("".join, product(*pairs))
        return tuple(line for line in lines if all(claim.fits(line) for claim in self.claims))

    @property
    def answer(self) -> str:
        """The line of its only solution."""
        (line,) = self.solutions
        return line

    @property
    def split(self) -> Split:
        """The split that it belongs to: the same for all puzzles that differ by names and by order alone.

        Characters are told apart by what they claim, by what is claimed of them, and so on from neighbour to
        neighbour; the hash is of all these together.
        """
        colours = dict.fromkeys(CHARACTERS[: self.num_characters], 0)
        for _ in range(3):
            colours = {letter: self._colour(letter, colours) for letter in colours}
        return split_of(_hash(sorted(colours.values())))

    def _colour(self, letter: str, colours: dict[str, int]) -> int:
        """A number made of the claims that name ``letter``, and of the colours of those whom they name."""
        named: list[tuple[object, ...]] = []
        for claim in self.claims:
            others = [colours[each] for each in (claim.first, claim.second) if each != letter]
            if letter in (claim.speaker, claim.first, claim.second):
                says, told = letter == claim.speaker, len(others) == 1
                named.append((claim.kind, says, told, colours[claim.speaker], *sorted(others)))
        return _hash((colours[letter], sorted(map(repr, named))))


def working(puzzle: Puzzle) -> str:
    """Write the whole search behind the prompt, without a slip, and the answer."""
    line = text = "A"
    while True:
        fits = True
        for claim in puzzle.claims:
            if fits and claim.judged_at == line[-1].upper():
                text += "".join(each.lower() if each.lower() in line else each for each in claim.text)
                fits = claim.fits(line)
        if not fits:
            line = line.rstrip(CHARACTERS.lower())  # of knaves both has been tried
            line = line[:-1] + line[-1].lower()
            text += "!" + line
        elif len(line) == puzzle.num_characters:
            return text + "." + line
        else:
            line += CHARACTERS[len(line)]
            text += line[-1]


def demonstration(puzzle: Puzzle, rng: random.Random, hasty: float) -> str:
    """Answer as a mixed crowd of people would, many of whom guess where a puzzle looks small: hardly ever rightly.

    Args:
        puzzle: What they are asked.
        rng: Decides who answers, and what is guessed.
        hasty: Share of those who guess where there are three characters.
    """
    if puzzle.num_characters > FEWEST or rng.random() >= hasty:
        return working(puzzle)
    return "." + "".join(rng.choice((letter, letter.lower())) for letter in puzzle.answer.upper())


def draw_puzzle(
    rng: random.Random, split: Split, fewest: int = FEWEST, most: int = MOST, more: float = CONTINUE
) -> Puzzle:
    """Draw a puzzle of ``split`` with one solution; the number of characters is geometric, cut at ``most``.

    Args:
        rng: Source of chance.
        split: Which split the puzzle is of.
        fewest: The fewest characters.
        most: The most characters.
        more: The chance that there is one more character.
    """
    letters = CHARACTERS[: geometric(rng, fewest, most, more)]
    while True:
        puzzle = Puzzle(tuple(sorted((_claim(rng, each, letters) for each in letters), key=_order)))
        if len(puzzle.solutions) == 1 and puzzle.split == split and len(working(puzzle)) <= LONGEST_WORKING:
            return puzzle


def _claim(rng: random.Random, speaker: str, letters: str) -> Claim:
    return Claim(speaker, rng.choice(list(KNIGHTS)), *rng.sample(letters, 2))


def _order(claim: Claim) -> tuple[str, str]:
    return claim.judged_at, claim.speaker


def _hash(value: Sequence[object]) -> int:
    return zlib.crc32(repr(value).encode())


class KnightsRows(DrawnRows):
    """Knights and knaves, each puzzle once and with one solution, none in both splits.

    A row has the columns ``prompt`` (``A=ABB/CAC|BC:``), ``answer`` (``aBC``: A is a knave, B and C are knights) and
    ``num_characters``. Puzzles that differ by names and by order alone are in one split. The embedded policy
    ``tiny_knights`` has been warm-started on the train split.

    Args:
        num_rows: How many rows.
        split: Which puzzles: ``train`` or ``validation``; none is in both.
        seed: Decides which puzzles of the split are drawn, and their order.
        min_characters: The fewest characters of a puzzle, from 3 to 7.
        max_characters: The most, from there to 7.

    Raises:
        ValueError: A limit is out of its range, or the split has fewer puzzles than ``num_rows``.
    """

    def __init__(
        self,
        num_rows: int = 2048,
        split: Split = "train",
        seed: int = 0,
        min_characters: int = FEWEST,
        max_characters: int = MOST,
    ) -> None:
        super().__init__(num_rows, split, seed)
        if not FEWEST <= min_characters <= MOST:
            raise ValueError(f"min_characters must be from {FEWEST} to {MOST}, not {min_characters}.")
        if not min_characters <= max_characters <= MOST:
            raise ValueError(f"max_characters must be from {min_characters} to {MOST}, not {max_characters}.")
        if max_characters == FEWEST and num_rows > PUZZLES_OF_THE_FEWEST[split]:
            raise ValueError(
                f"num_rows is {num_rows}, but the {split} split has only {PUZZLES_OF_THE_FEWEST[split]} puzzles with "
                f"max_characters={FEWEST}; ask for fewer rows or raise max_characters."
            )
        self.min_characters, self.max_characters = min_characters, max_characters

    def draw(self, rng: random.Random) -> dict[str, Any]:
        """Draw a puzzle."""
        puzzle = draw_puzzle(rng, self.split, self.min_characters, self.max_characters)
        return {"prompt": puzzle.prompt, "answer": puzzle.answer, "num_characters": puzzle.num_characters}
