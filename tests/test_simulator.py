"""Plans against traces, beside a simulation that takes every step by itself."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from benchmarks.baseline_plans import FIXED_SLOT, FULL_GROUP, MICRO_ROUNDS
from lit_grpo.methods.plans import find_plan, shipped_plans
from lit_grpo.rollout.slots.drafts.price import StepCost
from lit_grpo.scheduling.jobs import FittedLengths, Job, NoLengths
from lit_grpo.scheduling.ledger import RETRY_STEPS
from lit_grpo.scheduling.plans.plan import Queue, make_plan, memory_bound, slot_bound
from lit_grpo.tools.simulation.known import KnownLengths, lengths_of
from lit_grpo.tools.simulation.simulator import Engine, Schedule, simulate
from lit_grpo.tools.simulation.traces import Trace, load_trace
from lit_grpo.types import Key

REFILLING = (MICRO_ROUNDS, FIXED_SLOT, *shipped_plans())


def hand_made(lengths: list[int], groups: list[int] | None = None, prompts: list[int] | None = None) -> Trace:
    count = len(lengths)
    groups = groups or [0] * count
    keys: list[Key] = [(str(group), 0, (number,)) for number, group in enumerate(groups)]
    prompt_tokens = np.array(prompts or [1] * count)
    return Trace("hand made", keys, np.array(groups), prompt_tokens, np.array(lengths), np.full(count, max(lengths)))


def run(name: str, trace: Trace, engine: Engine, lengths: FittedLengths | None = None) -> Schedule:
    lengths = lengths_of(trace, 0.0) if lengths is None else lengths
    return simulate(trace, find_plan(name), engine, lengths)


class StepByStep:
    """The rollout loop told in the plainest words: what the simulator skips, it walks."""

    def __init__(self, trace: Trace, plan: Queue, engine: Engine, expected: np.ndarray) -> None:
        self.trace, self.plan, self.engine, self.expected = trace, plan, engine, expected
        self.jobs = trace.jobs
        self.done = [0] * len(self.jobs)
        self.active: list[int] = []  # in the order of admission
        self.ends = [0] * len(self.jobs)
        self.rows: list[int] = []
        self.kv: list[int] = []
        self.read = 0  # tokens
        self.set_asides = 0
        self.refused = False

    def prompts(self, numbers: list[int]) -> int:
        return sum({self.trace.group[n]: int(self.trace.prompt_tokens[n]) for n in numbers}.values())

    def held(self) -> int:
        return sum(self.done[n] + 1 for n in self.active) + self.prompts(self.active)

    def fits(self, job: Job) -> bool:
        numbers = [*self.active, self.jobs.index(job)]
        limit = {n: int(self.trace.max_tokens[n]) for n in numbers}
        worst = sum(limit.values()) + sum(int(self.trace.prompt_tokens[n]) for n in numbers)
        if self.engine.kv_tokens is not None and self.active and worst > self.engine.kv_tokens:
            left = {
                n: int(np.clip(np.ceil(self.expected[n]), self.done[n] + 1, limit[n])) - self.done[n] for n in numbers
            }
            peak = max(
                sum(self.done[n] + step for n in numbers if left[n] >= step)
                for step in range(1, max(left.values()) + 1)
            )
            if peak + self.prompts(numbers) > self.engine.kv_tokens:
                self.refused = True
                return False
        self.active.append(numbers[-1])
        return True

    def leave(self, n: int) -> None:
        self.active.remove(n)
        self.refused = False

    def run(self) -> None:
        self.plan.add(self.jobs)
        while len(self.plan) or self.active:
            free_slots = self.engine.num_slots - len(self.active)
            if free_slots and len(self.plan) and (not self.refused or len(self.rows) % RETRY_STEPS == 0):
                self.plan.admit(free_slots, self.fits)
            while self.engine.kv_tokens is not None and self.held() > self.engine.kv_tokens:
                self.plan.left(youngest := self.jobs[self.active[-1]])
                self.plan.put_first(youngest)
                self.leave(self.active[-1])
                self.set_asides += 1
            self.rows.append(len(self.active))
            self.kv.append(self.held())
            self.read += sum(self.done[n] + 1 + int(self.trace.prompt_tokens[n]) for n in self.active)
            for n in list(self.active):
                self.done[n] += 1
                if self.done[n] == self.trace.lengths[n]:
                    self.leave(n)
                    self.ends[n] = len(self.rows)
                    self.plan.left(self.jobs[n])


@pytest.mark.parametrize("name", REFILLING)
@pytest.mark.parametrize("limited", [False, True])
def test_skipping_gives_what_walking_does(name: str, limited: bool) -> None:
    rng = np.random.default_rng(0)
    set_asides = 0
    for _ in range(25):
        groups = np.sort(rng.integers(0, 4, rng.integers(1, 20))).tolist()
        prompts = [[5, 1, 9, 3][group] for group in groups]
        trace = hand_made(rng.integers(1, 15, len(groups)).tolist(), groups, prompts)
        num_slots = min(int(rng.integers(1, 6)), len(trace))
        kv_tokens = int((trace.lengths + prompts).max() + rng.integers(0, 20)) if limited else None
        engine = Engine(num_slots, kv_tokens)
        lengths = KnownLengths(trace.jobs, np.rint(trace.lengths * np.exp(0.7 * rng.standard_normal(len(groups)))))
        walked = StepByStep(trace, make_plan(find_plan(name), lengths, num_slots), engine, lengths.estimate(trace.jobs))
        walked.run()
        skipped = run(name, trace, engine, lengths)
        assert skipped.ends.tolist() == walked.ends
        assert skipped.kv_tokens_at(np.arange(skipped.steps)).tolist() == walked.kv
        assert skipped.peak_kv_tokens == max(walked.kv)
        assert skipped.set_asides == walked.set_asides
        assert skipped.bubble_ratio == pytest.approx(1 - sum(walked.rows) / (num_slots * len(walked.rows)))
        cost = StepCost(2.0, 0.3, 0.01)
        seconds = 2 * len(walked.rows) + 0.3 * sum(walked.rows) + 0.01 * walked.read
        assert skipped.seconds(cost) == pytest.approx(seconds)
        set_asides += skipped.set_asides
    assert set_asides > 10 if limited else set_asides == 0


@pytest.mark.parametrize("name", REFILLING)
def test_nothing_is_lost_and_no_limit_is_passed(name: str) -> None:
    rng = np.random.default_rng(1)
    for seed in range(8):
        trace = load_trace(f"lognormal_heavy:prompts=6,group=7,max_tokens=150,seed={seed}")
        kv_tokens = int((trace.lengths + trace.prompt_tokens).max() + rng.integers(0, 500))
        engine = Engine(int(rng.integers(1, 20)), kv_tokens)
        schedule = run(name, trace, engine, lengths_of(trace, 0.8, seed))
        decoded: Counter[Key] = Counter()
        for key, span in schedule.spans:
            assert span.start < span.end
            decoded[key] += int(span.end - span.start)
        assert [decoded[key] for key in trace.keys] == trace.lengths.tolist()
        assert schedule.peak_kv_tokens <= kv_tokens
        assert schedule.segments[:, 2].max() <= engine.num_slots
        for slot in range(engine.num_slots):
            spans = sorted((span.start, span.end) for _, span in schedule.spans if span.slot == slot)
            assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        bound = memory_bound(trace.group, trace.prompt_tokens, trace.lengths, engine.num_slots, kv_tokens)
        assert schedule.steps >= bound


def test_a_small_case_by_hand() -> None:
    trace = hand_made([4, 1, 2, 3])
    first_come = run("fcfs", trace, Engine(2))
    assert first_come.ends.tolist() == [4, 1, 3, 6]
    assert [tuple(span) for _, span in first_come.spans] == [(1, 0, 1, 0), (1, 1, 3, 0), (0, 0, 4, 0), (1, 3, 6, 0)]
    assert first_come.bubble_ratio == pytest.approx(2 / 12)
    assert first_come.mean_completion == 3.5
    rounds = run(MICRO_ROUNDS, trace, Engine(2))
    assert rounds.ends.tolist() == [4, 1, 6, 7]
    assert run("lpt", trace, Engine(2)).steps == 5 == slot_bound(trace.lengths, 2)
    assert run("sjf", trace, Engine(2)).ends.tolist() == [6, 1, 2, 4]


def test_the_youngest_is_set_aside_when_tokens_run_out_and_goes_on_later() -> None:
    trace = hand_made([6, 6], groups=[0, 1], prompts=[1, 1])
    wrong = KnownLengths(trace.jobs, np.array([1.0, 1.0]))
    schedule = run("fcfs", trace, Engine(2, kv_tokens=8), wrong)
    assert [tuple(span) for _, span in schedule.spans] == [(1, 0, 3, 1), (0, 0, 6, 0), (0, 6, 9, 1)]
    assert schedule.set_asides == 1
    careful = run("fcfs", trace, Engine(2, kv_tokens=8), NoLengths())
    assert careful.set_asides == 0 and careful.steps == 12


def test_golden_steps_of_all_plans() -> None:
    trace = load_trace("lognormal_heavy:prompts=8,group=16,max_tokens=512,seed=7")
    first_come = {MICRO_ROUNDS: 2162, FIXED_SLOT: 1127, "fcfs": 921}
    assert slot_bound(trace.lengths, 16) == 599
    steps = {name: run(name, trace, Engine(16)).steps for name in REFILLING}
    assert steps == first_come | {"sjf": 938, "lpt": 605, "short_last": 605, "balanced": 605, "infinite_sampling": 605}
    lengths = lengths_of(trace, 0.35, seed=7)
    steps = {name: run(name, trace, Engine(16), lengths).steps for name in REFILLING}
    assert steps == first_come | {"sjf": 941, "lpt": 609, "short_last": 612, "balanced": 630, "infinite_sampling": 749}
    assert run(FULL_GROUP, trace, Engine(128), lengths).steps == trace.lengths.max()


@pytest.mark.parametrize(
    ("engine", "sentence"),
    [
        (Engine(0), "The number of slots is 0: an engine has from 1 to 1,048,576."),
        (
            Engine(1, kv_tokens=9),
            "A KV budget of 9 tokens is too small for the longest completion of hand made with its prompt: the "
            "smallest that works is 10.",
        ),
    ],
)
def test_what_cannot_decode_is_told_in_one_sentence(engine: Engine, sentence: str) -> None:
    with pytest.raises(ValueError) as error:
        simulate(hand_made([6, 2], prompts=[4, 4]), "fcfs", engine)
    assert str(error.value) == sentence
