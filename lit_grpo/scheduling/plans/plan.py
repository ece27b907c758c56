"""Plans: which completion is decoded next."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from lit_grpo.scheduling.jobs import Job, Lengths
from lit_grpo.scheduling.plans.by_length import ByLength, FirstCome, ShortLast, anything_fits
from lit_grpo.scheduling.plans.lanes import Lanes
from lit_grpo.scheduling.plans.rounds import FullGroup, MicroRounds


class Plan(Protocol):
    """Answers what is admitted now, told what has happened so far.

    A plan only orders: it never drops, splits or repeats a job.
    """

    def add(self, jobs: Iterable[Job]) -> None:
        """Take jobs that wait to be decoded."""
        ...

    def admit(self, free_slots: int, fits: Callable[[Job], bool] = anything_fits) -> list[Job]:
        """Hand out at most ``free_slots`` of the waiting jobs, to be decoded from now on.

        Each is offered to ``fits`` first, which answers whether there is memory for it beside those before it. The
        first that does not fit ends the admission, so that a large one is not passed over for ever.
        """
        ...

    def set_aside(self, job: Job) -> None:
        """Take back a job that was handed out: it waits again, before all others."""
        ...

    def finish(self, job: Job, num_tokens: int) -> None:
        """Learn that a job has finished with a completion of ``num_tokens``."""
        ...

    def __len__(self) -> int:
        """Return the number of jobs that wait."""
        ...


PLANS: dict[str, Callable[[Lengths, int], Plan]] = {
    "full_group": lambda lengths, num_slots: FullGroup(num_slots),
    "micro_rounds": lambda lengths, num_slots: MicroRounds(),
    "fcfs": lambda lengths, num_slots: FirstCome(),
    "sjf": lambda lengths, num_slots: ByLength(lengths, longest_first=False),
    "lpt": lambda lengths, num_slots: ByLength(lengths, longest_first=True),
    "short_last": lambda lengths, num_slots: ShortLast(lengths, num_slots),
    "fptas": lambda lengths, num_slots: Lanes(lengths, num_slots, longest_first=True),
    "infinite_sampling": lambda lengths, num_slots: Lanes(lengths, num_slots, longest_first=False),
}
"""How a plan is made, by name, of the lengths that it follows and the slots that it fills."""


def make_plan(name: str, lengths: Lengths, num_slots: int) -> Plan:
    """Return a new plan.

    Args:
        name: One of ``PLANS``. ``full_group`` and ``micro_rounds`` are baselines; ``fcfs`` refills in the order of
            arrival; ``sjf`` takes the shortest first, ``lpt`` the longest; ``short_last`` takes them in the order of
            arrival and keeps the short ones for the end, longest first; ``fptas`` deals balanced lists onto the
            slots; ``infinite_sampling`` does so and decodes each list shortest first.
        lengths: What is thought of the lengths; where they are not informative, all plans hand out in the order of
            arrival.
        num_slots: Slots there are.
    """
    if name not in PLANS:
        raise ValueError(f"There is no plan {name!r}: take one of {', '.join(PLANS)}.")
    if num_slots < 1:
        raise ValueError(f"The number of slots is {num_slots}: a plan needs 1 or more.")
    return PLANS[name](lengths, num_slots)
