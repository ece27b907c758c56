"""Listeners of every run: displays, and what scores groups; and what a listener may go by."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, cast

from lit_grpo.plugins import Listener

if TYPE_CHECKING:
    import numpy as np

    from lit_grpo.faults import Phases
    from lit_grpo.rewards import RewardRunner
    from lit_grpo.rollout.generator import StepEvents
    from lit_grpo.scheduling.ledger import RequestLedger
    from lit_grpo.types import GroupKey, Key, RolloutGroup


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


class Arrivals:
    """Says when all members of a group have come to a point or ended before it.

    For example with ``point`` 64 and a group of three, of which two have had 64 tokens: once the third has 64 too, or
    ends at 40, :meth:`arrived` returns the group.

    Args:
        point: A number of tokens, at which the generator shows its hidden states.

    Attributes:
        members: Of each group.
        features: What the policy showed of each completion at the point, shape (D,).
        ended: The tokens of each completion that has ended.
    """

    def __init__(self, point: int) -> None:
        self.point = point
        self.members: dict[GroupKey, list[Key]] = {}
        self.features: dict[Key, np.ndarray] = {}
        self.ended: dict[Key, int] = {}
        self._awaited: dict[GroupKey, set[Key]] = {}

    def begin(self, ledger: RequestLedger) -> None:
        """A rollout begins, of which ``ledger`` tells what is in work."""
        self._ledger = ledger

    def arrived(self, events: StepEvents) -> list[GroupKey]:
        """Take a step of the rollout; return the groups of which all members have arrived with it."""
        if not self.members:  # all requests of the rollout are in flight at its first step
            for request in self._ledger.requests:
                self.members.setdefault(request.group, []).append(request.key)
            self._awaited = {group: set(keys) for group, keys in self.members.items()}
        new: list[Key] = []
        for observation in events.observations:
            if observation.num_tokens == self.point:
                keys = cast("Sequence[Key]", observation.keys)
                new += keys
                for key, row in zip(keys, observation.features, strict=True):
                    self.features.setdefault(key, row)
        self.ended |= {completion.request.key: completion.num_sampled for completion in events.finished}
        new += [completion.request.key for completion in events.finished]
        whole: list[GroupKey] = []
        for group in dict.fromkeys(key[:2] for key in new):
            awaited = self._awaited.get(group, set())
            awaited.difference_update(new)
            if group in self._awaited and not awaited:
                del self._awaited[group]
                whole.append(group)
        return whole
