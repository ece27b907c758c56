"""An engine that decodes in a simulation: slots, KV tokens, and nothing that is computed."""

from __future__ import annotations

import heapq
from collections import Counter

import numpy as np

from lit_grpo.scheduling.jobs import Job
from lit_grpo.types import Span

NEVER = 2**62


class Workload:
    """The jobs of a simulation, by number.

    Args:
        jobs: All jobs.
        group: A number for each that jobs with one prompt share, shape (jobs,).
        lengths: Tokens that each comes to, shape (jobs,).
        expected: Tokens expected of each, shape (jobs,).
    """

    def __init__(self, jobs: list[Job], group: np.ndarray, lengths: np.ndarray, expected: np.ndarray) -> None:
        self.jobs = jobs
        self.number = {job.key: number for number, job in enumerate(jobs)}
        self.group: list[int] = group.tolist()
        self.lengths: list[int] = lengths.tolist()
        self.expected: list[float] = expected.tolist()
        self.done = [0] * len(jobs)  # tokens of those that were set aside


class Engine:
    """Decodes one token of each active job a step, and holds their KV tokens.

    In its n-th step a job holds n tokens, and a prompt is held once while any job of its group is active. What is set
    aside keeps its tokens but not its KV: that is computed anew when it goes on, in no step of its own.

    Args:
        workload: What is decoded.
        num_slots: Jobs that are active at a time.
        kv_tokens: Tokens that can be held at a time; None for no limit.
    """

    def __init__(self, workload: Workload, num_slots: int, kv_tokens: int | None) -> None:
        self._work = workload
        self._budget = kv_tokens
        self._free = list(range(num_slots))[::-1]
        self._active: dict[int, tuple[int, int]] = {}  # job -> (slot, start), in the order of admission
        self._ends: list[tuple[int, int]] = []  # a heap of (end, job); of those set aside too
        self._members: Counter[int] = Counter()  # active jobs of each group
        self._prompts = 0  # tokens of their prompts
        self._offset = 0  # KV tokens held are this plus active jobs x (step + 1), with the prompts
        self._held = np.zeros(num_slots)  # for the forecast: tokens minus the step that they were had at
        self._expected = np.zeros(num_slots)
        self._limit = np.zeros(num_slots)
        self._busy = np.zeros(num_slots, dtype=bool)
        self.spans: list[Span] = []
        self.span_jobs: list[int] = []
        self.segments: list[tuple[int, int, int, int]] = []  # start, end, active jobs, KV tokens in the first step

    @property
    def num_free(self) -> int:
        """Slots that are free."""
        return len(self._free)

    @property
    def num_active(self) -> int:
        """Jobs that are active."""
        return len(self._active)

    def take(self, job: Job, now: int) -> bool:
        """Start a job at step ``now`` where its KV tokens fit beside those expected of all others, else say False.

        An idle engine takes any job.
        """
        number = self._work.number[job.key]
        if self._budget is not None and self._active and self._forecast(number, now) > self._budget:
            return False
        slot, done = self._free.pop(), self._work.done[number]
        self._active[number] = (slot, now)
        heapq.heappush(self._ends, (now + self._work.lengths[number] - done, number))
        group = self._work.group[number]
        self._members[group] += 1
        self._offset += done - now + (job.prompt_tokens if self._members[group] == 1 else 0)
        self._prompts += job.prompt_tokens if self._members[group] == 1 else 0
        if self._budget is not None:
            self._busy[slot] = True
            self._held[slot], self._expected[slot] = done - now, self._work.expected[number]
            self._limit[slot] = job.max_tokens
        return True

    def finish(self, now: int) -> list[Job]:
        """Return the jobs that are done at step ``now``, and free their slots."""
        done = []
        while self._ends and self._ends[0][0] <= now:
            end, number = heapq.heappop(self._ends)
            if self._is_current(end, number):
                self._stop(number, now)
                self._work.done[number] = self._work.lengths[number]
                done.append(self._work.jobs[number])
        return done

    def make_room(self, now: int) -> list[Job]:
        """Set the youngest jobs aside until the KV tokens of step ``now`` fit, and return them."""
        aside = []
        while self._budget is not None and self.held(now) > self._budget and len(self._active) > 1:
            number = next(reversed(self._active))
            start = self._stop(number, now)
            self._work.done[number] += now - start
            aside.append(self._work.jobs[number])
        return aside

    def next_event(self, now: int) -> int:
        """Return the next step in which a job is done or KV tokens have run out."""
        while self._ends and not self._is_current(*self._ends[0]):
            heapq.heappop(self._ends)
        end = self._ends[0][0] if self._ends else NEVER
        if self._budget is not None and len(self._active) > 1:
            end = min(end, (self._budget - self._offset) // len(self._active))
        return end

    def advance(self, now: int, then: int) -> None:
        """Decode from step ``now`` until step ``then``."""
        if self._active:
            self.segments.append((now, then, len(self._active), self.held(now)))

    def held(self, step: int) -> int:
        """Return the KV tokens that are held in a step, if nothing changes until then."""
        return self._offset + len(self._active) * (step + 1) if self._active else 0

    def _is_current(self, end: int, number: int) -> bool:
        """Whether an entry of the heap is that of an active job, not of an earlier start of one that was set aside."""
        active = self._active.get(number)
        return active is not None and active[1] + self._work.lengths[number] - self._work.done[number] == end

    def _stop(self, number: int, now: int) -> int:
        """Free the slot of a job, and return the step that it started in."""
        slot, start = self._active.pop(number)
        self._offset -= self._work.done[number] - start
        self._free.append(slot)
        self._busy[slot] = False
        group = self._work.group[number]
        self._members[group] -= 1
        if not self._members[group]:
            self._offset -= self._work.jobs[number].prompt_tokens
            self._prompts -= self._work.jobs[number].prompt_tokens
        if start < now:
            self.spans.append(Span(slot, start, now, group))
            self.span_jobs.append(number)
        return start

    def _forecast(self, number: int, now: int) -> float:
        """Return the most KV tokens that will be held if a job starts and all come to what is expected of them.

        A job that has outlived its estimate is expected to come to twice its tokens, or to its limit.
        """
        job, done = self._work.jobs[number], self._work.done[number]
        held = np.append(self._held[self._busy] + now, done)
        expected = np.append(self._expected[self._busy], self._work.expected[number])
        limit = np.append(self._limit[self._busy], job.max_tokens)
        final = np.where(expected > held, expected, np.minimum(2 * held, limit))
        left = np.maximum(final - held, 1.0)
        order = np.argsort(-left)  # those that stay longest first
        peaks = np.cumsum(held[order]) + np.arange(1, len(order) + 1) * left[order]
        prompt = 0 if self._members[self._work.group[number]] else job.prompt_tokens
        return float(peaks.max()) + self._prompts + prompt
