"""Price of a decode step, fraction of drafted tokens that are accepted, and how many tokens each row may try."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from lit_grpo.rollout.slots.drafts import Drafter
from lit_grpo.rollout.slots.drafts.suffix import Proposal, SuffixDrafter
from lit_grpo.types import Key, Prompt, Request, SamplingParams

if TYPE_CHECKING:
    from lit_grpo.rollout.generator import Decoder
    from lit_grpo.rollout.slots.kv.cache import SlotCache
    from lit_grpo.rollout.slots.rows import SampledStep, TokenRows

LONGEST_S = 1e6
MOST_DRAFTED = 8
"""The most tokens that a row tries in a step, where their price decides."""
_FADE = 0.998  # of counts by source in each step: half of what was seen 350 steps ago
_RECENT = 0.93  # of what rows got: half of 10 steps ago, since a completion's beginning is not like its end
_MATCHES = (3, 4, 6, 8)  # lengths of a match at which another count begins
_ROWS, _SKIPPED, _TIMED, _MOST_S = 64, 3, 5, 0.5
"""The most rows; steps that go by before, and that are timed of a size; and seconds after which sizes are enough."""


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
        if not all(0 <= value <= LONGEST_S for value in astuple(self)):
            given = self.step_s, self.row_s, self.token_s
            raise ValueError(f"The cost of a step is {given} in s: give three times from 0 s to {LONGEST_S:g} s.")

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
        scale = np.maximum(np.abs(columns_NP).max(axis=0), 1e-300)
        best, least = 0 * scale, np.inf
        for is_part in product([0, 1], repeat=len(scale)):
            columns = columns_NP * is_part / scale  # a column of zeros gets the part 0
            solution = np.linalg.lstsq(columns, seconds_N, rcond=None)[0]
            error = float(np.square(columns @ solution - seconds_N).sum())
            if (solution >= 0).all() and error < least:
                best, least = solution / scale, error
        return cls(*best.tolist())


def choose_drafts(cost: StepCost, rate: float, most: int, tokens_B: np.ndarray, left_B: np.ndarray) -> np.ndarray:
    """Return how many drafted tokens each row should try in a step, so that all rows are done soonest; shape (rows,).

    A row that tries k tokens, each accepted with the rate a, comes to ``1 + a + ... + a^k`` tokens on average. A step's
    fixed part counts as many times as the longest row takes steps, and each row's own part as long as it decodes. So
    the longest try up to ``most``, and each other row as few as it needs to take no longer.

    Args:
        cost: Seconds that the parts of a step take.
        rate: Probability that a drafted token is accepted if those before it were.
        most: The most that a row tries.
        tokens_B: Tokens that each row reads: its prompt and its completion so far.
        left_B: Tokens that each row is to sample yet. If they are equal, what counts is tokens per second.
    """
    steps_BK = np.maximum(left_B, 1)[:, None] / np.cumsum(rate ** np.arange(most + 1))
    own_B = cost.row_s + cost.token_s * tokens_B  # seconds of a query of each row
    wait_s = cost.wait_s + cost.wait_row_s * len(left_B)
    rows, choices = np.arange(len(left_B)), list[tuple[float, np.ndarray]]()
    for steps in steps_BK.max(0, initial=0.0).tolist():
        tried_B = (steps_BK <= steps).argmax(1)
        own_s = (own_B * (1 + tried_B) * steps_BK[rows, tried_B]).sum()
        choices.append(((cost.step_s + wait_s * bool(choices)) * steps + own_s, tried_B))
    return min(choices, key=lambda choice: choice[0])[1]


class PricedDrafter(SuffixDrafter):
    """Drafts as :class:`SuffixDrafter` does what is worth its price, and learns how often tokens are accepted.

    Two things are learned. By source and length of the match, the fraction of tokens that are accepted: the mean of a
    Beta distribution that begins as Beta(1, 1). And for all rows that are asked for drafts, those with no proposal
    among them, the tokens that come of it, in the tail and before. Counts fade with every step, the latter soon, so
    that a policy that changes is followed, and drafts that were not worth their price are tried again.

    Args:
        num_slots: Completions that decode at a time; while fewer do, none waits for a slot.
        cost: Seconds that the parts of a step take.
        most_tokens: The most tokens that a row tries in a step.
    """

    def __init__(self, num_slots: int, cost: StepCost, most_tokens: int = MOST_DRAFTED) -> None:
        super().__init__(most_tokens)
        self.num_slots, self.cost = num_slots, cost
        self._expected: dict[Key, float] = {}
        self._counts: dict[tuple[str, int], np.ndarray] = {}  # accepted and rejected tokens by source and match
        self._asked = np.zeros((2, 2))  # before and in the tail: rows that were asked, and what they got
        self._is_tail, self._num_asked = 0, 0

    def expect(self, requests: Sequence[Request], expected: Sequence[float] | None) -> None:
        """Note how many tokens each request that enters is expected to sample; by default its limit."""
        limits = [request.sampling.max_tokens for request in requests]
        keys = [request.key for request in requests]
        self._expected |= zip(keys, limits if expected is None else expected, strict=True)

    def most(self, rows: TokenRows, num_rows: int, room: int) -> np.ndarray:
        """Return how many tokens each row may propose for the next step.

        What rows got so far, of those that were asked, says whether a step with drafts is worth its price. While
        requests wait for a slot, what counts is tokens per second. In the tail nothing takes the place of a completion
        that ends, so what counts is when the last one ends. A row that has come to its expected length is taken to go
        on for half as many tokens as it has, within its limit.
        """
        self._is_tail = int(len(rows.requests) < self.num_slots)
        requests, sampled_B = rows.requests[:num_rows], rows.sampled[:num_rows]
        expected_B = np.array([self._expected[request.key] for request in requests])
        limits_B = np.array([request.sampling.max_tokens for request in requests])
        left_B = np.minimum(np.maximum(expected_B - sampled_B, sampled_B / 2), limits_B - sampled_B)
        tokens_B = np.array([len(request.prompt.token_ids) for request in requests]) + rows.counts[:num_rows]
        num_asked, num_gained = self._asked[self._is_tail].tolist()
        rate = (1 + num_gained) / (2 + num_asked + num_gained)  # 1 + rate + rate^2 + ... tokens a row and step
        goals_B = left_B if self._is_tail else np.ones(num_rows)
        chosen_B = choose_drafts(self.cost, rate, self.most_tokens, tokens_B, goals_B)
        self._least_B = rate**chosen_B
        asked_B = (chosen_B > 0) & (np.argsort(np.argsort(-left_B, kind="stable")) < room)  # the longest first
        return np.where(asked_B, min(self.most_tokens, room // max(int(asked_B.sum()), 1)), 0)

    def draft(
        self, rows: TokenRows, most_B: np.ndarray, cache: SlotCache, sampling: SamplingParams
    ) -> Sequence[Sequence[int]]:
        """Draft tokens that are as likely to be accepted as the last one that :meth:`most` took for worth its price."""
        super().draft(rows, most_B, cache, sampling)
        rates_B = np.array([self.rate(each) for each in self.tried])
        kept_B = (np.log(self._least_B) / np.log(rates_B) + 1e-9).astype(np.int64)
        pairs = zip(self.tried, kept_B.tolist(), strict=True)
        self.tried = [each._replace(token_ids=each.token_ids[:kept]) for each, kept in pairs]
        self._num_asked = int((most_B > 0).sum())
        return [each.token_ids for each in self.tried]

    def rate(self, proposal: Proposal) -> float:
        """Return the probability that a token of a proposal is accepted if those before it were."""
        accepted, rejected = self._counts.get(_place(proposal), (0.0, 0.0))
        return (1 + accepted) / (2 + accepted + rejected)

    def took(self, rows: TokenRows, step: SampledStep, accepted_B: np.ndarray) -> Mapping[str, int]:
        """Learn from a step; of a draft, tokens after the first one rejected count not."""
        self._asked *= _RECENT
        for counts in self._counts.values():
            counts *= _FADE
        if self._num_asked:
            self._asked[self._is_tail] += self._num_asked, accepted_B.sum()
        for proposal, num_accepted in zip(self.tried, accepted_B.tolist(), strict=False):
            if num_tried := len(proposal.token_ids):
                counts = self._counts.setdefault(_place(proposal), np.zeros(2))
                counts += num_accepted, num_accepted < num_tried
        self._num_asked = 0
        return super().took(rows, step, accepted_B)

    def left(self, rows: TokenRows, row: int, ended: bool) -> None:
        """Let others draft from what a row has come to."""
        self._expected.pop(rows.requests[row].key, None)
        super().left(rows, row, ended)


def _place(proposal: Proposal) -> tuple[str, int]:
    return proposal.source, bisect_right(_MATCHES, proposal.matched)


class TrialDrafter(Drafter):
    """Drafts nothing good, for steps that are timed."""

    most_tokens = 0

    def draft(self, rows: Any, most_B: np.ndarray, cache: Any, sampling: Any) -> list[list[int]]:
        """Return as many tokens as each row may try."""
        return [[0] * most for most in most_B.tolist()]

    def took(self, rows: Any, step: Any, accepted_B: np.ndarray) -> dict[str, int]:
        return {}


def measure_cost(generator: Decoder, trial: TrialDrafter, context: int) -> StepCost | None:
    """Time some steps of a generator that drafts by ``trial`` and has nothing in flight, with prompts of its own.

    Sizes are measured one after another, until the timed steps have taken half a second. Completions may end before
    all steps of a size are done; a step in which none decodes is not counted. What is compiled and recorded for these
    sizes, real steps need too. Returns None, after a warning, if a step cannot be measured, or none with drafts is;
    raises what is raised if the device failed, or its memory ran out.
    """
    from lit_grpo.policy.architecture.decoder import RUN_FAILURES, raise_device_failure
    from lit_grpo.process.terminal import error_text
    from lit_grpo.ranks import Ranks

    rows, short, long = min(generator.capacity().slots, _ROWS), 64, min(1024, context // 2)
    cases = [(rows, 0, short), (1, 0, short), (rows, 0, long), (1, 7, short), (rows, 3, short)]
    cases.append((rows // 4 or 1, 7, long))
    measured, keys = list[np.ndarray](), list[Key]()
    try:
        for case, (num_rows, trial.most_tokens, length) in enumerate(cases):
            if case > 3 and _TIMED * sum(median[0] for median in measured) > _MOST_S:
                break
            prompt = Prompt("price of a step", (0,) * length, "", visit=case)
            sampling = SamplingParams(max_tokens=(_SKIPPED + _TIMED) * (1 + trial.most_tokens))
            requests = [Request(prompt, (row,), sampling) for row in range(num_rows)]
            keys, steps = [request.key for request in requests], list[list[float]]()
            generator.submit(requests)
            for number in range(_SKIPPED + _TIMED):
                began = time.perf_counter()
                events = generator.step()
                seconds = time.perf_counter() - began
                if events.preempted:
                    raise ValueError(events.message)
                if not events.num_active:
                    break
                queries, drafts = events.num_active + events.num_drafted, int(events.num_drafted > 0)
                steps.append([seconds, 1, queries, queries * (length + number), drafts, drafts * events.num_active])
            generator.release([prompt])
            generator.abort(keys)
            if steps[_SKIPPED:]:
                measured.append(np.median(steps[_SKIPPED:], axis=0))
        measured_N6 = np.array(measured).reshape(-1, 6)
        if not measured_N6[:, 4].any():
            raise ValueError("completions ended before a step with drafts was timed")
        return StepCost.fit(measured_N6[:, 1:], measured_N6[:, 0])
    except RUN_FAILURES as error:
        raise_device_failure(error)
        generator.abort(keys)
        Ranks().warn(f"The price of a decode step cannot be measured ({error_text(error)}), so no drafts are tried.")
        return None
