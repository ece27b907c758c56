"""Listeners of every run: displays, and what scores groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lit_grpo.plugins import Listener

if TYPE_CHECKING:
    from lit_grpo.faults import Phases
    from lit_grpo.rewards import RewardRunner
    from lit_grpo.rollout.generator import StepEvents
    from lit_grpo.types import RolloutGroup


@dataclass
class Moving(Listener):
    """Tells the phases of a run that a rollout moves, and that rewards are waited for at its end.

    It moves at each step, and, while nothing can be decoded, as long as one of ``others`` waits within its time limits.
    """

    phases: Phases
    others: Sequence[Listener]

    def on_step(self, events: StepEvents) -> None:
        self.phases.heartbeat()

    def on_idle(self) -> None:
        for other in self.others:
            if other.waits_in_time:
                self.phases.heartbeat()

    def on_rollout_end(self, failed: bool) -> None:
        self.phases.begin("reward")


@dataclass
class Rewarding(Listener):
    """Scores each group as soon as it is whole, while others still decode.

    Args:
        runner: The runner that scores groups.
        waits: Whether the rollout ends once the rewards are there; if not, the caller waits when it takes the groups.
    """

    runner: RewardRunner
    waits: bool = True

    def on_group(self, group: RolloutGroup) -> None:
        self.runner.submit(group)

    def on_rollout_end(self, failed: bool) -> None:
        """Wait for the rewards, or drop what is being scored."""
        if self.waits and failed:
            self.runner.close()
        elif self.waits:
            self.runner.gather()
