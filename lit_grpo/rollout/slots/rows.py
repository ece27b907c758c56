"""What the completions in the slots have come to so far, without their keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from lit_grpo.process.copies import in_one_copy
from lit_grpo.rollout.generator import Observation
from lit_grpo.rollout.sampling import request_key, uniform
from lit_grpo.trajectory import num_common
from lit_grpo.types import EMPTY, Completion, FinishReason, Request, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class _Row(NamedTuple):
    """A row's request, and the policy version that samples what follows its prefix."""

    request: Request
    version: int


class TokenRows:
    """Tokens and log-probs of the rows in use, numbered from 0 without holes; all of it on the host.

    Args:
        num_rows: The most rows at a time.
        room: The most tokens of a row, observed ones among them.
    """

    def __init__(self, num_rows: int, room: int) -> None:
        self.room = room
        self._rows: list[_Row] = []
        self._index = np.arange(num_rows)
        self._tokens = np.zeros((num_rows, room), dtype=np.int64)
        self._logprobs = np.zeros((num_rows, room), dtype=np.float32)
        self._uniform = np.zeros((num_rows, room))  # the random numbers of all tokens to come
        self._entropy_sums = np.zeros(num_rows)
        self._counts = np.zeros(num_rows, dtype=np.int64)
        self._observed = np.zeros(num_rows, dtype=np.int64)
        self._prompt_lengths = np.zeros(num_rows, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def requests(self) -> list[Request]:
        """By row."""
        return [row.request for row in self._rows]

    @property
    def counts_B(self) -> np.ndarray:
        """Tokens of each row, a copy."""
        return self._counts[: len(self)].copy()

    @property
    def sampled_B(self) -> np.ndarray:
        """Sampled tokens of each row."""
        return self._counts[: len(self)] - self._observed[: len(self)]

    @property
    def positions_B(self) -> np.ndarray:
        """The position of each row's last token in its sequence, prompt included."""
        return self._prompt_lengths[: len(self)] + self._counts[: len(self)] - 1

    @property
    def last_tokens_B(self) -> np.ndarray:
        """The last token of each row; of one that has none yet it is any."""
        rows = len(self)
        return self._tokens[self._index[:rows], self._counts[:rows] - 1]

    @property
    def next_uniform_B(self) -> np.ndarray:
        """The random number of each row's next token."""
        rows = len(self)
        return self._uniform[self._index[:rows], self._counts[:rows]]

    def admit(self, requests: Sequence[Request], version: int) -> None:
        """Open rows after the others, each with the prefix of its request."""
        first, last = len(self), len(self) + len(requests)
        keys = np.array([request_key(request) for request in requests], dtype=np.uint64)
        self._uniform[first:last] = uniform(keys[:, None], np.arange(self.room))
        self._entropy_sums[first:last] = 0
        for row, request in enumerate(requests, first):
            prefix, count = request.prefix, request.prefix.num_tokens
            if count:
                self._tokens[row, :count] = prefix.token_ids_T.numpy()
                self._logprobs[row, :count] = prefix.logprobs_T.numpy()
                self._entropy_sums[row] = prefix.entropy * prefix.num_sampled
            self._counts[row], self._observed[row] = count, prefix.num_observed
            self._prompt_lengths[row] = len(request.prompt.token_ids)
            self._rows.append(_Row(request, version))

    def num_common(self, row: int, token_ids_T: np.ndarray) -> int:
        """How many tokens a row, without its last one, begins with that are those of ``token_ids_T``."""
        return num_common(self._tokens[row, : max(self._counts[row] - 1, 0)], token_ids_T)

    def append(self, tokens_B: np.ndarray, logprobs_B: np.ndarray, entropies_B: np.ndarray) -> None:
        """Give each row a token."""
        rows = len(self)
        index = self._index[:rows], self._counts[:rows]
        self._tokens[index] = tokens_B
        self._logprobs[index] = logprobs_B
        self._entropy_sums[:rows] += entropies_B
        self._counts[:rows] += 1

    def tails(self, num_tokens: int) -> list[list[int]]:
        """At most the last ``num_tokens`` tokens of each row."""
        counts = self._counts[: len(self)].tolist()
        return [self._tokens[row, max(count - num_tokens, 0) : count].tolist() for row, count in enumerate(counts)]

    def mean_logprobs(self, rows_N: np.ndarray, num_tokens: int) -> np.ndarray:
        """The mean log-prob of the tokens of some rows that have sampled ``num_tokens``, shape (some rows,)."""
        counts = self._counts[rows_N]
        logprobs = self._logprobs[rows_N, : counts.max()]  # 0 where observed
        return np.where(np.arange(counts.max()) < counts[:, None], logprobs, 0).sum(1) / num_tokens

    def request(self, row: int) -> Request:
        """Return a row's request, with what it has come to as its prefix."""
        return self._rows[row].request.after(self._trajectory(row))

    def completion(self, row: int, reason: FinishReason) -> Completion:
        """Return a row as a completion, with no text yet."""
        return Completion.of(self._rows[row].request.after(EMPTY), self._trajectory(row), reason)

    def _trajectory(self, row: int) -> Trajectory:
        count, (request, version) = int(self._counts[row]), self._rows[row]
        prefix = request.prefix
        versions_T, trained_T = np.empty(count, dtype=np.int64), np.ones(count, dtype=bool)
        if prefix.num_tokens:
            versions_T[: prefix.num_tokens] = prefix.versions_T.numpy()
            trained_T[: prefix.num_tokens] = prefix.trained_T.numpy()
        versions_T[prefix.num_tokens :] = version
        num_sampled = count - prefix.num_tokens + prefix.num_sampled
        entropy = float(self._entropy_sums[row]) / max(num_sampled, 1)
        return Trajectory(self._tokens[row, :count], self._logprobs[row, :count], versions_T, trained_T, entropy)

    def remove(self, row: int) -> None:
        """Free a row: the last one takes its place."""
        last = len(self) - 1
        if row != last:
            count = self._counts[last]
            for tokens in (self._tokens, self._logprobs):
                tokens[row, :count] = tokens[last, :count]
            self._uniform[row, count:] = self._uniform[last, count:]
            for state in (self._entropy_sums, self._counts, self._observed, self._prompt_lengths):
                state[row] = state[last]
            self._rows[row] = self._rows[last]
        del self._rows[last]


def with_stop_string(rows: TokenRows, stop: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Return whether the last token of each row has completed one of ``stop``, shape (rows,).

    Only as many tokens are decoded as it can take. One that a prefix holds already, in observed tokens, ends nothing.
    """
    if not stop:
        return np.zeros(len(rows), dtype=bool)
    longest = max(len(text.encode()) for text in stop)  # a token may hold as little as one byte of a character
    tails = rows.tails(longest + 1)
    pairs = zip(tokenizer.batch_decode(tails), tokenizer.batch_decode([tail[:-1] for tail in tails]), strict=True)
    return np.array([any(now.count(s) > before.count(s) for s in stop) for now, before in pairs])


def observe_prompts(keys: Sequence[tuple[str, int]], hidden_BD: torch.Tensor, entropies_B: torch.Tensor) -> Observation:
    """Tell the last hidden states of prompts, and the entropies of their completions' first tokens."""
    entropies_B1 = entropies_B[:, None]
    parts = (hidden_BD.float(), torch.zeros_like(entropies_B1), entropies_B1)
    return Observation(keys, 0, torch.cat(parts, -1).cpu().numpy())


def observe_rows(
    points: Sequence[int], rows: TokenRows, hidden_BD: torch.Tensor, entropies_B: np.ndarray
) -> list[Observation]:
    """Tell what the policy shows of rows that are at one of ``points``; what it shows of prompts, at 0, is left out.

    Args:
        points: Numbers of sampled tokens.
        rows: All rows.
        hidden_BD: The hidden states that the rows' next tokens come from.
        entropies_B: The entropies of the next tokens.
    """
    observations, sampled_B, requests = [], rows.sampled_B, rows.requests
    for point in sorted(set(points).intersection(sampled_B.tolist()) - {0}):
        rows_N = np.flatnonzero(sampled_B == point)
        index_N = in_one_copy({"rows": torch.from_numpy(rows_N)}, hidden_BD.device)["rows"]
        states_ND = hidden_BD.index_select(0, index_N).float().cpu().numpy()
        features = np.column_stack([states_ND, rows.mean_logprobs(rows_N, point), entropies_B[rows_N]])
        observations.append(Observation([requests[row].key for row in rows_N.tolist()], point, features))
    return observations
