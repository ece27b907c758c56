"""A harder task of very unequal workings: who is a knight, who is a knave.

Knights tell the truth, knaves lie. Everybody of a puzzle claims something about two of the others; exactly one answer
makes every knight's claim true and every knave's false. Claims are four characters each, the claimant first. A capital
stands for *is a knight* and a small letter for *is a knave*; ``&`` is *and*, ``|`` *or*, ``=`` *if and only if*::

    A=bCB|acC|Ba:    A: B is a knave iff C is a knight.  B: A or C is a knave.  C: B is a knight or A a knave.

The working tries everybody in turn as a knight first. Behind each new character stand the claimants whose claims can
now be judged; a claim that does not fit is marked ``!``, the last knight is made a knave, and the line so far written
anew. Behind a full stop is the answer::

    ABCA!ABcABc!AbCAbC!AbcA!aBCaBC.aBC

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
from typing import Literal

ANSWER_PATTERN = r"(?:^|\.)([A-Ga-g]+)$"
"""Group 1 of its match is the answer of a completion: what stands behind the full stop."""

CHARACTERS = "ABCDEFG"
KINDS = "&|="
ALPHABET = CHARACTERS + CHARACTERS.lower() + KINDS + ":!."
"""Every character of a prompt or of a working."""

Split = Literal["train", "validation"]
FEWEST, MOST = 3, 7
CONTINUE = 0.45  # the chance that a puzzle has one more character
LONGEST_WORKING = 479  # puzzles that take more are left out
VALIDATION_ONE_IN = 5


@dataclass(frozen=True)
class Claim:
    """What ``speaker`` says of two others, each a letter whose case says what it is claimed to be."""

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
        return max(self.speaker, self.first.upper(), self.second.upper())

    def fits(self, line: str) -> bool:
        """Whether it is true and a knight's, or false and a knave's, where everybody is what ``line`` says."""
        first, second = self.first in line, self.second in line
        true = {"&": first and second, "|": first or second, "=": first == second}[self.kind]
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
        return "validation" if _hash(sorted(colours.values())) % VALIDATION_ONE_IN == 0 else "train"

    def _colour(self, letter: str, colours: dict[str, int]) -> int:
        """A number made of the claims that name ``letter``, and of the colours of those whom they name."""
        named: list[tuple[object, ...]] = []
        for claim in self.claims:
            turned = claim.kind == "=" and claim.first.islower()  # a=B says the same as A=b
            said = {each.upper(): each.isupper() != turned for each in (claim.first, claim.second)}
            if claim.kind == "=":
                said = dict.fromkeys(said, all(said.values()))
            about = {each: (colours[each], knight) for each, knight in said.items()}
            if letter == claim.speaker:
                named.append(("says", claim.kind, *sorted(about.values())))
            elif letter in about:
                own = about.pop(letter)
                named.append(("is named", claim.kind, colours[claim.speaker], own, *about.values()))
        return _hash((colours[letter], sorted(map(repr, named))))


def working(puzzle: Puzzle) -> str:
    """Write the whole search behind the prompt, without a slip, and the answer."""
    return "".join(search(puzzle)) + "." + puzzle.answer


def search(puzzle: Puzzle) -> list[str]:
    """Write the search in parts, each up to a claim that does not fit; the last ends with the answer's line."""
    line, part, parts = "A", "A", list[str]()
    while True:
        fits = True
        for claim in puzzle.claims:
            if fits and claim.judged_at == line[-1].upper():
                part += claim.speaker if claim.speaker in line else claim.speaker.lower()
                fits = claim.fits(line)
        if not fits:
            parts.append(part + "!")
            line = line.rstrip(CHARACTERS.lower())  # of knaves both has been tried
            part = line = line[:-1] + line[-1].lower()
        elif len(line) == puzzle.num_characters:
            return [*parts, part]
        else:
            line += CHARACTERS[len(line)]
            part += line[-1]


def demonstration(puzzle: Puzzle, rng: random.Random, hasty: float, impatient: float) -> str:
    """Answer as a mixed crowd of people would.

    Those who do the whole search are right. The others guess, and are hardly ever.

    Args:
        puzzle: What they are asked.
        rng: Decides who answers, and what is guessed.
        hasty: Share of those who guess at once.
        impatient: Share of those who give up half-way.
    """
    mood = rng.random()
    if mood >= hasty + impatient:
        return working(puzzle)
    parts = search(puzzle)
    done = "" if mood < hasty else "".join(parts[: rng.randrange(len(parts))])
    guess = (rng.choice((letter, letter.lower())) for letter in CHARACTERS[: puzzle.num_characters])
    return done + "." + "".join(guess)


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
    num_characters = fewest
    while num_characters < most and rng.random() < more:
        num_characters += 1
    letters = CHARACTERS[:num_characters]
    while True:
        puzzle = Puzzle(tuple(sorted((_claim(rng, each, letters) for each in letters), key=_order)))
        if len(puzzle.solutions) == 1 and puzzle.split == split and len(working(puzzle)) <= LONGEST_WORKING:
            return puzzle


def _claim(rng: random.Random, speaker: str, letters: str) -> Claim:
    first, second = rng.sample([letter for letter in letters if letter != speaker], 2)
    return Claim(speaker, rng.choice(KINDS), *(rng.choice((each, each.lower())) for each in (first, second)))


def _order(claim: Claim) -> tuple[str, str]:
    return claim.judged_at, claim.speaker


def _hash(value: Sequence[object]) -> int:
    return zlib.crc32(repr(value).encode())
