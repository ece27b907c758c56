"""Makes ``tiny_catch``, an embedded policy that plays a game: ``python -m scripts.make_catch [FOLDER]``.

As :mod:`scripts.make_calculator`: first whole games of :class:`lit_grpo.tasks.Catch` in which every move is right,
then games most of whose players move at random. What comes out writes calls of ``move`` and mostly misses the ball.
The prompt, the directions and the unchanging parts of a call are tokens of their own, and so is each square.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from lit_grpo.policy.named import NAMED, TINY_CATCH
from lit_grpo.tasks.catch import PROMPT, Catch, CatchRows
from scripts.make_calculator import make_tokenizer
from scripts.make_tiny import EOS, Task, TinyRecipe, make, read_folder

PIECES = {
    "P": PROMPT,
    "c": '<tool_call>{"name": "move", "arguments": {"direction": "',
    "l": "left",
    "r": "right",
    "s": "stay",
    "x": '"}}</tool_call>',
    "b": "<tool_response>",
    "a": "</tool_response>",
}
"""Tokens of several characters, by the letter that stands for each in demonstrations."""
CHARACTERS = ".o_\n="
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'tool' %}"
    "{{ '<tool_response>' + message.content + '</tool_response>' }}"
    "{% elif message.role == 'assistant' %}{{ '=' if loop.previtem and loop.previtem.role == 'user' }}"
    "{{ message.content }}{% for call in message.tool_calls or [] %}"
    '{{ \'<tool_call>{"name": "move", "arguments": {"direction": "\' }}'
    "{{ call.function.arguments.direction }}{{ '\"}}</tool_call>' }}{% endfor %}{{ '<eos>' }}"
    "{% else %}{{ message.content }}{% endif %}{% endfor %}"
    "{{ '=' if add_generation_prompt and messages[-1].role == 'user' }}"
)
RECIPE = TinyRecipe(
    hidden_size=64,
    num_layers=2,
    intermediate_size=192,
    num_heads=4,
    num_kv_heads=2,
    max_positions=320,
    num_steps=250,
    batch_tokens=3072,
    crowd_steps=40,
    hasty=0.7,
    sharpness=1.0,
)


def draw(recipe: TinyRecipe, rng: random.Random, whole: bool) -> tuple[str, str]:
    """Draw a game of the train split: its prompt, and the turns with what each was told."""
    game = Catch()
    begin = game.reset(**CatchRows().draw(rng))
    at_random = not whole and rng.random() < recipe.hasty
    turns: list[str] = []
    while True:
        direction = rng.choice(("left", "right", "stay")) if at_random else right_move(game)
        turns.append(f"c{direction[0]}x")
        board = game.move(direction)
        if game.done:
            return f"P{begin}=", "".join(turns)
        turns[-1] += f"{EOS}b{board}a"


def right_move(game: Catch) -> str:
    """Return the move that brings the paddle nearer to the ball, or keeps it there."""
    return "left" if game.ball < game.paddle else "right" if game.ball > game.paddle else "stay"


CATCH = Task(CHARACTERS + "".join(PIECES), draw, lambda num_rows: CatchRows(num_rows, "validation"), "", 25)


def main(arguments: Sequence[str] | None = None) -> None:
    """Make it on one thread."""
    folder: Path = read_folder("make_catch", NAMED[TINY_CATCH].folder, arguments)
    make(folder, RECIPE, task=CATCH)
    make_tokenizer(CHARACTERS, tuple(PIECES.values()), TEMPLATE).save_pretrained(folder)
    print(f"{folder}: made; configs/catch.yaml trains it.")


if __name__ == "__main__":
    main()
