"""Listeners of every run: displays, and what scores groups."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from lit_grpo.plugins import Listener

if TYPE_CHECKING:
    from lit_grpo.faults import Phases
    from lit_grpo.rewards import RewardRunner
    from lit_grpo.rollout.generator import StepEvents
    from lit_grpo.types import RolloutGroup


class Moving(Listener):
    """Tells the phases of a run that a rollout moves, and that rewards are waited for at its end.

    It moves at each step, and, while nothing can be decoded, as long as one of ``others`` waits within its time limits.
    """

    def __init__(self, phases: Phases, others: Iterable[Listener]) -> None:
        self._phases, self._others = phases, list(others)

    def on_step(self, events: StepEvents) -> None:
        self._phases.move()

    def on_idle(self) -> None:
        if any(other.waits_in_time for other in self._others):
            self._phases.move()

    def on_rollout_end(self, failed: bool) -> None:
        self._phases.begin("reward")


class Rewarding(Listener):
    """Scores each group as soon as it is whole, while others still decode."""

    def __init__(self, runner: RewardRunner, waits: bool = True) -> None:
        self._runner, self._waits = runner, waits

    def on_group(self, group: RolloutGroup) -> None:
        self._runner.submit(group)

    def on_rollout_end(self, failed: bool) -> None:
        """Wait for the rewards, or drop what is being scored; where it does not wait, leave it to the one that does."""
        if not self._waits:
            return
        if failed:
            self._runner.close()
        else:
            self._runner.gather()
