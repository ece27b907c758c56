"""SlotGenerator: what it samples, when it stops, what it refuses, and what it leaves behind."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import ALPHABET, random_policy, table_rows
from hand_made import Environment, full_logprobs
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.rollouts import Stepped
from lit_grpo.methods.eptree import EPTree
from lit_grpo.plugins import fresh
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.rollout.buffer import RolloutBuffer
from lit_grpo.rollout.loop import RolloutLoop
from lit_grpo.rollout.rules import ReleaseRule
from lit_grpo.rollout.slots import generator as slots_module
from lit_grpo.rollout.slots import kept as kept_module
from lit_grpo.rollout.slots.attention import ATTENTION_NAME
from lit_grpo.rollout.slots.generator import SlotGenerator
from lit_grpo.rollout.slots.kept import KeptCompletions
from lit_grpo.rollout.slots.kv.cache import SlotCache
from lit_grpo.rollout.slots.rows import TokenRows
from lit_grpo.rollout.weights.tensors import WeightSyncError
from lit_grpo.types import Completion, Key, Prompt, Request, Rollout, SamplingParams, Trajectory, alone

EOS = 1
PROMPTS = [
    Prompt("a", (2, 3, 4), ""),
    Prompt("b", (9,), ""),
    Prompt("c", tuple(range(2, 30)), ""),
    Prompt("d", (5, 5, 5, 5, 7), ""),
]


@pytest.fixture
def make(policy: Any, tokenizer: Any) -> Callable[..., SlotGenerator]:
    """Makes started generators with weights, of the module's policy or another."""

    def make_generator(num_slots: int = 4, model: Any = None, **options: Any) -> SlotGenerator:
        generator = SlotGenerator(num_slots, **options)
        generator.start(PolicySpec(model or policy, tokenizer))
        generator.load_weights((model or policy).named_parameters(), 0)
        return generator

    return make_generator


def requests(prompts: Sequence[Prompt], count: int, sampling: SamplingParams, seed: int = 0) -> list[Request]:
    return [Request(prompt, (sample,), sampling, seed) for prompt in prompts for sample in range(count)]


def decode(generator: SlotGenerator, waiting: Iterable[Request]) -> dict[Key, Completion]:
    """Refill free slots in the order given, at every step, until all have finished."""
    waiting, finished = list(waiting), {}
    in_flight = generator.num_slots - generator.capacity().free_slots
    while waiting or in_flight:
        free_slots = generator.capacity().free_slots
        now, waiting = waiting[:free_slots], waiting[free_slots:]
        generator.submit(now)
        events = generator.step()
        in_flight += len(now) - len(events.finished)
        for completion in events.finished:
            assert completion.request.key not in finished
            finished[completion.request.key] = completion
    return finished


def tokens(completions: dict[Key, Completion]) -> dict[Key, list[int]]:
    return {key: completion.token_ids_T.tolist() for key, completion in completions.items()}


def scripted(monkeypatch: pytest.MonkeyPatch, *script: int) -> None:
    """Make every completion the same tokens, by position, with log-prob minus position; the last one repeats."""
    tokens_T = torch.tensor(script)

    def sample(logits_BV: torch.Tensor, sampling: Any, positions_B: torch.Tensor) -> Any:
        return tokens_T[positions_B.clamp(max=len(script) - 1)], -positions_B.float(), positions_B.float()

    inputs = TokenRows.inputs

    def with_positions(rows: TokenRows, *others: Any, **options: Any) -> dict[str, Any]:
        return inputs(rows, *others, **options) | {"uniform": rows.counts[: len(rows.requests)].copy()}

    monkeypatch.setattr(TokenRows, "inputs", with_positions)
    monkeypatch.setattr(slots_module, "sample_tokens", sample)


# ---- what is sampled ------------------------------------------------------------------------------


SAMPLING = SamplingParams(max_tokens=24)


@pytest.fixture(scope="module")
def expected(policy: Any, tokenizer: Any) -> dict[Key, Completion]:
    """Six completions of each prompt, each decoded alone."""
    generator = SlotGenerator(1)
    generator.start(PolicySpec(policy, tokenizer))
    generator.load_weights(policy.named_parameters(), 0)
    return decode(generator, requests(PROMPTS, 6, SAMPLING))


def test_a_longer_prompt_that_arrives_in_between_makes_room_and_changes_nothing(make: Any) -> None:
    sampling = SamplingParams(max_tokens=40)
    long = Prompt("long", tuple(2 + i % 30 for i in range(150)), "")
    alone = decode(make(1), requests([*PROMPTS, long], 2, sampling))
    generator = make(6)
    generator.submit(requests(PROMPTS[:2], 2, sampling))
    early = [completion for _ in range(3) for completion in generator.step().finished]
    done = decode(generator, requests([long, *PROMPTS[2:]], 2, sampling))
    assert tokens(done | {completion.request.key: completion for completion in early}) == tokens(alone)


# ---- prefixes ---------------------------------------------------------------------------------------


def test_a_stop_string_that_a_prefix_holds_already_ends_nothing(make: Any) -> None:
    seven = 2 + ALPHABET.index("7")
    prefix, lengths = Trajectory().followed_by([seven, seven]), []
    for stop in ((), ("77",)):
        sampling = SamplingParams(max_tokens=12, stop=stop, max_observed=2)
        done = decode(make(6), [request.after(prefix) for request in requests(PROMPTS[1:2], 6, sampling)])
        lengths.append([completion.num_tokens for completion in done.values()])
    assert lengths[0] == lengths[1] and max(lengths[0]) > 3


def test_under_autocast_decode_steps_take_the_short_way_too(make: Any, policy: Any) -> None:
    generator, lengths = make(3), []
    hook = policy.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    with torch.autocast("cpu", torch.bfloat16):
        done = decode(generator, requests(PROMPTS[2:3], 4, SAMPLING))
    hook.remove()
    assert lengths == [28]  # the prompt
    assert max(completion.num_tokens for completion in done.values()) > 8


class Casts(TorchDispatchMode):
    """Notes how often one of ``weights`` is cast."""

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.places, self.count = {weight.data_ptr() for weight in weights}, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        sources = {torch.ops.aten._to_copy.default: 0, torch.ops.aten.copy_.default: 1}
        self.count += func in sources and args[sources[func]].data_ptr() in self.places
        return func(*args, **(kwargs or {}))


def test_under_autocast_weights_that_arrive_are_cast_anew(make: Any) -> None:
    model: Any = random_policy()
    generator, matrices, counts = make(4, model), [weight for weight in model.parameters() if weight.dim() == 2], []
    with MixedPrecision("bf16-mixed", "cpu").forward_context(), Casts(matrices) as casts:
        todo = requests(PROMPTS[:1], 4, SAMPLING)
        generator.submit(todo)
        for version in (0, 0, 1):
            if version != generator.version:
                todo = generator.abort([request.key for request in todo])
                generator.load_weights(model.named_parameters(), version)
                generator.submit(todo)
            generator.step()
            counts.append(casts.count)
            casts.count = 0
        generator.close()
    assert counts == [len(matrices) - 1, 0, len(matrices) - 1]


def test_kv_memory_counts_the_dtype_that_keys_and_values_come_in(make: Any) -> None:
    generator = make(kv_memory="1MiB")
    assert generator.capacity().kv_tokens == 2**20 // 512  # keys and values of 2 layers, 2 heads of 16 float32 each
    with torch.autocast("cpu", torch.bfloat16):
        assert generator.capacity().kv_tokens == 2**20 // 256
        fits, long = SamplingParams(max_tokens=24), Prompt("long", (2,) * 200, "")
        assert len(decode(generator, requests([long], 1, fits))) == 1
    assert generator.capacity().kv_tokens == 2**20 // 512


# ---- when a completion ends -----------------------------------------------------------------------


def test_all_end_tokens_of_the_generation_config_count(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = random_policy()
    model.generation_config.eos_token_id = [7, 9]
    scripted(monkeypatch, 3, 9, 5, EOS)
    (completion,) = decode(make(1, model), requests(PROMPTS[:1], 1, SAMPLING)).values()
    assert (completion.token_ids_T.tolist(), completion.finish_reason) == ([3, 9], "stop")
    scripted(monkeypatch, 3, 5, EOS)
    (completion,) = decode(make(1, model), requests(PROMPTS[:1], 1, SAMPLING)).values()
    assert completion.token_ids_T.tolist() == [3, 5, EOS]


class ByteTokenizer:
    """One token a byte, so that a character can take several."""

    eos_token_id = EOS

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return bytes(ids).decode(errors="replace")

    def batch_decode(self, rows: list[list[int]]) -> list[str]:
        return [self.decode(ids) for ids in rows]


def test_a_stop_string_of_characters_of_several_tokens_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = random_policy(vocab_size=256)
    generator = SlotGenerator(2)
    generator.start(PolicySpec(model, ByteTokenizer()))  # pyrefly: ignore[bad-argument-type]
    generator.load_weights(model.named_parameters(), 0)
    scripted(monkeypatch, *"so: €€€ and on".encode())
    (completion,) = decode(generator, requests(PROMPTS[:1], 1, SamplingParams(max_tokens=30, stop=("€€€",)))).values()
    assert completion.text == "so: €€€"
    assert completion.finish_reason == "stop"


# ---- what is refused ------------------------------------------------------------------------------


def test_requests_in_flight_share_their_sampling(make: Any) -> None:
    generator = make(3)
    generator.submit(requests(PROMPTS[:1], 1, SAMPLING))
    with pytest.raises(ValueError, match="must share their sampling parameters"):
        generator.submit(requests(PROMPTS[1:2], 1, SamplingParams(max_tokens=9)))
    decode(generator, [])
    assert len(decode(generator, requests(PROMPTS[1:2], 1, SamplingParams(max_tokens=9)))) == 1


def test_a_refused_submission_admits_none_of_its_requests(make: Any, policy: Any) -> None:
    generator = make(4)
    long = Prompt("too long", (2,) * 240, "")
    with pytest.raises(ValueError):
        generator.submit(requests([PROMPTS[0], long], 1, SAMPLING))
    assert generator.capacity().free_slots == 4
    assert policy.config._attn_implementation != ATTENTION_NAME


def test_before_start_it_says_so_and_can_be_closed() -> None:
    generator = SlotGenerator()
    generator.close()
    with pytest.raises(RuntimeError, match="has not been started"):
        generator.load_weights([], 0)


def test_what_is_in_flight_does_not_go_on_with_weights_that_are_not_trusted(make: Any) -> None:
    generator, todo = make(2), requests(PROMPTS[:1], 1, SAMPLING)
    generator.submit(todo)
    generator.step()
    generator.invalidate_weights()
    with pytest.raises(WeightSyncError):
        generator.step()
    generator.abort([request.key for request in todo])


def test_nan_weights_are_an_error_and_not_a_token(make: Any) -> None:
    model: Any = random_policy()
    generator = make(2, model)
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    generator.submit(requests(PROMPTS[:1], 2, SAMPLING))
    with pytest.raises(FloatingPointError, match="NaN or infinite at version 0"):
        generator.step()
    generator.abort([request.key for request in requests(PROMPTS[:1], 2, SAMPLING)])


# ---- what is left behind --------------------------------------------------------------------------


@pytest.fixture
def training_policy() -> Any:
    return random_policy().train()


def is_as_it_was(model: Any) -> bool:
    return model.training and model.config._attn_implementation == "sdpa" and model.lm_head.training


def test_the_policy_is_given_back_after_abort_and_after_close(make: Any, training_policy: Any) -> None:
    generator = make(3, training_policy)
    todo = requests(PROMPTS[:1], 2, SAMPLING)
    generator.submit(todo)
    assert generator.abort([todo[0].key]) == [todo[0]]  # not begun: handed back as it came
    assert not training_policy.training
    generator.step()
    generator.abort([todo[1].key, ("unknown", 0, (0,))])
    assert is_as_it_was(training_policy)
    generator.submit(todo)
    generator.step()
    generator.close()
    assert is_as_it_was(training_policy)
    assert generator.capacity().free_slots == 3


PLACES: list[tuple[Any, str]] = [
    (SlotGenerator, "_decode"),
    (SlotGenerator, "_finish"),
    (slots_module, "sample_tokens"),
    (SlotCache, "write_prompts"),
    (SlotCache, "admit"),
    (SlotCache, "prepare"),
    (SlotCache, "remove"),
    (TokenRows, "admit"),
    (TokenRows, "take"),
    (TokenRows, "trajectory"),
]


@pytest.mark.parametrize(("owner", "name"), PLACES)
@pytest.mark.parametrize("call", table_rows([1, 2], [2]))
def test_an_interrupt_anywhere_leaves_policy_and_generator_usable(
    make: Any, training_policy: Any, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int
) -> None:
    generator, sampling = make(3, training_policy), SamplingParams(max_tokens=10)
    rollouts = RolloutLoop(generator)
    undisturbed, _ = rollouts.collect(PROMPTS, 3, sampling, seed=0)
    original, count = getattr(owner, name), 0

    def interrupting(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        result = original(*args, **kwargs)
        count += 1
        if count == call:
            raise KeyboardInterrupt
        return result

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupting)
        with pytest.raises(KeyboardInterrupt):
            rollouts.collect(PROMPTS, 3, sampling, seed=0)
    assert is_as_it_was(training_policy)
    assert generator.capacity().free_slots == 3
    assert generator.capacity().kv_tokens_in_use == 0
    again, _ = rollouts.collect(PROMPTS, 3, sampling, seed=0)
    for before, after in zip(undisturbed, again, strict=True):
        for one, other in zip(before.rollouts, after.rollouts, strict=True):
            assert torch.equal(one.completion.token_ids_T, other.completion.token_ids_T)


def test_it_decodes_a_policy_in_training_with_gradient_checkpointing(
    make: Any, expected: dict[Key, Completion]
) -> None:
    model: Any = random_policy().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert tokens(decode(make(8, model), requests(PROMPTS, 6, SAMPLING))) == tokens(expected)
    assert model.training and model.is_gradient_checkpointing


def test_a_prompt_is_prefilled_once_for_its_whole_group(make: Any, policy: Any) -> None:
    generator = make(3)
    shapes = []

    def count(module: Any, args: Any, kwargs: Any) -> None:
        shapes.append(tuple(kwargs.get("input_ids", args[0] if args else None).shape))

    long = [PROMPTS[0], PROMPTS[2], PROMPTS[3]]
    hook = policy.get_decoder().register_forward_pre_hook(count, with_kwargs=True)
    try:
        RolloutLoop(generator).collect(long, 10, SAMPLING, seed=0)
    finally:
        hook.remove()
    assert shapes == [(2, 5), (1, 28)]  # by the room they take; decode steps do not go through the module's forward


def test_prompts_are_dropped_when_their_last_sample_is_admitted(make: Any) -> None:
    generator, held = make(3), []
    many = [Prompt(f"train/{i}", (2, 3 + i % 30), "") for i in range(90)]
    rollouts = RolloutLoop(generator, listeners=[Stepped(lambda _: held.append(len(generator._cache.prompts)))])
    rollouts.collect(many, 4, SamplingParams(max_tokens=6), seed=0)
    assert 30 <= max(held) <= 33  # those of 512 tokens, 16 each, and what was needed first
    assert not generator._cache.prompts and not generator._released


def test_what_it_holds_does_not_grow_with_the_group(make: Any) -> None:
    def peak_tokens(group_size: int) -> int:
        generator, held = make(4), []
        controller = RolloutLoop(
            generator, listeners=[Stepped(lambda _: held.append(generator.capacity().kv_tokens_in_use))]
        )
        controller.collect(PROMPTS[2:3], group_size, SAMPLING, seed=0)
        return max(held)

    assert peak_tokens(64) == peak_tokens(8) == 4 * 24 + 32


def test_what_is_kept_of_completions_is_not_dropped_when_they_come_back(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = make(4)
    todo = requests(PROMPTS[:1], 4, replace(SAMPLING, max_tokens=64))
    generator.submit(todo)
    for _ in range(9):
        generator.step()
    stopped = generator.abort([request.key for request in todo])
    assert [request.prefix.num_tokens for request in stopped] == [9] * 4  # a quarter of the slots holds twice as many
    computed = counted_prefill(monkeypatch)
    generator.submit(stopped)
    generator.step()
    assert computed == []
    generator.close()


def counted_prefill(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of every sequence that goes through the policy from now on, when a prompt or a prefix is computed."""
    computed: list[int] = []
    real = kept_module.prefill

    def prefill(policy: Any, sequences: Sequence[Sequence[int]], *others: Any, **more: Any) -> torch.Tensor:
        computed.extend(map(len, sequences))
        return real(policy, sequences, *others, **more)

    for module in (slots_module, kept_module):  # prompts and prefixes
        monkeypatch.setattr(module, "prefill", prefill)
    return computed


NO_END = SamplingParams(max_tokens=80, max_observed=20)


def endless(policy: Any) -> Any:
    """The same policy, but no completion ends before its limit."""
    model = copy.deepcopy(policy)
    model.lm_head = torch.nn.Linear(model.lm_head.in_features, model.lm_head.out_features, bias=True)
    with torch.no_grad():
        model.lm_head.weight.copy_(policy.lm_head.weight)
        model.lm_head.bias.zero_()
        model.lm_head.bias[EOS] = -1e4
    return model


def check_alone(model: Any, done: dict[Key, Completion]) -> None:
    """Sampled tokens have the log-probs that a forward over the whole gives them."""
    for completion in done.values():
        expected_T = full_logprobs(model, Rollout(completion.request.prompt, completion))
        sampled_T = completion.trained_T
        assert torch.allclose(completion.logprobs_T[sampled_T], expected_T[sampled_T], atol=1e-5)


def test_a_fork_of_a_row_computes_nothing_again_and_its_branches_go_their_own_ways(
    make: Any, policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = endless(policy)
    generator = make(8, model)
    parent, *children = requests(PROMPTS[2:3], 4, NO_END)
    generator.submit([parent])
    for _ in range(40):
        generator.step()
    computed = counted_prefill(monkeypatch)
    (stopped,) = generator.abort([parent.key])
    ends = (40, 40, 25)
    forks = [child.after(stopped.prefix.until(end)) for child, end in zip(children, ends, strict=True)]
    done = decode(generator, [*forks[:2], stopped, forks[2]])
    assert computed == []  # the first finds what was kept of its parent, the others a row
    check_alone(model, done)
    told = {key: completion.token_ids_T.tolist() for key, completion in done.items()}
    for child, end in zip(children, ends, strict=True):
        assert told[child.key][:end] == told[parent.key][:end]
    assert len({tuple(ids) for ids in told.values()}) == 4


def test_forks_of_what_nobody_has_compute_their_common_prefix_once(
    make: Any, policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = endless(policy)
    generator, computed = make(8, model), counted_prefill(monkeypatch)
    whole = decode(generator, requests(PROMPTS[2:3], 1, NO_END))
    (trajectory,) = whole.values()
    children = requests(PROMPTS[2:3], 5, NO_END)[1:]
    forks = [child.after(trajectory.until(end)) for child, end in zip(children, (30, 50, 50, 41), strict=True)]
    done = decode(generator, forks)
    assert computed == [28, 49]  # the prompt, and the longest prefix but its last token
    check_alone(model, done)


def test_of_a_prefix_with_an_answer_the_tail_alone_is_computed(
    make: Any, policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = endless(policy)
    generator = make(2, model)
    (request,) = requests(PROMPTS[2:3], 1, NO_END)
    generator.submit([request])
    for _ in range(20):
        generator.step()
    (stopped,) = generator.abort([request.key])
    computed = counted_prefill(monkeypatch)
    answered = stopped.after(stopped.prefix.followed_by([3, 4, 5, 6, 7]))
    done = decode(generator, [answered])
    assert computed == [5]  # the last sampled token, whose keys nobody had, and the answer but its last token
    check_alone(model, done)


@pytest.mark.parametrize(("num_slots", "delay"), [(3, 3), (6, 200), (32, 3)])
def test_after_an_answer_nothing_is_computed_but_the_tail(
    num_slots: int, delay: int, make: Any, policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a whole rollout, where turns end by themselves; what has no room is computed again.

    Where environments are slow, free slots lend theirs.
    """
    generator, computed = make(num_slots, policy), counted_prefill(monkeypatch)
    sampling = SamplingParams(max_tokens=60, max_observed=100)
    groups, _ = RolloutLoop(generator, listeners=[Environment(delay)]).collect(PROMPTS[:3], 4, sampling, 0)
    completions = [rollout.completion for group in groups for rollout in group.rollouts]
    prompts = sum(len(prompt.token_ids) for prompt in PROMPTS[:3])
    answers = sum(completion.num_observed for completion in completions)
    assert answers > 40
    if num_slots > 3:
        assert sum(computed) == prompts + answers
    check_alone(policy, {completion.request.key: completion for completion in completions})
    assert generator.capacity().kv_tokens_in_use == 0  # nothing outlasts the rollout
    generator.close()


def test_groups_that_leave_in_parts_leave_no_keys_and_values_either(make: Any, policy: Any) -> None:
    """No group of theirs is ever said to be whole."""
    generator = make(32, policy)
    buffer = RolloutBuffer(ReleaseRule(num_completions=12))
    buffer.open(requests(PROMPTS[:3], 4, SamplingParams(max_tokens=60, max_observed=100)))
    RolloutLoop(generator, buffer, listeners=[Environment(3)]).run(buffer.ready)
    assert generator.capacity().kv_tokens_in_use == 0
    generator.close()


def test_forks_of_what_has_ended_copy_it(make: Any, policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    generator, computed = make(64, policy), counted_prefill(monkeypatch)
    listener = fresh(EPTree(2, 1, 2))
    RolloutLoop(generator, listeners=[listener]).collect(PROMPTS[:3], 4, SamplingParams(max_tokens=40), 0)
    assert listener.metrics(alone)["rollout/branched_tokens_saved"] > 100
    for prompt in PROMPTS[:3]:
        computed.remove(len(prompt.token_ids))
    assert all(number < kept_module._LEAST_COPIED for number in computed)  # for which a copy is not worth it
    generator.close()


def test_what_has_ended_makes_room_for_what_has_not(make: Any, policy: Any) -> None:
    model = endless(policy)
    generator = make(4, model)
    first, second, third = requests(PROMPTS[2:3], 3, NO_END)
    generator.submit([first, second, third])
    for _ in range(20):
        generator.step()
    kept, rows, cache = KeptCompletions(), generator._rows, generator._cache

    def keep(row: int, ended: bool) -> list[Any]:
        kept.store(row, rows, cache, 40, ended)
        return list(kept._kept)

    with torch.inference_mode():
        assert keep(0, True) == [first.key] and keep(1, False) == [first.key, second.key]
        assert keep(2, False) == [second.key, third.key]  # the ended one has gone
        assert keep(0, True) == [second.key, third.key]  # and comes in nobody's place
        kept.fit(20)
        assert list(kept._kept) == [third.key] and kept.num_tokens == 19
        keep(2, True)  # one that begins again from its prompt, and ends again
    assert list(kept._kept) == [third.key] and kept.num_tokens == 19
    generator.close()


def test_what_other_weights_computed_is_not_copied(make: Any, policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = endless(policy)
    generator = make(4, model)
    parent, child = requests(PROMPTS[2:3], 2, NO_END)
    generator.submit([parent])
    for _ in range(30):
        generator.step()
    (parent,) = generator.abort([parent.key])
    generator.load_weights(model.named_parameters(), 1)
    computed = counted_prefill(monkeypatch)
    generator.submit([child.after(parent.prefix)])
    generator.step()
    assert computed == [28, 29]  # the prompt and the prefix, under the weights of now
    generator.close()


def test_after_an_abort_no_keys_and_values_are_held(make: Any) -> None:
    generator, todo = make(4), requests(PROMPTS, 1, SAMPLING)
    generator.submit(todo)
    for _ in range(3):
        generator.step()
    generator.release(PROMPTS)
    generator.abort([request.key for request in todo])
    assert generator.capacity().kv_tokens_in_use == 0
    generator.close()
