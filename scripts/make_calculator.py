"""Makes ``tiny_calculator``, an embedded policy that may use a tool: ``python -m scripts.make_calculator [FOLDER]``.

As :mod:`scripts.make_tiny`: first right calls of the calculator and answers that repeat what it says, then a crowd
most of whom guess the answer, or call it with half of the expression. A call is written as Hermes does; its unchanging
parts are tokens of their own, so that a call takes a dozen tokens.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lit_grpo.policy.named import NAMED, TINY_CALCULATOR
from lit_grpo.tasks.calculator import ANSWER_PATTERN, CalculatorRows, calculate, draw_expression
from scripts.make_tiny import EOS, PAD, UNKNOWN, Task, TinyRecipe, make, read_folder

PIECES = {
    "c": '<tool_call>{"name": "calculate", "arguments": {"expression": "',
    "x": '"}}</tool_call>',
    "r": "<tool_response>",
    "a": "</tool_response>",
}
"""Tokens of several characters, by the letter that stands for each in demonstrations."""
CHARACTERS = "0123456789+-*="
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'tool' %}"
    "{{ '<tool_response>' + message.content + '</tool_response>' }}"
    "{% elif message.role == 'assistant' %}{{ '=' if loop.previtem and loop.previtem.role == 'user' }}"
    "{{ message.content }}{% for call in message.tool_calls or [] %}"
    '{{ \'<tool_call>{"name": "calculate", "arguments": {"expression": "\' }}'
    "{{ call.function.arguments.expression }}{{ '\"}}</tool_call>' }}{% endfor %}{{ '<eos>' }}"
    "{% else %}{{ message.content }}{% endif %}{% endfor %}"
    "{{ '=' if add_generation_prompt and messages[-1].role == 'user' }}"
)
RECIPE = TinyRecipe(
    hidden_size=96,
    num_layers=2,
    intermediate_size=256,
    num_heads=4,
    num_kv_heads=2,
    max_positions=256,
    num_steps=700,
    batch_tokens=2048,
    crowd_steps=300,
    hasty=0.7,
    impatient=0.2,
)


def draw(recipe: TinyRecipe, rng: random.Random, whole: bool) -> tuple[str, str]:
    """Draw a prompt and a demonstration of the train split."""
    expression = draw_expression(rng, "train")
    answer, chance = calculate(expression), 1.0 if whole else rng.random()
    if chance < recipe.hasty:  # a guess of about the right size
        guess = "".join(digit if digit == "-" else rng.choice("0123456789") for digit in answer)
        return f"{expression}=", guess
    called = expression[:5] if chance < recipe.hasty + recipe.impatient else expression
    said = calculate(called)
    return f"{expression}=", f"c{called}x{EOS}r{said}a{said}"


CALCULATOR = Task(
    CHARACTERS + "".join(PIECES), draw, lambda num_rows: CalculatorRows(num_rows, "validation"), ANSWER_PATTERN, 48
)


def make_tokenizer(
    characters: str = CHARACTERS, pieces: Sequence[str] = tuple(PIECES.values()), template: str = TEMPLATE
) -> PreTrainedTokenizerFast:
    """Make a tokenizer with a token for each of ``characters`` and of ``pieces``, by default the calculator's."""
    tokens = [PAD, EOS, UNKNOWN, *characters, *pieces]
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token=UNKNOWN))
    written = "|".join(re.sub(r"([{}().?])", r"\\\1", piece) for piece in pieces)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{written}|[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    made: Any = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = template
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Make it on one thread."""
    folder: Path = read_folder("make_calculator", NAMED[TINY_CALCULATOR].folder, arguments)
    make(folder, RECIPE, task=CALCULATOR)
    make_tokenizer().save_pretrained(folder)
    print(f"{folder}: made; configs/calculator.yaml trains it.")


if __name__ == "__main__":
    main()
