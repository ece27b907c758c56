"""Plans: which completion is decoded next."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from lit_grpo.scheduling.jobs import Lengths
from lit_grpo.scheduling.plans.lanes import Lanes
from lit_grpo.scheduling.plans.queue import (
    FullGroup,
    MicroRounds,
    Queue,
    longest_first,
    short_last,
    shortest_first,
)

PLANS: dict[str, Callable[[Lengths, int], Queue]] = {
    "full_group": FullGroup,
    "micro_rounds": MicroRounds,
    "fcfs": Queue,
    "sjf": partial(Queue, order=shortest_first),
    "lpt": partial(Queue, order=longest_first),
    "short_last": partial(Queue, order=short_last),
    "fptas": Lanes,
    "infinite_sampling": partial(Lanes, longest_first=False),
}
"""How a plan is made, by name, of the lengths that it follows and the slots that it fills."""

BLIND = frozenset({"full_group", "micro_rounds", "fcfs"})
"""Plans that hand out in the order of arrival, whatever is thought of lengths."""


def make_plan(name: str, lengths: Lengths, num_slots: int) -> Queue:
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
