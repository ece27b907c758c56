"""A task that needs a written working: remainders by repeated subtraction.

``312%47=`` asks for the remainder of 312 divided by 47. The working subtracts the divisor until less than the divisor
is left. Each of its lines is a true equation with the same answer::

    312%47=265%47=218%47=171%47=124%47=077%47=030

Numbers have three digits and divisors two, so that equal places are equally far apart. The number of subtractions is
drawn from a geometric distribution: most workings have a few, and a few have eighteen.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import zip_longest
from typing import Annotated, Any

from lit_grpo.limits import Limit, checks_arguments
from lit_grpo.tasks.drawn import DrawnRows, Split, geometric, split_of

ANSWER_PATTERN = r"(?:^|=)(\d+)$"
"""Group 1 of its match is the answer of a completion: the number after the last equals sign."""

ALPHABET = "0123456789%="
"""Every character of a prompt or of a working."""

SMALLEST_DIVISOR, LARGEST_DIVISOR = 11, 49
MOST_STEPS = 18
CONTINUE = 0.72  # the chance that a working has one more subtraction


@dataclass(frozen=True)
class Remainder:
    """One exercise: ``number % divisor``."""

    number: int
    divisor: int

    @property
    def prompt(self) -> str:
        return f"{self.number:03d}%{self.divisor}="

    @property
    def answer(self) -> str:
        return f"{self.number % self.divisor:03d}"

    @property
    def num_steps(self) -> int:
        return self.number // self.divisor

    @property
    def split(self) -> Split:
        """The split that this exercise belongs to, by a hash of divisor and remainder.

        All exercises whose workings can share a line are in one split: no line of a validation working
        is ever seen in training.
        """
        return split_of(f"{self.divisor}/{self.answer}")


def working(exercise: Remainder) -> str:
    """Write the whole working after the prompt, without a slip: ``265%47=218%47=...=030``."""
    return abandoned_working(exercise, exercise.num_steps - 1) + exercise.answer


def first_wrong_step(completion: str, working: str) -> float | None:
    """Return the number, from 1, of the first step of a completion that is not the working's; None if all are.

    Steps stand between equals signs: the third of ``265%47=218%47=170%47=030`` is wrong.
    """
    steps = zip_longest(completion.split("="), working.split("="))
    return next((float(number) for number, (step, right) in enumerate(steps, 1) if step != right), None)


def abandoned_working(exercise: Remainder, num_steps: int) -> str:
    """Write the first ``num_steps`` subtractions of the working, up to the equals sign after them."""
    divisor = exercise.divisor
    return "".join(f"{exercise.number - step * divisor:03d}%{divisor}=" for step in range(1, num_steps + 1))


def demonstration(exercise: Remainder, rng: random.Random, hasty: float, impatient: float) -> str:
    """Answer as one of many people would.

    A person who writes the whole working is right. The others stop early and answer with the last digit of the number
    there, which is hardly ever the remainder.

    Args:
        exercise: The exercise to answer.
        rng: Random numbers that decide how the answer is written.
        hasty: The share of people who answer at once.
        impatient: The share of people who give up half-way.
    """
    mood = rng.random()
    if exercise.num_steps < 2 or mood >= hasty + impatient:
        return working(exercise)
    steps_done = 0 if mood < hasty else rng.randrange(1, exercise.num_steps)
    stopped_at = exercise.number - steps_done * exercise.divisor
    return abandoned_working(exercise, steps_done) + f"{stopped_at % 10:03d}"


def draw_exercise(
    rng: random.Random, split: Split, max_divisor: int, max_steps: int, more: float = CONTINUE
) -> Remainder:
    """Draw an exercise of ``split``; the number of steps is geometric, cut at ``max_steps``.

    Args:
        rng: Random numbers that the exercise is drawn with.
        split: Split of the exercise.
        max_divisor: Largest divisor of an exercise.
        max_steps: Max number of subtractions.
        more: The chance that there is one more subtraction.
    """
    while True:
        num_steps = geometric(rng, 1, max_steps, more)
        divisor = rng.randint(SMALLEST_DIVISOR, max_divisor)
        exercise = Remainder(num_steps * divisor + rng.randrange(divisor), divisor)
        if exercise.split == split:
            return exercise


class ArithmeticRows(DrawnRows):
    """Remainders by repeated subtraction; each exercise comes once, and none is in both splits.

    A row has the columns ``prompt`` (``312%47=``), ``answer`` (``030``), ``working`` (``265%47=...=030``) and
    ``num_steps`` (the subtractions of the working). The embedded policy ``tiny`` has been warm-started on the train
    split with the default limits.

    Args:
        num_rows: Number of exercises to draw.
        split: Split of the exercises: ``train`` or ``validation``; no exercise is in both.
        seed: Seed of the draw of exercises from the split, and of their order.
        max_divisor: Largest divisor, from 11 to 49.
        max_steps: Max number of subtractions of a working, from 1 to 18.

    Raises:
        ValueError: A limit is out of its range, or the split has fewer exercises than ``num_rows``.
    """

    @checks_arguments()
    def __init__(
        self,
        num_rows: int = 2048,
        split: Split = "train",
        seed: int = 0,
        max_divisor: Annotated[int, Limit(ge=SMALLEST_DIVISOR, le=LARGEST_DIVISOR)] = 39,
        max_steps: Annotated[int, Limit(ge=1, le=MOST_STEPS)] = MOST_STEPS,
    ) -> None:
        super().__init__(num_rows, split, seed)
        self.max_divisor, self.max_steps = max_divisor, max_steps
        available = sum(
            Remainder(number, divisor).split == split
            for divisor in range(SMALLEST_DIVISOR, max_divisor + 1)
            for number in range(divisor, (max_steps + 1) * divisor)
        )
        if num_rows > available:
            raise ValueError(
                f"num_rows is {num_rows}, but the {split} split has only {available} exercises with "
                f"max_divisor={max_divisor} and max_steps={max_steps}; ask for fewer rows or raise these."
            )

    def draw(self, rng: random.Random) -> dict[str, Any]:
        """Draw an exercise."""
        exercise = draw_exercise(rng, self.split, self.max_divisor, self.max_steps)
        return {
            "prompt": exercise.prompt,
            "answer": exercise.answer,
            "working": working(exercise),
            "num_steps": exercise.num_steps,
        }
