"""Requests that an agent may send: each gets a reply or one sentence, and neither it nor the others lose anything."""

from __future__ import annotations

import asyncio
import functools
import gzip
import json
import logging
import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from conftest import table_rows
from conversations import SAMPLING, call, chat_tokenizer, prompts_of
from test_agent import ASKED, ENDS, TOOL, Client, play, refusal, user, worker_of

from lit_grpo.environments.agent import fields
from lit_grpo.environments.agent.dialogue import Dialogue
from lit_grpo.environments.agent.endpoint import MAX_BYTES, Endpoint
from lit_grpo.environments.agent.fields import FIELDS, Field, Form, Route
from lit_grpo.environments.chat import Chat
from lit_grpo.environments.log import EnvironmentLog
from lit_grpo.process.calls import EventLoop
from lit_grpo.types import Completion, Request, SamplingParams


class Served:
    """An endpoint with conversations that a test talks to, each answered with the same words."""

    def __init__(self) -> None:
        self.loop, self.endpoint, self.chat = EventLoop("served"), Endpoint(), Chat(chat_tokenizer())
        self.worker = worker_of(lambda base_url, api_key, **columns: None)
        self.samples = 0
        self.says = "turn"

    def conversation(self, row: dict[str, Any], sampling: SamplingParams = SAMPLING) -> tuple[Client, Dialogue]:
        """A new trajectory of a row, and the client of its agent."""
        (prompt,) = prompts_of(self.worker, [row])

        async def serve() -> tuple[str, Dialogue]:
            log = EnvironmentLog([])
            request = Request(prompt, (0,), sampling)
            dialogue = Dialogue(request, self.chat, log, self._sample, self._apart, ENDS)
            return await self.endpoint.serve(dialogue, self.loop.at_end), dialogue

        base_url, dialogue = self.loop.run(serve())
        return Client(base_url, self.endpoint.api_key), dialogue

    async def _sample(self, request: Request) -> Completion:
        self.samples += 1
        ids = [*chat_tokenizer()(self.says)["input_ids"], chat_tokenizer().eos_token_id]
        return Completion.of(request, request.prefix.followed_by(ids, [-1.0] * len(ids), 0), "stop")

    async def _apart(self, function: Callable[..., Any], *args: Any) -> Any:
        with self.endpoint.at_work():
            return await asyncio.to_thread(function, *args)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    made = Served()
    yield made
    made.loop.close()
    made.worker.close()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the user is told; nothing that aiohttp or asyncio say of errors, and no traceback."""
    records = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert {record.name for record in records} <= {"lit_grpo.environments.log"}, caplog.text
    assert not any(record.exc_info for record in records)
    return [record.getMessage() for record in records]


def one_sentence(answered: httpx.Response) -> str:
    """The reason of a refusal."""
    told = answered.json()["error"]
    assert told.keys() == {"message", "type", "param", "code"} and re.fullmatch(r"\w+", told["code"])
    sentence = told["message"]
    assert len(sentence) < 600 and "\n" not in sentence and sentence.endswith("."), sentence
    assert "Server got itself" not in sentence and "Traceback" not in sentence
    return str(sentence)


# ---- each field with each kind of value -----------------------------------------------------------------

RIGHT: dict[Form, Any] = {
    fields.FLAG: True,
    fields.INTEGER: 3,
    fields.NUMBER: 0.25,
    fields.TEXT: "x",
    fields.NAME: "x",
    fields.OBJECT: {"a": 1},
    fields.LIST: ["x"],
    fields.TEXTS: ["x"],
    fields.INTEGERS: [5],
    fields.TEXT_OR_TEXTS: "x",
    fields.TEXT_OR_OBJECT: {"type": "x"},
    fields.FLAG_OR_INTEGER: True,
    fields.NUMBERS: {"5": 1.5},
    fields.FLAGS: {"include_usage": True},
}
WRONG: dict[Form, Any] = {
    **dict.fromkeys((fields.FLAG, fields.FLAG_OR_INTEGER, fields.INTEGER, fields.NUMBER), "1"),
    **dict.fromkeys((fields.TEXT, fields.NAME, fields.TEXT_OR_TEXTS, fields.TEXT_OR_OBJECT), 5),
    **{form: ["x"] for form in (fields.OBJECT, fields.NUMBERS, fields.FLAGS)},
    **{form: {"a": 1} for form in (fields.LIST, fields.TEXTS, fields.INTEGERS)},
}
HUGE: dict[Form, Any] = {
    **dict.fromkeys((fields.FLAG, fields.FLAG_OR_INTEGER, fields.INTEGER, fields.NUMBER), 10**400),
    **dict.fromkeys((fields.TEXT, fields.NAME, fields.TEXT_OR_TEXTS, fields.TEXT_OR_OBJECT), "x" * 10**6),
    **{form: {str(number): 1.0 for number in range(20_000)} for form in (fields.OBJECT, fields.NUMBERS)},
    fields.FLAGS: {str(number): True for number in range(20_000)},
    **{form: [*range(20_000)] for form in (fields.LIST, fields.INTEGERS)},
    fields.TEXTS: ["x"] * 20_000,
}
NESTED: Any = functools.reduce(lambda inner, _: [inner], range(150), None)
SEEN_AS_WRONG = (fields.FLAG, fields.FLAG_OR_INTEGER, fields.INTEGER, fields.NUMBER, fields.NAME)
"""Forms of which the huge value is refused, because it is none of them."""
BY_HAND = ("messages", "tools", "token_ids", "sampling_params", "stop", "stop_token_ids", "stream")
KINDS = ("right", "same", "wrong", "huge", "null", "nested")
TABLE = [
    (route, name, kind)
    for route, table in FIELDS.items()
    for name, field in table.items()
    for kind in KINDS
    if name not in BY_HAND and (kind != "same" or field.same)
]
QUICK = [
    *[("chat", "seed", kind) for kind in ("right", "wrong", "null", "nested")],
    *[("chat", "guided_regex", kind) for kind in ("right", "wrong", "null")],
    *[("chat", "n", kind) for kind in ("right", "same", "huge")],
    *[("chat", "stream_options", kind) for kind in ("right", "wrong")],
    *[("tokens", "temperature", kind) for kind in ("right", "wrong", "huge")],
]


def of_kind(field: Field, kind: str) -> Any:
    if kind == "same":
        return field.same[0]
    right = True not in field.same if field.form == fields.FLAG else RIGHT[field.form]
    return {"right": right, "wrong": WRONG[field.form], "huge": HUGE[field.form], "nested": NESTED}.get(kind)


def begun(served: Served, route: Route) -> tuple[Callable[..., httpx.Response], Dialogue]:
    """A conversation after its first turn, and how its second turn is asked for, with more fields."""
    client, dialogue = served.conversation({"prompt": "Guess."})
    first = client.chat(ASKED, return_token_ids=True).json()
    token_ids = first["prompt_token_ids"] + first["choices"][0]["token_ids"]
    on = chat_tokenizer()("\n<|im_start|>user\nOn.<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    if route == "tokens":
        return lambda **more: client.generate(token_ids + on, **more), dialogue
    return lambda **more: client.chat(ASKED, first["choices"][0]["message"], user("On."), **more), dialogue


@pytest.mark.parametrize(("route", "name", "kind"), table_rows(TABLE, QUICK))
def test_a_field_is_used_or_told_as_ignored_or_refused(
    served: Served, route: Route, name: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    field = FIELDS[route][name]
    value = of_kind(field, kind)
    ask, dialogue = begun(served, route)
    samples = served.samples
    with caplog.at_level(logging.WARNING):
        answered = ask(**{name: value})
    told = warnings_of(caplog)
    is_wrong = kind in ("wrong", "nested") or (kind == "huge" and field.form in SEEN_AS_WRONG)
    if is_wrong and not (kind == "nested" and field.form == fields.LIST):
        assert answered.status_code == 400, answered.text
        assert one_sentence(answered).startswith(f"{name} must be {field.form.name}, not ")
    elif kind not in ("null", "same") and field.rule == "refused":
        assert answered.status_code == 400, answered.text
        assert name in one_sentence(answered) and "leave it out" in one_sentence(answered)
    else:
        assert answered.status_code == 200, answered.text
        is_told = kind not in ("null", "same") and field.rule in ("ignored", "run")
        assert len(told) == is_told and all(f"An agent requests {name} " in each for each in told)
    is_answered = answered.status_code == 200
    assert served.samples == samples + is_answered and (is_answered or not told)
    assert dialogue.log.counts["refused_requests"] == (not is_answered)
    if not is_answered:  # the same conversation goes on
        assert ask().status_code == 200 and served.samples == samples + 1


def test_the_table_has_each_field_of_openais_client() -> None:
    params = pytest.importorskip("openai.types.chat.completion_create_params")
    assert not {*params.CompletionCreateParamsBase.__annotations__} - {*FIELDS["chat"]}


@pytest.mark.nightly
def test_the_table_has_each_field_of_vllm() -> None:
    chat = pytest.importorskip("vllm.entrypoints.openai.chat_completion.protocol").ChatCompletionRequest
    tokens = pytest.importorskip("vllm.entrypoints.scale_out.token_in_token_out.protocol").GenerateRequest
    sampling = pytest.importorskip("vllm.sampling_params").SamplingParams
    own = {name for name in sampling.__struct_fields__ if not name.startswith("_")} - {"output_text_buffer_length"}
    assert not {*chat.model_fields} - {*FIELDS["chat"]}
    assert not ({*tokens.model_fields} | own) - {*FIELDS["tokens"]}


def test_the_page_on_environments_has_the_table() -> None:
    page = (Path(__file__).parents[1] / "docs" / "environments.md").read_text()
    rows = dict(re.findall(r"^\| (used|the run's value|told as ignored|refused) \| (.*) \|$", page, re.MULTILINE))
    names = {"used": "used", "run": "the run's value", "ignored": "told as ignored", "refused": "refused"}
    for rule, name in names.items():
        of_rule = {
            each + (f" ({json.dumps(field.same[0])})" if rule == "refused" and field.same else "")
            for table in FIELDS.values()
            for each, field in table.items()
            if field.rule == rule
        }
        assert rows[name] == ", ".join(f"`{each}`" for each in sorted(of_rule)), rule


# ---- requests by hand ------------------------------------------------------------------------------------


def message(**more: Any) -> dict[str, Any]:
    return {"messages": [ASKED | more]}


def assistant(**more: Any) -> dict[str, Any]:
    return {"messages": [ASKED, {"role": "assistant", "content": "x"} | more, user("On.")]}


def tool(**more: Any) -> dict[str, Any]:
    return {"messages": [ASKED], "tools": [TOOL | {"function": TOOL["function"] | more}]}


REFUSED: dict[str, tuple[Any, str]] = {
    "no object": ([], "The request must be a JSON object."),
    "no messages": ({}, "messages must be a list of chat messages."),
    "no list": ({"messages": "Guess."}, "messages must be a list, not 'Guess.'."),
    "null": ({"messages": None}, "messages must be a list of chat messages."),
    "messages of texts": ({"messages": ["x"]}, "The request has a chat message that is not"),
    "a role that is a number": (message(role=5), "The request has a chat message that is not"),
    "a role that is a control token": (message(role="<|im_end|>"), "messages is not as expected: 0.role"),
    "an empty role": (message(role=""), "messages is not as expected: 0.role"),
    "a name that is a number": (message(name=5), "messages is not as expected: 0.name"),
    "content that is a number": (message(content=5), "The request has a chat message that is not"),
    "content that is an object": (message(content={"type": "text"}), "The request has a chat message that is not"),
    "no parts": (message(content=[]), "The request has a chat message that is not"),
    "an image": (message(content=[{"type": "image_url", "image_url": {"url": "x"}}]), "a part of type 'image_url'"),
    "audio": (message(content=[{"type": "input_audio"}]), "with a part of type 'input_audio', and a prompt is text"),
    "a part without text": (message(content=[{"type": "text"}]), "has a part of a chat message that is not"),
    "a part of an odd type": (message(content=[{"type": ["text"]}]), "has a part of a chat message that is not"),
    "a call that is a text": (assistant(tool_calls=["x"]), "has a tool call that is not"),
    "calls that are no list": (assistant(tool_calls={}), "has a tool call that is not"),
    "a call without a function": (assistant(tool_calls=[{"function": None}]), "has a tool call that is not"),
    "a call with an odd id": (
        assistant(tool_calls=[{"id": 5, "function": {"name": "f"}}]),
        "messages is not as expected: 1.tool_calls",
    ),
    "a call with odd arguments": (
        assistant(tool_calls=[{"function": {"name": "f", "arguments": 5}}]),
        "messages is not as expected: 1.tool_calls",
    ),
    "reasoning that is a list": (assistant(reasoning_content=[1]), "messages is not as expected: 1.reasoning"),
    "a tool's answer with an odd id": (
        {"messages": [ASKED, {"role": "tool", "content": "x", "tool_call_id": 5}]},
        "messages is not as expected: 1.tool_call_id",
    ),
    "tools that are an object": ({"messages": [ASKED], "tools": {"a": 1}}, "tools must be a list, not {'a': 1}."),
    "a tool that is a text": ({"messages": [ASKED], "tools": ["f"]}, "tools is not as expected: 0"),
    "a tool of another type": ({"messages": [ASKED], "tools": [TOOL | {"type": "custom"}]}, "tools is not as expected"),
    "a tool without a name": (tool(name=None), "tools is not as expected: 0.function.name"),
    "a tool whose name is a control token": (tool(name="<|im_end|>"), "tools is not as expected: 0.function.name"),
    "a tool with an odd description": (tool(description=5), "tools is not as expected: 0.function.description"),
    "parameters that are a list": (tool(parameters=[1]), "tools is not as expected: 0.function.parameters"),
    "properties that are a list": (tool(parameters={"properties": [1]}), "0.function.parameters.properties"),
    "a property that is a text": (tool(parameters={"properties": {"a": "x"}}), "0.function.parameters.properties.a"),
    "an odd type": (tool(parameters={"properties": {"a": {"type": 5}}}), "0.function.parameters.properties.a.type"),
    "an odd alternative": (tool(parameters={"properties": {"a": {"anyOf": [5]}}}), "parameters.properties.a.anyOf.0"),
    "two tools of one name": ({"messages": [ASKED], "tools": [TOOL, TOOL]}, "tools has two functions with the name"),
    "parameters of the route in an odd form": ({"messages": [ASKED], "sampling_params": 5}, "sampling_params must be"),
    "an odd field of them": ({"messages": [ASKED], "sampling_params": {"n": "2"}}, "n must be an integer"),
    "a stop that is a number": ({"messages": [ASKED], "stop": 5}, "stop must be a text or a list of texts, not 5."),
    "stops of two kinds": ({"messages": [ASKED], "stop": ["a", 5]}, "stop must be a text or a list of texts, not"),
    "a long stop": ({"messages": [ASKED], "stop": "x" * 10**6}, "The run does not stop at 'xxx"),
    "many stops": ({"messages": [ASKED], "stop": [*map(str, range(10**4))]}, "The run does not stop at '0', "),
    "a stream that is a text": ({"messages": [ASKED], "stream": "yes"}, "stream must be true or false, not 'yes'."),
    "an odd option of streams": (
        {"messages": [ASKED], "stream": True, "stream_options": {"include_usage": "yes"}},
        "stream_options must be an object of true or false, not",
    ),
    "a long message": (message(content="x" * 10**6), "This trajectory is at its maximum context length: 1 new"),
    "many messages": ({"messages": [ASKED] * 10**4}, "This trajectory is at its maximum context length: 9,999 new"),
}
BYTES: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "The request is not JSON in UTF-8: EOF"),
    "half of it": (b'{"messages": [', "The request is not JSON in UTF-8: EOF"),
    "two objects": (b"{} {}", "trailing characters"),
    "a form": (b"model=m&messages=x", "The request is not JSON in UTF-8"),
    "UTF-16": ('{"messages": []}'.encode("utf-16"), "The request is not JSON in UTF-8"),
    "no UTF-8": (b'{"model": "\xff\xfe"}', "The request is not JSON in UTF-8"),
    "a lone surrogate": (b'{"model": "\\ud800"}', "half of a surrogate pair, which is no character, "),
    "a surrogate in bytes": (b'{"model": "\xed\xa0\x80"}', "The request is not JSON in UTF-8"),
    "a lone low surrogate": (b'{"model": "\\udc00 x"}', "half of a surrogate pair, which is no character, "),
    "NaN": (b'{"temperature": NaN}', "The request is not JSON in UTF-8"),
    "Infinity": (b'{"temperature": -Infinity}', "The request is not JSON in UTF-8"),
    "1e400": (b'{"temperature": 1e400}', "temperature must be a finite number, not inf."),
    "5,000 digits": (b'{"seed": %b}' % (b"9" * 5000), "number out of range"),
    "100,000 brackets": (b"[" * 100_000, "recursion limit exceeded"),
    "100,000 objects": (b'{"a":' * 100_000, "recursion limit exceeded"),
}


def refused_and_goes_on(
    served: Served,
    send: Callable[[Client], httpx.Response],
    says: str,
    caplog: pytest.LogCaptureFixture,
    status: int = 400,
) -> None:
    client, dialogue = served.conversation({"prompt": "Guess."})
    with caplog.at_level(logging.WARNING):
        answered = send(client)
    assert answered.status_code == status, answered.text
    assert says in one_sentence(answered), answered.text
    assert not warnings_of(caplog) and dialogue.completion is None
    assert client.say(ASKED)["content"] == "turn"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        pytest.param(
            *REFUSED[name], marks=() if name in ("a stop that is a number", "an image") else pytest.mark.nightly
        )
        for name in REFUSED
    ],
)
def test_a_body_of_wrong_types_is_refused(
    served: Served, body: Any, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    refused_and_goes_on(served, lambda client: client.post("/chat/completions", body), says, caplog)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        pytest.param(*BYTES[name], marks=() if name in ("a lone surrogate", "1e400") else pytest.mark.nightly)
        for name in BYTES
    ],
)
def test_a_body_that_is_no_json_is_refused(
    served: Served, body: bytes, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    def send(client: Client) -> httpx.Response:
        return client.http.post(f"{client.url}/chat/completions", content=body)

    refused_and_goes_on(served, send, says, caplog)


def zipped(client: Client, body: bytes) -> httpx.Response:
    headers = {"Content-Encoding": "gzip"}
    return client.http.post(f"{client.url}/chat/completions", content=body, headers=headers)


HTTP: dict[str, tuple[Callable[[Client], httpx.Response], int, str]] = {
    "another method": (
        lambda client: client.http.put(f"{client.url}/chat/completions", json={}),
        405,
        "the endpoint has",
    ),
    "another path": (lambda client: client.post("/completions", {}), 404, "the endpoint has POST /v1/chat/completions"),
    "an odd path": (lambda client: client.http.post(f"{client.root}/%00/../v1/x", json={}), 404, "the endpoint has"),
    "gzip": (
        lambda client: zipped(client, gzip.compress(b"{}")),
        415,
        "reads no Content-Encoding 'gzip'; send the body",
    ),
    "no gzip": (lambda client: zipped(client, b"{}"), 415, "The endpoint reads no Content-Encoding 'gzip'"),
    "too large": (lambda client: client.post("/chat/completions", "x" * MAX_BYTES), 413, "more than 16777216 bytes"),
}


@pytest.mark.parametrize("name", table_rows(HTTP, ["another method", "gzip"]))
def test_odd_http_is_refused(served: Served, name: str, caplog: pytest.LogCaptureFixture) -> None:
    send, status, says = HTTP[name]
    refused_and_goes_on(served, send, says, caplog, status)


@pytest.mark.nightly
def test_odd_headers_change_nothing(served: Served) -> None:
    body = json.dumps({"messages": [ASKED]}).encode()
    for headers in (
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/json; charset=utf-16"},
        {"X-Stainless-Retry-Count": "many"},
        [("X-Session-ID", "one"), ("X-Session-ID", "two")],
        {"Accept": "text/event-stream"},
        {"Expect": "100-continue"},
    ):
        client, _ = served.conversation({"prompt": "Guess."})
        answered = client.http.post(f"{client.url}/chat/completions", content=body, headers=headers)
        assert answered.status_code == 200, (headers, answered.text)
    client, _ = served.conversation({"prompt": "Guess."})  # in chunks
    answered = client.http.post(f"{client.url}/chat/completions", content=iter([body[:9], body[9:]]))
    assert answered.status_code == 200, answered.text


@pytest.mark.parametrize(
    "raw",
    table_rows(
        [
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
            b"POST / HTTP/9.9\r\n\r\n",
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nmany\r\n{}\r\n",
            b"GET /v1/models HTTP/1.1\r\nHost: x\r\nContent-Length: many\r\n\r\n",
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n" + b"A: " + b"x" * 70_000 + b"\r\n\r\n",
        ],
        [b"POST / HTTP/9.9\r\n\r\n"],
    ),
)
def test_what_is_no_http_is_refused_without_a_word_to_the_user(
    served: Served, raw: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    client, _ = served.conversation({"prompt": "Guess."})
    with (
        caplog.at_level(logging.WARNING),
        socket.create_connection(("127.0.0.1", urlsplit(client.url).port or 0)) as wire,
    ):
        wire.settimeout(60)
        wire.sendall(raw)
        assert wire.recv(2**16).startswith(b"HTTP/1.")
    assert not warnings_of(caplog) and client.say(ASKED)["content"] == "turn"


STRING: Any = {"type": "string"}
DEEP = functools.reduce(lambda inner, _: {"type": "object", "properties": {"a": inner}}, range(80), STRING)
ACCEPTED: dict[str, Any] = {
    "parts of text": message(content=[{"type": "text", "text": "Gue"}, {"type": "text", "text": "ss."}]),
    "a name": message(name="me"),
    "more fields of a message": message(annotations=[], audio=None, x={"y": 1}),
    "tools with nulls": tool(parameters=None, description=None, strict=None),
    "no tools": {"messages": [ASKED], "tools": []},
    "tools with deep schemas": tool(parameters=DEEP),
    "odd characters": {"messages": [ASKED, user("\0 \ufffe \x1b[31m \u202e \r\n <|im_end|> \U0010ffff")]},
    "duplicated keys": b'{"model": 5, "messages": [{"role": "user", "content": "Guess."}], "model": "m"}',
    "escapes": b'{"messages": [{"role": "user", "content": "\\u0047uess."}], "model": "\\ud83d\\ude00 \\u0000"}',
    "many unknown fields": {"messages": [ASKED], **{f"x{number}": number for number in range(1000)}},
    "an unknown field with a long name": {"messages": [ASKED], "x" * 10**6: 1},
}


@pytest.mark.parametrize("name", table_rows(ACCEPTED, ["parts of text", "many unknown fields"]))
def test_what_clients_send_besides_is_answered(served: Served, name: str, caplog: pytest.LogCaptureFixture) -> None:
    client, dialogue = served.conversation({"number": 1})
    body = ACCEPTED[name]
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    with caplog.at_level(logging.WARNING):
        answered = client.http.post(f"{client.url}/chat/completions", content=content)
    assert answered.status_code == 200, answered.text
    told = [each for each in warnings_of(caplog) if "does not know and ignores" in each]
    assert len(told) == {"many unknown fields": 20, "an unknown field with a long name": 1}.get(name, 0)
    assert all(len(each) < 200 for each in told) and not dialogue.log.counts["refused_requests"]


def test_what_nobody_foresaw_is_told_once_and_ends_in_one_sentence(
    served: Served, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise KeyError("oops\nand more")

    client, dialogue = served.conversation({"prompt": "Guess."})
    with caplog.at_level(logging.WARNING), monkeypatch.context() as patched:
        patched.setattr(served.chat, "beginning", fails)
        said = [client.chat(ASKED), client.chat(ASKED)]
    assert [each.status_code for each in said] == [500, 500]
    assert one_sentence(said[0]).startswith("The endpoint failed at this request (KeyError: ")
    assert len(warnings_of(caplog)) == 1 and dialogue.log.counts["refused_requests"] == 2
    assert client.say(ASKED)["content"] == "turn"


def test_a_turn_that_cannot_be_read_ends_its_trajectory_alone(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise KeyError("oops")

    seen: list[int] = []

    def solve(base_url: str, api_key: str, **columns: Any) -> float:
        client = Client(base_url, api_key)
        said = [client.chat(ASKED, tools=[TOOL]), client.chat(ASKED, tools=[TOOL], user="x")]
        seen.extend(each.status_code for each in said)
        return 1.0

    worker = worker_of(solve, retries=0)
    assert worker.chat is not None
    monkeypatch.setattr(worker.chat, "read", fails)
    with caplog.at_level(logging.WARNING):
        (group,) = play(worker, rows=[{"number": 1}])
    assert group.rollouts == [] and seen == [500, 500]
    assert "solve has a turn that the endpoint cannot read (KeyError" in caplog.text


# ---- the room, and the others --------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ["chat", "tokens"])
def test_what_cannot_fit_is_refused_before_it_is_encoded(
    served: Served, route: Route, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encodes(*_: Any) -> Any:
        raise AssertionError("It was encoded.")

    client, dialogue = served.conversation({"prompt": "Guess."})
    first = client.say(ASKED)
    with monkeypatch.context() as patched:
        patched.setattr(served.chat, "following", encodes)
        if route == "chat":
            answered = client.chat(ASKED, first, user("x" * 10**7))
        else:
            token_ids = [*dialogue.request.prompt.token_ids, *dialogue.completion.token_ids_T.tolist()]  # pyrefly: ignore[missing-attribute]
            answered = client.generate([*token_ids, *[5] * 10**6])
    assert answered.json()["error"]["code"] == "context_length_exceeded"
    assert one_sentence(answered).startswith("This trajectory is at its maximum context length: ")
    assert dialogue.is_full and client.say(ASKED, first, user("x" * 10))["content"] == "turn" and not dialogue.is_full


def test_a_long_message_that_fits_is_answered(served: Served) -> None:
    """As one does whose tokens stand for many characters each."""
    room = SamplingParams(max_tokens=400, max_observed=200_000)
    client, _ = served.conversation({"number": 1}, room)
    assert client.say(user("the answer " * 20_000))["content"] == "turn"


def test_a_trajectory_that_goes_on_after_a_refusal_for_lack_of_room_is_not_cut_short() -> None:
    def solve(base_url: str, api_key: str, **columns: Any) -> float:
        client = Client(base_url, api_key)
        first = client.say(ASKED)
        refusal(client.chat(ASKED, first, user("x" * 10**6)))
        client.say(ASKED, first, user("x"))
        return 1.0

    worker = worker_of(solve)
    (group,) = play(worker)
    assert [rollout.completion.finish_reason for rollout in group.rollouts] == ["stop"]
    assert worker.metrics()["environments/cut_short"] == 0


READ = {"slowly": (10**5, 1.5, 2 * 10**5), "to its tokens": (10**6, 10.0, 10**6), "by its size": (10**7, 10.0, 800)}
"""The characters of a message, the seconds that an agent may take, and the tokens for which there is room."""


@pytest.mark.parametrize("how", table_rows(READ, ["slowly"]))
def test_time_in_which_the_endpoint_reads_a_request_counts_in_nobodys_limit(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One agent of eight sends a long message; the others wait for its end between two requests."""
    size, limit_s, room = READ[how]
    is_read = threading.Event()
    worker = worker_of(_one_of_eight(is_read, size), timeout_s=limit_s, trajectory_timeout_s=limit_s + 1, retries=0)
    chat = worker.chat
    assert chat is not None
    following = chat.following

    def slowly(messages: Sequence[Any], last: int) -> list[int]:
        if len(messages[0]["content"]) == size:
            threading.Event().wait(2 * limit_s)
        return following(messages, last)

    monkeypatch.setattr(chat, "following", slowly)
    (group,) = play(worker, num_generations=8, sampling=SamplingParams(max_tokens=400, max_observed=room))
    assert len(group.rollouts) == 8 and worker.metrics()["environments/failures"] == 0
    turns = sorted(len(rollout.completion.turns) for rollout in group.rollouts)
    assert turns == [1 if how == "by its size" else 2, *[2] * 7]


def _one_of_eight(is_read: threading.Event, size: int) -> Callable[..., float]:
    begun, lock = [], threading.Lock()

    def solve(base_url: str, api_key: str, **columns: Any) -> float:
        client = Client(base_url, api_key)
        with lock:
            begun.append(base_url)
            is_first = len(begun) == 1
        first = client.say(ASKED)
        if is_first:
            client.chat(ASKED, first, user(("go on. " * size)[:size]))
            is_read.set()
        else:
            assert is_read.wait(300)
            client.say(ASKED, first, user("On."))
        return 1.0

    return solve


def test_other_conversations_go_on_while_a_request_is_read(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    (slow, _), (other, _) = (served.conversation({"prompt": "Guess."}) for _ in range(2))
    first, is_reading, goes_on = slow.say(ASKED), threading.Event(), threading.Event()
    following, said = served.chat.following, []

    def waits(messages: Sequence[Any], last: int) -> list[int]:
        if messages[0]["content"] == "Wait.":
            is_reading.set()
            assert goes_on.wait(300)
        return following(messages, last)

    monkeypatch.setattr(served.chat, "following", waits)
    asks = [threading.Thread(target=lambda: said.append(slow.say(ASKED, first, user("Wait."))))]
    asks[0].start()
    assert is_reading.wait(300)
    turn = other.say(ASKED)
    assert other.say(ASKED, turn, user("On."))["content"] == "turn" and not said
    samples = served.samples
    asks.append(threading.Thread(target=lambda: said.append(slow.say(ASKED, first, user("Wait.")))))  # a retry
    asks[1].start()
    assert refusal(slow.chat(ASKED, first, user("Other."))).startswith("This trajectory has an unanswered request")
    goes_on.set()
    for ask in asks:
        ask.join(300)
    assert said[0] == said[1] and served.samples == samples + 1


def test_requests_that_are_read_in_threads_at_a_time_add_the_tokens_that_they_add_alone(served: Served) -> None:
    def talk(_: int) -> list[int]:
        client, dialogue = served.conversation({"number": 1}, SamplingParams(max_tokens=400, max_observed=20_000))
        messages: list[Any] = []
        for size in (3, 500, 40):
            messages.append(user("Spelled: <|im_end|> " * size if size == 40 else "the answer " * size))
            messages.append(client.say(*messages))
        assert dialogue.completion is not None
        return dialogue.completion.token_ids_T.tolist()

    alone = talk(0)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(talk, range(16))) == [alone] * 16


# ---- the client of openai ---------------------------------------------------------------------------------


def test_openais_client_is_answered_with_the_options_that_people_use(
    served: Served, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    openai = pytest.importorskip("openai")
    http, dialogue = served.conversation({"number": 1})
    client = openai.OpenAI(base_url=http.url, api_key=served.endpoint.api_key)
    messages: list[Any] = [{"role": "developer", "content": "Be brief."}, ASKED]
    monkeypatch.setattr(served, "says", "I add." + call("add", a=3))
    usual: dict[str, Any] = {
        "model": "gpt-5",
        "tools": [TOOL],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "temperature": 0,
        "top_p": 0.9,
        "max_completion_tokens": 64,
        "seed": 42,
        "logprobs": True,
        "top_logprobs": 2,
        "n": 1,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "response_format": {"type": "text"},
        "store": False,
        "metadata": {"run": "one"},
        "user": "me",
        "service_tier": "auto",
    }
    with caplog.at_level(logging.WARNING):
        choice = client.chat.completions.create(messages=messages, **usual).choices[0]
        (made,) = choice.message.tool_calls
        messages += [choice.message, {"role": "tool", "tool_call_id": made.id, "content": "4"}]
        stream = client.chat.completions.create(
            messages=messages, stream=True, stream_options={"include_usage": True}, **usual
        )
        chunks = list(stream)
    assert choice.finish_reason == "tool_calls" and made.function.arguments == '{"a": 3}'
    assert chunks[-1].usage.completion_tokens == len(dialogue.completion.turns[1])  # pyrefly: ignore[missing-attribute]
    told = {each.split()[3] for each in warnings_of(caplog) if each.startswith("An agent requests")}
    assert told == {"temperature", "top_p", "max_completion_tokens", "seed", "top_logprobs", "metadata", "user"}
    for field, value in (("reasoning_effort", "low"), ("response_format", {"type": "json_object"}), ("n", 2)):
        with pytest.raises(openai.BadRequestError, match=f"{field} "):
            client.chat.completions.create(messages=messages, **{**usual, field: value})
    with pytest.raises(openai.BadRequestError, match="guided_regex cannot be set here"):
        client.chat.completions.create(messages=messages, extra_body={"guided_regex": "a+"}, **usual)
    assert dialogue.log.counts["refused_requests"] == 4
