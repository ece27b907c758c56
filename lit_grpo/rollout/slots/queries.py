"""What goes through the policy in a step, and what its rows come to by that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from lit_grpo.rollout.generator import StepEvents
from lit_grpo.rollout.sampling import to_device
from lit_grpo.rollout.slots.forward import DecoderStep, decode_step
from lit_grpo.rollout.slots.kv.cache import SlotCache
from lit_grpo.rollout.slots.rows import TokenRows, observe_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Queries:
    """The tokens that go through the policy in a step: the last one of each row, and behind these the drafted ones.

    Shapes (queries,): ``tokens_N``, the row of each, and how many tokens ahead of its row's last it is. A row's drafted
    tokens follow each other.
    """

    tokens_N: np.ndarray
    rows_N: np.ndarray
    ahead_N: np.ndarray
    num_rows: int

    @classmethod
    def of(cls, rows: TokenRows, drafted: Sequence[Sequence[int]] = ()) -> Queries:
        """Return those of all rows, with what has been drafted for each."""
        counts = [len(tokens) for tokens in drafted]
        if not any(counts):
            return cls(rows.last_tokens_B, rows.all, np.zeros(len(rows), dtype=np.int64), len(rows))
        tokens = np.array([token for tokens in drafted for token in tokens], dtype=np.int64)
        ahead = np.concatenate([np.arange(1, count + 1) for count in counts])
        return cls(
            np.concatenate([rows.last_tokens_B, tokens]),
            np.concatenate([rows.all, np.repeat(rows.all, counts)]),
            np.concatenate([np.zeros(len(rows), dtype=np.int64), ahead]),
            len(rows),
        )

    def followed_by(self, num_rows: int) -> Queries:
        """Return these and a query for each further row, of so many in all, whose first token comes from its prompt."""
        assert not self.num_drafted
        rows_N = np.arange(num_rows)
        return Queries(self.tokens_N, rows_N, np.zeros_like(rows_N), num_rows)

    def decode(
        self, policy: PreTrainedModel, fused: DecoderStep | None, rows: TokenRows, cache: SlotCache
    ) -> torch.Tensor:
        """Run the policy over the tokens; return their hidden states, shape (queries, hidden size).

        Args:
            policy: Switched to slot attention.
            fused: The short way, or ``None``.
            rows: What they belong to.
            cache: Takes their keys and values.
        """
        cache.prepare(rows.counts_B[self.rows_N] - 1 + self.ahead_N, self.rows_N if self.num_drafted else None)
        positions_N = rows.positions_B[self.rows_N] + self.ahead_N
        tokens, positions = (to_device(part, policy.device) for part in (self.tokens_N, positions_N))
        return decode_step(policy, fused, tokens, positions, int(positions_N.max()), cache)

    @property
    def num_drafted(self) -> int:
        """Tokens that are tried."""
        return len(self.rows_N) - self.num_rows

    def next_right(self, queries_N: np.ndarray, sampled_N: np.ndarray) -> np.ndarray:
        """Return the queries behind ``queries_N`` whose drafted tokens are those that were sampled by these."""
        if not self.num_drafted:
            return queries_N[:0]
        first = np.searchsorted(self.rows_N[self.num_rows :], self.rows_N[queries_N]) + self.num_rows
        behind = np.where(queries_N < self.num_rows, first, queries_N + 1)
        there = np.minimum(behind, len(self.tokens_N) - 1)
        right = (behind == there) & (self.rows_N[there] == self.rows_N[queries_N])
        return behind[right & (self.tokens_N[there] == sampled_N)]


Stopped = Callable[[TokenRows, np.ndarray, np.ndarray], np.ndarray]
"""Takes the rows, the numbers of some, and the tokens that these have just got; returns which of these end, (rows,)."""


@dataclass(frozen=True)
class Sampled:
    """The next token at each query, its log-prob and the entropy it came from, and the hidden states behind it."""

    tokens_N: np.ndarray
    logprobs_N: np.ndarray
    entropies_N: np.ndarray
    hidden_ND: torch.Tensor

    def give(
        self,
        rows: TokenRows,
        queries: Queries,
        stopped: Stopped,
        points: Sequence[int],
        events: StepEvents,
        version: int,
    ) -> dict[int, bool]:
        """Give each row its next token, and as many behind it as had been drafted right.

        Args:
            rows: Get them.
            queries: Where they were sampled.
            stopped: Says which tokens end a row.
            points: The numbers of tokens at which ``events`` get observations.
            events: Of this step.
            version: Of the policy.

        Returns:
            The rows that have ended, ascending, and whether it was a token that ended them: else it was the limit.

        Raises:
            FloatingPointError: A token was sampled from NaN.
        """
        if np.isnan(self.logprobs_N).any():
            raise FloatingPointError(
                f"The policy's logits are NaN or infinite at version {version}, so no token can be sampled; "
                "look for NaN weights or a learning rate that is too high."
            )
        events.num_active, events.num_drafted = len(rows), queries.num_drafted
        ends: dict[int, bool] = {}
        next_N = np.arange(len(rows))
        while len(next_N):
            rows_N, tokens_N, entropies_N = queries.rows_N[next_N], self.tokens_N[next_N], self.entropies_N[next_N]
            events.observations += observe_rows(points, rows, rows_N, self.hidden_ND, next_N, entropies_N)
            rows.append(rows_N, tokens_N, self.logprobs_N[next_N], entropies_N)
            events.num_tokens += len(rows_N)
            stopped_N = stopped(rows, rows_N, tokens_N)
            ended_N = stopped_N | (rows.counts_B[rows_N] >= rows.max_tokens)
            ends |= zip(rows_N[ended_N].tolist(), stopped_N[ended_N].tolist(), strict=True)
            next_N = queries.next_right(next_N[~ended_N], tokens_N[~ended_N])
        return dict(sorted(ends.items()))
