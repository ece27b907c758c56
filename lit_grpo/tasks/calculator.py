"""A task for a tool: arithmetic that a policy cannot do by itself, and a calculator.

``37*48-95`` asks for a number. A policy that calls the tool ``calculate`` with the whole expression is told it.
"""

from __future__ import annotations

import ast
import operator
import random
from collections.abc import Callable, Mapping
from typing import Any

from lit_grpo.tasks.drawn import DrawnRows, Split, split_of

ANSWER_PATTERN = r"(?:^|>)(-?\d+)$"
"""Group 1 of its match is the answer of a completion: the number after the last call."""
LONGEST = 200
"""Characters of an expression."""
MOST_BITS = 4096
"""The largest number that is computed has so many bits."""

_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: Mapping[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def calculate(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: Numbers, + - * / // % ** and brackets, as in "3*(4+5)".
    """
    if not isinstance(expression, str) or len(expression) > LONGEST:
        raise ValueError(f"an expression is a text of at most {LONGEST} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError("this is no arithmetic expression") from None
    try:
        return str(_value(tree.body))
    except (ArithmeticError, RecursionError) as error:
        raise ValueError(str(error) or type(error).__name__) from None


def _value(node: ast.expr) -> int | float:
    """Return what a part of an expression comes to; nothing but numbers and operators is looked at."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return _checked(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            _check_power(left, right)
        return _checked(_BINARY[type(node.op)](left, right))
    raise ValueError("an expression has numbers, + - * / // % ** and brackets alone")


def _check_power(base: float, exponent: float) -> None:
    """Refuse a power before it is computed, if it has too many digits or is no real number."""
    if base < 0 and exponent != int(exponent):
        raise ValueError("a root of a negative number")
    bits = base.bit_length() if isinstance(base, int) else 64
    if abs(exponent) * max(bits, 1) > MOST_BITS:
        raise ValueError("the result is too large")


def _checked(value: float) -> int | float:
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise ValueError("the result is too large")
    return value


def draw_expression(rng: random.Random, split: Split) -> str:
    """Draw an expression of ``split``: three numbers of two digits."""
    while True:
        numbers = [rng.randint(11, 99) for _ in range(3)]
        first, second = rng.choice("+-*"), rng.choice("+-*")
        expression = f"{numbers[0]}{first}{numbers[1]}{second}{numbers[2]}"
        if split_of(expression) == split:
            return expression


class CalculatorRows(DrawnRows):
    """Expressions of three numbers, each once, none in both splits.

    A row has the columns ``prompt`` (``37*48-95``) and ``answer`` (``1681``). The embedded policy ``tiny_calculator``
    has been warm-started on the train split.

    Args:
        num_rows: Number of expressions to draw.
        split: Split of the expressions: ``train`` or ``validation``.
        seed: Seed of the draw of expressions from the split, and of their order.
    """

    def __init__(self, num_rows: int = 2048, split: Split = "train", seed: int = 0) -> None:
        super().__init__(num_rows, split, seed)

    def draw(self, rng: random.Random) -> dict[str, Any]:
        expression = draw_expression(rng, self.split)
        return {"prompt": expression, "answer": calculate(expression)}


class EstimateRows(CalculatorRows):
    """Expressions of two numbers, whose size is to be estimated at once, without the calculator.

    A row has the columns ``prompt`` (``=37*48=``) and ``answer`` (``1776``); :func:`right_size` is its reward. With
    :class:`CalculatorRows` it is the second data set of ``configs/mixture.yaml``.

    Args:
        num_rows: Number of expressions to draw.
        split: Split of the expressions: ``train`` or ``validation``.
        seed: Seed of the draw of expressions from the split, and of their order.
    """

    def draw(self, rng: random.Random) -> dict[str, Any]:
        while True:
            expression = f"{rng.randint(11, 99)}{rng.choice('+-*')}{rng.randint(11, 99)}"
            if split_of(expression) == self.split:
                return {"prompt": f"={expression}=", "answer": calculate(expression)}


def right_size(completion: str, answer: str) -> float:
    """Return 1.0 if a completion is a number with the sign and the number of digits of the answer, else 0.0."""
    digits = completion.removeprefix("-")
    same_sign = completion.startswith("-") == answer.startswith("-")
    return float(digits.isdecimal() and same_sign and len(completion) == len(answer))
