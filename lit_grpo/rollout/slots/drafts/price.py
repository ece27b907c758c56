"""Price of a decode step, fraction of drafted tokens that are accepted, and how many tokens each row may try."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from lit_grpo.rollout.slots.drafts.suffix import MOST_DRAFTED, Proposal, SuffixDrafter

if TYPE_CHECKING:
    from lit_grpo.rollout.slots.rows import SampledStep, TokenRows
    from lit_grpo.types import Key, Request

LONGEST_S = 1e6
_FADE = 0.998  # of counts by source in each step: half of what was seen 350 steps ago
_RECENT = 0.93  # of what rows got: half of 10 steps ago, since a completion's beginning is not like its end
_MATCHES = (3, 4, 6, 8)  # lengths of a match at which another count begins


@dataclass(frozen=True)
class StepCost:
    """Seconds of a decode step: ``step_s + row_s x rows + token_s x tokens``, and of its host if it has drafts.

    A drafted token goes through the policy as a row of its own, and reads its completion's context again. A step
    without drafts is launched before the host has read the tokens of the last one; one with drafts waits for the host.

    Args:
        step_s: Seconds that every step takes, such as reading the weights.
        row_s: Seconds for each row that decodes.
        token_s: Seconds for each token of the prompt and the completion so far, which a row reads.
        wait_s: Seconds of the host that a step with drafts waits for.
        wait_row_s: Seconds of the host for each completion that decodes.
    """

    step_s: float
    row_s: float = 0.0
    token_s: float = 0.0
    wait_s: float = 0.0
    wait_row_s: float = 0.0

    def __post_init__(self) -> None:
        values = (self.step_s, self.row_s, self.token_s, self.wait_s, self.wait_row_s)
        if not all(0 <= value <= LONGEST_S for value in values):
            raise ValueError(f"The cost of a step is {values[:3]} in s: give three times from 0 s to {LONGEST_S:g} s.")

    def seconds(
        self, steps: np.ndarray, active: np.ndarray, rows: np.ndarray, tokens: np.ndarray, is_drafted: np.ndarray
    ) -> float:
        """Return the seconds of stretches of steps.

        Args:
            steps: Steps of each stretch, shape (stretches,).
            active: Completions that decode in each of its steps, likewise.
            rows: Rows of all its steps together, drafted tokens among them, likewise.
            tokens: Tokens that these read, likewise.
            is_drafted: Whether its steps have drafts, likewise.
        """
        device = self.step_s * steps + self.row_s * rows + self.token_s * tokens
        host = (self.wait_s + self.wait_row_s * active) * steps
        return float(np.where(is_drafted, device + host, np.maximum(device, host)).sum())

    @classmethod
    def fit(cls, columns_NP: np.ndarray, seconds_N: np.ndarray) -> StepCost:
        """Return the cost with the least squared error on measured steps, no part of it negative.

        With few parts, non-negative least squares is the best of the plain solutions on each choice of parts that is
        not negative anywhere.

        Args:
            columns_NP: What each part is multiplied with in each step, shape (steps, parts): 1, rows, and tokens; where
                drafted steps are measured too, then 1 for these and their completions.
            seconds_N: Seconds of each step.
        """
        if not len(seconds_N):
            raise ValueError("There are 0 measured steps: a step cost is fitted to 1 or more.")
        num_parts = columns_NP.shape[1]
        scale = np.maximum(np.abs(columns_NP).max(axis=0), 1e-300)
        best, least = np.zeros(num_parts), float(np.square(seconds_N).sum())
        choices = (list(parts) for size in range(num_parts) for parts in combinations(range(num_parts), size + 1))
        for parts in choices:
            solution = np.linalg.lstsq(columns_NP[:, parts] / scale[parts], seconds_N, rcond=None)[0]
            error = float(np.square(columns_NP[:, parts] / scale[parts] @ solution - seconds_N).sum())
            if (solution >= 0).all() and error < least:
                best, least = np.zeros(num_parts), error
                best[parts] = solution / scale[parts]
        return cls(*best.tolist())


def choose_drafts(
    cost: StepCost, rates_B: np.ndarray, most_B: np.ndarray, tokens_B: np.ndarray, left_B: np.ndarray, is_tail: bool
) -> np.ndarray:
    """Return how many drafted tokens each row should try in a step, int64, shape (rows,).

    A row that tries k tokens, each accepted with the rate a, comes to ``1 + a + ... + a^k`` tokens on average. While
    requests wait for a slot, what counts is tokens per second of the step. In the tail nothing takes the place of a
    completion that ends, so what counts is the second at which the last one ends: a step's fixed part as many times
    as the longest completion takes steps, and each row's own part as long as it decodes.

    Both are exact: gains per second fall with each further token of a row, so one order of all tokens holds the best
    choice as a prefix.

    Args:
        cost: Of a step.
        rates_B: Probability that a drafted token of each row is accepted if those before it were.
        most_B: The most that each row may try.
        tokens_B: Tokens that each row reads: its prompt and its completion so far.
        left_B: Tokens that each row is expected to sample yet.
        is_tail: Whether no request waits for a slot.
    """
    num_rows, most = len(rates_B), int(most_B.max(initial=0))
    own_B = np.maximum(cost.row_s + cost.token_s * tokens_B, 1e-12)  # seconds of a query of each row
    wait_s = cost.wait_s + cost.wait_row_s * num_rows
    gains_BK = rates_B[:, None] ** np.arange(1, most + 1)  # of each further token
    open_BK = np.arange(most) < most_B[:, None]
    chosen_B = np.zeros(num_rows, dtype=np.int64)
    if not open_BK.any():
        return chosen_B
    if is_tail:
        means_BK = np.cumsum(np.column_stack([np.ones(num_rows), gains_BK]), 1)
        steps_BK = np.maximum(left_B, 1)[:, None] / means_BK
        fewest = float(steps_BK[np.arange(num_rows), most_B].max())  # steps, if all rows try the most
        open_BK &= steps_BK[:, :-1] > fewest
        work_BK = own_B[:, None] * np.arange(1, most + 2) * steps_BK
        steps_N, more_N = steps_BK[:, :-1][open_BK], np.diff(work_BK)[open_BK]
        order = np.argsort(-steps_N, kind="stable")
        last_N = np.append(steps_N[order], fewest)  # steps of the longest, once so many of the tokens are tried
        seconds_N = cost.step_s * last_N + np.cumsum(np.append(0.0, more_N[order]))
        seconds_N[1:] += wait_s * last_N[1:]
        num_chosen = int(np.argmin(seconds_N))
    else:
        gains_N, own_N = gains_BK[open_BK], np.broadcast_to(own_B[:, None], open_BK.shape)[open_BK]
        order = np.argsort(-gains_N / own_N, kind="stable")
        tokens_N = num_rows + np.cumsum(np.append(0.0, gains_N[order]))
        seconds_N = cost.step_s + own_B.sum() + np.cumsum(np.append(0.0, own_N[order]))
        seconds_N[1:] += wait_s
        num_chosen = int(np.argmax(tokens_N / seconds_N))
    np.add.at(chosen_B, np.nonzero(open_BK)[0][order[:num_chosen]], 1)
    return chosen_B


class PricedDrafter(SuffixDrafter):
    """Drafts as :class:`SuffixDrafter` does what is worth its price, and learns how often tokens are accepted.

    Two things are learned. By source and length of the match, the fraction of tokens that are accepted: the mean of a
    Beta distribution that begins as Beta(1, 1). And for all rows that are asked for drafts, those with no proposal
    among them, the tokens that come of it, in the tail and before. Counts fade with every step, the latter soon, so
    that a policy that changes is followed, and drafts that were not worth their price are tried again.

    Args:
        num_slots: Completions that decode at a time; while fewer do, none waits for a slot.
        cost: Of a step.
        most_tokens: The most tokens that a row tries in a step.
    """

    def __init__(self, num_slots: int, cost: StepCost, most_tokens: int = MOST_DRAFTED) -> None:
        super().__init__(most_tokens)
        self.num_slots, self.cost = num_slots, cost
        self._expected: dict[Key, float] = {}
        self._counts: dict[tuple[str, int], list[float]] = {}  # accepted and rejected tokens by source and match
        self._asked = np.zeros((2, 2))  # before and in the tail: rows that were asked, and what they got
        self._is_tail, self._num_asked = False, 0
        self._least_B = np.zeros(0)  # in the tail, how likely a token has to be accepted to be tried

    def expect(self, requests: Sequence[Request], expected: Sequence[float] | None) -> None:
        """Note how many tokens each request that enters is expected to sample; by default its limit."""
        self._expected |= {
            request.key: request.sampling.max_tokens if expected is None else expected[number]
            for number, request in enumerate(requests)
        }

    def most(self, rows: TokenRows, num_rows: int, room: int) -> np.ndarray:
        """Return how many tokens each row may propose for the next step.

        What rows got so far, of those that were asked, says whether a step with drafts is worth its price, in the tail
        also which rows have to be faster. A row that has come to its expected length is taken to go on for half as many
        tokens as it has, within its limit.
        """
        self._is_tail = len(rows.requests) < self.num_slots
        requests, sampled_B = rows.requests[:num_rows], rows.sampled[:num_rows]
        expected_B = np.array([self._expected[request.key] for request in requests])
        limits_B = np.array([request.sampling.max_tokens for request in requests])
        left_B = np.minimum(np.maximum(expected_B - sampled_B, sampled_B / 2), limits_B - sampled_B)
        self._tokens_B = np.array([len(request.prompt.token_ids) for request in requests]) + rows.counts[:num_rows]
        num_asked, num_gained = self._asked[int(self._is_tail)].tolist()
        rate = (1 + num_gained) / (2 + num_asked + num_gained)  # 1 + rate + rate^2 + ... tokens a row and step
        rates_B, most_B = np.full(num_rows, rate), np.full(num_rows, self.most_tokens)
        chosen_B = choose_drafts(self.cost, rates_B, most_B, self._tokens_B, left_B, self._is_tail)
        self._least_B = rate**chosen_B
        asked_B = chosen_B > 0 if self._is_tail else np.full(num_rows, chosen_B.any())
        asked_B &= np.argsort(np.argsort(-left_B, kind="stable")) < room  # the longest first
        return np.where(asked_B, min(self.most_tokens, room // max(int(asked_B.sum()), 1)), 0)

    def propose(self, rows: TokenRows, most_B: np.ndarray) -> list[Proposal]:
        """Return as much of what follows the last tokens of rows as is worth its price, after :meth:`most` of them."""
        proposals = super().propose(rows, most_B)
        rates_B = np.array([self.rate(each) for each in proposals])
        kept_B = np.array([len(each.token_ids) for each in proposals])
        if self._is_tail:
            kept_B = np.minimum(kept_B, np.log(self._least_B) / np.log(rates_B) + 1e-9).astype(np.int64)
        else:
            queries = replace(self.cost, wait_s=0.0, wait_row_s=0.0)  # the step has waited
            kept_B = choose_drafts(queries, rates_B, kept_B, self._tokens_B, self._tokens_B, is_tail=False)
        pairs = zip(proposals, kept_B.tolist(), strict=True)
        self._num_asked = int((most_B > 0).sum())
        return [each._replace(token_ids=each.token_ids[:kept]) for each, kept in pairs]

    def rate(self, proposal: Proposal) -> float:
        """Return the probability that a token of a proposal is accepted if those before it were."""
        accepted, rejected = self._counts.get(_place(proposal), (0.0, 0.0))
        return (1 + accepted) / (2 + accepted + rejected)

    def took(self, rows: TokenRows, step: SampledStep, accepted_B: np.ndarray) -> dict[str, int]:
        """Learn from a step; of a draft, tokens after the first one rejected count not."""
        self._asked *= _RECENT
        for counts in self._counts.values():
            counts[:] = counts[0] * _FADE, counts[1] * _FADE
        if self._num_asked:
            self._asked[int(self._is_tail)] += self._num_asked, accepted_B.sum()
        for proposal, num_accepted in zip(self.tried, accepted_B.tolist(), strict=False):
            if num_tried := len(proposal.token_ids):
                counts = self._counts.setdefault(_place(proposal), [0.0, 0.0])
                counts[0] += num_accepted
                counts[1] += num_accepted < num_tried
        self._num_asked = 0
        return super().took(rows, step, accepted_B)

    def left(self, rows: TokenRows, row: int, ended: bool) -> None:
        """Let others draft from what a row has come to."""
        self._expected.pop(rows.requests[row].key, None)
        super().left(rows, row, ended)


def _place(proposal: Proposal) -> tuple[str, int]:
    return proposal.source, bisect_right(_MATCHES, proposal.matched)
