"""A vLLM engine in this process whose step breaks off: nothing is sampled with the half of it that it may hold."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lit_grpo.policy.loading import load_policy, load_tokenizer
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.rollout.generator import StepEvents
from lit_grpo.rollout.loop import RolloutLoop
from lit_grpo.rollout.vllm.engine import VLLMGenerator
from lit_grpo.rollout.vllm.generator import Room
from lit_grpo.rollout.vllm.streams import EngineRequests, SampledChunk
from lit_grpo.rollout.weights.tensors import SyncReport, WeightSyncError
from lit_grpo.types import Prompt, Request, RolloutGroup, SamplingParams

PROMPTS = [Prompt("a", (2, 3, 4), ""), Prompt("b", (9,), "")]
SAMPLING = SamplingParams(max_tokens=5)


class Engine:
    """As vLLM's: what it schedules counts as computed before it is, and requests that it is not told to forget stay."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self.computed: dict[tuple[int, ...], bool] = {}  # prompts, and whether their keys and values are right
        self.wrong: set[tuple[int, ...]] = set()  # of them, since a step broke off
        self.num_steps = 0
        self.fault: BaseException | None = None
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=False))

    def add_request(self, request_id: str, prompt: Any, params: Any, **_: Any) -> None:
        self.requests[request_id] = SimpleNamespace(ids=list(prompt["prompt_token_ids"]), num_left=params["max_tokens"])

    def abort_request(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.requests.pop(request_id, None)

    def step(self) -> list[Any]:
        self.num_steps += 1
        self.wrong = {prompt for prompt, is_right in self.computed.items() if not is_right}
        for request in self.requests.values():
            self.computed.setdefault(tuple(request.ids), False)
        if self.fault is not None and self.num_steps == 3:
            raise self.fault
        return [self._output(request_id) for request_id in list(self.requests)]

    def _output(self, request_id: str) -> Any:
        request = self.requests[request_id]
        prompt = tuple(request.ids)
        token = 0 if prompt in self.wrong else 2 + sum(prompt) % 20
        self.computed[prompt] = prompt not in self.wrong
        request.ids.append(token)
        request.num_left -= 1
        finished = not request.num_left
        if finished:
            del self.requests[request_id]
        sampled = SimpleNamespace(
            token_ids=[token],
            logprobs=[{token: SimpleNamespace(logprob=-1.0)}],
            finish_reason="length" if finished else None,
        )
        return SimpleNamespace(request_id=request_id, outputs=[sampled], finished=finished)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    """Those that were made, in a world where vLLM is this file's."""
    made: list[Engine] = []

    def make(generator: VLLMGenerator, policy: PolicySpec, lora: Mapping[str, Any]) -> None:
        made.append(Engine())
        generator._engine, generator._engine_room = made[-1], Room(64, [1024], 16)
        generator._is_half_stepped = False

    def load(generator: VLLMGenerator, weights: Any, version: int) -> SyncReport:
        return SyncReport({name: "" for name, _ in weights})

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=dict, TokensPrompt=dict))
    kinds = SimpleNamespace(RequestOutputKind=SimpleNamespace(DELTA=1, FINAL_ONLY=2))
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", kinds)
    monkeypatch.setattr(VLLMGenerator, "_make", make)
    monkeypatch.setattr(VLLMGenerator, "_load", load)
    return made


@pytest.fixture
def policy(policy_folder: Path) -> PolicySpec:
    return PolicySpec(load_policy(str(policy_folder)), load_tokenizer(str(policy_folder)))


def ready(generator: VLLMGenerator, policy: PolicySpec) -> VLLMGenerator:
    generator.start(policy)
    generator.load_weights(generator.weights(), 0)
    return generator


def tokens(groups: list[RolloutGroup]) -> list[list[int]]:
    return [rollout.completion.token_ids_T.tolist() for group in groups for rollout in group.rollouts]


@pytest.mark.parametrize("fault", [KeyboardInterrupt(), RuntimeError("CUDA error"), SystemExit(1)], ids=repr)
def test_an_engine_whose_step_broke_off_decodes_no_more_and_the_next_start_makes_another(
    engines: list[Engine], policy: PolicySpec, fault: BaseException
) -> None:
    generator = ready(VLLMGenerator(4), policy)
    loop = RolloutLoop(generator)
    expected = tokens(loop.collect(PROMPTS, 3, SAMPLING, seed=0)[0])
    engines[0].num_steps, engines[0].fault = 0, fault
    with pytest.raises(type(fault)):
        loop.collect(PROMPTS, 3, SAMPLING, seed=0)
    asked = dict(engines[0].requests)
    assert generator.version == -1 and generator.capacity().free_slots == 4
    for again in (
        lambda: loop.collect(PROMPTS, 3, SAMPLING, seed=0),
        lambda: generator.load_weights(generator.weights(), 1),
    ):
        with pytest.raises(
            WeightSyncError, match=r"broke off in the middle of a step .* call start again, as the next"
        ):
            again()
    assert engines[0].requests == asked  # it has been left alone
    generator.close()
    ready(generator, policy)
    assert len(engines) == 2 and not engines[1].requests
    assert tokens(loop.collect(PROMPTS, 3, SAMPLING, seed=0)[0]) == expected


def test_an_interrupt_while_given_tokens_are_scored_leaves_no_request_in_the_engine(
    engines: list[Engine], policy: PolicySpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = ready(VLLMGenerator(4), policy)
    monkeypatch.setattr(sys.modules["vllm"], "SamplingParams", lambda **fields: {"max_tokens": fields["max_tokens"]})
    add = engines[0].add_request

    def interrupted(request_id: str, *args: Any, **kwargs: Any) -> None:
        add(request_id, *args, **kwargs)
        if request_id == "1":
            raise KeyboardInterrupt

    monkeypatch.setattr(engines[0], "add_request", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generator.score([[2, 3], [4, 5], [6, 7]])
    assert not engines[0].requests and generator.version == 0


@pytest.mark.parametrize("lost", ["logprobs", "versions"])
def test_a_stream_that_an_interrupt_has_cut_in_a_token_is_handed_back_without_that_token(
    policy: PolicySpec, lost: str
) -> None:
    class Interrupted(list[Any]):
        def __iadd__(self, more: Any) -> Any:
            raise KeyboardInterrupt

    streams = EngineRequests(policy)
    stream = streams.open(Request(PROMPTS[0], (0,), SAMPLING), 5.0, "")
    streams.give_ticket(stream)
    streams.take(stream, SampledChunk([5, 6], [-1.0, -2.0], None), 0, StepEvents())
    setattr(stream, lost, Interrupted(getattr(stream, lost)))
    with pytest.raises(KeyboardInterrupt):
        streams.take(stream, SampledChunk([7], [-3.0], None), 0, StepEvents())
    assert stream.token_ids == [5, 6, 7]
    prefix = stream.so_far.prefix
    assert prefix.token_ids_T.tolist() == [5, 6] and torch.equal(prefix.logprobs_T, torch.tensor([-1.0, -2.0]))
