"""Prompts and rewards that several benchmarks share, so that they mean the same thing."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lit_grpo.data.arithmetic import ArithmeticRows
from lit_grpo.data.sources import RowSource
from lit_grpo.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NOISE_REWARD = "benchmarks.workloads.noise_reward"


def arithmetic_rows(num_prompts: int) -> ArithmeticRows:
    """The demo's exercises. Workings are long-tailed: most are short, and a few are ten times as long."""
    return ArithmeticRows(num_rows=num_prompts)


class HardRows(RowSource):
    """Of some of the demo's exercises those with the longest workings, whose completions differ most.

    Args:
        num_rows: How many rows.
        of: Of how many exercises.
    """

    def __init__(self, num_rows: int, of: int = 64) -> None:
        self.num_rows, self.of = num_rows, max(of, num_rows)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield one dict an exercise, the longest first."""
        rows = sorted(arithmetic_rows(self.of).rows(), key=lambda row: -row["num_steps"])
        yield from rows[: self.num_rows]


def arithmetic_prompts(
    tokenizer: PreTrainedTokenizerBase, num_prompts: int, rows: RowSource | None = None
) -> list[Prompt]:
    """The demo's exercises, or other rows, tokenised as in training."""
    texts = [str(row["prompt"]) for row in (rows or arithmetic_rows(num_prompts)).rows()]
    return [Prompt(f"train/{number}", tuple(tokenizer.encode(text)), text) for number, text in enumerate(texts)]


def noise_reward(completion: str) -> float:
    """A reward without meaning, spread evenly over [0, 1), so that no group is uniform and every rollout counts."""
    return zlib.crc32(completion.encode()) / 2**32


def load(policy: str, device: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a policy for decoding."""
    from lit_grpo.policy.loading import load_policy, load_tokenizer

    return load_policy(policy).to(device).eval(), load_tokenizer(policy)  # pyright: ignore[reportArgumentType]
