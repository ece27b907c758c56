"""A harder task whose workings differ much in length: who is a knight, who is a knave.

Knights tell the truth, knaves lie. Each person of a puzzle makes a claim about two persons, perhaps about himself.
Exactly one answer makes every knight's claim true and every knave's claim false. A claim has four characters; the first
is the person who makes it: ``A&BC`` is A's claim that B and C are both knights. ``|`` claims that at least one is a
knight, ``=`` that both are of one kind, ``^`` that they differ, ``-`` that both are knaves, and ``/`` that at least one
is a knave::

    A=ABB/CAC|BC:    A: B and I are of one kind.  B: C or A is a knave.  C: B or I am a knight.

The working tries each person first as a knight, written as a capital letter, and then as a knave, a small letter. After
each new letter come the claims that can now be judged, with each name written as the person is assumed to be. If a
claim does not fit, ``!`` follows: the last knight becomes a knave, and the line so far is written again. The answer
comes after a full stop::

    ABA=ABCB/CA!ABcB/cAc|Bc!AbA=Ab!aBa=aBCB/CaC|BC.aBC

The claims of a puzzle are in the order in which the search can judge them. The number of lines of a search is hard to
predict: most searches take a few, some of seven persons take dozens.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Annotated, Any

from lit_grpo.limits import Limit, check_value, checks_arguments
from lit_grpo.tasks.drawn import DrawnRows, Split, geometric, split_of

ANSWER_PATTERN = r"(?:^|\.)([A-Ga-g]+)$"
"""Group 1 of its match is the answer of a completion: the letters after the full stop."""

CHARACTERS = "ABCDEFG"
KNIGHTS = {"&": {2}, "|": {1, 2}, "=": {0, 2}, "^": {1}, "-": {0}, "/": {0, 1}}
"""Numbers of knights among the two characters with which a claim of each kind is true."""
ALPHABET = CHARACTERS + CHARACTERS.lower() + "".join(KNIGHTS) + ":!."
"""Every character of a prompt or of a working."""

FEWEST, MOST = 3, 7
CONTINUE = 0.4  # the chance that a puzzle has one more character
LONGEST_WORKING = 699  # characters; puzzles with a longer working are left out

PUZZLES_OF_THE_FEWEST: dict[Split, int] = {"train": 14936, "validation": 3240}
"""The number of puzzles with three characters; with four characters there are millions."""


@dataclass(frozen=True)
class Claim:
    """The claim of ``speaker`` about two characters; all three are capital letters."""

    speaker: str
    kind: str
    first: str
    second: str

    @property
    def text(self) -> str:
        return self.speaker + self.kind + self.first + self.second

    @property
    def judged_at(self) -> str:
        """The last character that must be known to judge the claim."""
        return max(self.speaker, self.first, self.second)

    def fits(self, line: str) -> bool:
        """Return whether the claim is a knight's and true, or a knave's and false, if ``line`` says who is a knight."""
        knights = (self.first in line) + (self.second in line)
        true = knights in KNIGHTS[self.kind]
        return true == (self.speaker in line)


@dataclass(frozen=True)
class Puzzle:
    """One puzzle: the claims, one of each character, in the order in which they can be judged."""

    claims: tuple[Claim, ...]

    @property
    def prompt(self) -> str:
        return "".join(claim.text for claim in self.claims) + ":"

    @property
    def num_characters(self) -> int:
        return len(self.claims)

    @cached_property
    def solutions(self) -> tuple[str, ...]:
        """All lines that fit all claims."""
        pairs = [(letter, letter.lower()) for letter in CHARACTERS[: self.num_characters]]
        lines = map("".join, product(*pairs))
        return tuple(line for line in lines if all(claim.fits(line) for claim in self.claims))

    @property
    def answer(self) -> str:
        (line,) = self.solutions
        return line

    @property
    def split(self) -> Split:
        """The split of the puzzle: the same for all puzzles that differ only in names and order.

        It is a hash of the characters' claims, the claims about them, and those of their neighbors.
        """
        colors: dict[str, int] = dict.fromkeys(CHARACTERS[: self.num_characters], 0)
        for _ in range(3):
            colors = {letter: self._color(letter, colors) for letter in colors}
        return split_of(_hash(sorted(colors.values())))

    def _color(self, letter: str, colors: dict[str, int]) -> int:
        """Return a hash of the claims that name ``letter``, and of the colors of the characters in them."""
        named: list[tuple[object, ...]] = []
        for claim in self.claims:
            others = [colors[each] for each in (claim.first, claim.second) if each != letter]
            if letter in (claim.speaker, claim.first, claim.second):
                says, told = letter == claim.speaker, len(others) == 1
                named.append((claim.kind, says, told, colors[claim.speaker], *sorted(others)))
        return _hash((colors[letter], sorted(map(repr, named))))


def working(puzzle: Puzzle) -> str:
    """Write the whole search after the prompt, without a mistake, and the answer."""
    line = text = "A"
    while True:
        fits = True
        for claim in puzzle.claims:
            if fits and claim.judged_at == line[-1].upper():
                text += "".join(each.lower() if each.lower() in line else each for each in claim.text)
                fits = claim.fits(line)
        if not fits:
            line = line.rstrip(CHARACTERS.lower())  # knaves have been tried as knights before
            line = line[:-1] + line[-1].lower()
            text += "!" + line
        elif len(line) == puzzle.num_characters:
            return text + "." + line
        else:
            line += CHARACTERS[len(line)]
            text += line[-1]


def demonstration(puzzle: Puzzle, rng: random.Random, hasty: float) -> str:
    """Answer as one of many people would; some guess the answer of a small puzzle, and are hardly ever right.

    Args:
        puzzle: The puzzle to answer.
        rng: Decides who answers, and the guess.
        hasty: The share of people who guess if there are three characters.
    """
    if puzzle.num_characters > FEWEST or rng.random() >= hasty:
        return working(puzzle)
    return "." + "".join(rng.choice((letter, letter.lower())) for letter in puzzle.answer.upper())


def draw_puzzle(
    rng: random.Random, split: Split, fewest: int = FEWEST, most: int = MOST, more: float = CONTINUE
) -> Puzzle:
    """Draw a puzzle of ``split`` with one solution; the number of characters is geometric, cut at ``most``.

    Args:
        rng: Random numbers that the puzzle is drawn with.
        split: Split of the puzzle.
        fewest: Min number of characters.
        most: Max number of characters.
        more: The chance that there is one more character.
    """
    letters = CHARACTERS[: geometric(rng, fewest, most, more)]
    while True:
        claims = [Claim(each, rng.choice(list(KNIGHTS)), *rng.sample(letters, 2)) for each in letters]
        puzzle = Puzzle(tuple(sorted(claims, key=lambda claim: (claim.judged_at, claim.speaker))))
        if len(puzzle.solutions) == 1 and puzzle.split == split and len(working(puzzle)) <= LONGEST_WORKING:
            return puzzle


def _hash(value: Sequence[object]) -> int:
    return zlib.crc32(repr(value).encode())


class KnightsRows(DrawnRows):
    """Knights and knaves, each puzzle once and with one solution, none in both splits.

    A row has the columns ``prompt`` (``A=ABB/CAC|BC:``), ``answer`` (``aBC``: A is a knave, B and C are knights) and
    ``num_characters``. Puzzles that differ by names and by order alone are in one split. The embedded policy
    ``tiny_knights`` has been warm-started on the train split.

    Args:
        num_rows: Number of puzzles to draw.
        split: Split of the puzzles: ``train`` or ``validation``; no puzzle is in both.
        seed: Seed of the draw of puzzles from the split, and of their order.
        min_characters: Min number of characters of a puzzle, from 3 to 7.
        max_characters: Max number of characters of a puzzle, from ``min_characters`` to 7.

    Raises:
        ValueError: A limit is out of its range, or the split has fewer puzzles than ``num_rows``.
    """

    @checks_arguments()
    def __init__(
        self,
        num_rows: int = 2048,
        split: Split = "train",
        seed: int = 0,
        min_characters: Annotated[int, Limit(ge=FEWEST, le=MOST)] = FEWEST,
        max_characters: int = MOST,
    ) -> None:
        super().__init__(num_rows, split, seed)
        check_value("max_characters", max_characters, Annotated[int, Limit(ge=min_characters, le=MOST)])
        if max_characters == FEWEST and num_rows > PUZZLES_OF_THE_FEWEST[split]:
            raise ValueError(
                f"num_rows is {num_rows}, but the {split} split has only {PUZZLES_OF_THE_FEWEST[split]} puzzles with "
                f"max_characters={FEWEST}; ask for fewer rows or raise max_characters."
            )
        self.min_characters, self.max_characters = min_characters, max_characters

    def draw(self, rng: random.Random) -> dict[str, Any]:
        puzzle = draw_puzzle(rng, self.split, self.min_characters, self.max_characters)
        return {"prompt": puzzle.prompt, "answer": puzzle.answer, "num_characters": puzzle.num_characters}
