"""A teacher on a vLLM server: its log-probs are those of the model that it serves, and what is refused.

The server of these tests answers as vLLM does, with a policy in this process.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import random_policy, save_tokenizer
from hand_made import VOCAB_SIZE, random_groups
from test_teachers import other_policy, rollouts_of, teacher_of

from lit_grpo.policy.loading import load_tokenizer
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.types import AllGather, alone
from lit_grpo.update.logprobs.teacher import ServerTeacher, TeacherSettings


class Served:
    """A server on loopback; ``spoil`` changes or breaks an answer before it is sent."""

    def __init__(self, tokenizer: Any) -> None:
        self.model, self.tokenizer, self.asked = other_policy(), tokenizer, list[str]()
        self.spoil: Callable[[str, Any], Any] = lambda path, answer: answer
        served = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer({"data": [{"id": "large", "max_model_len": 128}]})

            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path == "/detokenize":
                    return self.answer({"prompt": served.tokenizer.decode(asked["tokens"])})
                if "prompt_logprobs" not in asked:  # tests say what it samples
                    return self.answer({"choices": [{}]})
                with torch.no_grad():
                    ids = torch.tensor([asked["prompt"]])
                    logprobs_TV = served.model(input_ids=ids).logits[0].log_softmax(-1)
                told: list[Any] = [None]
                for token, row in zip(asked["prompt"][1:], logprobs_TV[:-1], strict=True):
                    order = row.argsort(descending=True).tolist()
                    named = dict.fromkeys([*order[: asked["prompt_logprobs"]], token])
                    told.append({str(n): {"logprob": float(row[n]), "rank": order.index(n) + 1} for n in named})
                self.answer({"choices": [{"prompt_logprobs": told}]})

            def answer(self, answer: Any) -> None:
                served.asked.append(self.path)
                answer = served.spoil(self.path, answer)
                status, body = answer if isinstance(answer, tuple) else (200, json.dumps(answer))
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return load_tokenizer(str(folder))


@pytest.fixture
def served(tokenizer: Any) -> Iterator[Served]:
    served = Served(tokenizer)
    yield served
    served.server.shutdown()


def connected(served: Served, **settings: Any) -> ServerTeacher:
    return ServerTeacher(TeacherSettings(served.url, **settings), served.tokenizer, VOCAB_SIZE)


def unused(*_: Any) -> Any:
    raise AssertionError("a server's teacher sends nothing through a model")


@pytest.mark.parametrize("top_k", [0, 3])
def test_its_scores_are_those_of_the_model(served: Served, top_k: int) -> None:
    rollouts = rollouts_of(random_groups(served.model, [[0.0] * 3] * 2))
    found = connected(served).score(unused, rollouts, lambda value: [value], top_k)

    def measure(rollouts: Any, what: Any, lend: Any = None, /) -> Any:
        values = {}
        for each in rollouts:
            ids, begin = [*each.prompt.token_ids, *each.completion.token_ids_T.tolist()], len(each.prompt.token_ids)
            with lend() as model, torch.no_grad():
                hidden = model.model(input_ids=torch.tensor([ids])).last_hidden_state[0, begin - 1 : -1]
                values[each.completion.request.key] = what(model, hidden, each.completion.token_ids_T, hidden[:, 0])
        return values

    expected = teacher_of(served.model).score(measure, rollouts, lambda value: [value], top_k)
    assert found.keys() == expected.keys() and len(found) == 6
    for key, its in found.items():
        assert torch.allclose(its.logprobs_T, expected[key].logprobs_T.float(), atol=1e-5)
        assert torch.equal(its.top_ids_TK, expected[key].top_ids_TK)
        assert its.top_logprobs_TL.shape == (len(its.logprobs_T), top_k and top_k + 1)
        assert torch.allclose(its.top_logprobs_TL, expected[key].top_logprobs_TL.float(), atol=1e-5)
        if top_k:
            top = expected[key].top_logprobs_TL.exp()
            assert torch.allclose(its.entropy_T, -(top * top.log()).sum(1).float(), atol=1e-4)
            assert bool((its.entropy_T <= expected[key].entropy_T + 1e-4).all())


def test_a_server_that_is_busy_is_asked_again(served: Served) -> None:
    teacher, left = connected(served), [2]

    def busy(path: str, answer: Any) -> Any:
        left[0] -= path == "/v1/completions"
        return (503, "busy") if left[0] >= 0 else answer

    served.spoil = busy
    rollouts = rollouts_of(random_groups(served.model, [[0.0]]))
    scores = teacher.score(unused, rollouts, lambda value: [value])
    assert len(scores) == 1 and served.asked.count("/v1/completions") == 3


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            (400, "too long"),
            "gives no log-probs: it answers 400 to /v1/completions: 'too long'. The batch was not trained on",
        ),
        ({"choices": []}, "gives no log-probs: list index out of range"),
        ({"choices": [{"prompt_logprobs": [None, None]}]}, "gives no log-probs"),
        ((200, "<html>"), "gives no log-probs: Expecting value"),
        ((503, "busy"), "gives no log-probs: it answers 503 .* for 0.6 s"),
    ],
)
def test_an_answer_without_log_probs_teaches_nothing(served: Served, answer: Any, message: str) -> None:
    teacher = connected(served, timeout_s=0.6)
    served.spoil = lambda path, given: answer
    with pytest.raises(ValueError, match=message):
        teacher.score(unused, rollouts_of(random_groups(served.model, [[0.0]])), lambda value: [value])


TOKENS = [3, 4, 1]


def completed(served: Served, answer: Any, all_gather: AllGather = alone) -> Any:
    """What a server's teacher makes of an answer to two prefixes, of no token and of two."""
    served.spoil = lambda path, given: answer if path == "/v1/completions" else given
    rollouts = rollouts_of(random_groups(other_policy(), [[0.0] * 2]))
    requests = [
        replace(each.completion.request, prefix=each.completion.until(2 * place)) for place, each in enumerate(rollouts)
    ]
    spec = PolicySpec(random_policy(), served.tokenizer)
    return requests, connected(served, timeout_s=0.6).complete(requests, spec, 7, all_gather)


def test_what_a_server_samples_follows_each_prefix(served: Served) -> None:
    answer = {"choices": [{"token_ids": TOKENS, "finish_reason": "stop"}]}
    requests, found = completed(served, answer)
    assert found.keys() == {each.key for each in requests}
    for request in requests:
        its, number = found[request.key], request.prefix.num_tokens
        assert its.token_ids_T.tolist() == [*request.prefix.token_ids_T.tolist(), *TOKENS]
        assert its.versions_T.tolist() == [*request.prefix.versions_T.tolist(), 7, 7, 7]
        assert its.finish_reason == "stop" and its.num_tokens == number + 3


def test_a_problem_of_any_rank_ends_all_of_them_with_its_sentence(served: Served) -> None:
    right, wrong = ({"choices": [{"token_ids": each, "finish_reason": "stop"}]} for each in (TOKENS, []))
    told = list[str]()

    def gather(problem: Any) -> list[Any]:
        told.append(problem)
        return [problem, "of another rank."]

    with pytest.raises(ValueError, match=r"^of another rank\.$"):
        completed(served, right, gather)
    with pytest.raises(ValueError, match=r"gives no tokens: it answers \[\]"):
        completed(served, wrong, gather)
    assert told[0] == "" and "it answers []" in told[1]  # the other rank gets to know it


def test_tokens_that_the_policy_does_not_know_complete_nothing(served: Served) -> None:
    answer = {"choices": [{"token_ids": [3, VOCAB_SIZE], "finish_reason": "stop"}]}
    assert completed(served, answer)[1] == {}


@pytest.mark.parametrize(
    ("token_ids", "reason"),
    [
        ([], "stop"),  # nothing
        ([3] * 1000, "length"),  # more than were asked for
        ([-1], "stop"),
        ([True], "stop"),
        (["3"], "stop"),
        ([3.0], "stop"),
        ([None], "stop"),
        ("34", "stop"),
        (None, "stop"),
        (TOKENS, "abort"),  # it was cut off
        (TOKENS, None),
    ],
)
def test_an_answer_that_is_no_completion_is_refused_in_one_sentence(
    served: Served, token_ids: Any, reason: Any
) -> None:
    with pytest.raises(ValueError, match=r"^model\.teacher\.policy 'http://\S+' gives no tokens: it answers .*\.$"):
        completed(served, {"choices": [{"token_ids": token_ids, "finish_reason": reason}]})


@pytest.mark.parametrize(
    "answer", [{}, {"choices": []}, {"choices": [{}]}, [], 3, (400, "too long"), (200, "<html>"), (503, "busy")]
)
def test_no_answer_is_refused_in_one_sentence(served: Served, answer: Any) -> None:
    with pytest.raises(ValueError, match=r"^model\.teacher\.policy 'http://\S+' gives no tokens: .*\.$"):
        completed(served, answer)


def test_log_probs_that_are_not_finite_are_refused(served: Served) -> None:
    teacher = connected(served)
    with torch.no_grad():
        served.model.get_output_embeddings().weight.fill_(math.nan)
    with pytest.raises(ValueError, match="the log-prob nan at its trained token 0"):
        teacher.score(unused, rollouts_of(random_groups(other_policy(), [[0.0]])), lambda value: [value])


def test_a_likely_token_that_the_policy_does_not_know_is_refused(served: Served) -> None:
    teacher = ServerTeacher(TeacherSettings(served.url), served.tokenizer, 1)
    with pytest.raises(ValueError, match=r"it names token \d+, and the policy knows 1 tokens"):
        teacher.score(unused, rollouts_of(random_groups(served.model, [[0.0]])), lambda value: [value], 2)


def test_tokens_that_only_the_server_knows_are_passed_over(served: Served) -> None:
    """Of the likeliest four, those that the policy has."""
    few, rollouts = VOCAB_SIZE - 3, rollouts_of(random_groups(served.model, [[0.0] * 4]))
    teacher = ServerTeacher(TeacherSettings(served.url), served.tokenizer, few)
    with torch.no_grad():
        served.model.get_output_embeddings().weight[few] *= 6  # among the likeliest at many places
    found = teacher.score(unused, rollouts, lambda value: [value], 4)
    for rollout in rollouts:
        ids = torch.tensor([[*rollout.prompt.token_ids, *rollout.completion.token_ids_T.tolist()]])
        with torch.no_grad():
            logits_TV = served.model(input_ids=ids).logits[0, len(rollout.prompt.token_ids) - 1 : -1]
        expected = logits_TV[:, :few].topk(4).indices
        assert torch.equal(found[rollout.completion.request.key].top_ids_TK, expected)
        assert (logits_TV.argmax(1) >= few).any()


@pytest.mark.parametrize("status", [200, 400])
def test_a_server_is_asked_whether_it_reads_the_policys_last_row(status: int, served: Served) -> None:
    served.spoil = lambda path, answer: (status, "{}") if path == "/v1/completions" else answer
    served.model.resize_token_embeddings(VOCAB_SIZE + 64)
    teacher = ServerTeacher(TeacherSettings(served.url), served.tokenizer, VOCAB_SIZE + 64)
    assert teacher.num_tokens == (VOCAB_SIZE + 64 if status == 200 else len(served.tokenizer))


def test_a_server_with_another_vocabulary_is_refused_with_the_first_token_that_differs(served: Served) -> None:
    plain = served.tokenizer
    served.tokenizer = SimpleNamespace(decode=lambda ids: plain.decode([8 if each == 7 else each for each in ids]))
    with pytest.raises(ValueError, match=r"has another vocabulary than the policy: it reads token 7 as '6', and the"):
        ServerTeacher(TeacherSettings(served.url), plain, VOCAB_SIZE)


def test_what_is_no_server_is_refused_at_once(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"is no vLLM server that can be used: it cannot be reached .*for 0.1 s"):
        ServerTeacher(TeacherSettings("http://127.0.0.1:9", timeout_s=0.1), served.tokenizer, VOCAB_SIZE)
    served.spoil = lambda path, given: (401, "no key")
    with pytest.raises(ValueError, match=r"is no vLLM server that can be used: it answers 401 to /v1/models"):
        connected(served)
    served.spoil = lambda path, given: (200, "<html>")
    with pytest.raises(ValueError, match=r"is no vLLM server that can be used: Expecting value"):
        connected(served)
    with pytest.raises(ValueError, match=r"is no vLLM server that can be used: it cannot be reached \(InvalidURL"):
        ServerTeacher(TeacherSettings("http://127.0.0.1:port", timeout_s=0.1), served.tokenizer, VOCAB_SIZE)
    monkeypatch.setenv("TEACHER_KEY", "k")
    with pytest.raises(ValueError, match=r"would send a key readably to 'http://example.com'; give an https"):
        TeacherSettings("http://example.com", api_key_env="TEACHER_KEY")
    with pytest.raises(ValueError, match=r"names NOT_SET, which is not set in the environment"):
        TeacherSettings("https://example.com", api_key_env="NOT_SET")


def test_a_row_that_is_too_long_for_the_server_is_refused_beforehand(served: Served) -> None:
    teacher = connected(served)
    teacher.check_context(127)
    with pytest.raises(ValueError, match=r"has a context of 128 tokens, and a prompt with its completion and one more"):
        teacher.check_context(128)
