"""A task for a chat model: word problems of one step, with small numbers.

A prompt is a conversation: two examples with their answers, then the question.

.. code-block:: text

    user       Mia has 3 plums and gets 4 more. How many plums does Mia have now?
    assistant  3 + 4 = 7
    user       Paul has 9 kites and gives 2 away. How many kites does Paul have now?
    assistant  9 - 2 = 7
    user       Emma has 8 coins and finds 5 more. How many coins does Emma have now?

The row's ``answer`` is ``13``; :data:`ANSWER_PATTERN` takes the last number of a reply. A chat model of 135 million
parameters answers about one in three right when it decodes greedily: it miscalculates, adds where it should subtract,
or talks on.

With ``tool: true`` the examples call the calculator, :func:`lit_grpo.tasks.calculator.calculate`, as a policy does
whose chat template shows no tools:

.. code-block:: text

    user       Mia has 3 plums and gets 4 more. How many plums does Mia have now?
    assistant  {"name": "calculate", "arguments": {"expression": "3 + 4"}}
    tool       7
    assistant  7
"""

from __future__ import annotations

import json
import random
from typing import Any

from lit_grpo.tasks.drawn import DrawnRows, Split, split_of

ANSWER_PATTERN = r"(\d+)\D*$"
"""Group 1 of its match is the answer of a reply: its last number."""

NAMES = ("Anna", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Henry", "Iris", "Jack", "Karen", "Leo")
THINGS = ("apples", "books", "pens", "coins", "cards", "eggs", "cups", "shells", "stamps", "balls")
MORE = ("gets {b} more", "finds {b} more", "buys {b} more")
FEWER = ("gives {b} away", "loses {b} of them", "sells {b} of them")
EXAMPLES = (
    ("Mia has 3 plums and gets 4 more. How many plums does Mia have now?", "3 + 4 = 7"),
    ("Paul has 9 kites and gives 2 away. How many kites does Paul have now?", "9 - 2 = 7"),
)
SMALLEST, LARGEST_PART, LARGEST_WHOLE = 2, 12, 20


class WordProblemRows(DrawnRows):
    """Rows with a ``prompt``, a conversation, and its ``answer``; half of them add, half subtract.

    Args:
        num_rows: Number of word problems to draw.
        split: Split of the rows: ``train`` or ``validation``; no pair of numbers is in both.
        seed: Seed of the draw of rows from the split, and of their order.
        tool: Let the examples call the calculator, as in ``configs/word_problems_tool.yaml``.

    Raises:
        ValueError: There is no such split, or ``num_rows`` is below 1.
    """

    def __init__(self, num_rows: int, split: Split = "train", seed: int = 0, tool: bool = False) -> None:
        super().__init__(num_rows, split, seed)
        self._examples = [message for example in EXAMPLES for message in (_called if tool else _said)(*example)]

    def draw(self, rng: random.Random) -> dict[str, Any]:
        """Draw a row of the split."""
        while True:
            adds = rng.random() < 0.5
            if adds:
                a, b = rng.randint(SMALLEST, LARGEST_PART), rng.randint(SMALLEST, LARGEST_PART)
            else:
                a = rng.randint(SMALLEST + 2, LARGEST_WHOLE)
                b = rng.randint(SMALLEST, min(a - 1, LARGEST_PART))
            if split_of(f"{a}{'+' if adds else '-'}{b}") == self.split:
                break
        name, things = rng.choice(NAMES), rng.choice(THINGS)
        change = rng.choice(MORE if adds else FEWER).format(b=b)
        question = f"{name} has {a} {things} and {change}. How many {things} does {name} have now?"
        prompt = [*self._examples, {"role": "user", "content": question}]
        return {"prompt": prompt, "answer": str(a + b if adds else a - b)}


def _said(question: str, reply: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]


def _called(question: str, reply: str) -> list[dict[str, str]]:
    expression, _, answer = reply.partition(" = ")
    call = json.dumps({"name": "calculate", "arguments": {"expression": expression}})
    return [*_said(question, call), {"role": "tool", "content": answer}, {"role": "assistant", "content": answer}]
