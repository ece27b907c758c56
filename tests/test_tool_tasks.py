"""The calculator and catch, as tasks and as code that a policy calls."""

from __future__ import annotations

import pytest

from lit_grpo.tasks import Catch, CatchRows
from lit_grpo.tasks.calculator import calculate


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("37*48-95", "1681"),
        ("-(3-5)**2", "-4"),
        (" 7//2 + 7%4 ", "6"),
        ("1/4", "0.25"),
        ("2**100", str(2**100)),
        ("1e308*10**300", "inf"),
        ("+3", "3"),
    ],
)
def test_arithmetic_is_computed(expression: str, result: str) -> None:
    assert calculate(expression) == result


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("__import__('os').system('ls')", "numbers, "),
        ("(1).__class__", "numbers, "),
        ("[1 for _ in (1,)]", "numbers, "),
        ("'a'*9", "numbers, "),
        ("True+1", "numbers, "),
        ("1 if 1 else 2", "numbers, "),
        ("a", "numbers, "),
        ("1;2", "no arithmetic expression"),
        ("", "no arithmetic expression"),
        ("\0", "no arithmetic expression"),
        ("9" * 201, "at most 200 characters"),
        ("(" * 150 + "1" + ")" * 49, "no arithmetic expression"),
        ("9**9**9", "too large"),
        ("2**-99999", "too large"),
        ("2**4000*2**4000", "too large"),
        ("(-2)**0.5", "root of a negative"),
        ("1/0", "division"),
        ("1j", "numbers, "),
        (3, "is a text"),
    ],
)
def test_nothing_else_is_and_nothing_takes_long(expression: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        calculate(expression)


def test_a_game_goes_on_from_its_state() -> None:
    game, other = Catch(), Catch()
    game.reset(seed=3)
    game.move("left")
    other.restore(game.state())
    assert (game.move("right"), game.turn_reward()) == (other.move("right"), other.turn_reward())
    other.move("stay")
    assert other.board != game.board


def play(seed: int) -> Catch:
    """As one should."""
    game = Catch()
    game.reset(seed=seed, prompt="unused")
    while not game.done:
        game.move("left" if game.ball < game.paddle else "right" if game.ball > game.paddle else "stay")
        game.turn_reward()
    return game


def test_every_game_of_catch_can_be_won() -> None:
    assert all(play(row["seed"]).get_reward() == 1.0 for row in CatchRows(50).rows())


def test_a_game_of_catch_is_a_board_in_text() -> None:
    game = Catch()
    board = game.reset(seed=4)
    assert len(board.split("\n")) == 6 and board.count("o") == board.count("_") == 1
    near = abs(game.ball - game.paddle)
    assert game.reset(seed=4) == board and not game.done
    side = "left" if game.ball < game.paddle else "right"
    game.move(side)
    assert game.turn_reward() == (near - abs(game.ball - game.paddle)) / 5 and game.turn_reward() == 0
    with pytest.raises(ValueError, match="must be left, right or stay"):
        game.move("up")
    for _ in range(4):
        game.move("stay")
    with pytest.raises(ValueError, match="the ball is down"):
        game.move("stay")
