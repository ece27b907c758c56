"""How many tokens of KV memory a prompt and a completion take, in the pieces that they are stored in."""

from __future__ import annotations

_FIRST_PIECE = 64
_PROMPT_STEP = 16


def piece_sizes(max_tokens: int) -> list[int]:
    """Return the sizes of a completion's pieces, ``max_tokens`` in all: each twice as long as all before it.

    A completion has as many pieces as its tokens need, so it takes less than three times its tokens, and never more
    than ``max_tokens``; pieces cost operations at each decode step, so there are few.

    Example:
        >>> piece_sizes(400)
        [64, 128, 208]
    """
    sizes, total = [], 0
    while total < max_tokens:
        sizes.append(min(max(_FIRST_PIECE, 2 * total), max_tokens - total))
        total += sizes[-1]
    return sizes


def prompt_room(num_tokens: int) -> int:
    """Return the KV tokens that a prompt takes: its length, rounded up by less than a quarter (or to 16).

    Prompts of equal room are stored and read together.
    """
    step = _PROMPT_STEP
    while num_tokens > 8 * step:
        step *= 2
    return -(-num_tokens // step) * step
