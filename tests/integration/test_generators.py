"""One suite for every generator: the embedded one, vLLM in this process, and two vLLM servers."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import random_policy, table_rows
from hand_made import Environment, full_logprobs, observed, relative_error
from test_branching import RandomForks, check_forks
from test_learner import gradient_of

from lit_grpo.policy.adapters import LoraSettings, add_adapters
from lit_grpo.policy.loading import load_tokenizer
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.rollout.buffer import RolloutBuffer, group_requests
from lit_grpo.rollout.generator import Generator
from lit_grpo.rollout.loop import RolloutLoop
from lit_grpo.rollout.proof import SyncProof, given_logprobs, given_tokens
from lit_grpo.rollout.rules import ReleaseRule
from lit_grpo.rollout.slots.generator import SlotGenerator
from lit_grpo.rollout.vllm.engine import VLLMGenerator
from lit_grpo.rollout.vllm.server import VLLMServerGenerator
from lit_grpo.rollout.weights.files import weights_folder, write
from lit_grpo.rollout.weights.tensors import WeightSyncError, check_arrival
from lit_grpo.types import EMPTY, OBSERVED, Completion, Prompt, Request, Rollout, SamplingParams, Trajectory

NUM_SLOTS = 4
PROMPTS = [
    Prompt("a", (2, 3, 4), ""),
    Prompt("b", (9,), ""),
    Prompt("c", tuple(2 + i * 7 % 30 for i in range(40)), ""),
]
SAMPLING = SamplingParams(max_tokens=24)
POINTS = (0, 8, 16)


@pytest.fixture(scope="module")
def tokenizer(policy_folder: Path) -> Any:
    return load_tokenizer(str(policy_folder))


def make_slots() -> Generator:
    return SlotGenerator(NUM_SLOTS)


def make_engine() -> Generator:
    return VLLMGenerator(NUM_SLOTS, kv_memory="8MiB", engine_args={"max_model_len": 128, "block_size": 32})


def make_engine_of_adapters() -> Generator:
    arguments = {"max_model_len": 128, "block_size": 32}
    return VLLMGenerator(NUM_SLOTS, kv_memory="8MiB", adapters="alone", engine_args=arguments)


def make_servers() -> Generator:
    arguments = {"max_model_len": 128, "block_size": 32, "kv_cache_memory_bytes": 8 * 2**20, "stream_interval": 1}
    return VLLMServerGenerator(NUM_SLOTS // 2, num_servers=2, server_args=arguments)


CASES = {
    "slots": (make_slots, False),
    "vllm, own head": (make_engine, False),
    "vllm, adapters alone": (make_engine_of_adapters, True),
    "two vllm servers": (make_servers, True),
}


LONG_ON_VLLM = pytest.mark.parametrize("case", table_rows(CASES, ["slots"]), indirect=True)
"""Of tests that take long on an engine of vLLM's, and prove there what others do in less."""


@pytest.fixture(scope="module", params=table_rows(CASES, ["slots", "vllm, own head"]))
def case(request: pytest.FixtureRequest) -> tuple[Any, bool]:
    return CASES[request.param]


@pytest.fixture(scope="module")
def policy(case: tuple[Any, bool]) -> Any:
    policy: Any = random_policy(head_dim=32, tie_word_embeddings=case[1])  # a head size that vLLM's CPU kernels know
    if case[0] is make_engine_of_adapters:
        add_random_adapters(policy)
    return policy


def add_random_adapters(policy: Any) -> None:
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        add_adapters(policy, LoraSettings(r=3, alpha=5.0, rslora=True))
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)


@pytest.fixture(scope="module")
def started(
    case: tuple[Any, bool], policy: Any, tokenizer: Any, forked_servers: None, request: pytest.FixtureRequest
) -> Iterator[Any]:
    if case[0] is make_engine:
        request.getfixturevalue("forked_inspections")
    generator = case[0]()
    generator.start(PolicySpec(policy, tokenizer))
    yield generator
    generator.close()


@pytest.fixture
def generator(started: Any, policy: Any) -> Any:
    started.load_weights(started.weights(), 0)
    started.feature_points = POINTS
    return started


def collect(generator: Any, num_generations: int, sampling: SamplingParams = SAMPLING, seed: int = 0) -> list[Rollout]:
    groups, _ = RolloutLoop(generator).collect(PROMPTS, num_generations, sampling, seed)
    return [rollout for group in groups for rollout in group.rollouts]


def tokens(rollouts: Sequence[Rollout]) -> list[list[int]]:
    return [rollout.completion.token_ids_T.tolist() for rollout in rollouts]


def until_done(generator: Any) -> list[Completion]:
    finished = []
    while generator.capacity().free_slots < NUM_SLOTS:
        finished += generator.step().finished
    return finished


def test_it_is_a_generator(generator: Any) -> None:
    assert isinstance(generator, Generator)
    assert generator.version == 0
    assert generator.capacity().slots == generator.capacity().free_slots == NUM_SLOTS


def test_a_group_larger_than_the_slots_comes_back_whole(generator: Any, policy: Any) -> None:
    rollouts = collect(generator, 16)
    assert [rollout.completion.request.key for rollout in rollouts] == [
        (prompt.prompt_id, 0, (sample,)) for prompt in PROMPTS for sample in range(16)
    ]
    reasons = set()
    for rollout in rollouts:
        completion = rollout.completion
        ids, logprobs, versions = completion.token_ids_T, completion.logprobs_T, completion.versions_T
        assert ids.dtype == versions.dtype == torch.int64 and logprobs.dtype == torch.float32
        assert ids.shape == logprobs.shape == versions.shape and 1 <= len(ids) <= 24
        assert versions.unique().tolist() == [0]
        stopped = int(ids[-1]) == 1
        assert 1 not in ids[:-1]
        assert completion.finish_reason == ("stop" if stopped else "length")
        assert stopped or len(ids) == 24
        assert torch.allclose(logprobs, full_logprobs(policy, rollout), atol=1e-4)
        reasons.add(completion.finish_reason)
    assert reasons == {"stop", "length"}
    assert len({tuple(ids) for ids in tokens(rollouts)}) > 30


def test_the_order_of_admission_does_not_change_what_is_sampled(generator: Any) -> None:
    expected = {rollout.completion.request.key: rollout for rollout in collect(generator, 4)}
    waiting = [rollout.completion.request for rollout in expected.values()][::-1]
    while waiting or generator.capacity().free_slots < NUM_SLOTS:
        now, waiting = waiting[: generator.capacity().free_slots], waiting[generator.capacity().free_slots :]
        generator.submit(now)
        for completion in generator.step().finished:
            same = expected.pop(completion.request.key).completion
            assert completion.token_ids_T.tolist() == same.token_ids_T.tolist()
    assert not expected


@pytest.mark.parametrize("points", table_rows([[8], [4, 8, 12]], [[4, 8, 12]]), ids=["a probe", "time slices"])
def test_a_probe_changes_neither_what_is_sampled_nor_its_gradient(generator: Any, points: list[int]) -> None:
    without, _ = RolloutLoop(generator).collect(PROMPTS, 6, SAMPLING, 0)
    groups, stats = RolloutLoop(generator, plan="lpt", points=points).collect(PROMPTS, 6, SAMPLING, 0)
    for _ in range(4):  # a server may be done before the abort reaches it
        if stats.num_parked <= 3:
            groups, stats = RolloutLoop(generator, plan="lpt", points=points).collect(PROMPTS, 6, SAMPLING, 0)
    assert stats.num_parked > 3
    assert stats.num_tokens == sum(rollout.completion.num_tokens for group in groups for rollout in group.rollouts)
    for group, other in zip(groups, without, strict=True):
        for one, two in zip(group.rollouts, other.rollouts, strict=True):
            assert one.completion.token_ids_T.tolist() == two.completion.token_ids_T.tolist()
            assert torch.allclose(one.completion.logprobs_T, two.completion.logprobs_T, atol=1e-5)
    assert relative_error(gradient_of(groups), gradient_of(without)) < 1e-4


def test_seeds_and_visits_sample_anew(generator: Any) -> None:
    assert tokens(collect(generator, 4)) == tokens(collect(generator, 4))
    assert tokens(collect(generator, 4)) != tokens(collect(generator, 4, seed=1))


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_log_probs_are_those_of_the_distribution_sampled_from(generator: Any, policy: Any, temperature: float) -> None:
    rollouts = collect(generator, 2, SamplingParams(temperature=temperature, max_tokens=12))
    for rollout in rollouts:
        expected = full_logprobs(policy, rollout, temperature or 1.0)
        assert torch.allclose(rollout.completion.logprobs_T, expected, atol=1e-4)
    if not temperature:
        assert tokens(rollouts)[::2] == tokens(rollouts)[1::2]


def test_each_request_of_a_batch_is_sampled_by_its_own_parameters_or_refused(generator: Any) -> None:
    requests = [
        Request(PROMPTS[0], (0,), SamplingParams(temperature=0.0, max_tokens=12)),
        Request(PROMPTS[0], (1,), SamplingParams(max_tokens=24, stop=("i", "o")), seed=1),
        Request(PROMPTS[1], (0,), SamplingParams(temperature=0.5, top_k=5, max_tokens=7), seed=2),
        Request(PROMPTS[2], (0,), SamplingParams(top_p=0.8, max_tokens=20)),
    ]
    alone = {request.key: go_on(generator, [request])[request.key] for request in requests}
    limits = {request.key: request.sampling.max_tokens for request in requests}
    assert any(completion.finish_reason == "length" for completion in alone.values())
    assert all(completion.num_tokens <= limits[key] for key, completion in alone.items())
    if isinstance(generator, SlotGenerator):
        with pytest.raises(ValueError, match=r"Sample \(1,\) of prompt 'a' has other sampling parameters than the req"):
            generator.submit(requests)
        assert generator.capacity().free_slots == NUM_SLOTS
        return
    for key, completion in go_on(generator, requests).items():
        check_equal(completion, alone[key])


def test_seeds_of_one_batch_may_differ(generator: Any) -> None:
    requests = [Request(PROMPTS[2], (0,), SAMPLING, seed=1), Request(PROMPTS[2], (1,), SAMPLING, seed=2)]
    (first, second), together = (go_on(generator, [each]) for each in requests), go_on(generator, requests)
    check_equal(together[requests[0].key], first[requests[0].key])
    check_equal(together[requests[1].key], second[requests[1].key])
    other = Request(PROMPTS[2], (0,), SAMPLING, seed=2)
    assert go_on(generator, [other])[other.key].token_ids_T.tolist() != first[other.key].token_ids_T.tolist()


def test_a_stop_string_ends_a_completion_and_is_kept(generator: Any) -> None:
    rollouts = collect(generator, 8, SamplingParams(max_tokens=24, stop=("i",)))
    ended = [rollout.completion for rollout in rollouts if "i" in rollout.completion.text]
    assert len(ended) > 2
    for completion in ended:
        assert completion.finish_reason == "stop"
        assert completion.text.count("i") == 1 and completion.text.endswith("i")


def test_aborting_returns_what_there_is_and_a_new_submission_samples_the_same(generator: Any) -> None:
    rollouts = collect(generator, 3, SamplingParams(max_tokens=80))
    expected = {rollout.completion.request.key: rollout.completion for rollout in rollouts}
    requests = [c.request for c in sorted(expected.values(), key=lambda completion: completion.num_tokens)[-2:]]
    partial: list[Request] = []
    for _ in range(5):  # a server may be done before the abort reaches it
        generator.submit(requests)
        early = [completion for _ in range(6) for completion in generator.step().finished]
        partial = generator.abort([request.key for request in requests])
        assert len(partial) + len(early) == 2
        assert generator.capacity().free_slots == NUM_SLOTS
        if partial:
            break
    assert sum(request.prefix.num_tokens for request in partial) > 0
    for request in partial:
        whole = expected[request.key]
        length = request.prefix.num_tokens  # none yet, where the request's server was the slower one
        assert length < whole.num_tokens
        assert request.prefix.token_ids_T.tolist() == whole.token_ids_T[:length].tolist()
    for goes_on in (partial, [request.after(EMPTY) for request in partial]):
        generator.submit(goes_on)
        finished = until_done(generator)
        assert len(finished) == len(partial)
        for completion in finished:
            check_equal(completion, expected[completion.request.key])
    assert generator.abort([("nobody", 0, (0,))]) == []


def test_what_has_not_begun_is_handed_back_as_it_came(generator: Any) -> None:
    sampling = replace(SAMPLING, max_observed=1)
    begun = Request(PROMPTS[0], (0,), sampling, prefix=Trajectory([5, 6], [-1.0, -2.0], [0, OBSERVED]))
    fresh = Request(PROMPTS[1], (0,), sampling)
    generator.submit([begun, fresh])
    assert generator.abort([fresh.key, begun.key]) in ([begun, fresh], [fresh, begun])
    assert generator.capacity().free_slots == NUM_SLOTS


def check_equal(completion: Completion, whole: Completion) -> None:
    """The same tokens of the same origin, and log-probs as equal as another batch leaves them."""
    assert completion.token_ids_T.tolist() == whole.token_ids_T.tolist()
    assert torch.allclose(completion.logprobs_T, whole.logprobs_T, atol=1e-5)
    assert completion.segments == whole.segments
    assert (completion.finish_reason, completion.text) == (whole.finish_reason, whole.text)


def go_on(generator: Any, requests: Sequence[Request]) -> dict[Any, Completion]:
    """Decode to the end, in as many slots as there are."""
    waiting, finished = list(requests), []
    while waiting or generator.capacity().free_slots < NUM_SLOTS:
        now, waiting = waiting[: generator.capacity().free_slots], waiting[generator.capacity().free_slots :]
        generator.submit(now)
        finished += generator.step().finished
    return {completion.request.key: completion for completion in finished}


@LONG_ON_VLLM
@pytest.mark.parametrize("temperature", table_rows([1.0, 0.7, 0.0], [0.7]))
def test_a_completion_cut_at_any_token_and_continued_equals_the_uncut_one(generator: Any, temperature: float) -> None:
    sampling = SamplingParams(temperature, max_tokens=12)
    whole = {each.completion.request.key: each.completion for each in collect(generator, 2, sampling, seed=3)[::2]}
    assert sum(each.num_tokens for each in whole.values()) > 20
    for cut in range(max(each.num_tokens for each in whole.values())):
        goes_on = [each.request.after(each.until(cut)) for each in whole.values() if cut < each.num_tokens]
        for key, continued in go_on(generator, goes_on).items():
            check_equal(continued, whole[key])


@LONG_ON_VLLM
def test_a_stop_string_across_the_cut_ends_a_completion(generator: Any) -> None:
    whole = [rollout.completion for rollout in collect(generator, 8) if rollout.completion.num_tokens > 4]
    assert len(whole) > 4
    for completion in whole[:4]:
        text = completion.text[2:4]  # a token is a character
        sampling = SamplingParams(max_tokens=24, stop=(text,))
        request = Request(completion.request.prompt, completion.request.path, sampling)
        (ended,) = go_on(generator, [request]).values()
        assert ended.finish_reason == "stop" and ended.text.endswith(text)
        for cut in range(1, ended.num_tokens):
            (continued,) = go_on(generator, [request.after(ended.until(cut))]).values()
            check_equal(continued, ended)


@LONG_ON_VLLM
def test_trajectories_of_turns_are_what_they_are_one_by_one(generator: Any, policy: Any) -> None:
    """Turns wait for their answers away from the slots, and come back in another order than they left."""
    sampling = SamplingParams(max_tokens=24, max_observed=12)
    groups, _ = RolloutLoop(generator, listeners=[Environment(5)]).collect(PROMPTS, 4, sampling, 0)
    completions = [rollout.completion for group in groups for rollout in group.rollouts]
    assert max(len(completion.turns) for completion in completions) > 1
    for completion in completions:
        expected_T = full_logprobs(policy, Rollout(completion.request.prompt, completion))
        sampled_T = completion.trained_T
        assert torch.allclose(completion.logprobs_T[sampled_T], expected_T[sampled_T], atol=1e-5)
        request = completion.request
        while True:
            (alone,) = go_on(generator, [request]).values()
            tokens = observed(alone)
            if tokens is None:
                break
            request = alone.request.after(alone.followed_by(tokens))
        check_equal(completion, alone)
        assert completion.text == alone.text


@LONG_ON_VLLM
def test_requests_that_begin_within_others_are_what_they_would_be_by_themselves(generator: Any, policy: Any) -> None:
    sampling = SamplingParams(max_tokens=24, max_observed=12)
    for seed in range(6, 16):  # on servers the clock decides when a step ends, and so which forks there are
        forks = RandomForks(seed)
        groups, _ = RolloutLoop(generator, listeners=[forks]).collect(PROMPTS, 2, sampling, seed=0)
        found = {each.completion.request.key: each.completion for group in groups for each in group.rollouts}
        assert forks.forked <= found.keys()
        check_forks(found, forks.begun, policy, generator)
        if any(len(key[2]) > 2 for key in found):
            return
    pytest.fail("No rollout has forked a fork.")


def test_observed_tokens_are_gone_on_from_and_keep_their_place(generator: Any, policy: Any) -> None:
    first = collect(generator, 1, SamplingParams(max_tokens=6))[2].completion
    prefix = first.until(4).followed_by([7, 8, 9])
    request = Request(PROMPTS[2], (0,), SamplingParams(max_tokens=16, max_observed=3)).after(prefix)
    (completion,) = go_on(generator, [request]).values()
    assert completion.token_ids_T[:7].tolist() == prefix.token_ids_T.tolist()
    assert completion.versions_T.tolist() == [0] * 4 + [OBSERVED] * 3 + [0] * (completion.num_tokens - 7)
    assert completion.trained_T.tolist() == [True] * 4 + [False] * 3 + [True] * (completion.num_tokens - 7)
    expected_T = full_logprobs(policy, Rollout(PROMPTS[2], completion))
    sampled = completion.trained_T
    assert torch.allclose(completion.logprobs_T[sampled], expected_T[sampled], atol=1e-5)
    assert completion.logprobs_T[~sampled].tolist() == [0.0] * 3
    for cut in range(7, completion.num_tokens):
        (continued,) = go_on(generator, [request.after(completion.until(cut))]).values()
        check_equal(continued, completion)


def test_what_was_in_flight_goes_on_with_new_weights(generator: Any, policy: Any) -> None:
    sampling = SamplingParams(max_tokens=80)
    whole = go_on(generator, [Request(PROMPTS[2], (sample,), sampling, seed=1) for sample in range(4 * NUM_SLOTS)])
    longest = sorted(whole.values(), key=lambda completion: completion.num_tokens)[-NUM_SLOTS:]
    generator.submit([completion.request for completion in longest])
    finished, num_tokens = [], 0
    while num_tokens < 4 * NUM_SLOTS:  # servers do not wait for what follows
        events = generator.step()
        num_tokens, finished = num_tokens + events.num_tokens, finished + events.finished
    saved = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    try:
        with torch.no_grad():
            for parameter in policy.parameters():
                if parameter.requires_grad:
                    parameter.mul_(1.1)
        handed_back = generator.abort([completion.request.key for completion in longest])
        generator.load_weights(generator.weights(), 5)
        generator.submit(handed_back)
        early = len(finished)
        finished += until_done(generator)
        assert len(finished) == NUM_SLOTS and early < NUM_SLOTS
        for completion in finished[early:]:
            old_T, new_T = completion.versions_T == 0, completion.versions_T == 5
            begun = int(old_T.sum())
            assert (old_T | new_T).all() and new_T.any() and old_T[:begun].all()
            same = whole[completion.request.key]
            assert completion.token_ids_T[:begun].tolist() == same.token_ids_T[:begun].tolist()
            assert torch.allclose(completion.logprobs_T[:begun], same.logprobs_T[:begun], atol=1e-5)
            expected_T = full_logprobs(policy, Rollout(PROMPTS[2], completion))
            assert torch.allclose(completion.logprobs_T[begun:], expected_T[begun:], atol=1e-4)
    finally:
        policy.load_state_dict(saved)


def test_weights_are_refused_while_requests_are_in_flight(generator: Any) -> None:
    requests = [Request(PROMPTS[2], (0,), SamplingParams(max_tokens=40))]
    generator.submit(requests)
    with pytest.raises(WeightSyncError, match="1 requests are in flight; abort them"):
        generator.load_weights(generator.weights(), 1)
    (request,) = generator.abort([requests[0].key])
    generator.load_weights(generator.weights(), 2)
    (completion,) = go_on(generator, [request]).values()
    begun = request.prefix.num_tokens
    assert completion.versions_T.tolist() == [0] * begun + [2] * (completion.num_tokens - begun)


def test_new_weights_count_from_the_next_step_on_and_no_old_prompt_is_used(generator: Any, policy: Any) -> None:
    before = tokens(collect(generator, 4))
    generator.sleep()
    saved = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    try:
        with torch.no_grad():
            for parameter in policy.parameters():
                if parameter.requires_grad:
                    parameter.mul_(1.1)
        weights = generator.weights()
        check_arrival(weights.digests, generator.load_weights(weights, 7).digests)
        after = collect(generator, 4)
        assert tokens(after) != before
        for rollout in after:
            assert torch.allclose(rollout.completion.logprobs_T, full_logprobs(policy, rollout), atol=1e-4)
            assert rollout.completion.versions_T.unique().tolist() == [7]
    finally:
        policy.load_state_dict(saved)
    generator.load_weights(generator.weights(), 8)
    assert tokens(collect(generator, 4)) == before


def test_what_traveled_is_told(generator: Any, policy: Any) -> None:
    weights = generator.weights()
    report = generator.load_weights(weights, 3)
    check_arrival(weights.digests, report.digests)
    adapters = sum(parameter.nbytes for parameter in policy.parameters() if parameter.requires_grad)
    everything = sum(parameter.nbytes for parameter in policy.parameters())
    if isinstance(generator, SlotGenerator):
        assert report.num_bytes == 0
    elif generator.sends_alone:
        assert report.num_bytes == adapters < everything / 5
        assert report.changed_share == adapters / everything
        generator.invalidate_weights()
        assert generator.load_weights(generator.weights(), 3).num_bytes == everything
    else:
        assert report.num_bytes == everything


def test_given_tokens_are_scored_as_the_policy_does_by_every_engine(
    generator: Any, policy: Any, tokenizer: Any
) -> None:
    assert ("scores" in generator.abilities) != isinstance(generator, SlotGenerator)  # which has no weights of its own
    if "scores" not in generator.abilities:
        return
    assert generator.longest_sequence == 127
    sequences = given_tokens(tokenizer, generator.longest_sequence)
    assert [len(sequence) for sequence in sequences] == [127] * 5
    expected_N = given_logprobs(policy, sequences)
    logits = policy(input_ids=torch.tensor(sequences), use_cache=False).logits.double().log_softmax(-1)
    assert torch.allclose(
        expected_N.double(), logits[:, :-1].gather(-1, torch.tensor(sequences)[:, 1:, None]).flatten(), atol=1e-5
    )
    scores = generator.score(sequences)
    assert len(scores) == (2 if isinstance(generator, VLLMServerGenerator) else 1)
    for scored_N in scores.values():
        assert torch.allclose(scored_N, expected_N, atol=1e-4)
    generator.submit([Request(PROMPTS[0], (0,), SAMPLING)])
    with pytest.raises(WeightSyncError, match="1 requests are in flight"):
        generator.score(sequences)
    generator.abort([(PROMPTS[0].prompt_id, 0, (0,))])


def test_one_of_two_servers_with_other_weights_is_named(generator: Any, policy: Any, tokenizer: Any) -> None:
    if not isinstance(generator, VLLMServerGenerator):
        return
    proof = SyncProof(tokenizer, 0.1, 1.3)
    assert proof.accepts(proof.measure(generator, policy))
    other = generator._fleet.alive[1]
    with weights_folder() as folder:
        weights = {name: tensor.clone() for name, tensor in generator.weights()}
        weights["model.layers.1.self_attn.o_proj.weight"] *= 1.001
        write(weights.items(), folder / "weights.safetensors")
        other.reload(0, source=str(folder / "weights.safetensors"))
    gap = proof.measure(generator, policy)
    assert not proof.accepts(gap)
    assert gap.engine == f"the vLLM server at {other.client.url}"


def test_completions_go_on_across_updates_with_the_tokens_that_they_have(generator: Any, policy: Any) -> None:
    buffer = RolloutBuffer(ReleaseRule(num_completions=4, leftovers="keep", max_staleness=9))
    loop, policies, trained_on = RolloutLoop(generator, buffer), list[Any](), list[Rollout]()
    buffer.open(group_requests(PROMPTS, 4, SAMPLING, seed=3))
    changed = [parameter for parameter in policy.parameters() if parameter.requires_grad][-1]
    before = changed.detach().clone()
    while len(buffer):
        generator.load_weights(generator.weights(), len(policies))
        policies.append(copy.deepcopy(policy).double().eval())
        loop.run(buffer.ready)
        buffer.close()
        trained_on += [rollout for group in buffer.take() for rollout in group.fresh]
        buffer.end_update()
        with torch.no_grad():
            changed.mul_(0.9)
    with torch.no_grad():
        changed.copy_(before)
    keys = [rollout.completion.request.key for rollout in trained_on]
    assert len(keys) == len(set(keys)) == 12
    if not isinstance(generator, VLLMServerGenerator):  # which may have more ended by the time that they are asked
        assert len(policies) == 3
        assert max(len(rollout.completion.versions_T.unique()) for rollout in trained_on) > 1
    for rollout in trained_on:
        by_version = [full_logprobs(each, rollout) for each in policies]
        exact_T = torch.stack(by_version).gather(0, rollout.completion.versions_T[None])[0]
        assert torch.allclose(exact_T, rollout.completion.logprobs_T, atol=1e-4)


def all_but_one(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterable[tuple[str, torch.Tensor]]:
    return [(name, tensor) for name, tensor in weights if "layers.1.mlp.up" not in name]


def one_of_no_name(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterable[tuple[str, torch.Tensor]]:
    return [*weights, ("model.layers.9.mlp.up_proj.weight", torch.zeros(64, 32))]


def broken_off(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    yield from list(weights)[:5]
    raise ConnectionError("the sender is gone")


@pytest.mark.parametrize("weights", table_rows([all_but_one, one_of_no_name, broken_off], [all_but_one]))
def test_a_sync_that_fails_poisons_it_until_one_succeeds(generator: Any, policy: Any, weights: Any) -> None:
    with pytest.raises((WeightSyncError, ConnectionError)):
        generator.load_weights(weights(generator.weights()), 1)
    assert generator.version == -1
    with pytest.raises(WeightSyncError):
        generator.submit([Request(PROMPTS[0], (0,), SAMPLING)])
    generator.load_weights(generator.weights(), 2)
    assert generator.version == 2
    assert len(collect(generator, 2)) == 6
    generator.invalidate_weights()
    with pytest.raises(WeightSyncError):
        generator.submit([Request(PROMPTS[0], (0,), SAMPLING)])


@pytest.mark.parametrize("which", [0, -1])
def test_a_tensor_with_another_content_is_found(generator: Any, policy: Any, which: int) -> None:
    weights = generator.weights()
    sent = dict(weights)
    name = [name for name in sent if "layers.0.mlp.down_proj" in name][which]  # of an adapter's two matrices, each
    other = sent | {name: sent[name.replace("layers.0", "layers.1")].clone()}
    with pytest.raises(WeightSyncError, match=r"1 of \d+ weights arrived with another content|is another tensor"):
        check_arrival(weights.digests, generator.load_weights(other.items(), 5).digests)


def test_it_shows_completions_at_the_points_asked_for(generator: Any) -> None:
    generator.expect(PROMPTS)
    generator.submit([Request(prompt, (0,), SAMPLING) for prompt in PROMPTS])
    seen: dict[int, set[Any]] = {}
    while generator.capacity().free_slots < NUM_SLOTS:
        for observation in generator.step().observations:
            assert observation.features.shape[0] == len(observation.keys)
            assert observation.features.dtype == "float32"
            seen.setdefault(observation.num_tokens, set()).update(observation.keys)
    assert seen[0] >= {(prompt.prompt_id, 0) for prompt in PROMPTS}
    assert set(seen) <= set(POINTS) and len(seen) > 1  # a server whose tokens arrive together may pass by a point


def test_what_cannot_be_decoded_is_refused_at_once(generator: Any) -> None:
    with pytest.raises(ValueError, match="'a' has 3 tokens"):
        generator.submit([Request(PROMPTS[0], (0,), SamplingParams(max_tokens=10_000))])
    with pytest.raises(ValueError, match="has no tokens"):
        generator.submit([Request(Prompt("empty", (), ""), (0,), SAMPLING)])
    with pytest.raises(ValueError, match=r"has 24 tokens, and sampling\.max_tokens 24 allows no 25 that are sampled"):
        generator.submit([Request(PROMPTS[0], (0,), SAMPLING, prefix=Trajectory([5] * 24, [0.0] * 24, [0] * 24))])
    with pytest.raises(ValueError, match="5 requests for 4 free slots"):
        generator.submit([Request(PROMPTS[0], (sample,), SAMPLING) for sample in range(5)])
    assert generator.capacity().free_slots == NUM_SLOTS
