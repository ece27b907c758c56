"""Scoring whole groups while others still decode."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal

from lit_grpo.rewards.execution import LoopThread, await_calls, run_calls
from lit_grpo.rewards.function import RewardFunction, check_names
from lit_grpo.rewards.inputs import LoggedMetrics, Surroundings, TrainerState
from lit_grpo.rewards.loading import first_line
from lit_grpo.rewards.streams import KeptStreams
from lit_grpo.types import Prompt, RolloutGroup

Values = Sequence[float | BaseException | None]
Arguments = list[dict[str, Any]]
_Submitted = tuple[Sequence[RolloutGroup], Future[list[list[Values]]]]

logger = logging.getLogger(__name__)
MOST_BATCHES_WITHOUT_REWARD = 3


class RewardError(RuntimeError):
    """A reward function failed on a rollout; the original exception is its cause."""


class RewardRunner:
    """Runs reward functions over rollout groups in the background.

    :meth:`submit` starts the work on a group and returns at once, :meth:`gather` waits for all submitted
    groups and writes ``rollout.rewards`` and ``rollout.reward``. Sync functions run in threads, at most
    ``num_workers`` at a time; a function may thus be called several times at once, for rollouts of one group too.
    ``async`` functions run on one event loop and are awaited all at once; they must not block it.

    ``state`` is what functions are told of training, and ``metrics`` what they log.

    An error is an exception, a call that takes longer than ``timeout_s``, a value that is neither a finite
    number nor ``None``, or a wrong number of values for a group. A sync call that is overdue cannot be
    stopped: its thread is abandoned, and goes on in the background without keeping the process from exiting.

    Args:
        functions: The reward functions; their names differ.
        on_error: ``raise`` makes :meth:`gather` raise a :class:`RewardError`; ``none`` counts the rollouts
            concerned as not rewarded by the function, and adds their number to ``num_errors``.
        timeout_s: The most seconds one call may take; ``null`` sets no limit.
        num_workers: How many calls of sync functions run at a time.
    """

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        on_error: Literal["raise", "none"] = "raise",
        timeout_s: float | None = 60.0,
        num_workers: int = 16,
    ) -> None:
        if not functions:
            raise ValueError("rewards is empty; name at least one reward function.")
        check_names(functions)
        if on_error not in ("raise", "none"):
            raise ValueError(f"on_error must be 'raise' or 'none', not {on_error!r}.")
        if timeout_s is not None and not 0 < timeout_s < math.inf:
            raise ValueError(f"timeout_s must be a finite number above 0, or null for none, not {timeout_s}.")
        if num_workers < 1:
            raise ValueError(f"num_workers must be at least 1, not {num_workers}.")
        self.functions = list(functions)
        self.num_errors = 0
        self.state = TrainerState()
        self.metrics = LoggedMetrics()
        self._raises = on_error == "raise"
        self._timeout_s = timeout_s
        self._num_workers = num_workers
        self._workers = asyncio.Semaphore(num_workers)
        self._pending: dict[int, _Submitted] = {}  # in the order of arrival
        self._numbers = itertools.count()
        self._warned: set[str] = set()
        # Two loops: one that keeps time, and one for the users' coroutines, which may block it.
        self._keeper: LoopThread | None = None
        self._coroutines: LoopThread | None = None
        self._streams: KeptStreams | None = None
        self._told_of_streams = False

    def submit(self, *groups: RolloutGroup) -> None:
        """Start to score groups: several at once take less time than one by one."""
        groups = tuple(group for group in groups if group.rollouts)
        if not groups:
            return
        if self._keeper is None:
            self._workers = asyncio.Semaphore(self._num_workers)
            self._keeper = LoopThread("lit_grpo-rewards")
            self._streams = KeptStreams()
        surroundings = Surroundings(self.state, self.metrics.log)
        # Here, not on the loop's thread: a thread that is in torch when the interpreter exits aborts the process.
        arguments = [[function.arguments(group, surroundings) for group in groups] for function in self.functions]
        self._pending[next(self._numbers)] = groups, self._keeper.submit(self._score(groups, arguments))

    def gather(self, groups: Iterable[RolloutGroup] | None = None) -> None:
        """Wait for all that was submitted, or for what has rollouts of these groups, and write the rewards.

        ``rollout.rewards`` holds each function's value by name, ``None`` where it does not apply;
        ``rollout.reward`` is the weighted sum of those that apply, NaN where none with a weight does.

        Raises:
            RewardError: With ``on_error="raise"``, for the first error in the order of groups, functions and
                rollouts. Groups before it have their rewards, the others are dropped.
        """
        these = None if groups is None else {id(rollout) for group in groups for rollout in group.rollouts}
        pending = []
        for number, (submitted, _) in list(self._pending.items()):
            if these is None or any(id(rollout) in these for group in submitted for rollout in group.rollouts):
                pending.append(self._pending.pop(number))
        try:
            for submitted, future in pending:
                for group, values in zip(submitted, zip(*future.result(), strict=True), strict=True):
                    self._write(group, values)
        finally:
            for _, future in pending:
                future.cancel()
            self._mend_streams()

    def _mend_streams(self) -> None:
        """Open standard output again where a function has closed it, and say so once."""
        mended = [] if self._streams is None else self._streams.mend()
        if mended and not self._told_of_streams:
            self._told_of_streams = True
            warnings.warn(
                f"A reward function closed {' and '.join(mended)}; the run has opened it again.", stacklevel=2
            )

    def score(self, group: RolloutGroup) -> None:
        """Score a group, and all that were submitted before it, now."""
        self.submit(group)
        self.gather()

    def close(self) -> None:
        """Drop what has not been gathered and stop the threads; a later :meth:`submit` starts them again."""
        for _, future in self._pending.values():
            future.cancel()
        self._pending = {}
        for thread in (self._keeper, self._coroutines):
            if thread is not None:
                thread.stop()
        self._keeper = self._coroutines = None
        if self._streams is not None:
            self._streams.close()
        self._streams = None

    async def _score(self, groups: Sequence[RolloutGroup], arguments: list[list[Arguments]]) -> list[list[Values]]:
        """Values by function and group, of what each function is to be called with by group."""
        sizes = [len(group.rollouts) for group in groups]
        pairs = zip(self.functions, arguments, strict=True)
        return await asyncio.gather(*(self._values(function, some, sizes) for function, some in pairs))

    async def _values(
        self, function: RewardFunction, arguments: Sequence[Arguments], sizes: Sequence[int]
    ) -> list[Values]:
        """One value or error a rollout; up to the first error alone if that is to be raised."""
        sizes = [size // len(some) for size, some in zip(sizes, arguments, strict=True)]  # of a call
        pairs = [(one, size) for some, size in zip(arguments, sizes, strict=True) for one in some]
        if function.is_async:
            if self._coroutines is None:
                self._coroutines = LoopThread("lit_grpo-async-rewards")
            calls = [functools.partial(function.score_async, *pair) for pair in pairs]
            outcomes = await await_calls(self._coroutines, calls, self._timeout_s)
        else:
            calls = [functools.partial(function.score, *pair) for pair in pairs]
            outcomes = await run_calls(calls, self._timeout_s, self._raises, self._workers, self._num_workers)
        values = (
            [outcome] * size if isinstance(outcome, BaseException) else outcome
            for outcome, (_, size) in zip(outcomes, pairs, strict=False)  # there are fewer behind an error
        )
        return [list(itertools.chain(*itertools.islice(values, len(some)))) for some in arguments]

    def _write(self, group: RolloutGroup, values: Sequence[Values]) -> None:
        for function, column in zip(self.functions, values, strict=True):
            for cause, samples in itertools.groupby(range(len(column)), key=column.__getitem__):
                if isinstance(cause, BaseException):  # one error may stand for a call on several rollouts
                    self._count_error(function, cause, group.prompt.prompt_id, list(samples))
        for rollout, row in zip(group.rollouts, zip(*values, strict=True), strict=True):
            rewards = [None if isinstance(value, BaseException) else value for value in row]
            named = list(zip(self.functions, rewards, strict=True))
            rollout.rewards = {function.name: value for function, value in named}
            applied = [function.weight * value for function, value in named if function.weight and value is not None]
            rollout.reward = sum(applied) if applied else math.nan

    def _count_error(self, function: RewardFunction, cause: BaseException, prompt_id: str, samples: list[int]) -> None:
        which = f"sample {samples[0]}" if len(samples) == 1 else f"samples {samples[0]} to {samples[-1]}"
        sentence = (
            f"reward {function.name!r} ({function.path}) failed on prompt {prompt_id!r}, {which}: {first_line(cause)}."
        )
        if self._raises:
            raise RewardError(sentence) from cause
        self.num_errors += len(samples)
        if function.name not in self._warned:
            self._warned.add(function.name)
            logger.warning("%s It counts as no reward, and its further errors are only counted.", sentence)


def can_score(functions: Iterable[RewardFunction], prompt: Prompt) -> bool:
    """Whether a prompt has the columns that all functions need."""
    try:
        for function in functions:
            function.check_columns(prompt.columns)
        return True
    except ValueError:
        return False


class RewardWatch:
    """Looks at what the reward functions gave to each batch of training.

    That no function gives a number to any completion of the first batch is an error, for such a run would never learn.
    Later, or where failures count as no reward, a batch may have none, but not several on end. A function may apply to
    some prompts alone: one that gives nothing to the first batch, where others do, is named once.

    Args:
        functions: Of the run.
        on_error: As in :class:`lit_grpo.rewards.runner.RewardRunner`.
    """

    def __init__(self, functions: Sequence[RewardFunction], on_error: Literal["raise", "none"]) -> None:
        self._functions, self._on_error = functions, on_error
        self._num_batches = self._num_without = 0

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint keeps."""
        return {"num_batches": self._num_batches, "num_without": self._num_without}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from it."""
        self._num_batches, self._num_without = state["num_batches"], state["num_without"]

    def sentence(self, logs: Mapping[str, float]) -> str | None:
        """Return what to say of a batch, if anything.

        Args:
            logs: Of the batch, all ranks together: ``frac_no_reward``, and ``rewards/NAME/mean`` of every function.

        Raises:
            RewardError: No function gave a number to any completion of the first batch, or so many batches on end have
                no reward that there is nothing to learn from.
        """
        if math.isnan(logs["frac_no_reward"]):  # the batch has no completion
            return None
        silent = [each for each in self._functions if math.isnan(logs[f"rewards/{each.name}/mean"])]
        is_first, self._num_batches = self._num_batches == 0, self._num_batches + 1
        without = logs["frac_no_reward"] == 1.0
        self._num_without = self._num_without + 1 if without else 0
        if is_first and without and len(silent) == len(self._functions) and self._on_error == "raise":
            raise RewardError(
                f"No completion of the first batch has a reward: {_listed(silent)} returned None for each of them; "
                "return a number, for None says that a function does not apply to a completion."
            )
        if self._num_without >= MOST_BATCHES_WITHOUT_REWARD:
            raise RewardError(
                f"No rollout of {self._num_without} batches on end has a reward, so there is nothing to learn from: "
                f"each of {_listed(self._functions)} returned None or failed; let one apply, and check its weight and "
                "the data."
            )
        if self._num_without == 1:
            return f"No rollout of this batch has a reward: each of {_listed(self._functions)} returned None or failed."
        if is_first and silent and len(silent) < len(self._functions):
            return (
                f"Of the first batch no completion has a value of {_listed(silent)}, which returned None or failed for "
                "each of them, where other functions gave numbers; return a number, unless it applies to other prompts "
                "alone."
            )
        return None


def _listed(functions: Sequence[RewardFunction]) -> str:
    return ", ".join(f"{function.name} ({function.path})" for function in functions)
