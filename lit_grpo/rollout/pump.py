"""Decoding in a thread of its own, while the policy is updated."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lit_grpo.plugins import CoreListener
from lit_grpo.rollout.loop import RolloutLoop, RolloutStats
from lit_grpo.types import AllGather, Part, PromptBatch, RolloutGroup, alone, over_ranks

if TYPE_CHECKING:
    from lit_grpo.faults import Phases
    from lit_grpo.rewards import RewardRunner

_LOOK_S = 1.0  # after which a thread that waits is told that time has passed


class RolloutPump(CoreListener):
    """Runs a rollout loop in a thread, and gives out groups that are whole and scored while it goes on.

    The thread owns generator and buffer but for the moments between two of its steps, in which others may have them:
    so each has one owner at a time. It decodes with one policy version; for another it is stopped, and started again.
    As a listener of its loop it has groups scored when they are complete; :meth:`take` waits for their rewards.

    Args:
        rewards: Runner of the reward functions, which scores groups.
        drains: Whether completions that are being decoded at a stop end before it, while nothing else begins; if not,
            they are preempted.

    Attributes:
        waited_s: Seconds that were spent in waiting for it, since the last :meth:`start`.
    """

    # What is unfinished is in the generator from a start to a stop alone, so a sync, a validation and a checkpoint find
    # it as between two rollouts.

    def __init__(self, rewards: RewardRunner, drains: bool = False) -> None:
        self._rewards, self._drains = rewards, drains
        self._turn = threading.Condition()
        self._thread: threading.Thread | None = None
        self._loop: RolloutLoop | None = None
        self._stats: RolloutStats | None = None
        self._error: BaseException | None = None
        self._at_rest = False  # the thread is between two steps, and lets others look
        self._num_guests = 0  # who look, or want to
        self._stopping = False
        self._wanted: Callable[[], bool] | None = None  # what somebody waits for
        self.waited_s = self._began = self._ran_s = 0.0

    @property
    def runs(self) -> bool:
        return self._thread is not None

    def start(self, loop: RolloutLoop) -> None:
        """Begin to decode what the loop's buffer asks for, and what it will ask for."""
        assert self._thread is None, "it runs already"
        self._loop, self._stats, self._error = loop, None, None
        self._at_rest = self._stopping = False
        self.waited_s, self._began = 0.0, time.perf_counter()
        self._thread = threading.Thread(target=self._run, args=(loop,), name="lit_grpo-rollout", daemon=True)
        self._thread.start()

    def on_group(self, group: RolloutGroup) -> None:
        self._rewards.submit(group)

    def take(self, tick: Callable[[], None], wanted: Callable[[], bool] | None = None) -> list[RolloutGroup]:
        """Wait for a release of the buffer, and return what is due with its rewards.

        Args:
            tick: Called every now and then.
            wanted: Says whether what is waited for has come; by default whether the buffer is ready for a release.

        Raises:
            Exception: Whatever went wrong in the thread.
            RewardError: A reward function failed.
        """
        assert self._loop is not None, "start comes first"
        buffer, began = self._loop.buffer, time.perf_counter()
        with self._turn:
            self._wanted = buffer.ready if wanted is None else wanted
            self._turn.notify_all()
            while self._wanted is not None and not self._stopping:
                self._turn.wait(_LOOK_S)
                tick()
            self._wanted = None
        self._raise()
        with self._between_steps():
            for part in buffer.close():
                self._rewards.submit(part)
            groups = buffer.take()
        self._rewards.gather(groups)
        self.waited_s += time.perf_counter() - began
        return groups

    def arriving(self, batch: PromptBatch, phases: Phases) -> Iterator[list[RolloutGroup]]:
        """Yield groups as they become whole, with their rewards, until all of a batch have come.

        The batch has all in the end, in the order of its prompts.
        """
        assert self._loop is not None, "start comes first"
        buffer = self._loop.buffer
        while len(buffer):
            with phases.of("rollout"):
                groups = self.take(phases.heartbeat, lambda: buffer.num_waiting > 0)
            batch.groups += groups
            yield groups
        places = {(prompt.prompt_id, prompt.visit): place for place, prompt in enumerate(batch.prompts)}
        batch.groups.sort(key=lambda group: places[group.key])

    def stop(self) -> RolloutStats | None:
        """Decode no more; what is unfinished is the buffer's. Return what was done since the start.

        Raises:
            Exception: Whatever went wrong in the thread.
        """
        if self._thread is None:
            return None
        asked = time.perf_counter()
        with self._turn:
            self._stopping = True
            self._turn.notify_all()
        self._thread.join()
        self.waited_s += time.perf_counter() - asked
        self._ran_s = time.perf_counter() - self._began
        self._thread = None
        self._raise()
        return self._stats

    def metrics(self, stats: RolloutStats, all_gather: AllGather = alone) -> dict[str, float]:
        """Say how far decoding and the update overlapped, from a start to its stop.

        ``time/rollout_s`` are the seconds in which nothing but decoding went on, and ``perf/overlap`` the share of the
        shorter of both that the other hid.
        """
        decoded_s = stats.decoded_s
        updated_s = self._ran_s - self.waited_s
        hidden_s = max(decoded_s - self.waited_s, 0.0)
        parts = {
            "time/rollout_s": Part(self.waited_s, "max"),
            "time/generation_s": Part(decoded_s, "max"),
            "perf/overlap": Part(min(hidden_s / max(min(decoded_s, updated_s), 1e-9), 1.0), "mean"),
        }
        return over_ranks(parts, all_gather)

    # ---- between the threads ------------------------------------------------------------------------

    def _run(self, loop: RolloutLoop) -> None:
        try:
            self._stats = loop.decode(self._is_over, self._admits, closes=False)
        except BaseException as error:
            self._error = error
        with self._turn:
            self._at_rest = self._stopping = True
            self._turn.notify_all()

    def _admits(self) -> bool:
        return not self._stopping

    def _is_over(self, num_steps: int) -> bool:
        """Let others look between two steps, and rest as long as there is nothing to decode."""
        assert self._loop is not None
        with self._turn:
            self._at_rest = True
            self._turn.notify_all()
            self._turn.wait_for(lambda: not self._rests())
            self._turn.wait_for(lambda: not self._num_guests)
            self._at_rest = False
            capacity = self._loop.generator.capacity()
            return self._stopping and not (self._drains and capacity.free_slots < capacity.slots)

    def _rests(self) -> bool:
        """Return whether somebody looks, or nothing is asked for; say so if what somebody waits for has come."""
        assert self._loop is not None
        if self._wanted is not None and self._wanted():
            self._wanted = None
            self._turn.notify_all()
        return not self._stopping and (self._num_guests > 0 or not self._loop.buffer.asks)

    @contextmanager
    def _between_steps(self) -> Iterator[None]:
        """Have generator and buffer while the thread rests."""
        with self._turn:
            self._num_guests += 1
            self._turn.wait_for(lambda: self._at_rest)
        try:
            yield
        finally:
            with self._turn:
                self._num_guests -= 1
                self._turn.notify_all()

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error
