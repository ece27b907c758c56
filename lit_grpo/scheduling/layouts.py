"""Layouts of the KV cache, counted in tokens: the memory of a prompt, and that of a completion."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Protocol

import numpy as np

_PIECE_STEP = 32
_PROMPT_STEP = 16
FEW, TIGHT = 2.0, 1 / 4
"""How much longer than all before it a piece may be: for few pieces, and for such as hold little that is not used."""


class KVLayout(Protocol):
    """The KV tokens that a generator sets apart. A prompt's are held once for its group."""

    def prompt(self, num_tokens: int) -> int:
        """Return what a prompt takes that its completions share."""
        ...

    def completion(self, prompt_tokens: np.ndarray, num_tokens: np.ndarray, max_tokens: np.ndarray) -> np.ndarray:
        """Return what completions of ``num_tokens``, 1 or more, take beside what their prompts do.

        Args:
            prompt_tokens: Tokens of their prompts, int64, shape (..., completions).
            num_tokens: Tokens of each completion, of the same shape.
            max_tokens: The most that they can come to, shape (completions,).
        """
        ...


@dataclass(frozen=True)
class Blocks:
    """Blocks of equal size, as in vLLM: a prompt shares those that it fills, a completion has the last one of its own.

    Args:
        size: Tokens of a block; with 1 every token counts, and no more.
    """

    size: int = 1

    def prompt(self, num_tokens: int) -> int:
        """Return the tokens of the blocks that the prompt fills."""
        return num_tokens // self.size * self.size

    def completion(self, prompt_tokens: np.ndarray, num_tokens: np.ndarray, max_tokens: np.ndarray) -> np.ndarray:
        """Return the tokens of all other blocks."""
        return -(-(prompt_tokens + num_tokens) // self.size) * self.size - prompt_tokens // self.size * self.size


@dataclass(frozen=True)
class Pieces:
    """Pieces that grow, as in the slots: see :func:`piece_sizes` and :func:`prompt_room`.

    Args:
        growth: How much longer than all before it a piece may be.
        state: What a prompt takes whatever its length, and a completion: the KV tokens that the states of recurrent
            layers come to.
    """

    growth: float = FEW
    state: int = 0

    def prompt(self, num_tokens: int) -> int:
        """Return the room of a prompt, and its state."""
        return prompt_room(num_tokens) + self.state

    def completion(self, prompt_tokens: np.ndarray, num_tokens: np.ndarray, max_tokens: np.ndarray) -> np.ndarray:
        """Return the tokens of the pieces that are begun, and the state."""
        limit = int(max_tokens[0]) if len(max_tokens) else 0
        if (max_tokens == limit).all():  # as a rule
            return _piece_rooms(limit, self.growth)[num_tokens] + self.state
        rooms = np.empty_like(num_tokens)
        for limit in np.unique(max_tokens).tolist():
            column = max_tokens == limit
            rooms[..., column] = _piece_rooms(limit, self.growth)[num_tokens[..., column]]
        return rooms + self.state


@lru_cache(4096)
def smallest_budget(layout: KVLayout, prompt_tokens: int, max_tokens: int) -> int:
    """Return the fewest KV tokens that one completion, with its prompt, can be decoded in whatever it comes to."""
    prompt, most = np.array([prompt_tokens]), np.array([max_tokens])
    return layout.prompt(prompt_tokens) + int(layout.completion(prompt, most, most)[0])


def piece_sizes(max_tokens: int, growth: float = FEW) -> list[int]:
    """Return the sizes of a completion's pieces, ``max_tokens`` in all: each ``growth`` times all before it, or more.

    A completion has as many pieces as its tokens need, and never more than ``max_tokens``. Each piece costs operations
    at each decode step, so there should be few; but with a growth of 2 a completion takes up to three times its tokens,
    with a quarter up to a quarter more.

    Example:
        >>> piece_sizes(400)
        [64, 128, 208]
        >>> piece_sizes(400, TIGHT)
        [32, 32, 32, 32, 32, 64, 64, 96, 16]
    """
    sizes, total = [], 0
    while total < max_tokens:
        steps = math.ceil(growth * max(total, _PIECE_STEP) / _PIECE_STEP)
        sizes.append(min(steps * _PIECE_STEP, max_tokens - total))
        total += sizes[-1]
    return sizes


@cache
def _piece_rooms(max_tokens: int, growth: float) -> np.ndarray:
    """Return the tokens of the pieces that are begun, by the tokens of a completion, from 0 to the most."""
    sizes = piece_sizes(max_tokens, growth)
    return np.append(sizes[:1], np.repeat(np.cumsum(sizes), sizes))


def prompt_room(num_tokens: int) -> int:
    """Return the KV tokens that a prompt takes: its length, rounded up by less than a quarter (or to 16).

    Prompts of equal room are stored and read together.
    """
    step = _PROMPT_STEP
    while num_tokens > 8 * step:
        step *= 2
    return -(-num_tokens // step) * step
