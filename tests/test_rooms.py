"""How much room prompts and completions take."""

from __future__ import annotations

import pytest

from lit_grpo.scheduling.flight import piece_sizes, prompt_room


@pytest.mark.parametrize("max_tokens", [1, 63, 64, 65, 200, 1000, 4096, 100_000])
def test_pieces_come_to_the_limit_and_are_few(max_tokens: int) -> None:
    sizes = piece_sizes(max_tokens)
    assert sum(sizes) == max_tokens and all(size > 0 for size in sizes)
    assert len(sizes) <= 8  # each three times the last
    for number in range(1, len(sizes)):
        held = sum(sizes[:number]) + 1  # tokens, of which the last has begun a piece
        assert sum(sizes[: number + 1]) < 3 * held


@pytest.mark.parametrize(("num_tokens", "room"), [(1, 16), (16, 16), (17, 32), (128, 128), (129, 160), (1024, 1024)])
def test_a_prompt_takes_its_length_rounded_up(num_tokens: int, room: int) -> None:
    assert prompt_room(num_tokens) == room


def test_a_long_prompt_takes_less_than_a_quarter_more() -> None:
    assert all(count <= prompt_room(count) < 1.25 * count for count in range(64, 20_000))
