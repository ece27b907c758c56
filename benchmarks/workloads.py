"""Prompts, lengths and rewards that several benchmarks share, so that they mean the same thing."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lit_grpo.data.sources import RowSource
from lit_grpo.tasks import ArithmeticRows
from lit_grpo.tasks.drawn import Split
from lit_grpo.tools.simulation.traces import synthetic_lengths
from lit_grpo.types import Key, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NOISE_REWARD = "benchmarks.workloads.noise_reward"


def arithmetic_rows(num_prompts: int) -> ArithmeticRows:
    """The demo's exercises. Most workings are short, and a few are ten times as long."""
    return ArithmeticRows(num_rows=num_prompts)


class HardRows(RowSource):
    """Of some of the demo's exercises those with the longest workings, whose completions differ most.

    Args:
        num_rows: How many rows.
        of: Of how many exercises.
        split: Which exercises: ``train`` or ``validation``.
    """

    def __init__(self, num_rows: int, of: int = 64, split: Split = "train") -> None:
        self.num_rows, self.of = num_rows, max(of, num_rows)
        self.split: Split = split

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield one dict an exercise, the longest first."""
        rows = sorted(ArithmeticRows(self.of, self.split).rows(), key=lambda row: -row["num_steps"])
        yield from rows[: self.num_rows]


def arithmetic_prompts(
    tokenizer: PreTrainedTokenizerBase, num_prompts: int, rows: RowSource | None = None
) -> list[Prompt]:
    """The demo's exercises, or other rows, tokenized as in training."""
    texts = [str(row["prompt"]) for row in (rows or arithmetic_rows(num_prompts)).rows()]
    return [Prompt(f"train/{number}", tuple(tokenizer.encode(text)), text) for number, text in enumerate(texts)]


def long_tailed(prompts: Sequence[Prompt], group_size: int, limit: int) -> dict[Key, int]:
    """Return the long-tailed lengths of all benchmarks: log-normal, with a median of 0.12 of the limit.

    Their logarithm has a spread of 1. About one in sixty would pass the limit, and ends there.
    """
    rng = np.random.default_rng(0)
    return by_key(prompts, synthetic_lengths("lognormal_heavy", len(prompts), group_size, limit, rng))


def by_key(prompts: Sequence[Prompt], lengths: np.ndarray) -> dict[Key, int]:
    """Return lengths, shape (prompts, group), by the key of their completions."""
    return {
        (prompt.prompt_id, prompt.visit, (sample,)): length
        for prompt, group in zip(prompts, lengths.tolist(), strict=True)
        for sample, length in enumerate(group)
    }


def noise_reward(completion: str) -> float:
    """A reward without meaning, spread evenly over [0, 1), so that no group is uniform and every rollout counts."""
    return zlib.crc32(completion.encode()) / 2**32


def load(policy: str, device: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a policy for decoding."""
    from lit_grpo.policy.loading import load_policy, load_tokenizer

    return load_policy(policy).to(device).eval(), load_tokenizer(policy)  # pyrefly: ignore[bad-argument-type]
