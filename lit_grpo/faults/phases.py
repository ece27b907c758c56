"""The phases of a run, and a watch that reports when nothing moves."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lit_grpo.plugins import CoreListener, Listener, ask

if TYPE_CHECKING:
    from lit_grpo.types import StepEvents

BETWEEN = "between phases"
NUM_FRAMES = 6


class Phases(CoreListener):
    """The current phase of a run (rollout, reward, update, weight sync, validation, checkpoint), and the time in each.

    It listens to rollouts: each decoding step is a movement, and at the end of a rollout rewards are waited for.

    Attributes:
        name: Name of the current phase.
        moved_at: The time of the last movement: a decoding step, a micro-batch or a change of phase.
        others: Listeners of the rollout that may wait for something, such as a tool. While nothing can be decoded, it
            is a movement if one of them waits within its time limits.
    """

    def __init__(self) -> None:
        self.name = BETWEEN
        self.moved_at = self._began = time.monotonic()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self.others: Sequence[Listener] = ()

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Be in a phase for the code within, then again in the phase before."""
        around = self.name
        self.begin(name)
        try:
            yield
        finally:
            self.begin(around)

    def begin(self, name: str) -> None:
        self.heartbeat()
        self._seconds[self.name] += self.moved_at - self._began
        self.name, self._began = name, self.moved_at

    def take(self) -> dict[str, float]:
        """Return the seconds in each phase, and between phases, since the last call."""
        self.begin(self.name)
        seconds, self._seconds = self._seconds, defaultdict(float)
        return dict(seconds)

    def heartbeat(self) -> None:
        self.moved_at = time.monotonic()

    def on_step(self, events: StepEvents) -> None:
        self.moved_at = time.monotonic()

    def on_idle(self) -> None:
        if any(ask(other, "waits_in_time") for other in self.others):
            self.heartbeat()

    def on_rollout_end(self, failed: bool) -> None:
        self.begin("reward")


class StallWatch:
    """Reports once what the main thread is doing when nothing has moved for a long time; it stops nothing."""

    def __init__(self, phases: Callable[[], Phases], minutes: float, rank: int) -> None:
        self._phases, self._minutes, self._rank = phases, minutes, rank
        self._over = threading.Event()
        self._told_of = -1.0
        self._thread = threading.Thread(target=self._watch, name="stall watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(self._minutes * 60 / 10):
            moved_at = self._phases().moved_at
            if moved_at != self._told_of and time.monotonic() - moved_at > self._minutes * 60:
                self._told_of = moved_at
                print(self._where(), file=sys.stderr, flush=True)

    def _where(self) -> str:
        phases = self._phases()
        minutes = (time.monotonic() - phases.moved_at) / 60
        phase = phases.name if phases.name == BETWEEN else f"in the phase {phases.name}"
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        frames = traceback.format_list(traceback.extract_stack(frame)[-NUM_FRAMES:])
        return (
            f"Rank {self._rank} has not moved for {minutes:.3g} minutes, {phase}; it goes on waiting. Its main thread "
            f"is at (innermost last):\n{''.join(frames)}"
        )
