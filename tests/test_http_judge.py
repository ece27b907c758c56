"""The judge behind HTTP, against a real server on loopback."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from lit_grpo.rewards import HTTPJudge, RewardError, RewardFunction, RewardRunner, RewardSpec
from lit_grpo.rewards.http_judge import is_on_loopback

TEMPLATE = "Q: {prompt}\nA: {completion}\nExpected: {answer}\nGive a score from 0 to 10."


class Judge(BaseHTTPRequestHandler):
    """Marks a completion with its number of letters; what is asked for otherwise is in ``server.faults``."""

    server: Any

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, self.headers.get("Authorization"), body))
        status, reply = self.server.faults.pop(0) if self.server.faults else (200, None)
        text = body["messages"][0]["content"]
        content = f"Out of 10 I give: {len(text.split('A: ')[1].splitlines()[0])}"
        reply = {"choices": [{"message": {"role": "assistant", "content": content}}]} if reply is None else reply
        time.sleep(self.server.delay_s)
        data = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        with contextlib.suppress(BrokenPipeError):  # who asked has not waited
            self.end_headers()
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Stay silent."""


@pytest.fixture
def server() -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    server.daemon_threads, server.seen, server.faults, server.delay_s = True, [], [], 0.0
    threading.Thread(target=server.serve_forever, daemon=True).start()
    server.url = f"http://127.0.0.1:{server.server_port}/v1"
    yield server
    server.shutdown()
    server.server_close()


def test_the_judge_is_asked_with_prompt_completion_columns_and_key(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    judge = HTTPJudge(server.url, "m", TEMPLATE, api_key_env="JUDGE_KEY", scale=10, options={"temperature": 0})
    assert judge(prompt="2+2?", completion="four", answer=4) == 0.4
    assert server.seen == [
        (
            "/v1/chat/completions",
            "Bearer secret",
            {
                "model": "m",
                "messages": [{"role": "user", "content": TEMPLATE.format(prompt="2+2?", completion="four", answer=4)}],
                "temperature": 0,
            },
        )
    ]


def test_the_columns_of_the_template_are_checked_before_the_run(server: Any) -> None:
    args = {"url": server.url, "model": "m", "template": TEMPLATE}
    function = RewardFunction.load(RewardSpec("lit_grpo.rewards.HTTPJudge", args=args))
    function.check_columns(["answer"])
    with pytest.raises(ValueError, match="needs the column 'answer', which the data does not have"):
        function.check_columns(["solution"])


def test_completions_of_a_group_are_judged_at_the_same_time_and_failures_asked_again(server: Any) -> None:
    from test_reward_runner import make_group

    server.delay_s, server.faults = 0.2, [(503, {"error": "busy"}), (200, {"no": "choices"})]
    args = {"url": server.url, "model": "m", "template": TEMPLATE}
    spec = RewardSpec("lit_grpo.rewards.HTTPJudge", args=args, retries=2, retry_pause_s=0.01)
    runner, group = RewardRunner([RewardFunction.load(spec)]), make_group(*["abc"] * 32, answer=3)
    began_s = time.monotonic()
    runner.score(group)
    runner.close()
    assert [rollout.reward for rollout in group.rollouts] == [3.0] * 32
    assert len(server.seen) == 34
    assert time.monotonic() - began_s < 4  # one after another they take 6.8 s


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ((401, {"error": "no key"}), r"answers 401: '\{\"error\": \"no key\"\}'"),
        ((200, {"no": "choices"}), "answers no chat completion"),
        (
            (200, {"choices": [{"message": {"content": "I would rather not"}}]}),
            "the judge's reply 'I would rather not' holds no score that pattern matches",
        ),
    ],
)
def test_a_reply_without_a_score_says_what_came(server: Any, fault: Any, problem: str) -> None:
    server.faults = [fault]
    with pytest.raises((RuntimeError, ValueError), match=problem):
        HTTPJudge(server.url, "m", TEMPLATE)(prompt="p", completion="c", answer=1)


def test_a_judge_that_is_slow_or_away_fails_the_call(server: Any) -> None:
    from test_reward_runner import make_group

    server.delay_s = 1.0
    with pytest.raises(RuntimeError, match=r"does not answer within 0.1 s \(timeout_s\)"):
        HTTPJudge(server.url, "m", TEMPLATE, timeout_s=0.1)(prompt="p", completion="c", answer=1)
    away = HTTPJudge("http://127.0.0.1:9", "m", TEMPLATE)
    with pytest.raises(RewardError, match=r"RuntimeError: the judge at http://127.0.0.1:9/chat/completions does not"):
        RewardRunner([RewardFunction.of(away, "judge")]).score(make_group("a", answer=1))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"url": "judge:80"}, "url must begin with http:// or https://, not 'judge:80'."),
        ({"template": "Judge {prompt}"}, "template has no {completion}, so every completion would score the same"),
        ({"template": "{completion} {"}, "template '{completion} {' is malformed"),
        ({"template": '{completion} {"a": 1}'}, 'template holds {"a"}, which is no column'),
        ({"pattern": r"\d+"}, r"has no group; put parentheses"),
        ({"api_key_env": "NO_SUCH_KEY"}, "api_key_env names NO_SUCH_KEY, which is not set in the environment; export"),
        ({"scale": 0}, "scale must not be 0"),
    ],
)
def test_what_cannot_judge_is_refused_before_the_run(changes: dict[str, Any], problem: str) -> None:
    settings: dict[str, Any] = {"url": "http://localhost", "model": "m", "template": TEMPLATE}
    with pytest.raises(ValueError) as caught:
        HTTPJudge(**(settings | changes))
    assert problem in str(caught.value)


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
def test_a_judge_on_this_machine_is_asked_without_a_proxy(
    variable: str, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "http://127.0.0.1:9")  # nobody listens there
    for host in ("127.0.0.1", "localhost"):
        url = server.url.replace("127.0.0.1", host)
        assert HTTPJudge(url, "m", TEMPLATE)(prompt="2+2?", completion="four", answer=4) == 4


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8000/v1", True),
        ("http://127.9.9.9/v1", True),
        ("http://[::1]:8000/v1", True),
        ("http://localhost/v1", True),
        ("http://judge.localhost/v1", True),
        ("http://localhost.example.com/v1", False),
        ("http://10.0.0.1/v1", False),
        ("https://api.openai.com/v1", False),
    ],
)
def test_what_lies_on_this_machine_is_told_from_what_does_not(url: str, expected: bool) -> None:
    assert is_on_loopback(url) == expected


@pytest.fixture
def slow_server() -> Iterator[str]:
    """Sends one byte at a time, or more than anyone wants."""

    class Drips(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                for _ in range(200):
                    self.wfile.write(b" " if "drips" in self.path else b" " * 2**16)
                    self.wfile.flush()
                    time.sleep(0.05 if "drips" in self.path else 0)

        def log_message(self, format: str, *args: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Drips) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_the_time_limit_is_of_the_whole_call_and_a_reply_has_a_limit_of_bytes(slow_server: str) -> None:
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"does not answer within 0.5 s \(timeout_s\)"):
        HTTPJudge(f"{slow_server}/drips", "m", TEMPLATE, timeout_s=0.5)(prompt="p", completion="c", answer=1)
    assert time.monotonic() - start < 3
    with pytest.raises(RuntimeError, match="answers more than 4 MiB; limit max_tokens"):
        HTTPJudge(f"{slow_server}/floods", "m", TEMPLATE, timeout_s=20.0)(prompt="p", completion="c", answer=1)
