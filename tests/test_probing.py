"""The probe: what it decodes first, what it does to a rollout, and when it is chosen."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hand_made import make_module

from lit_grpo.callbacks import RolloutScheduler
from lit_grpo.methods.plans import find_plan, shipped_plans
from lit_grpo.scheduling.jobs import Job, NoLengths, PredictedRollout
from lit_grpo.scheduling.layouts import Blocks
from lit_grpo.scheduling.ledger import RETRY_STEPS, RequestLedger
from lit_grpo.scheduling.plans.plan import make_queues, slot_bound
from lit_grpo.scheduling.plans.probe_choice import ProbeChoice, RolloutCount, count_steps
from lit_grpo.tools.simulation.known import KnownLengths
from lit_grpo.tools.simulation.simulator import Engine, simulate
from lit_grpo.tools.simulation.traces import load_trace
from lit_grpo.types import Key, Prompt, Request, SamplingParams

FOLLOWING = sorted(name for name, plan in shipped_plans().items() if plan.follows_lengths)


class Told(NoLengths):
    """Lengths that are told beforehand, and that nobody has found to be worth following."""

    def __init__(self, lengths: dict[tuple[str, int, tuple[int, ...]], float]) -> None:
        self.lengths = lengths

    def estimate(self, jobs: Sequence[Job]) -> np.ndarray:
        return np.array([self.lengths[job.key] for job in jobs])


def jobs_of(lengths: Sequence[int]) -> tuple[list[Job], Told]:
    jobs = [Job(("p", 0, (number,)), 4, 100) for number in range(len(lengths))]
    return jobs, Told({job.key: float(length) for job, length in zip(jobs, lengths, strict=True)})


def ledger_of(lengths: Sequence[int], num_slots: int, kv_tokens: int | None = None) -> RequestLedger:
    """A ledger with a probe after 8 tokens, in which requests of one prompt are queued."""
    jobs, told = jobs_of(lengths)
    requests = [Request(Prompt("p", (1,) * 4, ""), job.key[2], SamplingParams(max_tokens=100)) for job in jobs]
    ledger = RequestLedger()
    ledger.begin(num_slots, told, Blocks(), kv_tokens, make_queues("lpt", told, num_slots, [8]), [8])
    for request in requests:
        ledger.ask(request)
    ledger.enter(requests, {})
    return ledger


def admitted(ledger: RequestLedger, free_slots: int) -> list[int]:
    return [request.path[0] for request in ledger.admit(free_slots)]


def park(ledger: RequestLedger, *samples: int) -> None:
    ledger.park([(ledger.request(("p", 0, (sample,))), 8) for sample in samples])


def test_all_are_begun_before_any_goes_on_and_then_the_plan_decides() -> None:
    ledger = ledger_of([30, 90, 20, 60, 50], 2)
    assert admitted(ledger, 2) == [0, 1] and ledger.stops_at(8) and not ledger.stops_at(9)
    park(ledger, 0, 1)
    assert admitted(ledger, 2) == [2, 3]  # though 1 waits and is known to be the longest
    park(ledger, 2)
    assert admitted(ledger, 1) == [4]
    ledger.remove(("p", 0, (3,)))  # ended before it could be probed
    assert admitted(ledger, 1) == [1]
    park(ledger, 4)
    assert ledger.may_admit(("p", 0))
    assert admitted(ledger, 1) == [4] and ledger.num_queued == 2
    for sample in (1, 4):
        ledger.remove(("p", 0, (sample,)))
    assert admitted(ledger, 2) == [0, 2] and ledger.num_queued == 0
    assert not ledger.stops_at(8) and not ledger.may_admit(("p", 0))


def test_what_memory_preempts_goes_on_first_among_its_like() -> None:
    ledger = ledger_of([30, 90, 20], 2)
    assert admitted(ledger, 2) == [0, 1]
    ledger.preempt(ledger.request(("p", 0, (1,))))
    assert admitted(ledger, 1) == [1]
    park(ledger, 0, 1)
    assert admitted(ledger, 2) == [2, 1]
    ledger.preempt(ledger.request(("p", 0, (1,))))
    assert admitted(ledger, 1) == [1]
    ledger.remove(("p", 0, (1,)))
    park(ledger, 2)
    assert admitted(ledger, 2) == [0, 2]


def test_one_that_memory_refuses_keeps_the_plan_waiting() -> None:
    ledger = ledger_of([30, 90, 20], 3)
    assert admitted(ledger, 2) == [0, 1]
    park(ledger, 0)
    ledger.kv_tokens = 1
    assert admitted(ledger, 2) == []
    ledger.kv_tokens, ledger.step = None, RETRY_STEPS
    assert admitted(ledger, 2) == [2, 0]


@pytest.mark.parametrize("plan", FOLLOWING)
@pytest.mark.parametrize("kv_tokens", [None, 3000])
def test_every_completion_is_decoded_once_behind_a_probe(plan: str, kv_tokens: int | None) -> None:
    trace = load_trace("lognormal_heavy:prompts=3,group=16,max_tokens=512,seed=1")
    lengths = KnownLengths(trace.jobs, 0.5 * trace.lengths, informative=False)
    schedule = simulate(trace, find_plan(plan), Engine(5, kv_tokens), lengths, points=[16])
    decoded = dict.fromkeys(trace.keys, 0.0)
    for key, span in schedule.spans:
        decoded[key] += span.end - span.start
    assert decoded == dict(zip(trace.keys, trace.lengths.tolist(), strict=True))
    begun: dict[Key, float] = {}
    for key, span in schedule.spans:
        begun[key] = min(span.start, begun.get(key, span.start))
    assert sorted(begun.values()) == [begun[key] for key in trace.keys]  # in the order of arrival
    assert kv_tokens is None or schedule.peak_kv_tokens <= kv_tokens


def test_one_prompt_takes_fewer_steps_where_a_probe_tells_its_completions_apart() -> None:
    steps = {"fcfs": 0, "behind a probe": 0, "bound": 0}
    for seed in range(20):
        trace = load_trace(f"lognormal_heavy:prompts=1,group=32,seed={seed}")
        lengths = KnownLengths(trace.jobs, trace.lengths, informative=False)
        steps["fcfs"] += simulate(trace, "short_last", Engine(8), lengths).steps  # as they have arrived
        steps["behind a probe"] += simulate(trace, "short_last", Engine(8), lengths, points=[32]).steps
        steps["bound"] += slot_bound(trace.lengths, 8)
    assert steps["behind a probe"] < 1.08 * steps["bound"] and steps["fcfs"] > 1.2 * steps["bound"]


# ---- the choice ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("points", [(32,), (8,), (16, 32, 48, 64), (10, 100)])
@pytest.mark.parametrize("seed", range(4))
def test_steps_with_points_are_those_of_the_simulated_rollout(seed: int, points: tuple[int, ...]) -> None:
    trace = load_trace(f"lognormal_heavy:prompts=2,group=24,max_tokens=400,seed={seed}")
    said = np.minimum(trace.lengths * np.exp(0.4 * np.random.default_rng(seed).standard_normal(48)), 400)
    simulated = simulate(trace, "lpt", Engine(8), KnownLengths(trace.jobs, said), points)
    count = count_steps(trace.lengths, said, points, 8)
    assert count.steps == simulated.steps and count.computed_again == 0
    assert count.parked >= len(simulated.spans) - 48  # those that are parked and go on at once have one span or two


def test_what_is_parked_without_room_is_computed_again_and_takes_a_pass() -> None:
    totals, said = np.array([20, 20, 20, 20]), np.array([4.0, 3.0, 2.0, 1.0])
    assert count_steps(totals, said, (8,), 1) == RolloutCount(80, 4, 0)
    assert count_steps(totals, said, (8,), 1, kept_tokens=16) == RolloutCount(80, 4, 2)  # keys of eight tokens each
    assert count_steps(totals, said, (8,), 1, kept_tokens=0) == RolloutCount(80, 4, 4)
    with_room, without = learned(noise=0.1), learned(noise=0.1, kept_tokens=0)
    assert with_room.savings[8,] - without.savings[8,] > 0.05  # some 24 passes over some 350 steps


def outcome(noise: float, seed: int, spread: float) -> PredictedRollout:
    """Of 32 completions: nothing was known before decoding, then something after 8 tokens."""
    rng = np.random.default_rng(seed)
    totals = np.clip(np.exp(rng.normal(4, spread, 32)), 10, 1000).astype(np.int64)
    after = totals * np.exp(noise * rng.standard_normal(32))
    keys = tuple(("a", 0, (number,)) for number in range(32))
    return PredictedRollout(
        keys, (0, 8), np.column_stack([np.full(32, 100.0), after]), totals, np.zeros(32, dtype=np.int64)
    )


def learned(
    noise: float, num_slots: int = 8, max_tokens: int = 16, spread: float = 0.8, kept_tokens: float = math.inf
) -> ProbeChoice:
    choice = ProbeChoice()
    for seed in range(10):
        choice.learn(outcome(noise, seed, spread), max_tokens, num_slots, follows=True, kept_tokens=kept_tokens)
    return choice


def test_a_probe_is_chosen_where_it_would_have_saved_steps() -> None:
    choice = learned(noise=0.1)
    assert choice.savings[8,] > 0.1
    assert choice.points({8: 0.9}) == (8,)
    assert choice.points({8: 0.1}) == ()  # its ranks within groups are worth nothing


def test_nothing_is_learned_where_every_completion_has_a_slot() -> None:
    assert learned(noise=0.1, num_slots=32).savings == {}


def test_the_choice_goes_into_a_checkpoint() -> None:
    choice, other = learned(noise=0.1, max_tokens=512), ProbeChoice()
    other.load_state_dict(json.loads(json.dumps(choice.state_dict())))
    assert other.savings == choice.savings and set(choice.metrics()) == {
        "lengths/saving_of_probe_8",
        "lengths/saving_of_slices",
    }


# ---- what a user may ask for ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"probe_tokens": -1}, "probe_tokens must be auto, 0 for no probe, or ascending numbers of tokens from 1 on"),
        ({"probe_tokens": [32, 8]}, r"ascending numbers of tokens from 1 on, not \[32, 8\]"),
        ({"probe_tokens": []}, "ascending numbers of tokens"),
        ({"probe_tokens": 8, "plan": "fcfs"}, "probe_tokens 8 needs a plan that follows .* fcfs follows none; set"),
        ({"probe_tokens": 8, "predict_lengths": False}, "needs lengths .*predict_lengths false predicts none; set"),
    ],
)
def test_a_probe_that_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RolloutScheduler(**options)


@pytest.mark.parametrize("probe_tokens", [127, 128, [8, 127]])
def test_a_probe_that_leaves_nothing_to_order_is_refused(policy_folder: Path, probe_tokens: Any) -> None:
    module = make_module(policy_folder, sampling=SamplingParams(max_tokens=128))
    scheduler = RolloutScheduler(probe_tokens=probe_tokens)
    with pytest.raises(ValueError, match=r"sampling\.max_tokens is 128: 126 is the largest that leaves anyth"):
        scheduler.setup(SimpleNamespace(datamodule=None, strategy=None, callbacks=[]), module, "fit")  # pyrefly: ignore[bad-argument-type]


def test_a_probe_of_the_users_own_is_one_of_the_points_that_are_looked_at(policy_folder: Path) -> None:
    module = make_module(policy_folder, sampling=SamplingParams(max_tokens=128))
    scheduler = RolloutScheduler(probe_tokens=126)
    scheduler.setup(SimpleNamespace(datamodule=None, strategy=None, callbacks=[]), module, "fit")  # pyrefly: ignore[bad-argument-type]
    assert scheduler.session.lengths is not None and scheduler.session.lengths.points == (0, 8, 32, 64, 126)
