"""Plans and their queues: which completion is decoded next, and a lower bound on the decode steps of any plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lit_grpo.compatibility import Clash, check_clashes
from lit_grpo.scheduling.jobs import Followed, Job, Lengths, NoLengths
from lit_grpo.settings import by_name
from lit_grpo.types import Key

Order = Callable[[np.ndarray, int], np.ndarray]
"""Orders jobs, the next one first: from the tokens expected of each, shape (jobs,), and the slots to be filled."""

NARROW = 0.75
"""Share of the slots that are in use where memory counts as the limit."""


def anything_fits(job: Job) -> bool:
    """Memory is no limit."""
    return True


class Queue:
    """Continuous sampling: a free slot takes the next job, whatever its group.

    A plan only orders: it never drops, splits or repeats a job.

    It holds what waits alone: a job that gives up its slot and is to wait again is put first, or added.

    Jobs are put in order when there are new ones, and again when ``lengths.revision`` changes: that costs one estimate
    of all that wait and a sort; handing out costs the same however many wait. Where memory refuses a job while a
    quarter of the slots or more are idle, only as many slots count for the order from then on as are in use, until
    there are new jobs.

    Args:
        lengths: Predicted lengths; if they are not informative, the order is that of arrival.
        num_slots: Number of slots to fill.
        order: Order of jobs by length; None for the order of arrival.
    """

    def __init__(self, lengths: Lengths, num_slots: int, order: Order | None = None) -> None:
        self._lengths, self._num_slots, self._order = lengths, num_slots, order
        self._waiting: dict[Key, Job] = {}  # in the order of arrival
        self._first: list[Job] = []  # before all others; the last one comes next
        self._queue: list[Job] = []  # the next one last
        self._arranged_for: tuple[int, bool] | None = None
        self._width = num_slots  # slots that memory allows to be used
        self._num_active = 0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._first)

    def add(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            self._waiting[job.key] = job
        self._arranged_for, self._width = None, self._num_slots

    def admit(self, free_slots: int, fits: Callable[[Job], bool] = anything_fits) -> list[Job]:
        """Hand out at most ``free_slots`` jobs: what was put first, then the next ones in order.

        Each is offered to ``fits`` first, which answers whether there is memory for it beside those before it. The
        first that does not fit ends the admission, so that a large one is not passed over for ever.
        """
        admitted: list[Job] = []
        if free_slots < 1:
            return admitted
        now = (self._lengths.revision, self._lengths.informative)
        if now != self._arranged_for:
            self._arranged_for = now
            jobs = list(self._waiting.values())
            follows = jobs and self._lengths.informative
            self._arrange(jobs, np.maximum(self._lengths.estimate(jobs), 1.0) if follows else None)
        while len(admitted) < free_slots and len(self):
            job = self._first[-1] if self._first else self._peek()
            if not fits(job):
                if self._num_active <= NARROW * self._width:
                    self._width, self._arranged_for = max(self._num_active, 1), None
                break
            self._hand_out(job)
            admitted.append(job)
        return admitted

    def put_first(self, job: Job) -> None:
        """Let a job wait before all others: it was preempted, or it comes back from its environment."""
        self._first.append(job)

    def drop(self, job: Job) -> None:
        if self._waiting.pop(job.key, None) is not None:
            self._arranged_for = None
        else:
            self._first.remove(job)

    def left(self, job: Job) -> None:
        """A job that was handed out has given up its slot, for whatever reason."""
        self._num_active -= 1

    def _arrange(self, jobs: list[Job], estimates: np.ndarray | None) -> None:
        """Put all waiting jobs in order; without ``estimates``, shape (jobs,), as they have arrived."""
        if estimates is not None and self._order is not None:
            jobs = [jobs[number] for number in self._order(estimates, self._width).tolist()]
        self._queue = jobs[::-1]

    def _peek(self) -> Job:
        return self._queue[-1]

    def _hand_out(self, job: Job) -> None:
        """Remove the job that was put first last, or where there is none the one that ``_peek`` returned."""
        self._num_active += 1
        if self._first:
            self._first.pop()
        else:
            del self._waiting[job.key], self._queue[-1:]  # a plan with lists of its own leaves the queue empty


HELD_BACK = 0.75
"""Tokens that :class:`ShortLast` keeps for the end, relative to ``slots x longest``."""


@dataclass(frozen=True)
class Plan:
    """In the order of arrival, whatever is thought of lengths.

    A plan of your own is a dataclass of this kind that makes a queue of its own, or one of the kind :class:`ByLength`
    that orders. Its fields are its settings, and it is given by its class path, as in ``my_plans.MyPlan:field=3``.
    """

    follows_lengths: ClassVar[bool] = False

    def __str__(self) -> str:
        return next((name for name, plan in PLANS.items() if type(plan) is type(self)), type(self).__qualname__)

    def queue(self, lengths: Lengths, num_slots: int) -> Queue:
        """Return what the jobs of one rollout wait in.

        Args:
            lengths: What is thought of the lengths; where they are not informative, all plans hand out in the order of
                arrival.
            num_slots: Number of slots of the generator.
        """
        return Queue(lengths, num_slots)


@dataclass(frozen=True)
class ByLength(Plan):
    """In an order by expected length, over all jobs that wait."""

    follows_lengths: ClassVar[bool] = True

    def order(self, estimates: np.ndarray, num_slots: int) -> np.ndarray:
        """Return the numbers of the jobs that wait, int64, shape (jobs,), the next one first.

        Args:
            estimates: Tokens expected of each, float64, shape (jobs,), in the order of arrival.
            num_slots: Slots to be filled.
        """
        raise NotImplementedError

    def queue(self, lengths: Lengths, num_slots: int) -> Queue:
        return Queue(lengths, num_slots, self.order)


@dataclass(frozen=True)
class ShortestFirst(ByLength):
    """The shortest first: the least mean completion time, and the longest are left for the end (SJF)."""

    def order(self, estimates: np.ndarray, num_slots: int) -> np.ndarray:
        return np.argsort(estimates, kind="stable")


@dataclass(frozen=True)
class LongestFirst(ByLength):
    """The longest first: ends at most 4/3 - 1/(3 slots) times as late as the best order does, if lengths are true.

    LPT, Graham 1969.
    """

    def order(self, estimates: np.ndarray, num_slots: int) -> np.ndarray:
        return np.argsort(-estimates, kind="stable")


@dataclass(frozen=True)
class ShortLast(ByLength):
    """In the order of arrival; but the shortest are kept for the end, longest first.

    Longest first wins its steps at the very end, where short jobs fill the slots that are free while long ones are
    decoded. Before that the order does not matter to the slots, but it does to memory: all of the longest jobs at once
    hold the most KV tokens that there can be, and where those are limited they leave slots idle, while the short ones
    later leave memory idle. So this takes as many steps as longest first where memory is no limit and fewer where it
    is, holds fewer KV tokens, and has groups whole earlier. What is kept is measured in the tokens that all slots
    decode in the time of the longest job. Where that is all there is, this is longest first.
    """

    def order(self, estimates: np.ndarray, num_slots: int) -> np.ndarray:
        # Among equals the later arrival comes first here, and so waits longer.
        ascending = np.lexsort((-np.arange(len(estimates)), estimates))
        limit = HELD_BACK * num_slots * estimates.max()
        count = int(np.searchsorted(np.cumsum(estimates[ascending]), limit, side="right"))
        return np.concatenate([np.sort(ascending[count:]), ascending[:count][::-1]])


PLANS: dict[str, Plan] = {
    "fcfs": Plan(),
    "sjf": ShortestFirst(),
    "lpt": LongestFirst(),
    "short_last": ShortLast(),
}
"""The plans of the core by name; methods bring others (:func:`lit_grpo.methods.find_plan`)."""


def find_plan(spec: str | Plan, setting: str = "plan", plans: Mapping[str, Plan] = PLANS) -> Plan:
    """Return the plan of a spec.

    Args:
        spec: A plan, the name of one of ``plans``, or the class path of a :class:`Plan`; after a colon its fields, as
            in ``balanced:epsilon=0.05``.
        setting: What the user has set, for messages.
        plans: Plans that have a name.

    Raises:
        ValueError: There is no such plan or field, or a value does not fit.
    """
    return spec if isinstance(spec, Plan) else by_name(setting, spec, plans, Plan)


def make_plan(spec: str | Plan, lengths: Lengths, num_slots: int) -> Queue:
    """Return what the jobs of one rollout wait in, by the plan of a spec; see :func:`find_plan` and :class:`Plan`."""
    if num_slots < 1:
        raise ValueError(f"num_slots must be at least 1, not {num_slots}.")
    return find_plan(spec).queue(lengths, num_slots)


def make_queues(spec: str | Plan, lengths: Lengths, num_slots: int, points: Sequence[int]) -> list[Queue]:
    """Return what the jobs of one rollout wait in where all decode to the first of ``points`` before any decodes on.

    They are a queue for those that have not begun, in the order of arrival, and for each point one for those that have
    come to it, among which the plan of ``spec`` chooses. With one point this is the probe of Infinite Sampling (arXiv
    2506.22950), which tells the completions of one prompt apart: nothing else is known of them but what they have begun
    with. With many it shares the slots evenly, as an operating system does among processes whose times nobody knows
    ("least attained service": Nuyens and Wierman 2008, "The foreground-background queue"): whatever is known of
    lengths, no completion is begun when the others are nearly done, so that less is left to wait for at the end. The
    tokens are needed anyway; what it costs is taking jobs out of their slots and back.

    Args:
        spec: Name or path of the plan, as :func:`find_plan` takes it.
        lengths: What is thought of the lengths; the plan follows it.
        num_slots: Number of slots of the generator.
        points: Numbers of tokens, ascending; none for the plan's queue alone.
    """
    plan = find_plan(spec) if isinstance(spec, str) else spec
    if not points:
        return [plan.queue(lengths, num_slots)]
    return [Queue(NoLengths(), num_slots), *(plan.queue(Followed(lengths), num_slots) for _ in points)]


def check_probe(probe_tokens: int | list[int], plan: Plan, predict_lengths: bool) -> tuple[int, ...]:
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
    probe = f"rollout.probe_tokens {probe_tokens}"
    check_clashes(
        [
            Clash(
                f"{probe} needs a plan that follows lengths",
                f"rollout.plan {plan} follows none",
                found=not plan.follows_lengths,
                remedy="set probe_tokens to 0",
            ),
            Clash(
                f"{probe} needs lengths that are predicted",
                "rollout.predict_lengths false predicts none",
                found=len(points) == 1 and not predict_lengths,
                remedy="set probe_tokens to 0",
            ),
        ]
    )
    return points


def slot_bound(lengths: np.ndarray, num_slots: int) -> int:
    """Return steps that no schedule of completions on ``num_slots`` slots goes below.

    The largest of the longest completion, the total over the slots, and the pigeonhole bound of P||Cmax: of the
    ``k x slots + 1`` longest, some slot decodes ``k + 1``, which take at least what the shortest ``k + 1`` of them do.

    Args:
        lengths: Tokens of each completion, shape (completions,); a step decodes one token of each slot.
        num_slots: Completions decoded at a time.
    """
    if not len(lengths):
        return 0
    descending = np.sort(np.asarray(lengths, dtype=np.float64))[::-1]
    total = np.concatenate([[0.0], np.cumsum(descending)])
    rounds = np.arange(0, (len(descending) - 1) // num_slots + 1)  # k = 0 is the longest
    pigeonhole = total[rounds * num_slots + 1] - total[rounds * num_slots - rounds]
    return _ceil(max(total[-1] / num_slots, pigeonhole.max()))


def memory_bound(
    groups: Sequence[int] | np.ndarray,
    prompt_tokens: np.ndarray,
    lengths: np.ndarray,
    num_slots: int,
    kv_tokens: int,
) -> int:
    """Return steps that no schedule goes below whose KV cache holds ``kv_tokens`` at a time.

    The area under the KV tokens, over the budget: a completion of L tokens holds 1, 2, ..., L over its steps, and a
    prompt is held once for its group, for as long as its longest completion takes or the group's tokens on all slots.

    Args:
        groups: A number for each completion, equal where they share a prompt, shape (completions,).
        prompt_tokens: Tokens of each completion's prompt, shape (completions,).
        lengths: Tokens of each completion, shape (completions,).
        num_slots: Completions decoded at a time.
        kv_tokens: Tokens that the KV cache holds.
    """
    if not len(lengths):
        return 0
    own = np.asarray(lengths, dtype=np.float64)
    _, group = np.unique(np.asarray(groups), return_inverse=True)
    longest = np.zeros(group.max() + 1)
    np.maximum.at(longest, group, own)
    held = np.maximum(longest, np.ceil(np.bincount(group, weights=own) / num_slots))
    prompts = np.zeros(len(longest))
    prompts[group] = prompt_tokens
    area = (own * (own + 1) / 2).sum() + (prompts * held).sum()
    return max(slot_bound(lengths, num_slots), _ceil(area / kv_tokens))


def _ceil(steps: float) -> int:
    """Round up, but not for what the summation of floats has added."""
    return int(np.ceil(steps - 1e-9 * max(1.0, steps)))
