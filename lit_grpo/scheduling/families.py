"""Families of made-up completion lengths."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Draw = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]


def _lognormal_mild(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return 0.25 * np.exp(0.4 * rng.standard_normal(shape))


def _lognormal_heavy(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return 0.12 * np.exp(1.0 * rng.standard_normal(shape))


def _bimodal(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Four of five are short, the fifth is long: answers with and without a chain of thought."""
    medians = np.where(rng.random(shape) < 0.8, 0.08, 0.7)
    return medians * np.exp(0.2 * rng.standard_normal(shape))


def _per_prompt(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Prompts differ by much, and the completions of one by little."""
    return 0.15 * np.exp(0.8 * rng.standard_normal((shape[0], 1)) + 0.25 * rng.standard_normal(shape))


def _truncated(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """About a fifth reaches the limit."""
    return 0.5 * np.exp(0.8 * rng.standard_normal(shape))


FAMILIES: dict[str, Draw] = {
    "lognormal_mild": _lognormal_mild,
    "lognormal_heavy": _lognormal_heavy,
    "bimodal": _bimodal,
    "per_prompt": _per_prompt,
    "truncated": _truncated,
}
"""Lengths as fractions of the limit, which cuts off what exceeds it."""


def synthetic_lengths(
    family: str, num_prompts: int, group_size: int, max_tokens: int, rng: np.random.Generator
) -> np.ndarray:
    """Return lengths between 1 and ``max_tokens``, int64, shape (prompts, group)."""
    fractions = FAMILIES[family](rng, (num_prompts, group_size))
    return np.clip(np.rint(fractions * max_tokens), 1, max_tokens).astype(np.int64)
