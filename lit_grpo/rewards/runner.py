"""Scoring groups while other groups are still being decoded, and the values of the functions' arguments."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import math
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from lit_grpo.limits import Count, Limit, checks_arguments
from lit_grpo.plugins import CoreListener
from lit_grpo.process.calls import Calls, CallTimeout
from lit_grpo.process.processes import ProcessEnded
from lit_grpo.process.terminal import error_text, warn
from lit_grpo.rewards.function import RewardError, RewardFunction, check_names
from lit_grpo.rewards.inputs import NOT_IN_TRL, OF_EPISODES, TRL_INPUTS
from lit_grpo.types import FEEDBACK, AllGather, Completion, Part, Prompt, Rollout, RolloutGroup, alone, over_ranks

Values = Sequence[float | BaseException | None]
"""Values of one reward function for the rollouts of a group: a number, an error, or None if it does not apply."""
Arguments = list[dict[str, Any]]
"""The keyword arguments of the calls of one function on a group."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainerState:
    """Progress of training, with the field names of transformers' ``TrainerState``.

    Args:
        global_step: Optimizer steps that have been made.
        max_steps: Optimizer steps of the whole run; -1 means no limit.
        epoch: Passes over the data, with a fraction: 1.5 is in the middle of the second pass.
    """

    global_step: int = 0
    max_steps: int = -1
    epoch: float = 0.0


@dataclass(frozen=True)
class Surroundings:
    """The arguments that all calls share: the state of training, and the function that logs a metric."""

    state: TrainerState
    log_metric: Callable[[str, float], None]


@dataclass(frozen=True, eq=False)
class _Submission:
    """Groups that were submitted together, and their future values, by function and group."""

    groups: Sequence[RolloutGroup]
    values: Future[list[list[Values]]]


Timeout = Annotated[float | None, Limit(gt=0, remedy="null is no limit")]
"""Seconds that a call of a reward function may take."""


class RewardRunner(CoreListener):
    """Runs reward functions over rollout groups in the background.

    :meth:`submit` starts the work on groups and returns at once. :meth:`gather` waits for submitted groups and writes
    the rewards of their rollouts:

    .. code-block:: text

        functions   exact_match (weight 1)   format_match (weight 0.5)   length (weight 0, only logged)
        rollout     1.0                      None (does not apply)       120.0

        rollout.rewards = {"exact_match": 1.0, "format_match": None, "length": 120.0}
        rollout.reward  = 1 * 1.0 = 1.0         # NaN if no function with a weight applies

    Functions that are not ``async`` run in at most ``num_workers`` threads, so a function may be called several times
    at once, even for rollouts of one group. ``async`` functions all run on one event loop, which they must not block
    (:class:`lit_grpo.process.calls.UsersLoop`).

    An error is an exception, a call that takes longer than ``timeout_s``, a value that is neither a finite number nor
    ``None``, or a wrong number of values for a group. A thread cannot be stopped: when its call takes too long, the
    thread goes on in the background, and does not keep the process from exiting.

    As a listener of a rollout it scores each group as soon as it is complete, while others still decode, and the
    rollout ends once the rewards are there.

    Attributes:
        state: The state of training that functions get as ``trainer_state``; the trainer sets it.
        num_errors: Rollouts that a function failed on, with ``on_error="none"``.

    Args:
        functions: The reward functions; no two have the same name.
        on_error: Handling of a function that fails: with ``raise``, :meth:`gather` raises a :class:`RewardError`; with
            ``none``, the function counts as not applying to the rollout that it failed on.
        timeout_s: The most seconds that one call may take; ``null`` is no limit. A process of a function has its own
            limit (:attr:`RewardFunction.limits_itself`).
        num_workers: Number of threads that call reward functions which are not ``async``.
    """

    @checks_arguments()
    def __init__(
        self,
        functions: Sequence[RewardFunction],
        on_error: Literal["raise", "none"] = "raise",
        timeout_s: Timeout = 60.0,
        num_workers: Count = 16,
    ) -> None:
        if not functions:
            raise ValueError("rewards is empty; name at least one reward function.")
        check_names(functions)
        self.functions = list(functions)
        self._states = [
            (each.name, each.state) for each in functions if each.state is not None and each.state.keeps_something
        ]
        self.num_errors = 0
        self.state = TrainerState()
        self._metrics: dict[str, list[float]] = defaultdict(list)  # that functions have logged, from any thread
        self._metrics_lock = threading.Lock()
        self._raises = on_error == "raise"
        self._timeout_s = timeout_s
        self._num_workers = num_workers
        self._pending: list[_Submission] = []  # in the order of arrival
        self._warned: set[tuple[str, type]] = set()  # functions by name, with the kinds of their errors
        self._calls: Calls | None = None
        self._told_of_streams = False

    def submit(self, *groups: RolloutGroup) -> None:
        """Start to score groups; submitting several together takes less time than one by one."""
        groups = tuple(group for group in groups if group.rollouts)
        if not groups:
            return
        if self._calls is None:
            remedy = "let them end by themselves, or set process: true for the reward"
            self._calls = Calls(self._num_workers, "reward functions", remedy)
        surroundings = Surroundings(self.state, self._log_metric)
        # In this thread, not on the loop's: a thread that is in torch when the interpreter exits aborts the process.
        arguments = [[call_arguments(each, group, surroundings) for group in groups] for each in self.functions]
        self._pending.append(_Submission(groups, self._calls.start(self._score(self._calls, groups, arguments))))

    def on_group(self, group: RolloutGroup) -> None:
        self.submit(group)

    def on_rollout_end(self, failed: bool) -> None:
        """Wait for the rewards, or drop what is being scored."""
        if failed:
            self.close()
        else:
            self.gather()

    def gather(self, groups: Iterable[RolloutGroup] | None = None) -> None:
        """Wait for submitted groups and write their rewards.

        Args:
            groups: Wait only for submissions that have rollouts of these groups; by default for all.

        Raises:
            RewardError: With ``on_error="raise"``, for the first error in the order of groups, functions and
                rollouts. Groups before the error have their rewards; the others are dropped.
        """
        ids = None if groups is None else {id(rollout) for group in groups for rollout in group.rollouts}
        wanted = [
            each
            for each in self._pending
            if ids is None or any(id(rollout) in ids for group in each.groups for rollout in group.rollouts)
        ]
        self._pending = [each for each in self._pending if each not in wanted]
        try:
            for submission in wanted:
                for group, values in zip(submission.groups, zip(*submission.values.result(), strict=True), strict=True):
                    self._write(group, values)
        finally:
            for submission in wanted:
                submission.values.cancel()
            reopened = [] if self._calls is None else self._calls.reopen_streams()
            if reopened and not self._told_of_streams:
                self._told_of_streams = True
                warn(f"A reward function closed {' and '.join(reopened)}; the run has opened it again.", stacklevel=2)

    def score(self, *groups: RolloutGroup) -> None:
        self.submit(*groups)
        self.gather(groups)

    def _log_metric(self, name: str, value: float) -> None:
        with self._metrics_lock:
            self._metrics[name].append(float(value))

    def take_metrics(self, counts: bool = False, all_gather: AllGather = alone) -> dict[str, float]:
        """Return the mean of each metric that functions have logged since the last call, and forget the values.

        Args:
            counts: Whether to return, and forget, what each :class:`~lit_grpo.rewards.StatefulReward` counted too.
            all_gather: Brings values of all ranks together, which then call this together; by default the metrics are
                those of this rank.
        """
        with self._metrics_lock:
            values, self._metrics = self._metrics, defaultdict(list)
        metrics = {name: Part(math.fsum(numbers), "mean", len(numbers)) for name, numbers in values.items()}
        for function, state in self._states if counts else ():
            metrics |= {f"rewards/{function}/{name}": Part(number) for name, number in state.take_counts().items()}
        return over_ranks(metrics, all_gather)

    def close(self) -> None:
        """Drop submissions that have not been gathered and stop the threads; :meth:`submit` starts them again."""
        for submission in self._pending:
            submission.values.cancel()
        self._pending = []
        if self._calls is not None:
            self._calls.stop()
        self._calls = None

    async def _score(
        self, calls: Calls, groups: Sequence[RolloutGroup], arguments: list[list[Arguments]]
    ) -> list[list[Values]]:
        """Return the values by function and group; ``arguments`` are by function and group too.

        Values after an error that will be raised are missing.
        """
        sizes = [len(group.rollouts) for group in groups]

        async def values(function: RewardFunction, by_group: list[Arguments]) -> list[Values]:
            score = function.score_async if function.is_async else function.score
            made = [  # a call on the group has all of its rollouts, else one
                (functools.partial(score, keywords, size // len(of_group)), size // len(of_group))
                for of_group, size in zip(by_group, sizes, strict=True)
                for keywords in of_group
            ]
            functions = [call for call, _ in made]
            limit_s = None if function.limits_itself else self._timeout_s
            owner = f"reward {function.name!r} ({function.path})"
            results = await calls.call_all(functions, function.is_async, limit_s, owner, stop_on_error=self._raises)
            given = (
                result.value if result.error is None else [result.error] * size
                for result, (_, size) in zip(results, made, strict=False)
            )
            return [  # a group that the function does not apply to has no call
                list(itertools.chain(*itertools.islice(given, len(of_group)))) if of_group else [None] * size
                for of_group, size in zip(by_group, sizes, strict=True)
            ]

        return await asyncio.gather(*map(values, self.functions, arguments))

    def _write(self, group: RolloutGroup, values: Sequence[Values]) -> None:
        for function, column in zip(self.functions, values, strict=True):
            for cause, samples in itertools.groupby(range(len(column)), key=column.__getitem__):
                if isinstance(cause, BaseException):  # a call on the group gives its error to every rollout
                    self._count_error(function, cause, group.prompt.prompt_id, list(samples))
        for rollout, row in zip(group.rollouts, zip(*values, strict=True), strict=True):
            rollout.rewards, applied = {}, []
            for function, value in zip(self.functions, row, strict=True):
                number = None if isinstance(value, BaseException) else value
                rollout.rewards[function.name] = number
                if function.weight and number is not None:
                    applied.append(function.weight * number)
            rollout.reward = sum(applied) if applied else math.nan

    def _count_error(self, function: RewardFunction, cause: BaseException, prompt_id: str, samples: list[int]) -> None:
        which = f"sample {samples[0]}" if len(samples) == 1 else f"samples {samples[0]} to {samples[-1]}"
        why = str(cause) if isinstance(cause, CallTimeout | ProcessEnded) else error_text(cause)
        sentence = f"reward {function.name!r} ({function.path}) failed on prompt {prompt_id!r}, {which}: {why}."
        if self._raises:
            raise RewardError(sentence) from cause
        self.num_errors += len(samples)
        kind = function.name, type(cause)
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning("%s It counts as no reward, and further errors of this kind are only counted.", sentence)


def call_arguments(function: RewardFunction, group: RolloutGroup, surroundings: Surroundings) -> list[dict[str, Any]]:
    """Return the keyword arguments of each call of a function: one call for the group, or one for each rollout.

    There is none if the function does not apply to the group's data set.
    """
    if function.datasets and group.prompt.dataset not in function.datasets:
        return []
    columns = group.prompt.columns
    names = function.names
    if function.takes_columns:
        others = (columns.keys() - NOT_IN_TRL) | TRL_INPUTS if function.on_group else columns.keys()
        names = (names | others) - function.bound
    absent = dict.fromkeys(function.names & (OF_EPISODES[0] | OF_EPISODES[1]))
    if function.on_group:
        lists = {name: [value] * len(group.rollouts) for name, value in columns.items()}
        rows = [{**absent, **lists, **group_inputs(group, surroundings)}]
        rows[0]["log_feedback"] = functools.partial(_log_feedback, function.name, group.rollouts)
    else:
        rows = [{**absent, **columns, **rollout_inputs(each, surroundings)} for each in group.rollouts]
        for row, rollout in zip(rows, group.rollouts, strict=True):
            row["log_feedback"] = functools.partial(_log_one, function.name, rollout)
    return [{name: row[name] for name in row if name in names} for row in rows]


def rollout_inputs(rollout: Rollout, surroundings: Surroundings) -> dict[str, Any]:
    """Return the values of one rollout by the names in ``ROLLOUT_INPUTS``.

    Where the prompt gave the beginning of the answer, it belongs to the text of the completion, and not to the prompt.
    What ``reset`` of an environment added to the prompt belongs to the prompt.
    """
    completion = rollout.completion
    return {
        **({} if completion.episode is None else {"episode": completion.episode}),
        "prompt": rollout.asked.removesuffix(rollout.prompt.given),
        "completion": rollout.prompt.given + completion.text,
        "completion_ids": completion.arrays[0].tolist(),
        "num_tokens": completion.num_sampled,
        "finish_reason": completion.finish_reason,
        "max_tokens": completion.request.sampling.max_tokens,
        "trainer_state": surroundings.state,
        "log_metric": surroundings.log_metric,
        "log_extra": rollout.extra.__setitem__,
    }


def group_inputs(group: RolloutGroup, surroundings: Surroundings) -> dict[str, Any]:
    """Return the values of a group by the names in ``GROUP_INPUTS``; a conversation's texts are messages."""
    rollouts, is_chat, given = group.rollouts, group.prompt.messages is not None, group.prompt.given
    episodes = [rollout.completion.episode for rollout in rollouts]
    environments = [None if episode is None else episode.environment for episode in episodes]
    return {
        **({"episodes": episodes, "environments": environments} if any(episodes) else {}),
        "prompts": [rollout.asked_messages if is_chat else rollout.asked.removesuffix(given) for rollout in rollouts],
        "completions": [_answered(group.prompt, rollout.completion) for rollout in rollouts],
        "completion_ids": [rollout.completion.arrays[0].tolist() for rollout in rollouts],
        "num_tokens": [rollout.completion.num_sampled for rollout in rollouts],
        "finish_reasons": [rollout.completion.finish_reason for rollout in rollouts],
        "max_tokens": [rollout.completion.request.sampling.max_tokens for rollout in rollouts],
        "trainer_state": surroundings.state,
        "log_metric": surroundings.log_metric,
        "log_extra": functools.partial(_log_extra, rollouts),
    }


def _answered(prompt: Prompt, completion: Completion) -> str | list[dict[str, Any]]:
    """Return what followed a prompt: a text, or messages where the prompt is a conversation."""
    if completion.episode is not None:
        return completion.episode.messages
    text = prompt.given + completion.text
    return text if prompt.messages is None else [{"role": "assistant", "content": text}]


def _log_extra(rollouts: Sequence[Rollout], column: str, values: Sequence[Any]) -> None:
    """Store one value of ``column`` with each rollout."""
    if len(values) != len(rollouts):
        raise ValueError(
            f"log_extra({column!r}) was given {len(values)} values for {len(rollouts)} completions; give one each"
        )
    for rollout, value in zip(rollouts, values, strict=True):
        rollout.extra[column] = value


def _log_feedback(name: str, rollouts: Sequence[Rollout], texts: Sequence[str | None]) -> None:
    """Store what a reward function says of each completion."""
    if isinstance(texts, str) or len(texts) != len(rollouts):
        given = "one text" if isinstance(texts, str) else f"{len(texts)} texts"
        raise ValueError(f"log_feedback was given {given} for {len(rollouts)} completions; give a list with one each")
    for rollout, text in zip(rollouts, texts, strict=True):
        _log_one(name, rollout, text)


def _log_one(name: str, rollout: Rollout, text: str | None) -> None:
    if text is not None and not isinstance(text, str):
        raise ValueError(f"log_feedback was given {text!r:.80} of type {type(text).__name__}; give a text, or None")
    if text is not None and (found := re.search("[\ud800-\udfff]", text)):
        raise ValueError(f"log_feedback was given the lone surrogate {found[0]!r}, half a character; replace it")
    rollout.extra.pop(f"{FEEDBACK}{name}", None)  # the last call counts, such as that of a retry
    if text is not None and text.strip():
        rollout.extra[f"{FEEDBACK}{name}"] = text


def can_score(functions: Iterable[RewardFunction], prompt: Prompt) -> bool:
    """Return whether a prompt has the columns that all functions require."""
    try:
        for function in functions:
            if function.applies_to(prompt):
                function.check_columns(prompt.columns)
        return True
    except ValueError:
        return False
