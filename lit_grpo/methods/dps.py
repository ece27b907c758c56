"""DPS (arXiv 2603.10887): the prompts that a hidden Markov model expects to be passed in part are asked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import ClassVar

import numpy as np

from lit_grpo.budgets.history import Outcome, Record
from lit_grpo.budgets.prompts import State
from lit_grpo.limits import Count, Share
from lit_grpo.plugins import Plugin, RunNumbers
from lit_grpo.types import Prompt

PART = 1
"""The state in which some completions pass and some do not; 0 is that none does, 2 that all do."""
NUM_STATES = 3
PRIOR = 1.0
"""Each count of the Dirichlet prior of transitions, in the paper's runs."""
FORGOTTEN = 1e-9
"""Counts that are this close to the prior are equal to it."""
NEGLIGIBLE = 0.005
"""A visit whose count has decayed to less than this is forgotten."""


@dataclass
class DynamicsPredictive(Plugin):
    """Ask the prompts that are likeliest to be passed in part (Dynamics-Predictive Sampling, arXiv 2603.10887).

    A group teaches only where some of its completions pass and some do not. Each prompt has a hidden Markov model of
    three states: nobody passes, some do, all do. A step of the model is an update of the policy. A visit shows the
    state, and between visits the model predicts it, so that no completion is sampled to find out. With the belief
    ``m``, the transitions ``P = a / sum over a's columns`` and all ``a`` equal to 1 at first, a step is

    - not visited: ``m <- P m`` and ``a <- decay a + (1 - decay)``
    - visited, in state i: ``x_j = P_ij m_j / sum_k P_ik m_k``, then ``a <- decay a + (1 - decay)``, of which row i
      grows by ``x``, and ``m`` is 1 at i

    What is asked next is ranked by ``(P m)`` of the middle state: the largest of ``candidates`` times as many prompts
    as a batch takes, and of equals the one that is due first. A prompt that was not asked for long comes again, because
    its belief goes back to a third for each state. Of each prompt those last visits count of which more than half a
    percent can be left, 8 by default, and all of them where nothing is forgotten. With ``candidates: 1`` all
    prompts are asked in their order. For example::

        rollout:
          plugins:
            - dps: {candidates: 4}
    """

    needs: ClassVar[frozenset[str]] = frozenset({"revisits"})

    candidates: Count = 8
    """Number of due prompts per prompt that is asked, among which the best is chosen."""
    decay: Share = 0.5
    """Factor of the counts of transitions at each update: 1 forgets nothing; the paper's scripts (maoyixiu/DPS at
    5654d52) have 0.5, for MATH 0.7.
    """

    @property
    def numbers(self) -> RunNumbers:
        """Ask the best of the candidates, by the last visits of which more than half a percent is left."""
        num_recent = None if self.decay == 1 else math.ceil(math.log(NEGLIGIBLE) / math.log(self.decay))
        return RunNumbers(prompt_candidates=self.candidates, num_recent=num_recent)

    def prompt_chance(self, prompt: Prompt, record: Record, state: State) -> float:
        """Return the belief that a prompt is passed in part; 1 if there is nothing to choose among."""
        return 1.0 if self.candidates == 1 else self._partly(record.recent, state)

    def prompt_state(
        self, prompts: Sequence[Prompt], records: Sequence[Record] = (), state: State | None = None
    ) -> State:
        """The version of the policy after the last batch, and what of that batch was expected and seen."""
        if state is None:
            return {"trained_version": -1.0, "partly_expected": 0.0, "partly_passed": 0.0}
        seen = [record.recent for record in records if record.recent]
        if not seen:
            return state
        return {
            "trained_version": float(max(recent[-1].version for recent in seen)),
            "partly_expected": fmean(self._partly(recent[:-1], state) for recent in seen),
            "partly_passed": fmean(state_of(recent[-1]) == PART for recent in seen),
        }

    def _partly(self, recent: Sequence[Outcome], state: State) -> float:
        """The chance that a prompt with these outcomes is passed in part at the update that follows."""
        return float(predicted(recent, int(state["trained_version"]) + 1, self.decay)[PART])


def state_of(outcome: Outcome) -> int:
    return PART if 0 < outcome.pass_rate < 1 else int(2 * outcome.pass_rate)


def predicted(outcomes: Sequence[Outcome], version: int, decay: float) -> np.ndarray:
    """Return how likely each state of a prompt is at an update, by what visits before it have shown.

    Args:
        outcomes: Outcomes of the prompt's visits, the oldest first.
        version: Version of the policy before the update that is predicted.
        decay: What counts of transitions keep at each update.

    Returns:
        Float64, shape (3,), with sum 1; a third each where there are no outcomes.
    """
    counts_SS = np.full((NUM_STATES, NUM_STATES), PRIOR)  # to a state, from a state
    belief_S = np.full(NUM_STATES, 1 / NUM_STATES)
    last = outcomes[0].version - 1 if outcomes else version - 1
    for outcome in outcomes:
        counts_SS, belief_S = _not_visited(counts_SS, belief_S, outcome.version - last - 1, decay)
        state = state_of(outcome)
        moves_S = _transitions(counts_SS)[state] * belief_S
        counts_SS = _decayed(counts_SS, decay)
        counts_SS[state] += moves_S / moves_S.sum()
        belief_S = np.eye(NUM_STATES)[state]
        last = outcome.version
    counts_SS, belief_S = _not_visited(counts_SS, belief_S, version - last - 1, decay)
    return _transitions(counts_SS) @ belief_S


def _not_visited(
    counts_SS: np.ndarray, belief_S: np.ndarray, num_updates: int, decay: float
) -> tuple[np.ndarray, np.ndarray]:
    """Counts and belief after updates at which the prompt was not asked."""
    if decay == 1:
        return counts_SS, np.linalg.matrix_power(_transitions(counts_SS), num_updates) @ belief_S
    for _ in range(num_updates):
        belief_S = _transitions(counts_SS) @ belief_S
        counts_SS = _decayed(counts_SS, decay)
        if np.abs(counts_SS - PRIOR).max() < FORGOTTEN:
            return np.full_like(counts_SS, PRIOR), np.full(NUM_STATES, 1 / NUM_STATES)
    return counts_SS, belief_S


def _transitions(counts_SS: np.ndarray) -> np.ndarray:
    """The expected chance of each transition."""
    return counts_SS / counts_SS.sum(axis=0)


def _decayed(counts_SS: np.ndarray, decay: float) -> np.ndarray:
    return decay * counts_SS + (1 - decay) * PRIOR


PLUGINS = {"dps": DynamicsPredictive()}
