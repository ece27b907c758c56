"""Training batches that a run cannot learn from: without rewards or signal, or of a collapsed policy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from lit_grpo.rewards.runner import RewardError

if TYPE_CHECKING:
    from lit_grpo.rewards.function import RewardFunction

LESSON = ("frac_reward_zero_std", "advantages/max_abs")
"""Metrics from which a batch without a learning signal is detected."""
PATIENCE = 3
"""Number of batches in a row without a learning signal after which a warning is logged."""
MOST_BATCHES_WITHOUT_REWARD = 3
LEAST_ADVANTAGE = 1e-6
"""A smaller advantage is rounding."""


def has_no_signal(frac_uniform: float, max_advantage: float) -> bool:
    """Whether no group of a batch has rewards that differ, so that the batch gives no gradient.

    Args:
        frac_uniform: Fraction of zero-variance groups, ``frac_reward_zero_std``.
        max_advantage: Max absolute advantage, ``advantages/max_abs``, because some estimators give advantages to such
            groups too; NaN if no completion has a reward, which is another fault.
    """
    return frac_uniform == 1 and max_advantage <= LEAST_ADVANTAGE


class NoSignalCount:
    """Counts the batches of a run without a learning signal.

    Attributes:
        num_batches: Number of batches.
        num_empty: Number of batches without a learning signal.
        is_worth_a_word: Whether :data:`PATIENCE` of them have come in a row.
    """

    def __init__(self) -> None:
        self.num_batches = self.num_empty = self._in_a_row = 0
        self.is_worth_a_word = False

    def add(self, frac_uniform: float, max_advantage: float) -> None:
        """Count a batch; see :func:`has_no_signal`."""
        empty = has_no_signal(frac_uniform, max_advantage)
        self.num_batches += 1
        self.num_empty += empty
        self._in_a_row = self._in_a_row + 1 if empty else 0
        self.is_worth_a_word |= self._in_a_row >= PATIENCE

    def __str__(self) -> str:
        return f"{self.num_empty} of {self.num_batches} batches, in which no group had rewards that differ"


class BatchWatch:
    """Finds out, from the metrics of training batches, what keeps a run from learning.

    There are three such faults: reward functions that give no numbers, a policy that says the same however often it is
    asked and is not rewarded for it, and groups whose rewards do not differ.

    Args:
        functions: The reward functions of the run.
        on_error: ``raise`` or ``none``, as in :class:`lit_grpo.rewards.RewardRunner`.
    """

    def __init__(self, functions: Sequence[RewardFunction], on_error: Literal["raise", "none"]) -> None:
        self._functions, self._on_error = functions, on_error
        self._num_batches = self._num_unrewarded = 0  # batches so far; those without a reward in a row
        self._best, self._num_collapsed = 0.0, 0  # mean reward of the best batch; collapsed batches in a row
        self._num_empty, self._told = 0, False  # batches without a learning signal in a row; whether this was told

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {name: value for name, value in vars(self).items() if name not in ("_functions", "_on_error")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from a checkpoint."""
        vars(self).update(state)

    def collapse(self, logs: Mapping[str, float], version: int) -> str | None:
        """Return a warning about the third batch in a row whose completions of a prompt are equal and go unrewarded.

        From there nothing is learned: equal completions have equal rewards.

        Args:
            logs: The metrics of the batch over all ranks: ``reward``, ``completions/mean_logprob`` and
                ``frac_reward_zero_std``.
            version: Version of the policy.
        """
        reward, certain = logs["reward"], logs["completions/mean_logprob"] > -1e-3
        collapsed = certain and logs["frac_reward_zero_std"] == 1 and (reward <= 0 or reward < self._best)
        self._num_collapsed = self._num_collapsed + 1 if collapsed else 0
        self._best = max(self._best, reward)
        if self._num_collapsed != 3:
            return None
        return (
            f"The policy collapsed at update {version}: its completions of a prompt are all the same, with a reward of "
            f"{reward:.3g} (the best mean was {self._best:.3g}), so nothing is left to learn from; lower the learning "
            "rate, and go on from an earlier checkpoint."
        )

    def missing_rewards(self, logs: Mapping[str, float]) -> str | None:
        """Return a warning about reward functions that gave no number; None if there is nothing to warn of.

        If no function gives a number to any completion of the first batch, that is an error. A later batch, or any
        batch where failures count as no reward, may have no number, but not three batches in a row. A function may
        apply to some prompts only: if one gives no number to the first batch and others do, it is named once.

        Args:
            logs: The metrics of the batch over all ranks: ``frac_no_reward``, and ``rewards/NAME/mean`` of every
                function.

        Raises:
            RewardError: No function gave a number to any completion of the first batch, or of three batches in a row.
        """
        if math.isnan(logs["frac_no_reward"]):  # the batch has no completion
            return None
        silent = [each for each in self._functions if math.isnan(logs[f"rewards/{each.name}/mean"])]
        is_first, self._num_batches = self._num_batches == 0, self._num_batches + 1
        without = logs["frac_no_reward"] == 1.0
        self._num_unrewarded = self._num_unrewarded + 1 if without else 0
        if is_first and without and len(silent) == len(self._functions) and self._on_error == "raise":
            raise RewardError(
                f"No completion of the first batch has a reward: {_listed(silent)} returned None for each of them; "
                "return a number, because None says that a function does not apply to a completion."
            )
        if self._num_unrewarded >= MOST_BATCHES_WITHOUT_REWARD:
            raise RewardError(
                f"No rollout of {self._num_unrewarded} batches in a row has a reward, so there is nothing to learn "
                f"from: each of {_listed(self._functions)} returned None or failed; let one apply, and check its "
                "weight and the data."
            )
        if self._num_unrewarded == 1:
            return f"No rollout of this batch has a reward: each of {_listed(self._functions)} returned None or failed."
        if is_first and silent and len(silent) < len(self._functions):
            return (
                f"No completion of the first batch has a value of {_listed(silent)}, which returned None or failed for "
                "each of them, while other functions gave numbers; return a number, unless the function applies to "
                "other prompts only."
            )
        return None

    def missing_signal(self, frac_uniform: float, max_advantage: float, version: int) -> str | None:
        """Return a warning, once, after :data:`PATIENCE` batches in a row for which :func:`has_no_signal` is true."""
        self._num_empty = self._num_empty + 1 if has_no_signal(frac_uniform, max_advantage) else 0
        if self._told or self._num_empty < PATIENCE:
            return None
        self._told = True
        return (
            f"The last {PATIENCE} batches, up to update {version}, had no learning signal: in every group all rewards "
            "are equal; use easier prompts if all completions are wrong and harder ones if all are correct, raise "
            "model.num_generations, or use a reward with values in between."
        )


def _listed(functions: Sequence[RewardFunction]) -> str:
    return ", ".join(f"{function.name} ({function.path})" for function in functions)
