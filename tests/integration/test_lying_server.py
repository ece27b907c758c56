"""Runs on a server that lies about completions: each token that is trained on is right, or the run ends and says why.

Two servers sample the same tokens, and the first of them lies. A run on both ends with the weights of a run on honest
ones, or its first update is refused, with the address of the server that lies.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from conftest import table_rows
from hand_made import by_text, make_module, make_trainer, save_policy_for_vllm, sgd, weights_of

from lit_grpo.callbacks import RolloutScheduler, WeightSync
from lit_grpo.data.module import PromptDataModule
from lit_grpo.plugins import Listener
from lit_grpo.policy.loading import load_policy, load_tokenizer
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.rollout.generator import GenerationError, StepEvents
from lit_grpo.rollout.loop import RolloutLoop
from lit_grpo.rollout.vllm.guard import KEY_VARIABLE, TOKEN_VARIABLE
from lit_grpo.rollout.vllm.server import VLLMServerGenerator
from lit_grpo.scheduling.ledger import RequestLedger
from lit_grpo.types import Prompt, SamplingParams
from lit_grpo.update.metrics import LogprobGapError
from tests.doubles.lying_server import CHUNK, Lie, Sampled, ScriptedServer, honest, serving

pytest.importorskip("uvicorn", reason="what vLLM serves with is not installed")
END, STOP = 1, "7"


def changed(values: Sequence[Any], place: int, value: Any) -> list[Any]:
    return [*values[:place], value, *values[place + 1 :]]


def cut(sampled: Sampled, reason: str) -> Sequence[Any]:
    """The first chunk, as if it were all."""
    return sampled.told(token_ids=sampled.token_ids[:CHUNK], logprobs=sampled.logprobs[:CHUNK], reason=reason)


def without(events: list[Any], place: int) -> list[Any]:
    return events[:place] + events[place + 1 :]


def refitted(sampled: Sampled, token_ids: list[int], logprobs: list[float]) -> Sequence[Any]:
    """Other tokens, counted as they are, that end as the completion's own do."""
    most = len(sampled.token_ids) if sampled.reason == "stop" else sampled.max_tokens
    kept = most - 1
    own = sampled.token_ids[-1:], sampled.logprobs[-1:]
    return sampled.told(token_ids=(token_ids[:kept] + own[0]), logprobs=(logprobs[:kept] + own[1]))


def other_of(server: ScriptedServer, sampled: Sampled) -> Sampled:
    """Another completion of as many tokens or more, if there was one."""
    several = [each for each in server.sampled[:-1] if len(each.token_ids) >= len(sampled.token_ids)]
    return several[-1] if several else sampled


def swapped(server: ScriptedServer, sampled: Sampled) -> Sequence[Any]:
    events, other = sampled.told(), other_of(server, sampled).told()
    return [other[0], *events[1:]] if len(sampled.token_ids) > CHUNK else events


def swapped_and_named(server: ScriptedServer, sampled: Sampled) -> Sequence[Any]:
    other = other_of(server, sampled)
    if len(sampled.token_ids) <= CHUNK:
        return sampled.told()
    token_ids = other.token_ids[:CHUNK] + sampled.token_ids[CHUNK:]
    return sampled.told(token_ids=token_ids, logprobs=other.logprobs[:CHUNK] + sampled.logprobs[CHUNK:])


def first_choice(sampled: Sampled, **fields: Any) -> list[Any]:
    """Its events, with other fields in the choice of the first one."""
    events = sampled.told()
    events[0]["choices"][0] |= fields
    return events


def with_logprob(value: Any) -> Lie:
    return lambda server, sampled: sampled.told(logprobs=changed(sampled.logprobs, 0, value))


def with_token(value: Any) -> Lie:
    return lambda server, sampled: sampled.told(token_ids=changed(sampled.token_ids, 0, value))


def other_token(sampled: Sampled) -> int:
    return 2 + (sampled.token_ids[0] + 11) % 30


def with_versions(spans: Any) -> Lie:
    def lie(server: ScriptedServer, sampled: Sampled) -> Sequence[Any]:
        events = sampled.told()
        events[-2]["choices"][0]["weight_versions"] = spans
        return events

    return lie


def wrong_last_reason(server: ScriptedServer, sampled: Sampled) -> Sequence[Any]:
    return sampled.told(reason="length" if sampled.reason == "stop" else "stop")


def end_in_the_middle(server: ScriptedServer, sampled: Sampled) -> Sequence[Any]:
    return refitted(sampled, changed(sampled.token_ids, 0, END), sampled.logprobs)


def on_and_on(token: int) -> Lie:
    """Tokens without end, in events that are counted right."""

    def lie(server: ScriptedServer, sampled: Sampled) -> Iterator[Any]:
        for number in range(1, 40):
            one = sampled.told(token_ids=[token] * number, logprobs=[-1.0] * number)[-2]
            one["choices"][0] |= {"finish_reason": None, "token_ids": [token]}
            one["choices"][0]["logprobs"] = {"content": [{"token_id": token, "logprob": -1.0}]}
            yield one

    return lie


def empties(server: ScriptedServer, sampled: Sampled) -> Iterator[Any]:
    (event, *_) = sampled.told(token_ids=[], logprobs=[])
    event["choices"][0]["finish_reason"] = None
    for _ in range(10_000):
        yield event
        yield 0.05


def slowly(server: ScriptedServer, sampled: Sampled) -> Iterator[Any]:
    for event in sampled.told():
        yield 0.05
        yield event


def with_drafts(counts: Any) -> Lie:
    """Its events, and after its end what it says that was drafted for it."""

    def lie(server: ScriptedServer, sampled: Sampled) -> Sequence[Any]:
        *events, last = sampled.told()
        return [*events, {**last, "metrics": {"speculative_decoding": counts}}]

    return lie


def in_uneven_parts(server: ScriptedServer, sampled: Sampled) -> Iterator[Any]:
    """One token, then all others: what a step with drafts brings."""
    begun = 0
    for end in (1, len(sampled.token_ids)):
        if begun < end:
            event = sampled.told()[-2]
            choice = event["choices"][0]
            pairs = zip(sampled.token_ids[begun:end], sampled.logprobs[begun:end], strict=True)
            choice["token_ids"] = sampled.token_ids[begun:end]
            choice["logprobs"] = {"content": [{"token_id": token, "logprob": each} for token, each in pairs]}
            if end < len(sampled.token_ids):
                choice |= {"finish_reason": None, "weight_versions": None}
            yield {**event, "choices": [choice], "usage": {**event["usage"], "completion_tokens": end}}
            begun = end
    yield sampled.told()[-1]


def past_its_end(server: ScriptedServer, sampled: Sampled) -> Sequence[Any]:
    """Whatever has ended it, three more tokens."""
    more = {"token_ids": [*sampled.token_ids, 5, 6, 8], "logprobs": [*sampled.logprobs, -3.0, -3.0, -3.0]}
    return sampled.told(**more, reason="length")


class Told(NamedTuple):
    """A lie, and what is said of it: a pattern after the server's address; nothing if its tokens are right."""

    lie: Lie
    said: str
    in_update: bool = False
    timeout_s: float = 60.0


LIES: dict[str, Told] = {
    "ends early with stop": Told(
        lambda server, sampled: cut(sampled, "stop"),
        r"ends a completion with 'stop' after 3 of 12 tokens, of which the last, \d+, is no end token or end of a stop",
    ),
    "ends early with length": Told(
        lambda server, sampled: cut(sampled, "length"), r"ends a completion with 'length' after \d+ of 12 tokens\."
    ),
    "ends with the other reason": Told(wrong_last_reason, r"ends a completion with '(stop|length)' after \d+ of 12"),
    "an end token in the middle": Told(end_in_the_middle, r"goes on after one of the end tokens \[1\]\."),
    "goes on after its end": Told(
        past_its_end, r"goes on after (one of the end|the stop string)|sends \d+ tokens? more than max_to"
    ),
    "doubles a chunk": Told(
        lambda server, sampled: [sampled.told()[0], *sampled.told()],
        r"has sent \d+ tokens of a completion, where it counts \d+: some are missing, or|sends \d+ tokens? more than",
    ),
    "doubles a chunk and counts it": Told(
        lambda server, sampled: refitted(
            sampled, sampled.token_ids[:CHUNK] + sampled.token_ids, sampled.logprobs[:CHUNK] + sampled.logprobs
        ),
        "",
        in_update=True,
    ),
    "drops a chunk": Told(
        lambda server, sampled: without(sampled.told(), 0) if len(sampled.token_ids) > CHUNK else sampled.told(),
        r"has sent \d+ tokens of a completion, where it counts \d+: some are missing, or came twice",
    ),
    "swaps chunks of two completions": Told(swapped, r"sends '.*' as a part of a completion, which is of another\."),
    "swaps chunks and their names": Told(swapped_and_named, "", in_update=True),
    "a wrong token with the log-prob of another": Told(
        lambda server, sampled: first_choice(
            sampled, token_ids=changed(sampled.told()[0]["choices"][0]["token_ids"], 0, other_token(sampled))
        ),
        r"sends the tokens \[.*\] with the log-probs of \[.*\]\.",
    ),
    "a wrong token with the right log-prob": Told(
        lambda server, sampled: (
            sampled.told(token_ids=changed(sampled.token_ids, 0, other_token(sampled)))
            if len(sampled.token_ids) > 1
            else sampled.told()
        ),
        "",
        in_update=True,
    ),
    "two tokens in the other order": Told(
        lambda server, sampled: refitted(
            sampled,
            [*sampled.token_ids[:2][::-1], *sampled.token_ids[2:]],
            [*sampled.logprobs[:2][::-1], *sampled.logprobs[2:]],
        ),
        "",
        in_update=True,
    ),
    "log-probs a little off": Told(
        lambda server, sampled: sampled.told(logprobs=[each - 0.06 for each in sampled.logprobs]), "", in_update=True
    ),
    "a log-prob that is NaN": Told(with_logprob(math.nan), r"sends the log-prob nan, which none can be"),
    "a log-prob that is infinite": Told(with_logprob(-math.inf), r"sends the log-prob -inf, which none can be"),
    "a log-prob above 0": Told(with_logprob(0.5), r"sends the log-prob 0.5, which none can be"),
    "a log-prob that is vLLM's NaN": Told(with_logprob(-9999.0), r"sends the log-prob -9999.0, which none can be"),
    "no log-prob": Told(with_logprob(None), r"sends the log-prob None, which none can be"),
    "a token beyond the vocabulary": Told(with_token(35), r"sends the token 35, which is not among the 35 known"),
    "a negative token": Told(with_token(-1), r"sends the token -1, which is not among"),
    "a token that is true": Told(with_token(True), r"sends the token True, which is not among"),
    "a token that is text": Told(with_token("5"), r"sends the token '5', which is not among"),
    "other weights": Told(
        with_versions([{"version": "theirs", "start": 0, "end": 9}]), r"has sampled with the weights \['theirs'\]"
    ),
    "no weights": Told(with_versions(None), r"has sampled with the weights \[\]"),
    "a span that is too short": Told(
        lambda server, sampled: with_versions([{"version": sampled.version, "start": 0, "end": 0}])(server, sampled),
        r"has sent \d+ tokens of a completion, where it counts 0",
    ),
    "a slow drip": Told(slowly, ""),
    "tokens without end": Told(on_and_on(5), r"sends 1 token more than max_tokens"),
    "events without tokens": Told(empties, r"has hung: .* moved for 3 s", timeout_s=3.0),
    "a reason of its own": Told(
        lambda server, sampled: sampled.told(reason="tired"), r"broke off a completion: tired\."
    ),
    "two ends": Told(lambda server, sampled: [*sampled.told()[:-1], *sampled.told()[-2:]], ""),
    "lines that are no events": Told(
        lambda server, sampled: [b"tokens: 1, 2, 3\n", *sampled.told()], r"sends 'tokens: 1, 2, 3' as a part of a compl"
    ),
    "an event that is no JSON": Told(
        lambda server, sampled: [b"data: 1, 2, 3\n\n", *sampled.told()], r"sends 'data: 1, 2, 3' as a part of a complet"
    ),
    "an event that is nested without end": Told(
        lambda server, sampled: [b'data: {"choices": ' + b"[" * 100_000 + b"\n\n"],
        r"sends '.*in which (RecursionError|JSONDec)",
    ),
    "a choice of another number": Told(
        lambda server, sampled: first_choice(sampled, index=1),
        r"sends '.*' as a part of a completion, which is of another\.",
    ),
    "two choices": Told(
        lambda server, sampled: [
            {**sampled.told()[0], "choices": 2 * sampled.told()[0]["choices"]},
            *sampled.told()[1:],
        ],
        r"sends '.*' as a part of a completion, which is of another\.",
    ),
    "tokens in uneven parts": Told(in_uneven_parts, ""),
    "draft counts": Told(with_drafts({"num_draft_tokens": 9, "num_accepted_draft_tokens": 4}), ""),
    "draft counts that are none": Told(with_drafts({"num_draft_tokens": -9, "num_accepted_draft_tokens": "4"}), ""),
    "draft counts of another shape": Told(with_drafts([[], None]), ""),
    "no reason at the end": Told(lambda server, sampled: [], r"ended a completion without a reason\."),
}
QUICK = [
    "ends early with stop",
    "doubles a chunk",
    "swaps chunks and their names",
    "a wrong token with the right log-prob",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy_for_vllm(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def servers(folder: Path) -> Iterator[list[tuple[ScriptedServer, str]]]:
    """Two servers and their addresses; the first of them is told how to lie."""
    with pytest.MonkeyPatch.context() as monkeypatch, ExitStack() as stack:
        for variable in (KEY_VARIABLE, TOKEN_VARIABLE):
            monkeypatch.setenv(variable, "a-token-of-some-length")
        made = [ScriptedServer(folder) for _ in range(2)]
        yield [(server, stack.enter_context(serving(server))) for server in made]


class Run(NamedTuple):
    """What came of a run: its weights, or how it ended, and what its user was told."""

    weights: torch.Tensor
    version: int
    error: Exception | None
    said: str


def train(folder: Path, urls: Sequence[str], timeout_s: float = 60.0) -> Run:
    """Take two updates."""
    generator = VLLMServerGenerator(4, urls=list(urls), timeout_s=timeout_s)
    module = make_module(
        folder,
        generator=generator,
        optimizer=sgd(0.1),
        sampling=SamplingParams(max_tokens=12, stop=(STOP,)),
        rewards=[by_text()],
        num_generations=8,
    )
    data = PromptDataModule(str(folder), train=str(folder / "train.jsonl"), batch_size=2)
    trainer = make_trainer(RolloutScheduler(), WeightSync(), max_steps=2, max_epochs=-1)
    error = None
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            trainer.fit(module, datamodule=data)
        except (GenerationError, LogprobGapError, ValueError) as raised:
            error = raised
        finally:
            generator.close()
    said = "\n".join([*(str(each.message) for each in told), str(error or "")])
    return Run(weights_of(module), module.policy_version, error, said)


@pytest.fixture(scope="module")
def expected(folder: Path, servers: list[tuple[ScriptedServer, str]]) -> Run:
    run = train(folder, [url for _, url in servers])
    assert run.error is None and run.version == 2, run.said
    return run


@pytest.mark.parametrize("name", table_rows(LIES, QUICK))
def test_what_a_lying_server_sends_is_right_or_reaches_no_update(
    name: str, folder: Path, servers: list[tuple[ScriptedServer, str]], expected: Run
) -> None:
    (liar, url), (_, other) = servers
    told = LIES[name]
    liar.lie = told.lie
    run = train(folder, [url, other], told.timeout_s)
    liar.lie = honest
    if told.in_update:
        assert isinstance(run.error, LogprobGapError) and run.version == 0, run.said
        assert re.search(
            rf"the farthest is token \d+ of sample \(\d+,\) of prompt '.*', visit 0, which the vLLM server at {url} h",
            run.said,
        ), run.said
        return
    assert run.error is None and run.version == 2, run.said
    assert torch.equal(run.weights, expected.weights)
    assert other not in run.said
    if told.said:
        assert re.search(f"The vLLM server at {url} ({told.said})", run.said), run.said
    else:
        assert "vLLM server" not in run.said


def test_a_server_that_refuses_to_go_on_with_its_own_tokens_is_at_fault(
    folder: Path, servers: list[tuple[ScriptedServer, str]], expected: Run
) -> None:
    (liar, url), (_, other) = servers
    liar.lie = lambda server, sampled: sampled.told()[:1] if len(sampled.token_ids) > CHUNK else sampled.told()
    liar.refuses = lambda prompt: len(prompt) > 4  # those of the rows have 4
    run = train(folder, [url, other])
    liar.lie, liar.refuses = honest, lambda prompt: False
    assert run.error is None and torch.equal(run.weights, expected.weights)
    assert f"The vLLM server at {url} refuses a prompt: 400 max_tokens must be at least 1, got 0." in run.said
    assert "will go on from there on the server that is left." in run.said


def test_a_server_that_refuses_the_prompt_of_a_row_ends_the_run(
    folder: Path, servers: list[tuple[ScriptedServer, str]]
) -> None:
    (liar, url), _ = servers
    liar.refuses = lambda prompt: True
    run = train(folder, [url])
    liar.refuses = lambda prompt: False
    assert isinstance(run.error, ValueError) and run.version == 0
    assert str(run.error).startswith(f"The vLLM server at {url} refuses a prompt: 400 ")


@pytest.mark.nightly
def test_a_run_whose_only_server_lies_ends_with_its_name(
    folder: Path, servers: list[tuple[ScriptedServer, str]]
) -> None:
    (liar, url), _ = servers
    liar.lie = LIES["ends early with stop"].lie
    run = train(folder, [url])
    liar.lie = honest
    assert isinstance(run.error, GenerationError) and run.version == 0
    assert str(run.error).startswith(f"The vLLM server at {url} ends a completion with 'stop' after 3 of 12 tokens")
    assert str(run.error).endswith("No vLLM server is left; start them again and resume from the last checkpoint.")


SERVED: dict[str, tuple[Any, Any, str]] = {
    "as the run says": ({"method": "ngram", "num_speculative_tokens": 3}, {"num_speculative_tokens": 3}, ""),
    "of which the run says nothing": ({"method": "ngram", "num_speculative_tokens": 3}, None, ""),
    "of another number": (
        {"method": "ngram", "num_speculative_tokens": 4},
        {"num_speculative_tokens": 3},
        r"^The server at http\S+ has the speculative_config {.*4.*}, and .* {.*3.*}; start it with --spec",
    ),
    "that it does not make": (None, {"method": "ngram"}, "has the speculative_config None, and server_args"),
    "that change what is sampled": (
        {"method": "ngram", "num_speculative_tokens": 3, "rejection_sample_method": "synthetic"},
        None,
        r"^At the server http\S+ speculative_config.rejection_sample_method is 'synthetic', by which tokens are kept",
    ),
    "of an unknown method": ({"method": "theirs"}, None, r"speculative_config.method is 'theirs'; take ngram, "),
    "of no shape": ("fast", None, r"has the speculative_config 'fast', as no vLLM has. Start it with"),
}


@pytest.mark.parametrize("name", SERVED)
def test_the_drafts_of_a_named_server_are_those_of_the_run_or_refused(
    name: str, folder: Path, servers: list[tuple[ScriptedServer, str]]
) -> None:
    (server, url), _ = servers
    server.drafts, given, said = SERVED[name]
    generator = VLLMServerGenerator(4, urls=[url], server_args=given and {"speculative_config": given})
    policy = PolicySpec(load_policy(str(folder)), load_tokenizer(str(folder)))
    try:
        with pytest.raises(ValueError, match=said) if said else nullcontext():
            generator.start(policy)
    finally:
        generator.close()
        server.drafts = None


class Progress(Listener):
    """Keeps what the ledger has counted of each completion that decodes, and the tokens that are there of it."""

    def __init__(self, generator: VLLMServerGenerator) -> None:
        self.generator, self.counted, self.there = generator, list[int](), list[int]()

    def on_rollout_start(self, ledger: RequestLedger) -> None:
        self.ledger = ledger

    def on_step(self, events: StepEvents) -> None:
        progress = self.ledger.progress()
        for stream in self.generator._streams:
            self.counted.append(progress[stream.request.key])
            self.there.append(stream.num_sampled)


def test_the_ledger_counts_the_tokens_that_each_completion_has_got_and_the_metrics_what_was_drafted(
    folder: Path, servers: list[tuple[ScriptedServer, str]]
) -> None:
    (server, url), _ = servers
    counts = {"num_draft_tokens": 9, "num_accepted_draft_tokens": 2}
    last = {"metrics": {"speculative_decoding": counts}}
    server.lie = lambda server, sampled: [
        *(parts := list(in_uneven_parts(server, sampled)))[:-1],
        {**parts[-1], **last},
    ]
    generator = VLLMServerGenerator(4, urls=[url])
    policy = PolicySpec(load_policy(str(folder)), load_tokenizer(str(folder)))
    progress = Progress(generator)
    try:
        generator.start(policy)
        generator.load_weights(generator.weights(), 0)
        loop = RolloutLoop(generator, listeners=[progress])
        _, stats = loop.collect([Prompt("a", (2, 3, 4), "")], 12, SamplingParams(max_tokens=12), seed=0)
    finally:
        generator.close()
        server.lie = honest
    metrics = stats.metrics()
    assert progress.there and progress.counted == progress.there
    drafted, accepted = metrics["rollout/drafted_tokens"], metrics["rollout/accepted_tokens"]
    assert drafted % 9 == 0 and 9 * 8 <= drafted <= 9 * 12 and accepted == drafted / 9 * 2  # the last may come too late
