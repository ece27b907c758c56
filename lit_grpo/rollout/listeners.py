"""What hears of a rollout while it goes on, and may answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lit_grpo.rewards import RewardRunner
    from lit_grpo.rollout.generator import StepEvents
    from lit_grpo.scheduling.flight import Flight
    from lit_grpo.types import Completion, Key, Request, RolloutGroup


@dataclass(frozen=True)
class Answer:
    """What a listener wants done: more requests of open groups or of new ones, or none of some that are in work.

    An ``abort`` ends a request with what it has, as a member of its group; a ``drop`` leaves it out of its group.
    """

    submit: Sequence[Request] = ()
    open: Sequence[Request] = ()
    abort: Sequence[Key] = ()
    drop: Sequence[Key] = ()


class Listener:
    """Hears what happens in a rollout, and may answer. Each method does nothing where it is not overridden."""

    def begin(self, flight: Flight) -> None:
        """A rollout begins; ``flight`` tells what is in work for as long as it lasts."""

    def step(self, events: StepEvents) -> Answer | None:
        """A step has been taken."""

    def finish(self, completion: Completion) -> Answer | None:
        """A completion has ended."""

    def whole(self, group: RolloutGroup) -> Answer | None:
        """The last member of a group has ended."""

    def idle(self) -> Answer | None:
        """Nothing is left to decode; whoever has more to ask, or waits for what tells whether, does so now."""

    def end(self, failed: bool) -> None:
        """The rollout is over, or has ``failed``: what was told of it is void."""


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
        """Wait for the rewards, or drop what is being scored; where it does not wait, leave it to whoever does."""
        if not self._waits:
            return
        if failed:
            self._runner.close()
        else:
            self._runner.gather()
