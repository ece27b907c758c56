"""The simulator beside a real model on the same trace: every completion begins and ends at the same steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import random_policy, table_rows

from benchmarks.baseline_plans import FIXED_SLOT, MICRO_ROUNDS
from benchmarks.rollouts import ForcedGenerator
from lit_grpo.methods.plans import find_plan, shipped_plans
from lit_grpo.policy.loading import load_tokenizer
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.rollout.loop import RolloutLoop
from lit_grpo.rollout.slots.forward import FusedDecoder
from lit_grpo.rollout.slots.kv.cache import KVBudget
from lit_grpo.scheduling.layouts import Pieces
from lit_grpo.tools.simulation.known import KnownLengths
from lit_grpo.tools.simulation.simulator import Engine, simulate
from lit_grpo.tools.simulation.traces import Trace, noisy
from lit_grpo.types import Key, Prompt, SamplingParams

LIMIT = 150
PROMPT_TOKENS = [3, 20, 33]
GROUP_SIZE = 12


def make_trace(seed: int) -> Trace:
    """Lengths of all kinds, up to the limit."""
    rng = np.random.default_rng(seed)
    groups = np.repeat(np.arange(len(PROMPT_TOKENS)), GROUP_SIZE)
    lengths = np.clip(rng.lognormal(3.2, 0.9, len(groups)), 1, LIMIT).astype(np.int64)
    keys: list[Key] = [(str(group), 0, (number % GROUP_SIZE,)) for number, group in enumerate(groups.tolist())]
    return Trace("", keys, groups, np.array(PROMPT_TOKENS)[groups], lengths, np.full(len(groups), LIMIT))


PLANS = [(plan, 420) for plan in (MICRO_ROUNDS, FIXED_SLOT, *shipped_plans())]


ROWS = [*PLANS, ("short_last", None), ("short_last", 200)]
QUICK = [(MICRO_ROUNDS, 420), (FIXED_SLOT, 420), ("fcfs", 420), ("lpt", 420), ("short_last", None), ("short_last", 200)]


@pytest.mark.parametrize(("plan", "kv_tokens"), table_rows(ROWS, QUICK))
def test_every_plan_takes_the_same_steps_as_with_a_model(policy_folder: Path, plan: str, kv_tokens: int | None) -> None:
    num_preempted = check(policy_folder, plan, kv_tokens)
    assert num_preempted > 0 or kv_tokens != 420 or plan not in ("fcfs", "sjf", "lpt")


@pytest.mark.parametrize(
    ("plan", "points", "kv_tokens"),
    table_rows(
        [
            (plan, *cut)
            for plan in ("lpt", "infinite_sampling")
            for cut in (((8,), 420), ((40,), None), ((10, 30, 60), 420))
        ],
        [("lpt", (40,), None), ("infinite_sampling", (10, 30, 60), 420)],
    ),
)
def test_probes_and_time_slices_take_the_same_steps_as_with_a_model(
    policy_folder: Path, plan: str, points: tuple[int, ...], kv_tokens: int | None
) -> None:
    check(policy_folder, plan, kv_tokens, points)


def check(policy_folder: Path, plan: str, kv_tokens: int | None, points: tuple[int, ...] = ()) -> int:
    """Decode a trace with a model and without; return how often a completion was set aside."""
    trace, num_slots = make_trace(len(plan)), 7
    lengths = KnownLengths(trace.jobs, np.ceil(0.3 * noisy(trace.lengths, 0.6)))  # so that memory runs out
    simulated = simulate(trace, plan, Engine(num_slots, kv_tokens, Pieces()), lengths, points)
    policy: Any = random_policy()
    generator = ForcedGenerator(dict(zip(trace.keys, trace.lengths.tolist(), strict=True)), num_slots)
    generator.start(PolicySpec(policy, load_tokenizer(str(policy_folder))))
    generator.load_weights(policy.named_parameters(), 0)
    if kv_tokens is not None:
        assert generator.budget is not None
        size = generator.budget.bytes_per_token
        generator.budget = KVBudget(kv_tokens * size, size, prefill_tokens=8192)
    prompts = [Prompt(str(group), (5,) * tokens, "") for group, tokens in enumerate(PROMPT_TOKENS)]
    loop = RolloutLoop(generator, plan=find_plan(plan), lengths=lengths, points=points)
    _, stats = loop.collect(prompts, GROUP_SIZE, SamplingParams(max_tokens=LIMIT), seed=0)
    assert list(stats.spans) == list(simulated.spans)
    assert stats.num_steps == simulated.steps and stats.num_preempted == simulated.set_asides
    assert kv_tokens is None or stats.kv_tokens_peak <= kv_tokens
    return stats.num_preempted


def test_rows_that_have_ended_are_not_computed_in_the_rest_of_their_round(
    policy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[int] = []
    decode = FusedDecoder.__call__

    def counting(decoder: FusedDecoder, tokens_B: Any, *others: Any) -> Any:
        computed.append(len(tokens_B))
        return decode(decoder, tokens_B, *others)

    lengths: dict[Key, int] = {("0", 0, (sample,)): length for sample, length in enumerate([4, 1, 2, 1, 3])}
    policy: Any = random_policy()
    generator = ForcedGenerator(lengths, 3)
    generator.start(PolicySpec(policy, load_tokenizer(str(policy_folder))))
    generator.load_weights(policy.named_parameters(), 0)
    monkeypatch.setattr(FusedDecoder, "__call__", counting)  # after the trial at the start
    loop = RolloutLoop(generator, plan=MICRO_ROUNDS)
    _, stats = loop.collect([Prompt("0", (5,) * 3, "")], 5, SamplingParams(max_tokens=LIMIT), seed=0)
    assert stats.num_steps == 4 + 3  # the first step of a round is that of the prompt
    assert computed == [2, 1, 1, 1, 1]
