"""Whether a rollout begins with a probe, and of how many tokens: learned from what probes would have saved so far."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import Any

import numpy as np

from lit_grpo.scheduling.lengths import Outcome

FORGETTING = 0.8  # the weight of all earlier rollouts, at each new one
MOST_JOBS = 20_000  # of a rollout that is decoded in thought


class ProbeChoice:
    """Chooses how many tokens of all completions are decoded before any goes on, or 0: no probe.

    All completions pass every point at which lengths are foretold, probe or not. So after each rollout it is known
    what would have been said of them in a probe, and the steps that they would have taken are counted: in the order
    of arrival or by what was said before decoding, and behind a probe by what was said after it. The probe that has
    saved most is taken, where that is worth its cost and its predictions rank the completions of one prompt: a
    correlation over all of them would mostly be that of the prompts, which need no probe.

    Args:
        min_correlation: Rank correlation within groups from which on a probe is considered.
        min_saving: Share of the steps that a probe must have saved: it costs about this much, since each completion is
            taken out of its slot and put back.
    """

    def __init__(self, min_correlation: float = 0.2, min_saving: float = 0.02) -> None:
        self.min_correlation, self.min_saving = min_correlation, min_saving
        self.savings: dict[int, float] = {}  # by point: share of the steps that its probe would have saved of late

    def tokens(self, correlations: Mapping[int, float]) -> int:
        """Return the tokens of the next rollout's probe, or 0.

        Args:
            correlations: Within groups, by point.
        """
        worth = {
            point: saving
            for point, saving in self.savings.items()
            if saving >= self.min_saving and correlations[point] >= self.min_correlation
        }
        return max(worth, key=worth.__getitem__, default=0)

    def learn(self, outcome: Outcome, num_slots: int, follows: bool) -> None:
        """Take what was said in a rollout, and what came.

        Args:
            outcome: Of a rollout that is learned from.
            num_slots: Slots that it was decoded in.
            follows: Whether what is said before decoding is followed.
        """
        done = np.flatnonzero(outcome.totals > 0)[:MOST_JOBS]
        if len(done) <= num_slots:
            return
        totals, said = outcome.totals[done], outcome.said[done]
        before = said[:, 0] if follows else np.full(len(done), np.nan)
        usual = probed_steps(totals, before, 0, num_slots)
        for point, of_point in zip(outcome.points[1:], said.T[1:], strict=True):
            saving = 1 - probed_steps(totals, of_point, point + 1, num_slots) / usual
            before_it = self.savings.get(point, saving)
            self.savings[point] = saving + FORGETTING * (before_it - saving)

    def state_dict(self) -> dict[str, Any]:
        """Return what has been learned, as lists."""
        return {"savings": [[point, saving] for point, saving in self.savings.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what ``state_dict`` returned."""
        self.savings = {int(point): saving for point, saving in state["savings"]}


def probed_steps(totals: np.ndarray, said: np.ndarray, num_tokens: int, num_slots: int) -> int:
    """Return the steps that a probe of ``num_tokens`` takes with all that follows, longest foretold first.

    Args:
        totals: Tokens of each job, in the order of arrival, shape (jobs,).
        said: Tokens that the probe foretells, shape (jobs,); those of which it says nothing come last, as they arrived.
        num_tokens: Tokens of the probe; 0 for none.
        num_slots: Slots that decode.
    """
    free = [0] * num_slots
    begun = _run(np.minimum(totals, num_tokens), np.zeros(len(totals), dtype=np.int64), free)
    left = np.flatnonzero(totals > num_tokens)
    order = left[np.argsort(-np.nan_to_num(said[left], nan=0.0), kind="stable")]
    return int(max(begun.max(), _run(totals[order] - num_tokens, begun[order], free).max(initial=0)))


def _run(work: np.ndarray, ready: np.ndarray, free: list[int]) -> np.ndarray:
    """Give each job in turn to the slot that is free first; return when they end, and leave in ``free`` when slots do.

    Args:
        work: Steps of each job, shape (jobs,).
        ready: Steps before which it cannot begin.
        free: When each slot is free, a heap.
    """
    ends = []
    for steps, earliest in zip(work.tolist(), ready.tolist(), strict=True):
        ends.append(max(free[0], earliest) + steps)
        heapq.heapreplace(free, ends[-1])
    return np.array(ends, dtype=np.int64)
