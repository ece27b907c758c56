"""Slots that launch a step before they have read the tokens of the last one, beside slots that do not: all is the same.

On a CPU they do not run ahead, so here they are made to. A case is all that follows from a seed: model and way of
decoding, slots, memory, sampling, plan, points, when a rollout ends, what listeners ask for; two rollouts each, with
other weights in the second one.
"""

from __future__ import annotations

import copy
import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from conftest import random_policy, table_rows
from hand_made import Environment
from test_cuda_graphs import Recorder
from test_states import decode as decode_all

from lit_grpo.methods.eptree import EPTree
from lit_grpo.methods.latr import LookAhead
from lit_grpo.methods.plans import find_plan, shipped_plans
from lit_grpo.methods.treepo import TreePO
from lit_grpo.plugins import Answer, Listener, ObservationPoint, fresh
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.rollout.buffer import RolloutBuffer, group_requests
from lit_grpo.rollout.generator import StepEvents
from lit_grpo.rollout.loop import RolloutLoop
from lit_grpo.rollout.rules import SYNCHRONOUS, ReleaseRule
from lit_grpo.rollout.slots import kept
from lit_grpo.rollout.slots.generator import SlotGenerator
from lit_grpo.rollout.slots.graphs import GraphedDecoder
from lit_grpo.rollout.slots.kv import cache
from lit_grpo.rollout.slots.kv.cache import KVBudget, SlotCache
from lit_grpo.rollout.slots.kv.tables import RowTables
from lit_grpo.rollout.slots.rows import TokenRows
from lit_grpo.scheduling import layouts
from lit_grpo.scheduling.jobs import Job, NoLengths
from lit_grpo.scheduling.layouts import smallest_budget
from lit_grpo.types import Completion, Key, Prompt, Request, RolloutGroup, SamplingParams
from tests.doubles.row_attention import attend_by_tables

PROMPTS = [
    Prompt("a", (2, 3, 4), ""),
    Prompt("b", (9,), ""),
    Prompt("c", tuple(range(2, 30)), ""),
    Prompt("d", (5, 5, 5, 5, 7), ""),
]
NUM_SEEDS, QUICK_SEEDS = 200, (9, 17, 18, 34, 41, 123, 140)


class ByHash(NoLengths):
    """Expects any length of a completion, the same in each run; mostly too short, so that memory runs out."""

    informative = True

    def estimate(self, jobs: Sequence[Job]) -> np.ndarray:
        return np.array([1.0 + zlib.crc32(repr(job.key).encode()) % 6 for job in jobs])


class Watching(Listener):
    """Takes down what each step brings, and the tokens that requests are said to have after it.

    With a chance it also drops one of them, or divides it.
    """

    def __init__(self, at: int, drops: float, divides: float) -> None:
        self.at, self.drops, self.divides = at, drops, divides
        self.steps: list[Any] = []
        self.features: list[np.ndarray] = []
        self.seen: dict[Any, np.ndarray] = {}  # features by request and number of tokens
        self.generator: Any = None
        self._num_divided = 0

    @property
    def observes(self) -> ObservationPoint | None:
        return ObservationPoint(self.at) if self.at else None

    def on_rollout_start(self, ledger: Any) -> None:
        self._ledger = ledger

    def on_step(self, events: StepEvents) -> Answer | None:
        progress = self._ledger.progress()
        rows = self.generator._rows
        assert {key: progress[key] for key in [each.key for each in rows.requests]} == {
            request.key: int(rows.sampled[row]) for row, request in enumerate(rows.requests)
        }
        for each in events.observations:
            pairs = zip(each.keys, each.features, strict=True)
            self.seen |= {(key, each.num_tokens): row.copy() for key, row in pairs}
        self.steps.append((events.num_active, [each.request.key for each in events.finished]))
        self.steps.append((dict(progress), [(each.num_tokens, list(each.keys)) for each in events.observations]))
        self.features += [each.features for each in events.observations]
        ended = {completion.request.key for completion in events.finished}
        left = [key for key in progress if key not in ended and len(key[2]) == 1]
        rng = random.Random(len(self.steps))
        if left and rng.random() < self.divides and self._num_divided < 5:
            self._num_divided += 1
            key = rng.choice(left)
            return Answer(fork={key: [(*key[2], self._num_divided)]})
        if left and rng.random() < self.drops:
            return Answer(drop=[rng.choice(left)])
        return None


class Dividing(Watching):
    """One that says that it divides requests."""

    traits: ClassVar = frozenset({"forks"})


@dataclass
class Result:
    """All that two runs have in common: but for rounding in ``logprobs`` and ``features``, they are equal."""

    told: list[Any] = field(default_factory=list)
    logprobs: list[torch.Tensor] = field(default_factory=list)
    features: list[np.ndarray] = field(default_factory=list)
    completions: list[Completion] = field(default_factory=list)
    seen: dict[Any, np.ndarray] = field(default_factory=dict)
    most_held: int = 0
    budget: int = 0
    num_preempted: int = 0
    num_launched: int = 0
    num_steps: int = 0

    def add(self, groups: Sequence[RolloutGroup], stats: Any) -> None:
        """Take down what a rollout brought."""
        for group in groups:
            for completion in (rollout.completion for rollout in group.rollouts):
                own = [completion.token_ids_T, completion.versions_T, completion.trained_T]
                self.told.append((completion.request.key, completion.finish_reason, completion.text))
                self.told.append([each.tolist() for each in own])
                self.logprobs.append(completion.logprobs_T)
                self.completions.append(completion)
                self.features.append(np.array([[completion.entropy]]))
        self.told.append((stats.num_steps, stats.num_tokens, list(stats.spans), stats.num_preempted, stats.num_parked))
        self.num_preempted += stats.num_preempted
        self.num_steps += stats.num_steps


@dataclass
class Case:
    """Settings of two rollouts."""

    seed: int

    def __post_init__(self) -> None:
        draw = random.Random(f"ahead/{self.seed}")
        self.kind = draw.choice(["short"] * 4 + ["recorded"] * 2 + ["model", "hybrid"])
        self.slots, self.group, self.num_prompts = draw.randint(1, 6), draw.randint(1, 3), draw.randint(1, 4)
        self.prefill = draw.choice([9, 8192])
        stop: Any = draw.choice([(), (), ("7",), ("a", "12")])
        self.listens = draw.choice(["no", "drops", "divides", "environment", "eptree", "treepo", "latr"])
        observed = 25 if self.listens == "environment" else 0
        self.sampling = SamplingParams(
            max_tokens=7 if self.kind == "hybrid" else draw.choice([7, 14, 35]), max_observed=observed, stop=stop,
            temperature=draw.choice([1.0, 1.0, 0.7, 0.0]), top_k=draw.choice([0, 0, 5]), top_p=draw.choice([1.0, 0.8]),
        )  # fmt: skip
        self.plan = draw.choice(sorted(shipped_plans()))
        self.points = draw.choice([(), (), (3,), (2, 5)])
        self.at = draw.choice([0, 4])
        rules = [
            SYNCHRONOUS,
            ReleaseRule(num_groups=1, leftovers="keep", max_staleness=4),
            ReleaseRule(num_groups=1, leftovers="discard"),
            ReleaseRule(num_completions=3, leftovers="keep", max_staleness=4),
            ReleaseRule(num_steps=9, leftovers="keep", max_staleness=4),
        ]
        self.rule = SYNCHRONOUS if self.listens in ("eptree", "treepo", "latr") else draw.choice(rules)
        if self.listens == "environment" and self.rule.leftovers == "discard":
            self.rule = SYNCHRONOUS  # this environment would answer what has been discarded
        self.roominess = draw.choice([None, 1.0, 1.5, 2.5, 4.0])  # of the memory of one completion; None for enough

    def listeners(self) -> list[Any]:
        """What asks for more, or for less."""
        listens = self.listens
        kind = Dividing if listens == "divides" else Watching
        watching = kind(self.at, 0.1 * (listens == "drops"), 0.2 * (listens == "divides"))
        others: dict[str, Any] = {
            "environment": partial(Environment, 3),
            "eptree": lambda: fresh(EPTree(2, 1, 2)),
            "treepo": lambda: fresh(TreePO(width=4, segment=5)),
            "latr": lambda: fresh(LookAhead(width=4, least=0.1, gap=0.2, look_ahead=3)),
        }
        return [watching, *([others[listens]()] if listens in others else [])]

    def run(self, policy: Any, tokenizer: Any, ahead: bool, drafts: Any = "off") -> Result:
        """Sample two rollouts."""
        policy = copy.deepcopy(policy)
        generator, result = SlotGenerator(self.slots, prefill_tokens=self.prefill, drafts=drafts), Result()
        generator.start(PolicySpec(policy, tokenizer))
        assert not generator.runs_ahead
        generator.runs_ahead = ahead
        if self.kind == "model":
            generator._fused = None
        if self.kind == "recorded":
            fused: Any = generator._fused
            generator._tables = RowTables(generator._shape, generator._most_queries, attend_by_tables)
            generator._graphs = GraphedDecoder(fused, generator._tables, policy.parameters, Recorder().make)
        shape = generator._shape
        if self.roominess is not None:
            longest = max(len(prompt.token_ids) for prompt in PROMPTS[: self.num_prompts])
            tokens = smallest_budget(shape.pieces, longest, self.sampling.room)
            num_bytes = int(self.roominess * tokens) * shape.bytes_per_token
            generator.budget = KVBudget(num_bytes, shape.bytes_per_token, self.prefill)
        assert generator.budget is not None
        decode, result.budget = generator._decode, generator.budget.tokens

        def watched(*args: Any) -> Any:
            step = decode(*args)
            result.num_launched += 1
            result.most_held = max(result.most_held, generator._kept.num_tokens + generator._cache.allocated_tokens)
            return step

        generator._decode = watched  # pyrefly: ignore[bad-assignment]
        buffer, listeners = RolloutBuffer(self.rule), self.listeners()
        listeners[0].generator = generator
        for number in range(2):
            generator.load_weights(policy.named_parameters(), number)
            prompts = [replace(prompt, visit=number) for prompt in PROMPTS[: self.num_prompts]]
            buffer.open(group_requests(prompts, self.group, self.sampling, seed=self.seed))
            plan = find_plan(self.plan)
            loop = RolloutLoop(generator, buffer, plan, ByHash(), listeners=listeners, points=self.points)
            stats = loop.run(buffer.ready)
            result.add(buffer.take(), stats)
            buffer.end_update()
            assert generator._launched is None and generator.capacity().free_slots == self.slots
            with torch.no_grad():
                for weight in policy.parameters():
                    weight.mul_(1.02)
        generator.close()
        result.told += listeners[0].steps
        result.features += listeners[0].features
        result.seen = listeners[0].seen
        return result


@pytest.fixture
def small_pieces() -> Iterator[None]:
    """Completions grow into a further piece of memory after 8 and 24 tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layouts, "_PIECE_STEP", 4)
        patch.setattr(cache, "_WIDTH_STEP", 4)
        layouts._piece_rooms.cache_clear()
        layouts.smallest_budget.cache_clear()
        yield
    layouts._piece_rooms.cache_clear()
    layouts.smallest_budget.cache_clear()


@pytest.fixture(scope="module")
def policies() -> dict[bool, Any]:
    """A policy, and a hybrid whose layers have states."""
    return {hybrid: random_policy(hybrid=hybrid) for hybrid in (False, True)}


def same(actual: Result, expected: Result) -> None:
    """Check that two runs are equal but for rounding: bounds are twice what 200 cases come to."""
    assert actual.told == expected.told
    for one, other in zip(actual.logprobs, expected.logprobs, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-5)
    for mine, others in zip(actual.features, expected.features, strict=True):
        assert np.allclose(mine, others, rtol=0, atol=2e-5)


@pytest.mark.parametrize("seed", table_rows(range(NUM_SEEDS), QUICK_SEEDS))
def test_whatever_is_asked_the_samples_and_all_that_listeners_hear_are_the_same(
    seed: int, policies: dict[bool, Any], tokenizer: Any, small_pieces: None
) -> None:
    case = Case(seed)
    policy = policies[case.kind == "hybrid"]
    expected, actual = (case.run(policy, tokenizer, ahead) for ahead in (False, True))
    same(actual, expected)
    assert actual.num_launched >= actual.num_steps == expected.num_steps
    assert actual.most_held <= max(actual.budget, expected.most_held)


@pytest.mark.parametrize("seed", table_rows([3, 9, 13], [3]))
def test_what_log_probs_differ_by_is_rounding(
    seed: int, policies: dict[bool, Any], tokenizer: Any, small_pieces: None
) -> None:
    """In float64 they differ in the last bits of float32, in which they are told, and not by several times that."""
    case = Case(seed)
    policy = copy.deepcopy(policies[False]).double()
    expected, actual = (case.run(policy, tokenizer, ahead) for ahead in (False, True))
    assert actual.told == expected.told
    for one, other in zip(actual.logprobs, expected.logprobs, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-6)


# ---- a step in flight -----------------------------------------------------------------------------


REQUESTS = [Request(prompt, (number,), SamplingParams(max_tokens=30)) for prompt in PROMPTS for number in range(2)]


def make(policy: Any, tokenizer: Any, ahead: bool = True, drafts: Any = "off") -> SlotGenerator:
    """A generator of four slots, and no completion of it ends before its limit."""
    generator = SlotGenerator(4, drafts=drafts)
    generator.start(PolicySpec(policy, tokenizer))
    generator.load_weights(policy.named_parameters(), 0)
    generator._eos_ids, generator.runs_ahead = generator._eos_ids[:0], ahead
    return generator


def decode(generator: SlotGenerator, waiting: Sequence[Request]) -> dict[Key, list[int]]:
    return {key: completion.token_ids_T.tolist() for key, completion in decode_all(generator, waiting).items()}


def test_what_is_stopped_has_the_tokens_that_were_told_and_goes_on_without_a_pass(
    policies: dict[bool, Any], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where another row is in flight; the token in flight is sampled again, from the same hidden state."""
    policy = policies[False]
    expected = decode(make(policy, tokenizer, ahead=False), REQUESTS)
    generator = make(policy, tokenizer)
    generator.submit(REQUESTS[:4])
    for _ in range(9):
        assert generator.step().num_tokens == 4
        assert generator._launched is not None
    stopped = generator.abort([request.key for request in REQUESTS[1:3]])
    assert [request.prefix.token_ids_T.tolist() for request in stopped] == [
        expected[request.key][:9] for request in REQUESTS[1:3]
    ]
    computed: list[Any] = []
    monkeypatch.setattr(kept, "prefill", lambda *args: computed.append(args))
    assert decode(generator, [*stopped, *REQUESTS[4:]]) == expected
    assert not computed and generator._launched is None


def test_at_the_limit_nothing_is_launched_that_nobody_reads(policies: dict[bool, Any], tokenizer: Any) -> None:
    generator = make(policies[False], tokenizer)
    real, launched = generator._decode, list[int]()
    generator._decode = lambda *args: launched.append(1) or real(*args)  # pyrefly: ignore[bad-argument-type, bad-assignment]
    generator.submit(REQUESTS[:4])
    for step in range(30):
        generator.step()
        assert len(launched) == min(step + 2, 30)
    assert generator.capacity().free_slots == 4


@pytest.mark.parametrize("number", [4, 5, 9])
def test_memory_that_runs_out_in_a_step_ahead_sets_aside_what_was_told(
    number: int, policies: dict[bool, Any], tokenizer: Any
) -> None:
    policy = policies[False]
    expected = decode(make(policy, tokenizer, ahead=False), REQUESTS)
    generator = make(policy, tokenizer)
    real, launched = generator._decode, list[int]()

    def failing(*args: Any) -> Any:
        launched.append(1)
        if len(launched) == number:
            raise torch.OutOfMemoryError
        return real(*args)

    generator._decode = failing  # pyrefly: ignore[bad-assignment]
    assert decode(generator, REQUESTS) == expected
    assert len(launched) > number


def test_nan_is_told_in_its_own_step_and_no_token_of_it(policies: dict[bool, Any], tokenizer: Any) -> None:
    policy = copy.deepcopy(policies[False])
    generator = make(policy, tokenizer)
    generator.submit(REQUESTS[:4])
    for _ in range(3):
        generator.step()
    with torch.no_grad():
        policy.model.norm.weight[0] = torch.nan  # the fourth step has been launched
    assert generator.step().num_tokens == 4
    with pytest.raises(FloatingPointError, match="NaN or infinite at version 0"):
        generator.step()
    assert generator._launched is None and generator.capacity().free_slots == 4


def interrupt(generator: SlotGenerator, owner: Any, name: str, call: int) -> None:
    """Decode until the call of that number to a function of a class, in which the user interrupts."""
    original, count = getattr(owner, name), 0

    def interrupting(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == call:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, interrupting)
        with pytest.raises(KeyboardInterrupt):
            decode(generator, REQUESTS)


@pytest.mark.parametrize("call", table_rows([3, 4], [4]))
@pytest.mark.parametrize("owner", [SlotGenerator, SlotCache, TokenRows])
def test_an_interrupt_leaves_no_step_in_flight(
    owner: Any, call: int, policies: dict[bool, Any], tokenizer: Any
) -> None:
    generator = make(policies[False], tokenizer)
    expected = decode(make(policies[False], tokenizer), REQUESTS)
    interrupt(generator, owner, {SlotGenerator: "_decode", SlotCache: "prepare", TokenRows: "take"}[owner], call)
    assert generator._launched is None and generator.capacity().kv_tokens_in_use == 0
    assert decode(generator, REQUESTS) == expected
