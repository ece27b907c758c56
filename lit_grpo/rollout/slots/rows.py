"""Tokens so far of the completions in the slots, without their keys and values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lit_grpo.rollout.generator import Likeliest, Observation
from lit_grpo.rollout.sampling import request_key, uniform
from lit_grpo.types import Key, Request, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lit_grpo.rollout.slots.drafts.draft import Draft
    from lit_grpo.rollout.slots.drafts.states import StatesAhead


@dataclass(eq=False)
class SampledStep:
    """A token of each row, and one after each token that rows try, which the device samples and sends to the host.

    Attributes:
        bits_FB: On the device, float32, shape (3 + 2 K, places): tokens as the bits of int32, log-probs, and entropies;
            then the K likeliest tokens, if anybody looks at them, as such bits, and their log-probs.
        hidden_BD: The hidden states that the tokens come from.
        arriving: ``bits_FB`` on the host, in parts.
        places: The place of each row, which may have moved since.
        shown: By place, the hidden states on the host of rows that are observed.
        ready: Event after which all of it has arrived; None where that is so.
        draft: Tokens that rows try.
        ahead: With these the states of the policy's layers after each of them, if layers have states.
    """

    bits_FB: torch.Tensor
    hidden_BD: torch.Tensor
    arriving: list[torch.Tensor]
    places: list[int]
    shown: dict[int, torch.Tensor] = field(default_factory=dict)
    ready: Any = None
    draft: Draft | None = None
    ahead: StatesAhead | None = None

    def hidden_of(self, row: int) -> torch.Tensor:
        return self.hidden_BD[self.places[row]]

    def join(self, later: SampledStep) -> None:
        """Take in tokens of the same step that rows after all others get."""
        first = self.bits_FB.shape[1]
        self.bits_FB = torch.cat([self.bits_FB, later.bits_FB], 1)
        self.hidden_BD = torch.cat([self.hidden_BD, later.hidden_BD])
        self.arriving += later.arriving
        self.places += [first + place for place in later.places]
        self.shown |= {first + place: state_D for place, state_D in later.shown.items()}
        self.ready = later.ready


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
        self._prompt_ends = np.zeros(num_rows, dtype=np.int64)
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
            prompt, shift = request.prompt, sum(each.shift for _, each in prefix.pictures)
            self._prompt_ends[row] = (len(prompt.token_ids) if prompt.pictures is None else prompt.end) - shift
        self.requests += requests

    def inputs(
        self, num_decoded: int, first: int = 0, num_ahead: int = 0, draft: Draft | None = None
    ) -> dict[str, np.ndarray]:
        """Return what a step needs: of each row from ``first`` on the random number of its next token, ``uniform``.

        Of the first ``num_decoded`` rows also the ``positions`` of their last tokens in their sequences, prompts
        included, and these ``tokens``. With ``num_ahead`` tokens of each in flight the last ones are not known here.
        With a ``draft`` all this is by query, and rows that are not decoded follow.
        """
        rows = len(self.requests)
        if draft is not None:
            rows_N, ahead_N, entering = draft.rows_N, draft.ahead_N, self._index[num_decoded:rows]
            counts_N = np.append(self.counts[rows_N] + ahead_N, self.counts[entering])
            positions_N = self._prompt_ends[rows_N] + self.counts[rows_N] - 1 + ahead_N
            last_B = self._tokens[self._index[:num_decoded], self.counts[:num_decoded] - 1]
            return {
                "uniform": self._uniform[np.append(rows_N, entering), counts_N],
                "positions": positions_N,
                "tokens": np.append(last_B, draft.tokens_BK[draft.tokens_BK >= 0]),
            }
        columns = np.minimum(self.counts[first:rows] + num_ahead, self.room - 1)  # of a row at its limit any will do
        arrays: dict[str, np.ndarray] = {"uniform": self._uniform[self._index[first:rows], columns]}
        if num_decoded:
            last = self.counts[:num_decoded] - 1
            arrays["positions"] = self._prompt_ends[:num_decoded] + last + num_ahead
            if not num_ahead:
                arrays["tokens"] = self._tokens[self._index[:num_decoded], last]
        return arrays

    def take(self, step: SampledStep, points: Sequence[int]) -> tuple[np.ndarray, list[Observation], Likeliest | None]:
        """Give each row its token of a step.

        Args:
            step: The step whose tokens have arrived.
            points: Numbers of sampled tokens at which the policy's hidden states are observed; 0 is for prompts alone.

        Returns:
            The tokens, what is observed of rows that were at one of the points, and what tokens were drawn from, if
            anybody looks at that.

        Raises:
            FloatingPointError: A token has no log-prob.
        """
        rows, observations = len(self.requests), list[Observation]()
        bits_B, logprobs_B, entropies_B, *drawn = torch.cat(step.arriving, 1).numpy()[:, step.places]
        tokens_B = bits_B.view(np.int32).astype(np.int64)
        if np.isnan(logprobs_B).any():
            raise FloatingPointError(
                f"The policy's logits are NaN or infinite at version {self._versions[0]}, so no token can be sampled; "
                "look for NaN weights or a learning rate that is too high."
            )
        sampled_B = self.sampled[:rows]
        for point in sorted(set(points).intersection(sampled_B.tolist()) - {0}) if step.shown else ():
            rows_N = np.flatnonzero(sampled_B == point)
            states_ND = torch.stack([step.shown[step.places[row]] for row in rows_N]).numpy()
            counts = self.counts[rows_N]
            logprobs = self._logprobs[rows_N, : counts.max()]  # 0 where observed
            means_N = np.where(np.arange(counts.max()) < counts[:, None], logprobs, 0).sum(1) / point
            keys = [self.requests[row].key for row in rows_N.tolist()]
            features = np.column_stack([states_ND, means_N, entropies_B[rows_N]])
            observations.append(Observation(keys, point, features))
        index = self._index[:rows], self.counts[:rows]
        self._tokens[index] = tokens_B
        self._logprobs[index] = logprobs_B
        self._entropy_sums[:rows] += entropies_B
        self.counts[:rows] += 1
        self.sampled[:rows] += 1
        if not drawn:
            return tokens_B, observations, None
        ids_KB, logprobs_KB = np.split(np.stack(drawn), 2)
        keys, ids_BK = [request.key for request in self.requests], ids_KB.view(np.int32).T
        return tokens_B, observations, Likeliest(keys, tokens_B, entropies_B, ids_BK, logprobs_KB.T, self.come_to)

    def take_drafted(
        self, step: SampledStep, last_B: np.ndarray, stopped_B: np.ndarray, accepted_B: np.ndarray
    ) -> Iterator[np.ndarray]:
        """Give rows the tokens sampled after drafted ones, as long as these are those that were sampled before them.

        Args:
            step: Whose first tokens the rows have taken. It comes to know the places of the last ones.
            last_B: These tokens, which become the last ones.
            stopped_B: Which rows their last token has ended, to be known by the next time.
            accepted_B: Counts the tokens that each row gets.

        Yields:
            All rows, then those that have got a token more.
        """
        draft, (bits_N, logprobs_N, entropies_N) = step.draft, torch.cat(step.arriving, 1).numpy()
        assert draft is not None
        tokens_N, going_on = bits_N.view(np.int32), np.arange(len(draft.tokens_BK))  # others enter in this step
        yield self._index[: len(last_B)]
        for ahead, tried_B in enumerate(draft.tokens_BK.T):
            going_on = going_on[~stopped_B[going_on] & (tried_B[going_on] == last_B[going_on])]
            if not len(going_on):
                break
            places, index = draft.first_B[going_on] + ahead, (going_on, self.counts[going_on])
            self._tokens[index] = last_B[going_on] = tokens_N[places]
            self._logprobs[index] = logprobs_N[places]
            self._entropy_sums[going_on] += entropies_N[places]
            for counts_B in (self.counts, self.sampled, accepted_B):
                counts_B[going_on] += 1
            for row, place in zip(going_on.tolist(), places.tolist(), strict=True):
                step.places[row] = place
            yield going_on

    def token_ids(self, row: int) -> np.ndarray:
        """The tokens of a row so far, no copy."""
        return self._tokens[row, : self.counts[row]]

    def contents(self, row: int) -> np.ndarray:
        """Return what tells the tokens of a row from others, see :attr:`lit_grpo.types.Trajectory.contents`."""
        return self.trajectory(row).contents if self.requests[row].prefix.pictures else self.token_ids(row)

    def with_stop_string(
        self, rows: Iterable[int], stop: Sequence[str], tokenizer: PreTrainedTokenizerBase
    ) -> np.ndarray:
        """Return whether the last token of each of these rows has completed one of ``stop``, shape (rows,).

        Only as many tokens are decoded as it can take. One that a prefix holds already, in observed tokens, ends
        nothing.
        """
        longest = max(len(text.encode()) for text in stop)  # a token may hold as little as one byte of a character
        tails = [self.token_ids(row)[-longest - 1 :].tolist() for row in rows]
        pairs = zip(tokenizer.batch_decode(tails), tokenizer.batch_decode([tail[:-1] for tail in tails]), strict=True)
        return np.array([any(now.count(s) > before.count(s) for s in stop) for now, before in pairs])

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
        columns = self._tokens[row, :count], self._logprobs[row, :count], versions_T, trained_T
        return Trajectory(*columns, entropy, pictures=prefix.pictures)

    def come_to(self, key: Key) -> Trajectory:
        """Return what the request in some row has come to."""
        return self.trajectory([request.key for request in self.requests].index(key))

    def remove(self, row: int) -> None:
        """Free a row: the last one takes its place."""
        last = len(self.requests) - 1
        if row != last:
            count = self.counts[last]
            for tokens in (self._tokens, self._logprobs):
                tokens[row, :count] = tokens[last, :count]
            self._uniform[row, count:] = self._uniform[last, count:]
            for state in (self._entropy_sums, self.counts, self.sampled, self._prompt_ends, self._versions):
                state[row] = state[last]
            self.requests[row] = self.requests[last]
        del self.requests[last]
