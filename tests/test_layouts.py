"""How much room prompts and completions take."""

from __future__ import annotations

import numpy as np
import pytest

from lit_grpo.scheduling.layouts import TIGHT, Blocks, Pieces, piece_sizes, smallest_budget


@pytest.mark.parametrize("max_tokens", [1, 63, 64, 65, 200, 1000, 4096, 100_000])
def test_pieces_come_to_the_limit_and_are_few(max_tokens: int) -> None:
    sizes = piece_sizes(max_tokens)
    assert sum(sizes) == max_tokens and all(size > 0 for size in sizes)
    assert len(sizes) <= 8  # each three times the last
    for number in range(1, len(sizes)):
        held = sum(sizes[:number]) + 1  # tokens, of which the last has begun a piece
        assert sum(sizes[: number + 1]) < 3 * held


@pytest.mark.parametrize("max_tokens", [1, 31, 32, 33, 200, 1000, 4096, 100_000])
def test_tight_pieces_hold_little_that_is_not_used(max_tokens: int) -> None:
    sizes = piece_sizes(max_tokens, TIGHT)
    assert sum(sizes) == max_tokens and all(size > 0 for size in sizes)
    assert len(sizes) <= 34
    for number in range(1, len(sizes)):
        held = sum(sizes[:number]) + 1
        assert sum(sizes[: number + 1]) < 5 / 4 * held + 32


def test_the_smallest_budget_is_a_prompt_and_a_whole_completion() -> None:
    assert smallest_budget(Pieces(), 17, 100) == 32 + 100
    assert smallest_budget(Blocks(16), 17, 100) == 16 + 112  # 117 tokens in 8 blocks, of which the prompt fills one
    assert smallest_budget(Blocks(), 17, 100) == 117


def test_blocks_are_shared_where_a_prompt_fills_them() -> None:
    layout = Blocks(16)
    assert [layout.prompt(count) for count in (15, 16, 17, 40)] == [0, 16, 16, 32]
    held = layout.completion(np.array([15, 16, 17, 40]), np.array([1, 1, 16, 8]), np.full(4, 99))
    assert held.tolist() == [16, 16, 32, 16]
