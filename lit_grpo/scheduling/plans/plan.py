"""Plans: which completion is decoded next."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from lit_grpo.scheduling.jobs import Lengths
from lit_grpo.scheduling.plans.lanes import FixedSlots, Lanes
from lit_grpo.scheduling.plans.queue import (
    FullGroup,
    MicroRounds,
    Queue,
    longest_first,
    short_last,
    shortest_first,
)

PLANS: dict[str, Callable[..., Queue]] = {
    "full_group": FullGroup,
    "micro_rounds": MicroRounds,
    "fixed_slot": FixedSlots,
    "fcfs": Queue,
    "sjf": partial(Queue, order=shortest_first),
    "lpt": partial(Queue, order=longest_first),
    "short_last": partial(Queue, order=short_last),
    "balanced": Lanes,
    "infinite_sampling": partial(Lanes, longest_first=False),
}
"""How a plan is made, by name, of the lengths that it follows and the slots that it fills."""

BLIND = frozenset({"full_group", "micro_rounds", "fixed_slot", "fcfs"})
"""Plans that hand out in the order of arrival, whatever is thought of lengths."""

OPTIONS = {"balanced": ("epsilon",), "infinite_sampling": ("epsilon",)}
"""What can be set of a plan."""


def make_plan(spec: str, lengths: Lengths, num_slots: int) -> Queue:
    """Return a new plan.

    Args:
        spec: One of ``PLANS``. ``full_group``, ``micro_rounds`` and ``fixed_slot`` (a list for each slot, dealt out
            beforehand by arrival) are baselines; ``fcfs`` refills in the order of arrival; ``sjf`` takes the shortest
            first, ``lpt`` the longest; ``short_last`` takes them in the order of arrival and keeps the short ones for
            the end, longest first; ``balanced`` deals lists of about equal length onto the slots;
            ``infinite_sampling`` does so and decodes each list shortest first. The last two take an ``epsilon``, as in
            ``balanced:epsilon=0.05``: what the longest list may exceed the best possible by.
        lengths: What is thought of the lengths; where they are not informative, all plans hand out in the order of
            arrival.
        num_slots: Slots there are.
    """
    name, _, settings = spec.partition(":")
    if name not in PLANS:
        raise ValueError(f"There is no plan {name!r}: take one of {', '.join(PLANS)}.")
    if num_slots < 1:
        raise ValueError(f"The number of slots is {num_slots}: a plan needs 1 or more.")
    return PLANS[name](lengths, num_slots, **_parse_options(name, settings))


def _parse_options(name: str, settings: str) -> dict[str, float]:
    """Return the options that a spec sets; a ValueError for others, and for what is no number."""
    options: dict[str, float] = {}
    for part in filter(None, settings.split(",")):
        option, _, value = part.partition("=")
        if option not in OPTIONS.get(name, ()):
            known = ", ".join(OPTIONS.get(name, ())) or "none"
            raise ValueError(f"The plan {name} has no option {option!r}: leave it out (its options: {known}).")
        try:
            options[option] = float(value)
        except ValueError:
            raise ValueError(f"The plan {name} sets {option} to {value!r}: give a number.") from None
    return options


def check_probe(probe_tokens: int | list[int], plan: str, predict_lengths: bool) -> tuple[int, ...]:
    """Return the points that a user has named as ``probe_tokens``, or none.

    Raises:
        ValueError: They are none, or change nothing.
    """
    points = (probe_tokens,) if isinstance(probe_tokens, int) else tuple(probe_tokens)
    if points == (0,):
        return ()
    if not points or min(points) < 1 or list(points) != sorted(set(points)):
        raise ValueError(
            f"probe_tokens must be auto, 0 for no probe, or ascending numbers of tokens from 1 on, not {probe_tokens}."
        )
    if plan in BLIND or (len(points) == 1 and not predict_lengths):
        why = f"the plan {plan} does not follow lengths" if plan in BLIND else "predict_lengths is false"
        raise ValueError(f"probe_tokens is {probe_tokens}, but {why}, so a probe changes nothing: set it to 0.")
    return points
