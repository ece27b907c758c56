"""The prediction at one point: a regression, and the residuals it has had."""

from __future__ import annotations

from typing import Any

import numpy as np

from lit_grpo.scheduling.online_ridge import OnlineRidge
from lit_grpo.scheduling.survival import Residuals

EXPECTATION, OUTRIGHT, CORRECTING = range(3)
HANDICAP = np.array([[1.0], [1.1], [1.1]])  # completions of a prompt are alike, so that small differences mean nothing


class LengthModel:
    """Predicts the log of the tokens to come, from the history and the features, as a correction or outright.

    The first column is what is expected without these features, NaN where that is nothing. One regression corrects
    it, another does without. These two and the expectation as it is are judged by what they have foretold lately, apart
    for prompts that have a history and those that have none to speak of. A regression is used where it is the best, and
    clearly better than the expectation.
    """

    def __init__(self, forgetting: float) -> None:
        self.forgetting = forgetting
        self.residuals = Residuals()
        self._outright, self._correcting = OnlineRidge(2, forgetting), OnlineRidge(3, forgetting)
        self._errors = np.zeros((3, 2))  # squared, forgetting; of prompts without a history, and with

    @property
    def ready(self) -> bool:
        """Whether anything has been learned."""
        return self._outright.ready

    def predict(self, columns: np.ndarray) -> np.ndarray:
        """Return predicted logs, shape (n,); NaN where there is nothing better than the expectation.

        Args:
            columns: The expectation, mean and weight of the prompt's history, and features: shape (n, 3 + features).
        """
        best = np.argmin(self._errors * HANDICAP, axis=0)[_familiar(columns)]
        best[np.isnan(columns[:, 0])] = OUTRIGHT
        predicted = np.full(len(columns), np.nan)
        for which, ridge, first in ((OUTRIGHT, self._outright, 1), (CORRECTING, self._correcting, 0)):
            rows = best == which
            if rows.any():
                predicted[rows] = ridge.predict(columns[rows, first:])
        return predicted

    def learn(self, columns: np.ndarray, tokens: np.ndarray, scale: np.ndarray, kept: np.ndarray) -> None:
        """Take one rollout, row by row.

        Args:
            columns: As for ``predict``.
            tokens: The tokens that came, shape (n,).
            scale: The error expected of the logs, shape (n,).
            kept: Of which rows the residuals are kept, bool, shape (n,).
        """
        familiar = _familiar(columns)
        corrects = (self._errors[CORRECTING] < self._errors[OUTRIGHT])[familiar]
        errors = self._learn(columns, np.log(tokens))
        comparable = ~np.isnan(errors).any(0)
        self._errors *= self.forgetting
        for kind in (0, 1):
            self._errors[:, kind] += np.square(errors[:, comparable & (familiar == kind)]).sum(1)
        residuals = np.where(corrects & ~np.isnan(errors[CORRECTING]), errors[CORRECTING], errors[OUTRIGHT])
        there = ~np.isnan(residuals)
        if (there & kept).any():
            there &= kept
        self.residuals.add((residuals / scale)[there])

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain lists."""
        ridges = [self._outright.state_dict(), self._correcting.state_dict()]
        return {"ridges": ridges, "errors": self._errors.tolist(), "residuals": self.residuals.values.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what ``state_dict`` returned."""
        for ridge, its_state in zip((self._outright, self._correcting), state["ridges"], strict=True):
            ridge.load_state_dict(its_state)
        self._errors = np.array(state["errors"])
        self.residuals = Residuals()
        self.residuals.add(np.array(state["residuals"], dtype=np.float64))

    def _learn(self, columns: np.ndarray, logs: np.ndarray) -> np.ndarray:
        """Refit both; return by how much each of the three was wrong, shape (3, n), NaN where it said nothing."""
        errors = np.full((3, len(logs)), np.nan)
        errors[EXPECTATION] = logs - columns[:, 0]
        outright = self._outright.learn(columns[:, 1:], logs)
        errors[OUTRIGHT, len(logs) - len(outright) :] = outright
        known = np.flatnonzero(~np.isnan(columns[:, 0]))
        if len(known):
            correcting = self._correcting.learn(columns[known], logs[known])
            errors[CORRECTING, known[len(known) - len(correcting) :]] = correcting
        return errors


def _familiar(columns: np.ndarray) -> np.ndarray:
    """Whether the past of each row's prompt weighs more than what is known without it: 0 or 1, shape (n,)."""
    return (columns[:, 2] > 0.5).astype(np.int64)
