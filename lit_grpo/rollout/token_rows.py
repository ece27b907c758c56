"""What the completions in the slots have come to so far, without their keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lit_grpo.rollout.sampling import request_key, uniform
from lit_grpo.types import Completion, FinishReason, Request


@dataclass
class _Row:
    """A row's request, when it came, and from which token on which policy version has sampled it."""

    request: Request
    arrival: int
    versions: list[tuple[int, int]]


class TokenRows:
    """Tokens and log-probs of the rows in use, numbered from 0 without holes.

    ``counts_B`` (int64, on the host) says how many tokens each row has.

    Args:
        num_rows: The most rows at a time.
        max_tokens: The most tokens of a row.
        device: Where tokens are sampled.
    """

    def __init__(self, num_rows: int, max_tokens: int, device: torch.device) -> None:
        self.max_tokens = max_tokens
        self._rows: list[_Row] = []
        self._arrivals = 0
        self._index = torch.arange(num_rows, device=device)
        self._tokens = torch.zeros((num_rows, max_tokens), dtype=torch.int64, device=device)
        self._logprobs = torch.zeros((num_rows, max_tokens), device=device)
        self._entropy_sums = torch.zeros(num_rows, device=device)
        self._keys = np.zeros(num_rows, dtype=np.uint64)
        self._counts = np.zeros(num_rows, dtype=np.int64)
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
    def positions_B(self) -> np.ndarray:
        """The position of each row's last token in its sequence, prompt included."""
        return self._prompt_lengths[: len(self)] + self._counts[: len(self)] - 1

    @property
    def last_tokens_B(self) -> torch.Tensor:
        """The last token of each row, all of which have one."""
        columns_B = torch.from_numpy(self._counts[: len(self)] - 1).to(self._index.device)
        return self._tokens[self._index[: len(self)], columns_B]

    @property
    def uniform_B(self) -> np.ndarray:
        """The random number of each row's next token."""
        return uniform(self._keys[: len(self)], self._counts[: len(self)])

    def youngest(self) -> int:
        """The row that was admitted last."""
        return max(range(len(self)), key=lambda row: self._rows[row].arrival)

    def admit(self, requests: Sequence[Request], begun: Sequence[Completion | None], version: int) -> None:
        """Open rows behind the others, each empty or with what it has ``begun``."""
        first, last = len(self), len(self) + len(requests)
        self._keys[first:last] = [request_key(request) for request in requests]
        self._entropy_sums[first:last] = 0
        for row, (request, completion) in enumerate(zip(requests, begun, strict=True), first):
            count = 0 if completion is None else completion.num_tokens
            versions = []
            if completion is not None:
                self._tokens[row, :count] = completion.token_ids_T
                self._logprobs[row, :count] = completion.logprobs_T
                self._entropy_sums[row] = completion.entropy * count
                versions = _segments(completion.versions_T.tolist())
            self._counts[row] = count
            self._prompt_lengths[row] = len(request.prompt.token_ids)
            if not versions or versions[-1][1] != version:
                versions.append((count, version))
            self._rows.append(_Row(request, self._arrivals, versions))
            self._arrivals += 1

    def append(self, tokens_B: torch.Tensor, logprobs_B: torch.Tensor, entropies_B: torch.Tensor) -> None:
        """Give every row a token."""
        rows = len(self)
        index = (self._index[:rows], torch.from_numpy(self.counts_B).to(self._index.device))
        self._tokens[index] = tokens_B
        self._logprobs[index] = logprobs_B
        self._entropy_sums[:rows] += entropies_B
        self._counts[:rows] += 1

    def new_version(self, version: int) -> None:
        """Note that further tokens come from another policy version."""
        for row, count in zip(self._rows, self.counts_B.tolist(), strict=True):
            row.versions.append((count, version))

    def tails(self, num_tokens: int) -> list[list[int]]:
        """At most the last ``num_tokens`` tokens of each row."""
        rows = len(self)
        columns_L = torch.arange(-num_tokens, 0)
        columns_BL = (torch.from_numpy(self.counts_B)[:, None] + columns_L).clamp(min=0).to(self._index.device)
        tails_BL = self._tokens[:rows].gather(1, columns_BL).tolist()
        return [tail[-min(count, num_tokens) :] for tail, count in zip(tails_BL, self.counts_B.tolist(), strict=True)]

    def mean_logprobs(self, rows: Sequence[int]) -> torch.Tensor:
        """The mean log-prob of the tokens of some rows; 0 of none. Shape (rows, 1), on the host."""
        means = [self._logprobs[row, : self._counts[row]].mean() if self._counts[row] else 0.0 for row in rows]
        return torch.tensor([float(mean) for mean in means])[:, None]

    def completion(self, row: int, reason: FinishReason, text: str = "") -> Completion:
        """Return a row as a completion, on the CPU; it may take part in autograd."""
        count = int(self._counts[row])
        with torch.inference_mode(False):
            token_ids_T, logprobs_T = (buffer[row, :count].clone().cpu() for buffer in (self._tokens, self._logprobs))
            (_, version), *later = self._rows[row].versions
            versions_T = torch.full((count,), version)
            for begin, version in later:
                versions_T[begin:] = version
        entropy = float(self._entropy_sums[row]) / max(count, 1)
        return Completion(self._rows[row].request, token_ids_T, logprobs_T, versions_T, reason, text, entropy)

    def remove(self, row: int) -> None:
        """Free a row: the last one takes its place."""
        last = len(self) - 1
        if row != last:
            for state in (self._tokens, self._logprobs):
                state[row, : self._counts[last]] = state[last, : self._counts[last]]
            for state in (self._entropy_sums, self._keys, self._counts, self._prompt_lengths):
                state[row] = state[last]
            self._rows[row] = self._rows[last]
        del self._rows[last]


def _segments(versions: Sequence[int]) -> list[tuple[int, int]]:
    """Return where each run of equal versions begins."""
    return [(i, version) for i, version in enumerate(versions) if i == 0 or versions[i - 1] != version]
