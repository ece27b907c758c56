"""Memory that does not reach: completions that are set aside, and go on as if nothing had been."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import random_policy, table_rows
from hand_made import relative_error
from test_learner import gradient_of

from benchmarks.baseline_plans import FIXED_SLOT, FULL_GROUP, MICRO_ROUNDS
from benchmarks.rollouts import Stepped
from lit_grpo.methods.plans import find_plan, shipped_plans
from lit_grpo.policy.loading import load_tokenizer
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.rollout.loop import RolloutLoop
from lit_grpo.rollout.slots import generator as slots_module
from lit_grpo.rollout.slots.forward import FusedDecoder
from lit_grpo.rollout.slots.generator import KEPT_SHARE, SlotGenerator
from lit_grpo.rollout.slots.kv.cache import KVBudget
from lit_grpo.types import Key, Prompt, RolloutGroup, SamplingParams

SAMPLING = SamplingParams(max_tokens=100)
PROMPTS = [Prompt("a", (2, 3, 4), ""), Prompt("b", tuple(range(2, 30)), ""), Prompt("c", (7,) * 17, "")]

SLICES = [*range(10, 99, 10)]


@pytest.fixture(scope="module")
def policy() -> Any:
    policy: Any = random_policy()
    with torch.no_grad():  # the end comes seldom, so lengths are spread up to the limit
        policy.lm_head.weight[1] *= 0.2
    return policy


@pytest.fixture(scope="module")
def tokenizer(policy_folder: Path) -> Any:
    return load_tokenizer(str(policy_folder))


def make(
    policy: Any, tokenizer: Any, num_slots: int, kv_tokens: int | None = None, prefill_tokens: int = 8192
) -> SlotGenerator:
    generator = SlotGenerator(num_slots, prefill_tokens)
    generator.start(PolicySpec(policy, tokenizer))
    generator.load_weights(policy.named_parameters(), 0)
    if kv_tokens is not None:
        assert generator.budget is not None
        size = generator.budget.bytes_per_token
        generator.budget = KVBudget(kv_tokens * size, size, prefill_tokens)
    return generator


def samples(groups: list[RolloutGroup]) -> dict[Key, list[int]]:
    completions = [rollout.completion for group in groups for rollout in group.rollouts]
    return {completion.request.key: completion.token_ids_T.tolist() for completion in completions}


@pytest.fixture(scope="module")
def expected(policy: Any, tokenizer: Any) -> list[RolloutGroup]:
    return RolloutLoop(make(policy, tokenizer, 1)).collect(PROMPTS, 4, SAMPLING, seed=0)[0]


def test_lengths_are_of_all_kinds(expected: list[RolloutGroup]) -> None:
    lengths = [len(tokens) for tokens in samples(expected).values()]
    assert min(lengths) < 30 and max(lengths) == 100 and 15 < sum(lengths) / len(lengths) < 90


@pytest.mark.parametrize("prefill_tokens", [8192, 9])
def test_what_is_set_aside_comes_out_the_same_with_its_logprobs(
    policy: Any, tokenizer: Any, expected: list[RolloutGroup], prefill_tokens: int
) -> None:
    generator = make(policy, tokenizer, 6, kv_tokens=350, prefill_tokens=prefill_tokens)
    held = []
    controller = RolloutLoop(
        generator, listeners=[Stepped(lambda _: held.append(generator.capacity().kv_tokens_in_use))]
    )
    controller.lengths.estimate = lambda jobs: torch.ones(len(jobs)).numpy()  # always too short
    groups, stats = controller.collect(PROMPTS, 4, SAMPLING, seed=0)
    assert stats.num_preempted > 1
    assert max(held) <= 350
    assert samples(groups) == samples(expected)
    for group, other in zip(groups, expected, strict=True):
        for one, two in zip(group.rollouts, other.rollouts, strict=True):
            assert torch.allclose(one.completion.logprobs_T, two.completion.logprobs_T, atol=1e-5)
            assert one.completion.versions_T.tolist() == two.completion.versions_T.tolist()
            assert one.completion.entropy == pytest.approx(two.completion.entropy, abs=1e-4)


def test_estimates_that_know_the_limit_admit_no_more_than_fits(
    policy: Any, tokenizer: Any, expected: list[RolloutGroup]
) -> None:
    generator = make(policy, tokenizer, 6, kv_tokens=350)
    groups, stats = RolloutLoop(generator).collect(PROMPTS, 4, SAMPLING, seed=0)
    assert stats.num_preempted == 0
    assert stats.kv_tokens_peak <= 350
    assert samples(groups) == samples(expected)


@pytest.mark.parametrize(
    "plan",
    table_rows(
        sorted((FULL_GROUP, MICRO_ROUNDS, FIXED_SLOT, *shipped_plans())),
        (FULL_GROUP, MICRO_ROUNDS, "lpt", "short_last"),
    ),
)
def test_no_plan_slot_count_or_budget_changes_what_is_sampled(
    policy: Any, tokenizer: Any, expected: list[RolloutGroup], plan: str
) -> None:
    rng = random.Random(plan)
    slots = 12 if plan == FULL_GROUP else rng.randint(1, 9)
    budget = None if plan == FULL_GROUP else rng.randint(150, 600)
    controller = RolloutLoop(make(policy, tokenizer, slots, budget), plan=find_plan(plan))
    if rng.random() < 0.5:
        controller.lengths.estimate = lambda jobs: torch.rand(len(jobs)).mul(100).double().numpy()
    assert samples(controller.collect(PROMPTS, 4, SAMPLING, seed=0)[0]) == samples(expected)


@pytest.mark.parametrize("kv_tokens", table_rows([None, 600, 350, 200], [350]))
@pytest.mark.parametrize("points", table_rows([[8], [64], SLICES], [[8], SLICES]), ids=["early", "late", "slices"])
def test_a_probe_under_scarce_memory_changes_neither_samples_nor_gradient(
    policy: Any, tokenizer: Any, expected: list[RolloutGroup], points: Any, kv_tokens: int | None
) -> None:
    held = []
    generator = make(policy, tokenizer, 6, kv_tokens)
    listener = Stepped(lambda _: held.append(generator.capacity().kv_tokens_in_use))
    loop = RolloutLoop(generator, plan="lpt", listeners=[listener], points=points)
    groups, stats = loop.collect(PROMPTS, 4, SAMPLING, seed=0)
    assert stats.num_parked > 3 and max(held) <= (kv_tokens or 6 * 100 * (1 + KEPT_SHARE) + 100)
    assert samples(groups) == samples(expected)
    for group, other in zip(groups, expected, strict=True):
        for one, two in zip(group.rollouts, other.rollouts, strict=True):
            assert torch.allclose(one.completion.logprobs_T, two.completion.logprobs_T, atol=1e-5)
    assert relative_error(gradient_of(groups), gradient_of(expected)) < 1e-4
    assert generator.capacity().kv_tokens_in_use == 0  # nothing is kept of what has ended


@pytest.mark.parametrize(
    ("owner", "place", "error"),
    [
        (FusedDecoder, "__call__", torch.OutOfMemoryError("CUDA out of memory")),
        (slots_module, "sample_tokens", torch.OutOfMemoryError("CUDA out of memory")),
        (slots_module, "prefill", RuntimeError("can't allocate memory")),
    ],
)
def test_when_memory_runs_out_the_budget_shrinks_and_the_rollout_completes(
    policy: Any,
    tokenizer: Any,
    expected: list[RolloutGroup],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    owner: Any,
    place: str,
) -> None:
    generator, calls = make(policy, tokenizer, 6), 0
    original = getattr(owner, place)

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == (1 if place == "prefill" else 30):
            raise error
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, place, failing)
    groups, stats = RolloutLoop(generator).collect(PROMPTS, 4, SAMPLING, seed=0)
    assert samples(groups) == samples(expected)
    assert stats.num_preempted > 1
    (message,) = stats.messages
    assert message.startswith("Memory ran out with")
    if place == "prefill":
        assert "prompts in pieces of 4096 tokens" in message
    else:  # four fifths of the most that was held
        held = int(message.split()[4])
        assert f"go on with at most {int(0.8 * held)}, and prompts in pieces of 8192 tokens" in message


@pytest.mark.nightly
def test_one_shortage_that_passes_costs_few_steps(policy: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    undisturbed, original, calls = make(policy, tokenizer, 12), FusedDecoder.__call__, 0
    steps = RolloutLoop(undisturbed).collect(PROMPTS, 60, SAMPLING, seed=0)[1].num_steps

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:  # little is held yet
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(*args, **kwargs)

    generator = make(policy, tokenizer, 12)
    monkeypatch.setattr(FusedDecoder, "__call__", failing)
    _, stats = RolloutLoop(generator).collect(PROMPTS, 60, SAMPLING, seed=0)
    assert generator.budget is not None and generator.budget.tokens == generator.budget.granted_tokens
    assert stats.num_steps < 1.1 * steps


def test_after_an_interrupt_under_scarce_memory_no_token_of_old_weights_is_left(policy: Any, tokenizer: Any) -> None:
    generator, calls = make(policy, tokenizer, 6, kv_tokens=350), 0

    def interrupting(_: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 60:
            raise KeyboardInterrupt

    loop = RolloutLoop(generator, listeners=[Stepped(interrupting)])
    loop.lengths.estimate = lambda jobs: torch.ones(len(jobs)).numpy()  # always too short
    with pytest.raises(KeyboardInterrupt):
        loop.collect(PROMPTS, 4, SAMPLING, seed=0)
    assert len(loop.buffer) == 0 and generator.capacity().free_slots == 6
    generator.load_weights(policy.named_parameters(), 1)
    groups, stats = loop.collect(PROMPTS, 4, SAMPLING, seed=0)
    assert stats.num_preempted > 1  # as there were before
    assert {v for g in groups for r in g.rollouts for v in r.completion.versions_T.tolist()} == {1}


def test_memory_that_does_not_reach_for_one_completion_alone_is_an_error(
    policy: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    generator = make(policy, tokenizer, 1)
    monkeypatch.setattr(FusedDecoder, "__call__", failing)
    with pytest.raises(torch.OutOfMemoryError):
        RolloutLoop(generator).collect(PROMPTS, 2, SAMPLING, seed=0)


def test_a_budget_too_small_for_one_completion_says_the_smallest_that_works(policy: Any, tokenizer: Any) -> None:
    generator = SlotGenerator(4, kv_memory="20KiB")
    generator.start(PolicySpec(policy, tokenizer))
    generator.load_weights(policy.named_parameters(), 0)
    with pytest.raises(
        ValueError, match=r"take 0\.1MiB of keys and values, but kv_memory allows 0\.0MiB; give at least"
    ):
        RolloutLoop(generator).collect(PROMPTS, 2, SAMPLING, seed=0)


@pytest.mark.parametrize("text", ["", "2", "GiB", "0GiB", "120%", "-1GiB", "a lot"])
def test_a_budget_that_is_no_amount_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="kv_memory"):
        SlotGenerator(4, kv_memory=text)
