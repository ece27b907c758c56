"""Tokens so far of the completions in the slots, without their keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from lit_grpo.memory import in_one_copy
from lit_grpo.rollout.generator import Observation
from lit_grpo.rollout.sampling import request_key, uniform
from lit_grpo.types import Request, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TokenRows:
    """Tokens and log-probs of the rows in use, numbered from 0 without holes; all of it on the host.

    ``requests`` has the request of each row, with the prefix that it came with; ``counts`` are the tokens of each row
    and ``sampled`` those of them that were sampled, int64, with room for all rows that there may be.

    Args:
        num_rows: The most rows at a time.
        room: The most tokens of a row, observed ones among them.
    """

    def __init__(self, num_rows: int, room: int) -> None:
        self.room = room
        self.requests: list[Request] = []
        self._index = np.arange(num_rows)
        self._tokens = np.zeros((num_rows, room), dtype=np.int64)
        self._logprobs = np.zeros((num_rows, room), dtype=np.float32)
        self._uniform = np.zeros((num_rows, room))  # the random numbers of all tokens to come
        self._entropy_sums = np.zeros(num_rows)
        self.counts = np.zeros(num_rows, dtype=np.int64)
        self.sampled = np.zeros(num_rows, dtype=np.int64)
        self._prompt_lengths = np.zeros(num_rows, dtype=np.int64)
        self._versions = np.zeros(num_rows, dtype=np.int64)  # of the policy that samples what follows the prefix

    def admit(self, requests: Sequence[Request], version: int) -> None:
        """Open rows after the others, each with the prefix of its request; ``version`` samples what follows."""
        first, last = len(self.requests), len(self.requests) + len(requests)
        keys = np.array([request_key(request) for request in requests], dtype=np.uint64)
        self._uniform[first:last] = uniform(keys[:, None], np.arange(self.room))
        self._entropy_sums[first:last], self._versions[first:last] = 0, version
        for row, request in enumerate(requests, first):
            prefix, count = request.prefix, request.prefix.num_tokens
            self.counts[row], self.sampled[row] = count, 0
            if count:
                self._tokens[row, :count] = prefix.token_ids_T.numpy()
                self._logprobs[row, :count] = prefix.logprobs_T.numpy()
                self.sampled[row] = prefix.num_sampled
                self._entropy_sums[row] = prefix.entropy * prefix.num_sampled
            self._prompt_lengths[row] = len(request.prompt.token_ids)
        self.requests += requests

    def inputs(self, num_decoded: int) -> dict[str, np.ndarray]:
        """Return what the next step needs: of each row the random number of its next token, ``uniform``.

        Of the first ``num_decoded`` rows also their last ``tokens``, and the ``positions`` of these in their sequences,
        prompts included.
        """
        rows = len(self.requests)
        uniform_B = self._uniform[self._index[:rows], self.counts[:rows]]
        if not num_decoded:
            return {"uniform": uniform_B}
        columns = self.counts[:num_decoded] - 1
        tokens = self._tokens[self._index[:num_decoded], columns]
        return {"uniform": uniform_B, "tokens": tokens, "positions": self._prompt_lengths[:num_decoded] + columns}

    def append(self, tokens_B: np.ndarray, logprobs_B: np.ndarray, entropies_B: np.ndarray) -> None:
        """Give each row a token."""
        rows = len(self.requests)
        index = self._index[:rows], self.counts[:rows]
        self._tokens[index] = tokens_B
        self._logprobs[index] = logprobs_B
        self._entropy_sums[:rows] += entropies_B
        self.counts[:rows] += 1
        self.sampled[:rows] += 1

    def token_ids(self, row: int) -> np.ndarray:
        """The tokens of a row so far, no copy."""
        return self._tokens[row, : self.counts[row]]

    def with_stop_string(self, stop: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
        """Return whether the last token of each row has completed one of ``stop``, shape (rows,).

        Only as many tokens are decoded as it can take. One that a prefix holds already, in observed tokens, ends
        nothing.
        """
        longest = max(len(text.encode()) for text in stop)  # a token may hold as little as one byte of a character
        tails = [self.token_ids(row)[-longest - 1 :].tolist() for row in range(len(self.requests))]
        pairs = zip(tokenizer.batch_decode(tails), tokenizer.batch_decode([tail[:-1] for tail in tails]), strict=True)
        return np.array([any(now.count(s) > before.count(s) for s in stop) for now, before in pairs])

    def observe(self, points: Sequence[int], hidden_BD: torch.Tensor, entropies_B: np.ndarray) -> list[Observation]:
        """Tell what the policy shows of rows that are at one of ``points``, but for prompts, at 0.

        Args:
            points: Numbers of sampled tokens.
            hidden_BD: The hidden states that the rows' next tokens come from.
            entropies_B: The entropies of the next tokens.
        """
        observations, sampled_B = [], self.sampled[: len(self.requests)]
        for point in sorted(set(points).intersection(sampled_B.tolist()) - {0}):
            rows_N = np.flatnonzero(sampled_B == point)
            index_N = in_one_copy({"rows": rows_N}, hidden_BD.device)["rows"]
            states_ND = hidden_BD.index_select(0, index_N).float().cpu().numpy()
            counts = self.counts[rows_N]
            logprobs = self._logprobs[rows_N, : counts.max()]  # 0 where observed
            means_N = np.where(np.arange(counts.max()) < counts[:, None], logprobs, 0).sum(1) / point
            keys = [self.requests[row].key for row in rows_N.tolist()]
            features = np.column_stack([states_ND, means_N, entropies_B[rows_N]])
            observations.append(Observation(keys, point, features))
        return observations

    def trajectory(self, row: int) -> Trajectory:
        """Return what a row has come to, its prefix with it."""
        count, prefix = int(self.counts[row]), self.requests[row].prefix
        versions_T, trained_T = np.empty(count, dtype=np.int64), np.ones(count, dtype=bool)
        if prefix.num_tokens:
            versions_T[: prefix.num_tokens] = prefix.versions_T.numpy()
            trained_T[: prefix.num_tokens] = prefix.trained_T.numpy()
        versions_T[prefix.num_tokens :] = self._versions[row]
        num_sampled = count - prefix.num_tokens + prefix.num_sampled
        entropy = float(self._entropy_sums[row]) / max(num_sampled, 1)
        return Trajectory(self._tokens[row, :count], self._logprobs[row, :count], versions_T, trained_T, entropy)

    def remove(self, row: int) -> None:
        """Free a row: the last one takes its place."""
        last = len(self.requests) - 1
        if row != last:
            count = self.counts[last]
            for tokens in (self._tokens, self._logprobs):
                tokens[row, :count] = tokens[last, :count]
            self._uniform[row, count:] = self._uniform[last, count:]
            for state in (self._entropy_sums, self.counts, self.sampled, self._prompt_lengths, self._versions):
                state[row] = state[last]
            self.requests[row] = self.requests[last]
        del self.requests[last]
