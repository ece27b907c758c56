"""Makes ``tiny_knights``, the embedded policy of the harder task: ``python -m scripts.make_knights [FOLDER]``.

As :mod:`scripts.make_tiny`, on knights and knaves: first whole searches, then a crowd most of whom guess where there
are three characters. It is deeper, for a claim is looked up in the prompt and then judged by the line so far.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from lit_grpo.policy.named import NAMED, TINY_KNIGHTS
from lit_grpo.tasks import KnightsRows
from lit_grpo.tasks.knights import ALPHABET, ANSWER_PATTERN, demonstration, draw_puzzle
from scripts.make_tiny import Task, TinyRecipe, exact_match, make, read_folder

RECIPE = TinyRecipe(
    num_layers=4,
    intermediate_size=256,
    num_heads=4,
    num_kv_heads=2,
    max_positions=768,
    num_steps=900,
    batch_tokens=2048,
    crowd_steps=200,
    hasty=0.8,
    more=0.6,
)


def draw(recipe: TinyRecipe, rng: random.Random, whole: bool) -> tuple[str, str]:
    """Draw a prompt and a demonstration of the train split."""
    puzzle = draw_puzzle(rng, "train", more=recipe.more)
    return puzzle.prompt, demonstration(puzzle, rng, 0.0 if whole else recipe.hasty)


KNIGHTS = Task(ALPHABET, draw, lambda num_rows: KnightsRows(num_rows, "validation"), ANSWER_PATTERN, 700)


def main(arguments: Sequence[str] | None = None) -> None:
    """Make it on one thread, and say how good it is."""
    folder = read_folder("make_knights", NAMED[TINY_KNIGHTS].folder, arguments)
    make(folder, RECIPE, task=KNIGHTS)
    print(f"{folder}: {exact_match(folder, task=KNIGHTS):.1%} of the held-out puzzles are solved, decoded greedily.")


if __name__ == "__main__":
    main()
