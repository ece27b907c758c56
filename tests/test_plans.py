"""The order in which waiting jobs are handed out."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks.baseline_plans import FIXED_SLOT, FULL_GROUP, MICRO_ROUNDS
from lit_grpo.methods.plans import find_plan, shipped_plans
from lit_grpo.scheduling.jobs import Job, NoLengths
from lit_grpo.scheduling.plans.plan import Queue, make_plan
from lit_grpo.tools.simulation.known import KnownLengths

ALL = (FULL_GROUP, MICRO_ROUNDS, FIXED_SLOT, *shipped_plans())


def queue(spec: str, lengths: NoLengths, num_slots: int) -> Queue:
    return make_plan(find_plan(spec), lengths, num_slots)


def jobs(prompt_id: str, count: int) -> list[Job]:
    return [Job((prompt_id, 0, (sample,)), 2, 99) for sample in range(count)]


def test_first_come_hands_out_in_the_order_of_arrival_whatever_the_group() -> None:
    plan = queue("fcfs", NoLengths(), 4)
    plan.add(jobs("a", 3))
    plan.add(jobs("b", 2))
    assert [(job.key[0], *job.key[2]) for job in plan.admit(4)] == [("a", 0), ("a", 1), ("a", 2), ("b", 0)]
    plan.add(jobs("c", 1))
    assert [(job.key[0], *job.key[2]) for job in plan.admit(4)] == [("b", 1), ("c", 0)]


def known(lengths: Sequence[float], informative: bool = True) -> tuple[list[Job], KnownLengths]:
    waiting = jobs("a", len(lengths))
    return waiting, KnownLengths(waiting, np.array(lengths), informative)


def samples(admitted: list[Job]) -> list[int]:
    return [job.key[2][0] for job in admitted]


def preempt(plan: Queue, job: Job) -> None:
    plan.left(job)
    plan.put_first(job)


def made(name: str, lengths: Sequence[float], num_slots: int, informative: bool = True) -> tuple[Queue, list[Job]]:
    waiting, estimates = known(lengths, informative)
    plan = queue(name, estimates, num_slots)
    plan.add(waiting)
    return plan, waiting


def test_less_is_kept_for_the_end_where_memory_leaves_slots_idle_until_there_are_new_jobs() -> None:
    lengths = [4, 2, 9, 5, 8, 3, 7, 6]
    plan, _ = made("short_last", lengths, 8)
    assert samples(plan.admit(8, lambda job: job.key[2] == (2,))) == [2]  # by length, and 8 tokens do not fit
    # One slot counts, which decodes 8 tokens in the time of the longest; three quarters of that are 2 + 3.
    assert samples(plan.admit(3)) == [0, 3, 4]
    waiting, estimates = known(lengths)
    plan = queue("short_last", estimates, 8)
    plan.add(waiting[:7])
    assert samples(plan.admit(8, lambda job: job.key[2] == (2,))) == [2]
    plan.add(waiting[7:])
    assert samples(plan.admit(8)) == [4, 6, 7, 3, 0, 5, 1]


@pytest.mark.parametrize("name", [name for name in ALL if name not in (FULL_GROUP, MICRO_ROUNDS)])
def test_what_was_set_aside_comes_before_all_others(name: str) -> None:
    plan, _ = made(name, [5, 9, 2, 9, 7], 5)
    admitted = plan.admit(2)
    for job in admitted[::-1]:
        preempt(plan, job)
    assert plan.admit(2) == admitted
    assert len(plan) == 3


def test_the_two_stage_plan_balances_groups_and_decodes_each_shortest_first() -> None:
    plan, waiting = made("infinite_sampling", [6, 5, 4, 3], 2)
    assert samples(plan.admit(2)) == [3, 2]
    plan.left(waiting[3])
    assert samples(plan.admit(1)) == [0]  # of lane 6 + 3; shortest first alone would take 1


@pytest.mark.parametrize("name", ALL)
def test_every_plan_loses_and_repeats_nothing(name: str) -> None:
    rng = random.Random(1)
    for _ in range(10):
        num_slots = 200 if name == FULL_GROUP else rng.randint(1, 6)
        everything = [job for number in range(8) for job in jobs(f"p{number}", rng.randint(1, 6))]
        lengths = KnownLengths(everything, np.array([rng.randint(1, 90) for _ in everything]))
        plan = queue(name, lengths, num_slots)
        unseen, active, waiting, away, finished = list(everything), [], [], [], []
        while len(finished) < len(everything):
            least = num_slots if name == FIXED_SLOT and len(unseen) == len(everything) else 0
            arriving = rng.randint(least, len(unseen))
            plan.add(unseen[:arriving])
            waiting += unseen[:arriving]
            del unseen[:arriving]
            if len(waiting) > 1 and rng.random() < 0.3:
                plan.drop(dropped := waiting.pop(rng.randrange(len(waiting))))
                finished.append(dropped)
            if away and rng.random() < 0.5:
                plan.put_first(back := away.pop())
                waiting.append(back)
            assert len(plan) == len(waiting)
            free = num_slots - len(active)
            before = len(plan)
            admitted = plan.admit(free, (lambda job: rng.random() < 0.8) if name != FULL_GROUP else lambda job: True)
            assert len(admitted) <= free and len(plan) == before - len(admitted)
            active += admitted
            waiting = [job for job in waiting if job not in admitted]
            everywhere = [*unseen, *waiting, *active, *away, *finished]
            assert sorted(job.key for job in everywhere) == sorted(job.key for job in everything)
            for job in rng.sample(active, rng.randint(0, len(active))):
                active.remove(job)
                lengths.revision += rng.randint(0, 1)
                chance = rng.random()
                if chance < 0.2:
                    preempt(plan, job)
                    waiting.append(job)
                elif chance < 0.4:
                    plan.left(job)
                    away.append(job)
                else:
                    plan.left(job)
                    finished.append(job)
        assert len(plan) == 0 and plan.admit(num_slots) == []


def test_an_unknown_plan_and_no_slots_are_told_in_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"^plan ltp: there is none; give one of fcfs, .*, or the class path of a"):
        queue("ltp", NoLengths(), 4)
    with pytest.raises(ValueError, match=r"^num_slots must be at least 1, not 0\.$"):
        queue("balanced", NoLengths(), 0)


OWN = """
from dataclasses import dataclass

import numpy as np

from lit_grpo.scheduling.plans import ByLength


@dataclass(frozen=True)
class MiddleFirst(ByLength):
    middle: float = 100

    def order(self, estimates, num_slots):
        return np.argsort(np.abs(estimates - self.middle), kind="stable")
"""


def test_a_plan_of_ones_own_is_given_by_its_class_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_plans.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    assert samples(made("my_plans.MiddleFirst:middle=6", [5, 9, 2, 90, 7], 2)[0].admit(5)) == [0, 4, 1, 2, 3]
    assert samples(made("my_plans.MiddleFirst", [5, 9, 2, 90, 7], 2)[0].admit(5)) == [3, 1, 4, 0, 2]
    with pytest.raises(ValueError, match=r"^plan my_plans\.MiddleFirst:end=1: it has no field 'end'; it has middle\.$"):
        queue("my_plans.MiddleFirst:end=1", NoLengths(), 2)
    with pytest.raises(ValueError, match=r"^plan my_plans\.ByWeight: it cannot be loaded"):
        queue("my_plans.ByWeight", NoLengths(), 2)
