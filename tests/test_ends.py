"""The gate between engines and a run: where a completion may end, and which tokens it may have."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import random_policy, save_tokenizer

from lit_grpo.policy.loading import load_tokenizer
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.rollout.generator import GenerationError, StepEvents
from lit_grpo.rollout.vllm.engine import VLLMGenerator
from lit_grpo.rollout.vllm.http import Arrival, ServerError
from lit_grpo.rollout.vllm.server import VLLMServerGenerator
from lit_grpo.rollout.vllm.streams import DraftCount, EngineRequests, NotAsAsked, SampledChunk
from lit_grpo.types import EMPTY, Completion, Prompt, Request, SamplingParams, Trajectory

END = 1
A, B, C = 18, 19, 20
"""Tokens of these letters."""


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> PolicySpec:
    folder = save_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return PolicySpec(random_policy(), load_tokenizer(folder))


def of(*token_ids: Any, reason: str | None = None, logprobs: Any = None) -> SampledChunk:
    return SampledChunk(list(token_ids), [-1.0] * len(token_ids) if logprobs is None else logprobs, reason)


def request(prefix: Trajectory = EMPTY, stop: tuple[str, ...] = (), max_tokens: int = 4, observed: int = 0) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, stop=stop, max_observed=observed)
    return Request(Prompt("train/0", (A, B), "ab"), (0,), sampling, prefix=prefix)


def taken(policy: PolicySpec, asked: Request, *chunks: SampledChunk) -> list[Completion]:
    """Send these chunks to the in-process generator's gate, one in each step; return what has finished."""
    generator, events = VLLMGenerator(2), StepEvents(num_active=1)
    generator._policy, generator._streams, generator.version = policy, EngineRequests(policy), 0
    stream = generator._streams.open(asked, 1.0, "")
    generator._streams.give_ticket(stream)
    ticket = stream.ticket
    for chunk in chunks:
        logprobs = [{token: SimpleNamespace(logprob=each)} for token, each in zip(*_pairs(chunk), strict=True)]
        sampled = SimpleNamespace(token_ids=chunk.token_ids, logprobs=logprobs, finish_reason=chunk.finish_reason)
        done = chunk.finish_reason is not None
        output = SimpleNamespace(request_id=str(ticket), outputs=[sampled], finished=done)
        generator._engine = SimpleNamespace(step=lambda output=output: [output], abort_request=lambda ids: None)
        generator._receive(events)
    return events.finished


def _pairs(chunk: SampledChunk) -> tuple[list[int], list[float]]:
    count = min(len(chunk.token_ids), len(chunk.logprobs))
    return list(chunk.token_ids[:count]), list(chunk.logprobs[:count])


EARLIER = Trajectory([A, C], [-1.0, -1.0], [0, 0])
TURN = Trajectory([A, END, B], [-1.0, -1.0, 0.0], [0, 0, -1])
RIGHT: dict[str, tuple[Request, list[SampledChunk], list[int]]] = {
    "an end token": (request(), [of(A), of(B, END, reason="stop")], [A, B, END]),
    "an end token at the limit": (request(), [of(A, B, C, END, reason="stop")], [A, B, C, END]),
    "the limit": (request(), [of(A, B), of(C, A, reason="length")], [A, B, C, A]),
    "a reason after the tokens": (request(), [of(A, END), of(reason="stop")], [A, END]),
    "a stop string": (request(stop=("bc",)), [of(A, B, C, reason="stop")], [A, B, C]),
    "a stop string at the limit": (request(stop=("bc",)), [of(A, A, B, C, reason="stop")], [A, A, B, C]),
    "an end token before a stop string": (request(stop=("bc",)), [of(B, END, reason="stop")], [B, END]),
    "a stop string that the prompt began": (request(stop=("ba",)), [of(A, B, B, B, reason="length")], [A, B, B, B]),
    "a stop string that the prefix began": (request(EARLIER, ("ca",)), [of(A), of(A)], [A, C, A]),
    "a prefix": (request(EARLIER), [of(A, B, reason="length")], [A, C, A, B]),
    "a turn after another": (request(TURN, observed=1), [of(C, A, reason="length")], [A, END, B, C, A]),
    "a turn with a stop string again": (
        request(Trajectory([B, C, A], [-1.0, -1.0, 0.0], [0, 0, -1]), ("bc",), observed=1),
        [of(B, C, reason="stop")],
        [B, C, A, B, C],
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_completion_that_ends_where_it_should_is_taken(name: str, policy: PolicySpec) -> None:
    asked, chunks, token_ids = RIGHT[name]
    (completion,) = taken(policy, asked, *chunks)
    assert completion.token_ids_T.tolist() == token_ids
    assert completion.finish_reason == (chunks[-1].finish_reason or "stop")
    assert completion.engines == ((asked.prefix.num_tokens, "vLLM's engine in this process"),)


WRONG: dict[str, tuple[Request, list[SampledChunk], str]] = {
    "stop without an end token": (
        request(),
        [of(A), of(B, reason="stop")],
        "ends a completion with 'stop' after 2 of 4 tokens, of which the last, 19, is no end token",
    ),
    "stop without a token": (
        request(EARLIER),
        [of(reason="stop")],
        "ends a completion with 'stop' after 0 of 2 tokens, of which the last, None, is no end token",
    ),
    "stop at the limit": (request(), [of(A, B, C, A, reason="stop")], "ends a completion with 'stop' after 4 of 4 tok"),
    "stop without a stop string": (
        request(stop=("bc",)),
        [of(A, B, reason="stop")],
        "ends a completion with 'stop' after 2 of 4 tokens, of which the last, 19, is no end token or end of a stop",
    ),
    "length before the limit": (request(), [of(A, reason="length")], "ends a completion with 'length' after 1 of 4"),
    "length with a prefix": (
        request(EARLIER),
        [of(A, reason="length")],
        "ends a completion with 'length' after 1 of 2",
    ),
    "length at an end token": (
        request(),
        [of(A, B, C, END, reason="length")],
        "ends a completion with 'length' after 4 of 4 tokens, of which the last ends it with 'stop'",
    ),
    "length at a stop string": (
        request(stop=("bc",)),
        [of(A, A, B, C, reason="length")],
        "ends a completion with 'length' after 4 of 4 tokens, of which the last ends it with 'stop'",
    ),
    "an end token in the middle": (request(), [of(A, END, B)], "goes on after one of the end tokens [1]"),
    "an end token in an earlier chunk": (request(), [of(A, END), of(B)], "goes on after one of the end tokens [1]"),
    "a stop string in the middle": (
        request(stop=("ab",)),
        [of(A), of(B), of(C, A, reason="length")],
        "goes on after the stop string 'ab'",
    ),
    "too many tokens": (request(), [of(A, B, C), of(A, B)], "sends 1 token more than max_tokens"),
    "too many after a prefix": (request(EARLIER), [of(A, B, C)], "sends 1 token more than max_tokens"),
    "a reason of its own": (
        request(),
        [of(A, reason="repetition")],
        "ends a completion with 'repetition' after 1 of 4",
    ),
    "an abort": (request(), [of(A, reason="abort")], "ends a completion with 'abort' after 1 of 4 tokens"),
    "a token beyond the vocabulary": (request(), [of(35)], "sends the token 35, which is not among the 35 known"),
    "a negative token": (request(), [of(-1)], "sends the token -1, which is not among the 35 known"),
    "a token that is true": (request(), [of(True)], "sends the token True, which is not among the 35 known"),
    "a token that is text": (request(), [of("a")], "sends the token 'a', which is not among the 35 known"),
    "a log-prob that is none": (request(), [of(A, logprobs=[None])], "sends the log-prob None, which none can be"),
    "a log-prob that is NaN": (
        request(),
        [of(A, logprobs=[math.nan])],
        "sends the log-prob nan, which none can be; l",
    ),
    "an infinite log-prob": (request(), [of(A, logprobs=[-math.inf])], "sends the log-prob -inf, which none can be"),
    "a log-prob above 0": (request(), [of(A, logprobs=[0.1])], "sends the log-prob 0.1, which none can be"),
    "fewer log-probs": (request(), [of(A, B, logprobs=[-1.0])], "sends 2 tokens with 1 log-prob"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_completion_that_no_engine_can_sample_ends_the_run_with_a_sentence(name: str, policy: PolicySpec) -> None:
    asked, chunks, said = WRONG[name]
    with pytest.raises(GenerationError) as raised:
        taken(policy, asked, *chunks)
    assert str(raised.value).startswith(f"vLLM's engine in this process {said}"), str(raised.value)
    assert isinstance(raised.value.__cause__, NotAsAsked)


def test_a_server_that_sends_what_no_engine_can_sample_has_failed(
    policy: PolicySpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator, failures = VLLMServerGenerator(2), list[ServerError]()
    generator._policy, generator._streams, generator.version = policy, EngineRequests(policy), 0
    stream = generator._streams.open(request(), 1.0, "")
    generator._streams.give_ticket(stream)
    assert stream.ticket is not None
    arrivals = [Arrival(stream.ticket, of(A, 35))]
    generator._at[stream] = SimpleNamespace(client=SimpleNamespace(url="http://one"))  # pyrefly: ignore[unsupported-operation]
    generator._pump = SimpleNamespace(arrivals=lambda timeout_s: arrivals)  # pyrefly: ignore[bad-assignment]
    monkeypatch.setattr(generator, "_fail", lambda stream, error: failures.append(error))
    generator._receive(StepEvents(num_active=1))
    (failure,) = failures
    said = "The vLLM server at http://one sends the token 35, which is not among the 35 known."
    assert (failure.kind, str(failure)) == ("nonsense", said) and not stream.token_ids


def test_tokens_that_are_dropped_are_no_more_of_their_engine_and_are_not_observed(policy: PolicySpec) -> None:
    streams, events = EngineRequests(policy), StepEvents()
    streams.features.points = (2,)
    stream = streams.open(request(EARLIER, max_tokens=8), 1.0, "")
    for name, token_ids in (("one", [A]), ("two", [B, C])):
        stream.engine = name
        streams.give_ticket(stream)
        streams.take(stream, of(*token_ids), 0, events)
        streams.take_ticket(stream)
    assert stream.so_far.prefix.engines == ((2, "one"), (3, "two"))
    stream.drop_new()
    assert stream.so_far.prefix.engines == ((2, "one"),) and stream.token_ids == [A, C, A]
    fresh = streams.open(Request(Prompt("train/1", (A,), "a"), (0,), SamplingParams()), 1.0, "")
    streams.give_ticket(fresh)
    streams.take(fresh, of(A, B), 0, events)
    fresh.drop_new()
    streams.observe(events)
    assert not events.observations
    streams.take(fresh, of(A, B), 0, events)
    streams.observe(events)
    assert [observation.keys for observation in events.observations] == [[fresh.request.key]]


def test_tokens_that_are_not_one_a_step_are_told_with_their_request(policy: PolicySpec) -> None:
    """Those of steps with drafts, of prompts that are prefilled in parts, and of engines that are left out."""
    streams = EngineRequests(policy)
    begun = streams.open(request(EARLIER, max_tokens=8), 1.0, "")
    fresh = streams.open(Request(Prompt("train/1", (A,), "a"), (0,), SamplingParams()), 1.0, "")
    for stream in (begun, fresh):
        streams.give_ticket(stream)
    got = {1: ([A, B, C], [A]), 2: ([], [A, B])}
    told = []
    for steps, parts in got.items():
        events = StepEvents(num_steps=steps)
        for stream, token_ids in zip((begun, fresh), parts, strict=True):
            streams.take(stream, of(*token_ids), 0, events)
        streams.observe(events)
        told.append(events.beyond)
    begun.drop_new()
    streams.observe(events := StepEvents(num_steps=0))
    assert told == [{begun.request.key: 2}, {begun.request.key: -2}]
    assert events.beyond == {begun.request.key: -3}


def test_what_an_engine_in_this_process_drafts_is_counted_when_a_completion_ends(policy: PolicySpec) -> None:
    generator, events = VLLMGenerator(2), StepEvents(num_active=1)
    generator._policy, generator._streams, generator.version = policy, EngineRequests(policy), 0
    generator._streams.give_ticket(stream := generator._streams.open(request(), 1.0, ""))
    counts = SimpleNamespace(num_draft_tokens=9, histogram=[1, 2, 0, 1])  # steps by the tokens that were kept
    logprobs = [{token: SimpleNamespace(logprob=-1.0)} for token in (A, END)]
    sampled = SimpleNamespace(token_ids=[A, END], logprobs=logprobs, finish_reason="stop", spec_decode_metrics=counts)
    output = SimpleNamespace(request_id=str(stream.ticket), outputs=[sampled], finished=True)
    generator._engine = SimpleNamespace(step=lambda: [output])
    generator._receive(events)
    assert (events.num_drafted, events.accepted.total(), len(events.finished)) == (9, 5, 1)


def test_steps_of_a_server_are_its_tokens_without_those_that_it_has_drafted(policy: PolicySpec) -> None:
    generator, parts = VLLMServerGenerator(2), list[list[Arrival]]()
    generator._policy, generator._streams, generator.version = policy, EngineRequests(policy), 0
    generator._streams.give_ticket(stream := generator._streams.open(request(max_tokens=16), 1.0, ""))
    ticket = stream.ticket or 0
    generator._pump = SimpleNamespace(arrivals=lambda timeout_s: parts.pop(0))  # pyrefly: ignore[bad-assignment]
    counted = []
    for content in (of(A, B, C, A, B), DraftCount(6, 3), of(A, B), of(A, B, C)):
        parts.append([Arrival(ticket, content)])  # the counts are those of another completion, which has ended
        generator._receive(events := StepEvents(num_active=1))
        counted.append((events.num_steps, events.num_drafted, events.accepted.total()))
    assert counted == [(5, 0, 0), (0, 6, 3), (0, 0, 0), (2, 0, 0)]
