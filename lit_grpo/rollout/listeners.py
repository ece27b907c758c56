"""Listeners of every run: displays, and what scores groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lit_grpo.plugins import Listener

if TYPE_CHECKING:
    from lit_grpo.rewards import RewardRunner
    from lit_grpo.rollout.generator import StepEvents
    from lit_grpo.types import RolloutGroup


class Stepped(Listener):
    """Calls a function with the number of tokens after each step, for displays, and another at the end."""

    def __init__(self, call: Callable[[int], None], at_end: Callable[[], None] = lambda: None) -> None:
        self._call, self._at_end = call, at_end

    def end(self, failed: bool) -> None:
        """Call the other."""
        self._at_end()

    def step(self, events: StepEvents) -> None:
        """Pass the number on."""
        self._call(events.num_tokens)


class Rewarding(Listener):
    """Scores each group as soon as it is whole, while others still decode."""

    def __init__(self, runner: RewardRunner, waits: bool = True) -> None:
        self._runner, self._waits = runner, waits

    def whole(self, group: RolloutGroup) -> None:
        """Begin to score."""
        self._runner.submit(group)

    def end(self, failed: bool) -> None:
        """Wait for the rewards, or drop what is being scored; where it does not wait, leave it to the one that does."""
        if not self._waits:
            return
        if failed:
            self._runner.close()
        else:
            self._runner.gather()
