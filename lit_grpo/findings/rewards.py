"""Warnings from the rewards of a run: no rewards, no learning signal, a collapsed policy, functions that diverge."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from lit_grpo.rewards.function import RewardError
from lit_grpo.rewards.inputs import begun
from lit_grpo.types import PassRule, Rollout

if TYPE_CHECKING:
    from lit_grpo.policy.spec import PolicySpec
    from lit_grpo.rewards.function import RewardFunction


MOST_BLOCKS = 64
"""Rows after the first ones are kept as at most so many means, each over as many rows as it takes."""
CERTAIN = 5.0
"""A change counts if it is at least so many of its standard errors.

A standard error is that of a difference of means, from the spread of the batches themselves. The first mean is of eight
batches only, batches that follow one another are alike, and a long run is looked at some twenty times. So two standard
errors, which are usual for one test, would give false alarms; ``tests/test_findings.py`` counts those of noise.
"""
DOUBTFUL = 2.0
"""A change of fewer standard errors may be noise."""
LEAST_SHARE = 0.2
"""The function that decides pass@1 has no part in a rise if it contributes less than this fraction, noise included."""
NAMED_SHARE = 0.25
"""Functions that give at least this share of a rise are named."""
CEILING = 0.9
"""Above this share of the threshold of passing there is little left to gain."""
LOOKS = 1.25
"""Curves are looked at again when they have this many times the rows of the last look."""
ROUNDING = 1e-6
"""A smaller change is no change."""


class Place(NamedTuple):
    """The source of curves: the number of first rows that count as the beginning, the unit of a row, and its name."""

    num_first: int
    rows: str
    where: str
    label: str


TRAINING = Place(num_first=8, rows="updates", where="", label="")
HELD_OUT = Place(num_first=3, rows="validations", where=" on held-out prompts", label=", held out")


class CurveChange(NamedTuple):
    """Difference of a curve's mean between the first rows and the last."""

    first: float
    last: float
    error: float

    @property
    def size(self) -> float:
        return self.last - self.first

    def is_certain(self, sign: float) -> bool:
        """Return whether the curve has moved in the direction of ``sign`` by more than noise."""
        return math.copysign(1.0, sign) * self.size > max(CERTAIN * self.error, ROUNDING)

    def __str__(self) -> str:
        return f"from {self.first:.3g} to {self.last:.3g}"


class Finding(NamedTuple):
    """Something that is wrong: its name, in a word or two what is concerned, and a sentence."""

    name: str
    about: str
    sentence: str


class RewardCurves:
    """The means of the reward and of each reward function, a row for each update or validation, in bounded memory.

    The first rows are kept, later ones in blocks, the last quarter of which is compared with the first rows. The
    standard error of a difference comes from the spread of rows, or blocks, around their mean (Welch's test).

    Args:
        weights: The weights of all reward functions by name.
        passes: The reward function that decides whether a completion is correct, and its threshold.
        place: Whether rows are of updates or of validations.

    Attributes:
        latest: The latest row: the mean of each function by name; empty before the first.
        num_rows: The rows that have been added.
    """

    def __init__(self, weights: Mapping[str, float], passes: PassRule, place: Place = TRAINING) -> None:
        self.weights, self.passes, self._place = dict(weights), passes, place
        self.latest: dict[str, float] = {}
        self._first: list[list[float]] = []
        self._blocks: list[list[float]] = []
        self._open: list[list[float]] = []  # of the next block
        self._width = 1  # rows of a block
        self._next_look = 2 * place.num_first
        self._told: list[str] = []
        self.num_rows = 0

    def state_dict(self) -> dict[str, Any]:
        rows = {"first": self._first, "blocks": self._blocks, "open": self._open}
        counts = {"width": self._width, "next_look": self._next_look, "told": self._told}
        return {"weights": self.weights, "latest": self.latest, **rows, **counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; with other functions or weights start again, because their sum is another."""
        if state["weights"] != self.weights:
            return
        self.latest, self._told = dict(state["latest"]), list(state["told"])
        self._first, self._blocks, self._open = (list(state[name]) for name in ("first", "blocks", "open"))
        self._width, self._next_look = state["width"], state["next_look"]
        self.num_rows = len(self._first) + self._width * len(self._blocks) + len(self._open)

    def add(self, logs: Mapping[str, float]) -> list[Finding]:
        """Add a row; return the findings to tell after it: none twice, and none between two looks.

        Args:
            logs: Metrics with ``reward`` and ``rewards/NAME/mean`` of every function. A row without a finite reward is
                left out; a function that applies to no completion is NaN.
        """
        self.latest = {name: logs[f"rewards/{name}/mean"] for name in self.weights}
        if not math.isfinite(logs["reward"]):
            return []
        row = [logs["reward"], *self.latest.values()]
        self.num_rows += 1
        if len(self._first) < self._place.num_first:
            self._first.append(row)
            return []
        self._open.append(row)
        if len(self._open) == self._width:
            self._blocks.append(_means(self._open))
            self._open = []
        if len(self._blocks) == MOST_BLOCKS:
            self._blocks = [_means(self._blocks[place : place + 2]) for place in range(0, MOST_BLOCKS, 2)]
            self._width *= 2
        if self.num_rows < self._next_look:
            return []
        self._next_look = math.ceil(LOOKS * self.num_rows)
        found = [finding for finding in self.findings() if finding.name not in self._told]
        self._told += [finding.name for finding in found]
        return found

    def findings(self) -> list[Finding]:
        """Return what the curves show by now."""
        num_last = max(self._place.num_first, len(self._blocks) // 4)
        if len(self._blocks) < num_last or len(self.weights) < 2:
            return []
        first, last = np.array(self._first), np.array(self._blocks[-num_last:])
        changes = list(map(_change, first.T, last.T))
        reward, functions = changes[0], dict(zip(self.weights, changes[1:], strict=True))
        return [*self._hacked(reward, functions), *self._fallen(functions)]

    def _hacked(self, reward: CurveChange, functions: Mapping[str, CurveChange]) -> Iterator[Finding]:
        """Find that the reward has risen, and the function that decides who passes has no part in it."""
        parts = {name: self.weights[name] * change.size for name, change in functions.items()}
        others = {name: part for name, part in parts.items() if name != self.passes.reward and part > 0}
        if not others or not reward.is_certain(+1) or not self._has_no_part(functions[self.passes.reward], reward):
            return
        named = [name for name in others if others[name] >= NAMED_SHARE * reward.size]
        named = named or [max(others, key=lambda name: others[name])]
        gave = _listed([f"`{name}` ({functions[name]})" for name in named])
        yield Finding(
            f"reward hacking{self._place.label}",
            " and ".join(named),
            f"The reward{self._place.where} rose {reward} in {self.num_rows} {self._place.rows} by {gave}, and not by "
            f"`{self.passes.reward}`, which decides pass@1: it {_course(functions[self.passes.reward])}. Weigh "
            f"{_listed([f'`{name}`' for name in named])} less, or let it pay only where `{self.passes.reward}` does.",
        )

    def _has_no_part(self, decides: CurveChange, reward: CurveChange) -> bool:
        """Return whether the function that decides who passes could have risen and, beyond noise, has not.

        One with weight 0 is taken as if it weighed as much as the heaviest.
        """
        weight = abs(self.weights[self.passes.reward]) or max(map(abs, self.weights.values()))
        most = decides.size + DOUBTFUL * decides.error
        may_have_risen = decides.size > DOUBTFUL * decides.error or weight * most >= LEAST_SHARE * reward.size
        return not (may_have_risen or self._is_at_ceiling(decides) or math.isnan(most))

    def _is_at_ceiling(self, decides: CurveChange) -> bool:
        threshold = self.passes.threshold
        return decides.last >= threshold - (1 - CEILING) * abs(threshold)

    def _fallen(self, functions: Mapping[str, CurveChange]) -> Iterator[Finding]:
        """Find that one function has fallen while another rose."""
        signs = {name: math.copysign(1.0, self.weights[name]) for name in functions}
        counts = [name for name, weight in self.weights.items() if weight or name == self.passes.reward]
        rose = [name for name in counts if functions[name].is_certain(signs[name])]
        fell = [name for name in counts if functions[name].is_certain(-signs[name])]
        if rose and fell:
            down, up = ([self._moved(name, functions[name]) for name in names] for names in (fell, rose))
            yield Finding(
                f"rewards part{self._place.label}",
                " and ".join(fell),
                f"{_listed(down)}{self._place.where} in {self.num_rows} {self._place.rows}, while {_listed(up)}. If "
                f"{_listed([f'`{name}`' for name in fell])} matters, weigh it more.",
            )

    def _moved(self, name: str, change: CurveChange) -> str:
        weight = self.weights[name]
        weighed = "" if weight >= 0 else f", whose weight is {weight:g},"
        return f"`{name}`{weighed} {'rose' if change.size > 0 else 'fell'} {change}"


def _change(first: np.ndarray, last: np.ndarray) -> CurveChange:
    """Compare the means of two stretches of a curve; NaN where either has fewer than half of its values."""
    means, variances = [], []
    for values in (first, last):
        there = values[np.isfinite(values)]
        enough = len(there) >= max(len(values) / 2, 2)
        means.append(float(there.mean()) if enough else math.nan)
        variances.append(float(there.var(ddof=1)) / len(there) if enough else math.nan)
    return CurveChange(means[0], means[1], math.sqrt(sum(variances)))


def _means(rows: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean of each column, over the values that are there."""
    columns = [[value for value in column if math.isfinite(value)] for column in zip(*rows, strict=True)]
    return [sum(column) / len(column) if column else math.nan for column in columns]


def _course(change: CurveChange) -> str:
    """Say how a function went that has not risen."""
    if change.is_certain(-1):
        return f"fell {change}"
    if f"{change.first:.3g}" == f"{change.last:.3g}":
        return f"stayed at {change.last:.3g}"
    return f"went {change}, which may be noise"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


LESSON = ("frac_reward_zero_std", "advantages/max_abs")
OTHER_LOSSES = ("token_loss", "ce/loss")
"""Metrics of losses that need no advantage."""
"""Metrics from which a batch without a learning signal is detected."""
PATIENCE = 3
"""Number of batches in a row without a learning signal after which a warning is logged."""
MOST_BATCHES_WITHOUT_REWARD = 3
MOST_COLLAPSED = 3
"""Number of collapsed batches in a row of which the last one is warned of."""
LEAST_ADVANTAGE = 1e-6
"""A smaller advantage is rounding."""


def has_no_signal(metrics: Mapping[str, float]) -> bool:
    """Return whether no group of a batch has rewards that differ, so that the batch gives no gradient.

    Args:
        metrics: Of the batch and its update: the fraction of zero-variance groups, ``frac_reward_zero_std``, and the
            max absolute advantage, ``advantages/max_abs``, because some estimators give advantages to such groups too;
            NaN if no completion has a reward, which is another fault. A batch with one of :data:`OTHER_LOSSES` has a
            signal.
    """
    frac_uniform, max_advantage, *others = (float(metrics.get(name, math.nan)) for name in (*LESSON, *OTHER_LOSSES))
    return frac_uniform == 1 and max_advantage <= LEAST_ADVANTAGE and all(map(math.isnan, others))


class NoSignalCount:
    """Counts the batches of a run without a learning signal.

    Attributes:
        num_batches: Number of batches that have been looked at.
        num_empty: Number of batches without a learning signal.
        is_worth_a_word: Whether :data:`PATIENCE` of them have come in a row.
    """

    def __init__(self) -> None:
        self.num_batches = self.num_empty = self._in_a_row = 0
        self.is_worth_a_word = False

    def add(self, metrics: Mapping[str, float]) -> None:
        """Count a batch; see :func:`has_no_signal`."""
        empty = has_no_signal(metrics)
        self.num_batches += 1
        self.num_empty += empty
        self._in_a_row = self._in_a_row + 1 if empty else 0
        self.is_worth_a_word |= self._in_a_row >= PATIENCE

    def __str__(self) -> str:
        return f"{self.num_empty} of {self.num_batches} batches, in which no group had rewards that differ"


class BatchWatch:
    """Finds out, from training batches and their metrics, what keeps a run from learning.

    There are four such faults: reward functions that give no numbers or do not see part of the text, a policy that says
    the same however often it is asked and is not rewarded for it, and groups whose rewards do not differ.

    Args:
        functions: The reward functions of the run.
        on_error: ``raise`` or ``none``, as in :class:`lit_grpo.rewards.RewardRunner`.
    """

    def __init__(self, functions: Sequence[RewardFunction], on_error: Literal["raise", "none"]) -> None:
        self._functions, self._on_error = functions, on_error
        self._num_batches = self._num_unrewarded = 0  # batches so far; those without a reward in a row
        self._best, self._num_collapsed = 0.0, 0  # mean reward of the best batch; collapsed batches in a row
        self._num_empty, self._told = 0, False  # batches without a learning signal in a row; whether this was told
        self._told_of_tokens = self._saw_first = False  # special tokens that rewards do not see; the first batch

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_functions", "_on_error")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)

    def collapse(self, logs: Mapping[str, float], version: int) -> str | None:
        """Return a warning about the third batch in a row whose completions of a prompt are equal and go unrewarded.

        ``logs`` has means over all ranks: ``reward``, ``completions/mean_logprob`` and ``frac_reward_zero_std``.
        """
        reward, certain = logs["reward"], logs["completions/mean_logprob"] > -1e-3
        collapsed = certain and logs["frac_reward_zero_std"] == 1 and (reward <= 0 or reward < self._best)
        self._num_collapsed = self._num_collapsed + 1 if collapsed else 0
        self._best = max(self._best, reward)
        if self._num_collapsed != MOST_COLLAPSED:
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
        apply to some prompts only: if one gives no number to the first batch and others do, it is named once. Nothing
        is missing where the weight of every function is 0, so that their values are logged alone.

        Args:
            logs: The metrics of the batch over all ranks: ``frac_no_reward``, and ``rewards/NAME/mean`` of every
                function.

        Raises:
            RewardError: No function gave a number to any completion of the first batch, or of three batches in a row.
        """
        if math.isnan(logs["frac_no_reward"]) or not any(function.weight for function in self._functions):
            return None  # the batch has no completion, or the run no reward
        silent: list[RewardFunction] = []
        for function in self._functions:
            if math.isnan(logs[f"rewards/{function.name}/mean"]):
                silent.append(function)
        is_first, self._num_batches = self._num_batches == 0, self._num_batches + 1
        without = logs["frac_no_reward"] == 1.0
        self._num_unrewarded = self._num_unrewarded + 1 if without else 0
        if is_first and without and len(silent) == len(self._functions) and self._on_error == "raise":
            raise RewardError(
                f"No completion of the first batch has a reward: {_paths(silent)} returned None for each of them; "
                "return a number, because None says that a function does not apply to a completion."
            )
        if self._num_unrewarded >= MOST_BATCHES_WITHOUT_REWARD:
            raise RewardError(
                f"No rollout of {self._num_unrewarded} batches in a row has a reward, so there is nothing to learn "
                f"from: each of {_paths(self._functions)} returned None or failed; let one apply, and check its "
                "weight and the data."
            )
        if self._num_unrewarded == 1:
            return f"No rollout of this batch has a reward: each of {_paths(self._functions)} returned None or failed."
        if is_first and silent and len(silent) < len(self._functions):
            return (
                f"No completion of the first batch has a value of {_paths(silent)}, which returned None or failed for "
                "each of them, while other functions gave numbers; return a number, unless the function applies to "
                "other prompts only."
            )
        return None

    def unseen_text(self, rollouts: Sequence[Rollout], spec: PolicySpec) -> list[str]:
        """Return warnings, each once, about text that reward functions do not see.

        It is the special tokens of completions, or a tag in which the prompts of the first batch begin the answer,
        while a function gives 0 to all of them.
        """
        sentences = list[str]()
        unseen = [] if self._told_of_tokens else spec.unseen_tokens([rollout.completion for rollout in rollouts])
        if unseen:
            self._told_of_tokens = True
            sentences.append(
                f"Completions hold the special tokens {', '.join(unseen)}, which the text that reward functions get "
                "leaves out; set model.keep_special_tokens to true where a reward is to see them."
            )
        is_first, self._saw_first = not self._saw_first, True
        tag = begun(rollouts[0].prompt.text).strip() if is_first and rollouts else ""
        flat = list[str]()
        for function in self._functions if tag else ():
            if all(rollout.rewards.get(function.name) == 0 for rollout in rollouts):
                flat.append(function.name)
        if flat:
            sentences.append(
                f"Prompts end in {tag!r}, which is therefore not in the text of completions, and "
                f"{', '.join(flat)} gave 0 to every completion of the first batch. If it looks for {tag!r}, "
                "let it take the argument prompt too, or use format_match, which counts what the prompt has begun."
            )
        return sentences

    def missing_signal(self, metrics: Mapping[str, float], version: int) -> str | None:
        """Return a warning, once, after :data:`PATIENCE` batches in a row for which :func:`has_no_signal` is true."""
        self._num_empty = self._num_empty + 1 if has_no_signal(metrics) else 0
        if self._told or self._num_empty < PATIENCE:
            return None
        self._told = True
        if self._num_collapsed == MOST_COLLAPSED:  # this batch's warning says so already
            return None
        return (
            f"The last {PATIENCE} batches, up to update {version}, had no learning signal: in every group all rewards "
            "are equal; use easier prompts if all completions are wrong and harder ones if all are correct, raise "
            "model.num_generations, or use a reward with values in between."
        )


def _paths(functions: Sequence[RewardFunction]) -> str:
    return ", ".join(f"{function.name} ({function.path})" for function in functions)
