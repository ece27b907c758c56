"""Agents that ask over HTTP: their turns are the trajectory's, and what is no extension of it is refused."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import httpx
import pytest
from conversations import SAMPLING, Scripted, call, chat_tokenizer, only, prompts_of, text_of
from conversations import play as play_with
from hand_made import credited

from lit_grpo.data.chat import UnusableRow
from lit_grpo.environments.agent.plugin import Agent
from lit_grpo.environments.plugin import Trajectories
from lit_grpo.methods.mt_grpo import MTGRPO
from lit_grpo.plugins import Answer, Listener, RunFacts, fresh
from lit_grpo.process import calls
from lit_grpo.rewards import RewardRunner
from lit_grpo.rewards.function import RewardFunction
from lit_grpo.rollout.buffer import RolloutBuffer, group_requests
from lit_grpo.rollout.generator import StepEvents
from lit_grpo.rollout.loop import RolloutLoop
from lit_grpo.rollout.rules import ReleaseRule
from lit_grpo.types import Completion, Request, RolloutGroup, SamplingParams

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
ASKED = {"role": "user", "content": "Guess."}
ENDS = [7, chat_tokenizer().eos_token_id]


class Client:
    """Asks as an agent would, and keeps all answers."""

    def __init__(self, base_url: str, api_key: str | None, **headers: str) -> None:
        known: dict[str, Any] = {} if api_key is None else {"Authorization": f"Bearer {api_key}".encode()}
        self.http = httpx.Client(timeout=60, headers=known | headers, trust_env=False, verify=False)
        self.first: dict[str, Any] = {}  # the policy's first turn
        self.url, self.root = base_url, base_url.removesuffix("/v1")

    def chat(self, *messages: dict[str, Any], **fields: Any) -> httpx.Response:
        return self.post("/chat/completions", {"model": "m", "messages": list(messages), **fields})

    def say(self, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
        answered = self.chat(*messages, **fields)
        assert answered.status_code == 200, answered.text
        return answered.json()["choices"][0]["message"]

    def post(self, path: str, body: Any) -> httpx.Response:
        return self.http.post(self.url + path, json=body)

    def generate(self, token_ids: Sequence[Any], **fields: Any) -> httpx.Response:
        return self.http.post(f"{self.root}/inference/v1/generate", json={"token_ids": list(token_ids), **fields})


def refusal(answered: httpx.Response, status: int = 400) -> str:
    assert answered.status_code == status, answered.text
    return answered.json()["error"]["message"]


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def worker_of(run: Any, **options: Any) -> Agent:
    worker = fresh(Agent(run=run, **options))
    worker.prepare(chat_tokenizer(), {})
    worker.on_policy_start(ENDS)
    return worker


def numbered(request: Request, turn: int) -> str:
    return f"turn {turn}"


def play(
    worker: Trajectories,
    says: Callable[[Request, int], str] = numbered,
    rows: Sequence[dict[str, Any]] = ({"prompt": "Guess.", "number": 3},),
    **options: Any,
) -> list[RolloutGroup]:
    return play_with(worker, says, rows, **options)


def two_turns(base_url: str, api_key: str, prompt: str, **columns: Any) -> float:
    client = Client(base_url, api_key)
    first = client.say(user(prompt))
    client.say(user(prompt), first, user("And now?"))
    return 0.5


async def async_two_turns(base_url: str, api_key: str, prompt: str) -> float:
    return await asyncio.to_thread(two_turns, base_url, api_key, prompt)


@pytest.mark.parametrize("agent", [two_turns, async_two_turns])
def test_an_agents_requests_are_the_turns_of_one_completion(agent: Any) -> None:
    worker = worker_of(agent)
    completion = only(play(worker))
    assert text_of(completion) == (
        "<|im_start|>user\nGuess.<|im_end|>\n<|im_start|>assistant\nturn 0<|im_end|>\n"
        "<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\nturn 1<|im_end|>"
    )
    assert completion.finish_reason == "stop" and completion.episode is not None
    assert completion.episode.reward == 0.5 and completion.episode.kind == agent.__name__
    assert completion.episode.messages == [
        {"role": "assistant", "content": "turn 0"},
        user("And now?"),
        {"role": "assistant", "content": "turn 1"},
    ]
    assert chat_tokenizer().decode(completion.sampled_ids) == "turn 0<|im_end|>turn 1<|im_end|>"
    prompt = chat_tokenizer().decode(list(completion.request.prompt.token_ids))
    assert prompt == "<|im_start|>user\nGuess.<|im_end|>\n<|im_start|>assistant\n"  # which the group shares
    assert worker.metrics()["environments/turns"] == 2


def test_the_prompt_of_a_row_is_shared_and_an_agent_that_writes_its_own_is_observed() -> None:
    """Whatever it begins with: a system message, tools."""
    seen: list[dict[str, Any]] = []

    def solve(base_url: str, api_key: str, number: int, **columns: Any) -> None:
        client, system = Client(base_url, api_key), {"role": "system", "content": "Be brief."}
        asked = client.say(system, user(f"Add {number}."), tools=[TOOL])
        answer = {"role": "tool", "tool_call_id": asked["tool_calls"][0]["id"], "content": "4"}
        seen.extend([asked, client.say(system, user(f"Add {number}."), asked, answer, tools=[TOOL])])

    def says(request: Request, turn: int) -> str:
        return "I add." + call("add", a=3) + "<tool_call>{oops</tool_call>" if turn == 0 else "4"

    worker = worker_of(solve)
    completion = only(play(worker, says, [{"number": 3}]))
    assert text_of(completion) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nAdd 3.<|im_end|>\n<|im_start|>assistant\nI add."
        + call("add", a=3)
        + "<tool_call>{oops</tool_call><|im_end|>\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n4<|im_end|>"
    )
    assert chat_tokenizer().decode(list(completion.request.prompt.token_ids)) == "<|im_start|>"
    assert seen[0]["content"] == "I add.<tool_call>{oops</tool_call>"  # as it is, and counted
    assert seen[0]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 3}'}
    assert completion.episode is not None and not worker.rewards
    roles = [message["role"] for message in completion.episode.messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]
    assert worker.metrics()["environments/tool_calls"] == worker.metrics()["environments/broken_calls"] == 1


def test_the_token_route_goes_on_from_ids_alone() -> None:
    seen: list[dict[str, Any]] = []

    def solve(base_url: str, api_key: str, session_id: str, **columns: Any) -> float:
        tokenizer = chat_tokenizer()
        root = base_url.removesuffix(f"/{session_id}/v1")
        client = Client(f"{root}/v1", api_key, **{"X-Session-ID": session_id})
        token_ids = tokenizer("<|im_start|>user\nGuess.<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
        for more in ("\n<|im_start|>user\nOn.<|im_end|>\n<|im_start|>assistant\n", ""):
            asked = {"logprobs": 1, "stop_token_ids": [tokenizer.eos_token_id]}  # as verifiers' client does
            answered = client.generate(token_ids, model="m", sampling_params=asked)
            seen.append(answered.json())
            token_ids += answered.json()["choices"][0]["token_ids"] + tokenizer(more)["input_ids"]
        return float("add nothing" in refusal(client.generate(token_ids)))

    completion = only(play(worker_of(solve)))
    assert completion.episode is not None and completion.episode.reward == 1
    assert [each["choices"][0]["token_ids"] for each in seen] == completion.turns
    assert text_of(completion).endswith("<|im_start|>user\nOn.<|im_end|>\n<|im_start|>assistant\nturn 1<|im_end|>")
    (choice,) = seen[0]["choices"]
    assert seen[0]["request_id"] and choice["index"] == 0 and choice["finish_reason"] == "stop"
    named = [f"token_id:{token}" for token in choice["token_ids"]]
    assert [(each["token"], each["logprob"], each["top_logprobs"]) for each in choice["logprobs"]["content"]] == [
        (name, -1.0, []) for name in named
    ]


def test_turns_are_streamed_and_ids_and_logprobs_come_with_them_where_asked() -> None:
    seen: list[Any] = []

    def solve(base_url: str, api_key: str, **columns: Any) -> None:
        client = Client(base_url, api_key)
        fields = {"stream": True, "stream_options": {"include_usage": True}, "tools": [TOOL]}
        seen.append(client.chat(ASKED, **fields))
        asked: dict[str, Any] = {
            "role": "assistant",
            **json.loads(seen[0].text.split("\n\n")[0].removeprefix("data: "))["choices"][0]["delta"],
        }
        answer = {"role": "tool", "tool_call_id": asked["tool_calls"][0]["id"], "content": "4"}
        seen.append(client.chat(ASKED, asked, answer, tools=[TOOL], logprobs=True, return_token_ids=True).json())

    completion = only(play(worker_of(solve), lambda _, turn: "4" if turn else call("add", a=1), [{"number": 1}]))
    assert seen[0].headers["content-type"] == "text/event-stream"
    events = [event.removeprefix("data: ") for event in seen[0].text.strip().split("\n\n")]
    first, last, usage = (json.loads(event) for event in events[:3])
    assert events[3:] == ["[DONE]"] and first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"]["tool_calls"][0]["index"] == 0 and not first["choices"][0]["finish_reason"]
    assert last["choices"] == [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == len(completion.turns[0])
    (choice,) = seen[1]["choices"]
    tokens = [*completion.request.prompt.token_ids, *completion.token_ids_T.tolist()]
    assert choice["token_ids"] == completion.turns[1] and seen[1]["prompt_token_ids"] + choice["token_ids"] == tokens
    assert [each["token"] for each in choice["logprobs"]["content"]] == ["4", "<|im_end|>"]
    assert choice["finish_reason"] == "stop" and choice["logprobs"]["content"][0]["logprob"] == -1


def asking(tries: Callable[[Client], Any]) -> tuple[Any, Agent, Completion]:
    """What an agent finds out, which has taken one turn and takes another in the end."""
    found: list[Any] = []

    def solve(base_url: str, api_key: str, **columns: Any) -> None:
        client = Client(base_url, api_key)
        client.first = client.say(ASKED)
        found.append(tries(client))
        client.say(ASKED, client.first, user("On."))

    worker = worker_of(solve)
    completion = only(play(worker))
    assert len(completion.turns) == 2
    return found[0], worker, completion


def test_no_request_without_the_token_is_answered() -> None:
    def tries(client: Client) -> list[str]:
        others = [Client(client.url, key) for key in (None, "wrong", "ü")]
        paths = ("/chat/completions", "/nothing")
        said = [refusal(other.post(path, {}), 401) for other in others for path in paths]
        return [*said, *(refusal(other.http.get(f"{client.url}/models"), 401) for other in others)]

    found, worker, _ = asking(tries)
    assert len(found) == 9 and {*found} == {"The bearer token is not the api_key that the agent was given."}
    assert worker.metrics()["environments/refused_requests"] == 0


def test_models_are_listed_with_the_room_of_the_trajectory() -> None:
    found, _, completion = asking(lambda client: client.http.get(f"{client.url}/models").json()["data"])
    room = len(completion.request.prompt.token_ids) + SAMPLING.max_tokens + SAMPLING.max_observed
    assert [(each["id"], each["max_model_len"]) for each in found] == [("policy", room)]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (["asked", "first"], "The request adds no message that the policy could answer. A trajectory is trained on as"),
        (["asked", user("Fork.")], r"messages\[1\] differs from the conversation so far"),
        ([user("Edited."), "first", user("On.")], r"messages\[0\] differs from the conversation so far"),
        (
            ["asked", {"role": "assistant", "content": "mine"}, user("On.")],
            r"messages\[1\] differs from the conversation so far",
        ),
        (
            ["asked", "first", user("a"), {"role": "assistant", "content": "b"}, user("c")],
            "that the policy did not sample",
        ),
        (["asked", "first", {"role": "assistant", "content": "b"}], "adds no message that the policy could answer"),
        (["asked", "first", {"role": "tool", "tool_call_id": "x", "content": "b"}], "has the id of no tool call: 'x'"),
        (["asked", "first", {"role": "user"}], "The request has a chat message that is not"),
        ([], "messages must be a list of chat messages"),
    ],
)
def test_a_history_that_the_trajectory_does_not_have_is_refused(messages: list[Any], message: str) -> None:
    def tries(client: Client) -> str:
        known = {"asked": ASKED, "first": client.first}
        return refusal(client.chat(*(known[each] if isinstance(each, str) else each for each in messages)))

    found, worker, completion = asking(tries)
    assert re.search(message, found), found
    assert worker.metrics()["environments/refused_requests"] == 1
    assert text_of(completion).count("<|im_start|>") == 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stop": "\n"}, r"The run does not stop at '\n'; name them in model.sampling.stop."),
        (
            {"sampling_params": {"stop_token_ids": [*ENDS, 5]}},
            f"The run does not stop at the token ids 5 of stop_token_ids, but at {ENDS[0]}, {ENDS[1]}; leave",
        ),
        ({"stop_token_ids": 5}, "stop_token_ids must be a list of integers, not 5."),
        ({"sampling_params": {"ignore_eos": True}}, "ignore_eos must be False here, not True; leave it out."),
        ({"tools": [TOOL]}, "The tools differ from those of the first request."),
        (
            {"tools": [{"name": "add"}]},
            "tools is not as expected: 0.function: field required; send messages and tools as",
        ),
    ],
)
def test_what_would_be_sampled_differently_is_refused(fields: dict[str, Any], message: str) -> None:
    found, *_ = asking(lambda client: refusal(client.chat(ASKED, client.first, user("On."), **fields)))
    assert found.startswith(message)


def test_bodies_that_cannot_be_read_are_refused() -> None:
    def tries(client: Client) -> list[str]:
        chat = f"{client.url}/chat/completions"
        said = [refusal(client.http.post(chat, content=body)) for body in (b"{", b"\xff", b"[" * 100_000, b"[]")]
        said.append(refusal(client.http.post(chat, content=b" " * (2**24 + 1)), 413))
        said += [refusal(client.generate(ids)) for ids in ([-1], [10**9], [True], [1.5])]
        said.append(refusal(client.generate([1, 2])))
        said.append(refusal(Client(client.root[:-5] + "xxxxx/v1", _key(client)).chat(ASKED), 404))
        return said

    found, worker, _ = asking(tries)
    assert all(said.startswith("The request is not JSON in UTF-8: ") for said in found[:3])
    assert found[3] == "The request must be a JSON object." and found[4].startswith(
        "The request has more than 16777216"
    )
    assert all(said.startswith("token_ids must be a list of integers") for said in found[5:9])
    assert found[9].startswith("token_ids differ from the row's prompt at position 0.")
    assert found[10].startswith("This trajectory is over, or was never begun.")
    assert worker.metrics()["environments/refused_requests"] == 10


def _key(client: Client) -> str:
    return client.http.headers["Authorization"].removeprefix("Bearer ")


def test_a_second_request_at_a_time_is_refused() -> None:
    answers: list[httpx.Response] = []
    is_answered = threading.Event()

    def solve(base_url: str, api_key: str, **columns: Any) -> None:
        client = Client(base_url, api_key)
        first = client.say(ASKED)

        def ask(said: str) -> None:
            answers.append(client.chat(ASKED, first, user(said)))
            is_answered.set()

        threads = [threading.Thread(target=ask, args=(said,)) for said in ("On.", "And on.")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def says(request: Request, turn: int) -> str:
        assert turn == 0 or is_answered.wait(300)  # the other request, which is refused
        return "turn"

    assert len(only(play(worker_of(solve), says)).turns) == 2
    refused, answered = sorted(answers, key=lambda each: each.status_code, reverse=True)
    assert answered.status_code == 200 and refused.json()["error"]["code"] == "parallel"
    assert refusal(refused).startswith("This trajectory has an unanswered request")


def test_a_request_that_is_sent_again_gets_the_same_answer() -> None:
    """As after a time-out of its own, before the turn is over or after it; its header makes no difference."""
    said: list[Any] = []
    is_late = threading.Event()

    def solve(base_url: str, api_key: str, **columns: Any) -> None:
        client, again = Client(base_url, api_key), Client(base_url, api_key, **{"X-Stainless-Retry-Count": "1"})
        with pytest.raises(httpx.ReadTimeout):
            client.http.post(f"{client.url}/chat/completions", json={"model": "m", "messages": [ASKED]}, timeout=0.2)
        is_late.set()
        said.append(again.say(ASKED))
        said.append(client.say(ASKED))
        said.append(refusal(client.chat(ASKED, n=1)))
        said.append(again.say(ASKED))
        said.append(again.say(ASKED, said[0], user("On.")))

    def says(request: Request, turn: int) -> str:
        assert is_late.wait(300)
        return f"turn {turn}"

    assert len(only(play(worker_of(solve), says)).turns) == 2
    assert said[0] == said[1] == said[3] == {"role": "assistant", "content": "turn 0"}
    assert said[4]["content"] == "turn 1"
    assert said[2].startswith("The request adds no message")


def test_a_prompt_that_the_row_does_not_have_is_refused_with_the_way_out() -> None:
    said: list[str] = []

    def solve(base_url: str, api_key: str, **columns: Any) -> None:
        client = Client(base_url, api_key)
        said.append(refusal(client.chat({"role": "system", "content": "Be brief."}, ASKED)))
        client.say(ASKED)

    play(worker_of(solve))
    assert said[0].startswith("The conversation does not begin with the prompt of row train/0. Begin the conversation")


def test_messages_after_token_ids_are_refused_and_token_ids_after_messages_go_on() -> None:
    said: list[str] = []

    def solve(base_url: str, api_key: str, **columns: Any) -> None:
        client, more = Client(base_url, api_key), chat_tokenizer()("<|im_start|>x")["input_ids"]
        first = client.chat(ASKED, return_token_ids=True).json()
        token_ids = first["prompt_token_ids"] + first["choices"][0]["token_ids"]
        said.append(refusal(client.generate(token_ids[:-1] + more)))
        assert client.generate(token_ids + more).status_code == 200
        said.append(refusal(client.chat(ASKED, first["choices"][0]["message"], user("On."))))

    assert len(only(play(worker_of(solve))).turns) == 2
    assert said[0].startswith("token_ids differ from the conversation so far at position ")
    assert said[1].startswith("Earlier requests of this trajectory sent token ids. Send token_ids again")


def test_sampling_stays_the_runs_and_the_user_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    def solve(base_url: str, api_key: str, **columns: Any) -> None:
        Client(base_url, api_key).say(ASKED, temperature=0.2, top_p=1, max_tokens=None)

    with caplog.at_level(logging.WARNING):
        play(worker_of(solve), num_generations=3)
    told = [record.message for record in caplog.records if "An agent requests" in record.message]
    assert told == [
        "An agent requests temperature 0.2, but gets 1.0, the value of model.sampling, because all completions of a "
        "run are sampled with the same parameters."
    ]


# ---- ends ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("max_tokens", "max_observed"), [(9, 400), (400, 3)])
@pytest.mark.parametrize("raises", [True, False])
def test_a_trajectory_without_room_ends_there_whatever_the_agent_makes_of_it(
    max_tokens: int, max_observed: int, raises: bool
) -> None:
    said: list[Any] = []

    def solve(base_url: str, api_key: str, **columns: Any) -> float:
        client = Client(base_url, api_key)
        first = client.say(ASKED)
        said.append(client.chat(ASKED, first, user("On.")).json()["error"])
        if raises:
            raise RuntimeError("context length")
        return 1.0

    worker, sampling = worker_of(solve), SamplingParams(max_tokens=max_tokens, max_observed=max_observed)
    completion = only(play(worker, lambda *_: "a long turn" * (max_tokens < 99) or "turn", sampling=sampling))
    assert completion.finish_reason == "length" and len(completion.turns) == 1
    assert completion.episode is not None and completion.episode.reward == (None if raises else 1.0)
    assert said[0]["code"] == "context_length_exceeded" and "maximum context length" in said[0]["message"]
    assert worker.metrics()["environments/cut_short"] == 1 and worker.metrics()["environments/dropped"] == 0


def test_a_first_request_without_room_is_a_failure_that_says_so(caplog: pytest.LogCaptureFixture) -> None:
    def solve(base_url: str, api_key: str, **columns: Any) -> None:
        Client(base_url, api_key).say(ASKED)

    with caplog.at_level(logging.WARNING):
        worker = worker_of(solve, retries=0)
        (group,) = play(worker, rows=[{"number": 1}], sampling=SamplingParams(max_tokens=9, max_observed=3))
    assert group.rollouts == [] and "model.sampling.max_observed allows 3" in caplog.text
    assert worker.metrics()["environments/dropped"] == 1


def failing(times: int, how: Callable[[Client], Any]) -> Any:
    begun = [0]

    def solve(base_url: str, api_key: str, **columns: Any) -> float:
        client = Client(base_url, api_key)
        begun[0] += 1
        return how(client) if begun[0] <= times else float(bool(client.say(ASKED)))

    return solve


def _raises(client: Client) -> float:
    client.say(ASKED)
    raise SystemExit("no")


def _hangs(client: Client) -> float:
    client.say(ASKED)
    time.sleep(60)
    return 1.0


def _never_asks(client: Client) -> float:
    return 1.0


FAILURES = {_raises: "fails (SystemExit: no)", _hangs: "takes too long", _never_asks: "ends without a request"}


@pytest.mark.parametrize("how", FAILURES)
def test_an_agent_that_fails_begins_again_and_is_no_reward_of_0(how: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        times, limit_s = (1, 3.0) if how is _hangs else (2, 300.0)
        worker = worker_of(failing(times, how), timeout_s=limit_s)
        completion = only(play(worker))
    assert completion.episode is not None and completion.episode.reward == 1 and len(completion.turns) == 1
    assert f"solve {FAILURES[how]}" in caplog.text
    metrics = worker.metrics()
    assert metrics["environments/failures"] == metrics["environments/retries"] == times
    worker = worker_of(failing(9, how), timeout_s=limit_s, retries=times - 1)
    (group,) = play(worker)
    assert group.rollouts == [] and worker.metrics()["environments/dropped"] == 1


def test_too_many_agents_that_hang_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MOST_LOST", 1)
    with pytest.raises(RuntimeError, match="2 calls of environments or tools have taken longer than they may"):
        play(worker_of(failing(9, _hangs), timeout_s=0.5, retries=9))


def test_an_async_agent_that_blocks_its_loop_is_replaced() -> None:
    begun = [0]

    async def solve(base_url: str, api_key: str, **columns: Any) -> float:
        begun[0] += 1
        if begun[0] == 1:
            time.sleep(60)
        return await asyncio.to_thread(two_turns, base_url, api_key, **columns)

    assert only(play(worker_of(solve, timeout_s=5))).episode.reward == 0.5  # pyrefly: ignore[missing-attribute]


def test_waiting_for_a_thread_or_for_the_policy_is_no_hanging() -> None:
    def says(request: Request, turn: int) -> str:
        time.sleep(0.4)
        return "turn"

    worker = worker_of(two_turns, timeout_s=3.0, trajectory_timeout_s=3.5, num_threads=1)
    (group,) = play(worker, says, num_generations=6, num_slots=1)
    assert len(group.rollouts) == 6 and worker.metrics()["environments/failures"] == 0


def test_an_agent_at_work_within_its_limit_is_no_standstill() -> None:
    in_time: dict[str, bool] = {}

    def solve(base_url: str, api_key: str, **columns: Any) -> None:
        Client(base_url, api_key).say(ASKED)
        time.sleep(0.2)
        in_time["working"] = worker.waits_in_time

    def says(request: Request, turn: int) -> str:
        in_time["waiting"] = worker.waits_in_time
        return "turn"

    worker = worker_of(solve)
    play(worker, says)
    assert in_time == {"working": True, "waiting": False}


def test_an_agent_that_has_been_given_up_is_answered_no_more() -> None:
    said: list[Any] = []
    given_up, gone = threading.Event(), threading.Event()

    def solve(base_url: str, api_key: str, **columns: Any) -> float:
        client = Client(base_url, api_key)
        first = client.say(ASKED)
        if not said:
            said.append(first["content"])
            assert given_up.wait(300)
            said.append(client.chat(ASKED, first, user("On.")).status_code)
            gone.set()
        return 1.0

    def says(request: Request, turn: int) -> str:
        if said:  # the next agent asks
            given_up.set()
            assert gone.wait(300)
        return "turn"

    completion = only(play(worker_of(solve, timeout_s=3), says))
    assert said == ["turn", 404] and len(completion.turns) == 1


class Drops(Listener):
    """Leaves out what is decoded, and what is away once it is told to."""

    def __init__(self, told: Sequence[Any]) -> None:
        self.told = told

    def on_rollout_start(self, ledger: Any) -> None:
        self.ledger = ledger

    def on_step(self, events: StepEvents) -> Answer | None:
        return Answer(drop=list(self.ledger.decoding)) if not events.finished else None

    def on_idle(self) -> Answer | None:
        return Answer(drop=list(self.ledger.awaiting_env)) if self.told else None


def dropped(worker: Trajectories, told: Sequence[Any], generator: Callable[..., Scripted] = Scripted) -> None:
    """A rollout whose only trajectory is left out of its group."""
    loop = RolloutLoop(generator(chat_tokenizer(), numbered), listeners=[worker, Drops(told)])
    (group,), _ = loop.collect(prompts_of(worker, [{"prompt": "Guess."}]), 1, SAMPLING, seed=0)
    assert group.rollouts == [] and not worker.drivers


def test_an_agent_whose_trajectory_is_dropped_while_it_works_is_canceled_and_closed() -> None:
    happened: list[str] = []
    over = threading.Semaphore(0)

    class Working:
        async def run(self, base_url: str, api_key: str, **columns: Any) -> None:
            await asyncio.to_thread(Client(base_url, api_key).say, ASKED)
            happened.append("asked")
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                happened.append("canceled")
                over.release()
                raise

        def close(self) -> None:
            happened.append("closed")
            over.release()

    worker = worker_of(Working)
    dropped(worker, happened)
    assert over.acquire(timeout=120) and over.acquire(timeout=120)
    assert sorted(happened) == ["asked", "canceled", "closed"]
    assert worker.metrics()["environments/retries"] == worker.metrics()["environments/dropped"] == 0
    worker.close()


def test_a_validation_does_not_wait_for_threads_of_agents_that_wait_for_the_policy() -> None:
    goes_on = threading.Event()

    def solve(base_url: str, api_key: str, **_: Any) -> float:
        client = Client(base_url, api_key)
        first = client.say(ASKED)
        goes_on.wait(120)
        client.say(ASKED, first, user("On."))
        return 1.0

    worker, buffer = worker_of(solve, num_threads=2), RolloutBuffer(ReleaseRule(num_groups=1, leftovers="keep"))
    generator = Scripted(chat_tokenizer(), numbered)
    (prompt,) = prompts_of(worker, [{"prompt": "Guess."}])
    buffer.open(group_requests([prompt], 2, SAMPLING, 0))
    both_begun = lambda _: [bool(each.num_turns) for each in worker.drivers.values()] == [True] * 2  # noqa: E731
    RolloutLoop(generator, buffer, listeners=[worker]).run(both_begun)
    goes_on.set()
    buffer.end_update()
    held_out, found = replace(prompt, prompt_id="validation/0"), []

    def validate() -> None:
        loop = RolloutLoop(Scripted(chat_tokenizer(), numbered), listeners=[worker])
        found.extend(loop.collect([held_out], 3, SAMPLING, 0)[0])

    validation = threading.Thread(target=validate, daemon=True)
    validation.start()
    validation.join(120)
    assert [len(group.rollouts) for group in found] == [3]
    RolloutLoop(generator, buffer, listeners=[worker]).run(lambda _: not buffer.asks)
    assert [len(group.rollouts) for group in buffer.take()] == [2]
    worker.close()


@pytest.mark.parametrize("asks_between", [True, False])
def test_an_agent_works_on_over_several_rollouts_and_begins_again_where_it_is_too_old(asks_between: bool) -> None:
    """As in modes that keep groups open: once it is away when the rollout ends, once its turn is too old."""
    begun: list[str] = []
    goes_on = threading.Event()

    def solve(base_url: str, api_key: str, **columns: Any) -> float:
        begun.append(api_key)
        client = Client(base_url, api_key)
        first = client.say(ASKED)
        goes_on.wait(120)
        client.say(ASKED, first, user("On."))
        return 1.0

    for version, times in ((0, 1), (5, 2)):
        goes_on.clear()
        begun.clear()
        worker, buffer = worker_of(solve), RolloutBuffer(ReleaseRule(num_groups=1, leftovers="keep", max_staleness=1))
        generator = Scripted(chat_tokenizer(), numbered)
        buffer.open(group_requests(prompts_of(worker, [{"prompt": "Guess."}]), 1, SAMPLING, 0))
        is_away = lambda _: bool(begun) and any(each.num_turns for each in worker.drivers.values())  # noqa: B023, E731
        RolloutLoop(generator, buffer, listeners=[worker]).run(is_away)
        buffer.end_update()
        ((key, places),) = worker.state_dict()["trajectories"]
        assert key == ["train/0", 0, (0,)] and {state for _, state in places} == {None}  # no agent outlives a kill
        generator.version = version
        goes_on.set()
        until = time.monotonic() + 20
        while asks_between and not worker._events and time.monotonic() < until:  # as during an update
            time.sleep(0.01)
        RolloutLoop(generator, buffer, listeners=[worker]).run(lambda _: not buffer.asks)  # noqa: B023
        completion = only(buffer.take())
        assert len(completion.turns) == 2 and completion.oldest_version == version and len(begun) == times
        worker.close()


class Solver:
    """Gives its reward later, and is closed once it has been scored."""

    def __init__(self) -> None:
        self.closed = False

    async def run(self, base_url: str, api_key: str, prompt: str) -> str:
        self.said = await asyncio.to_thread(lambda: Client(base_url, api_key).say(user(prompt))["content"])
        return self.said

    def get_reward(self) -> float:
        return float(len(self.said))

    def close(self) -> None:
        self.closed = True


def test_an_object_of_a_class_gives_its_reward_later_and_is_handed_to_reward_functions() -> None:
    def closed(completions: Any, environments: Any) -> list[float]:
        return [float(environment.closed) for environment in environments]

    worker = worker_of(Solver)
    runner = RewardRunner([*worker.rewards, RewardFunction.of(closed, "closed")])
    (group,) = play(worker, listeners=[runner])
    runner.close()
    assert group.rollouts[0].rewards == {"Solver": 6.0, "closed": 0.0}
    assert group.rollouts[0].completion.episode.environment.closed  # pyrefly: ignore[missing-attribute]


EARNED = {"reward": 0.5, "turn_rewards": [0.25, 1]}


class Later:
    def run(self, base_url: str, api_key: str, prompt: str) -> None:
        two_turns(base_url, api_key, prompt)

    def get_reward(self) -> Any:
        return EARNED


def at_once(base_url: str, api_key: str, prompt: str) -> Any:
    two_turns(base_url, api_key, prompt)
    return EARNED


@pytest.mark.parametrize("agent", [at_once, Later])
def test_what_turns_earned_by_themselves_is_trained_on_by_turn(agent: Any) -> None:
    worker = worker_of(agent)
    (group,) = play(worker, rows=[{"prompt": "Guess."}], num_generations=2)
    assert [rollout.turn_rewards for rollout in group.rollouts] == [(0.25, 1.0)] * 2
    assert [reward.name for reward in worker.rewards] == [agent.__name__]
    assert {rollout.completion.episode.reward for rollout in group.rollouts} == {0.5}  # pyrefly: ignore[missing-attribute]
    group.rollouts[1].turn_rewards = (0.75, 0.0)
    for rollout in group.rollouts:
        rollout.reward = 0.5
    compares = credited(MTGRPO(weight=2.0, scale=False), group, [0.0, 0.0])
    assert compares == [[-0.5, 1.0], [0.5, -1.0]]


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"turn_rewards": [1.0]}, r"turn_rewards is \[1.0\], but there were 2 turns; return one number per turn"),
        ({"turn_rewards": [1.0, None]}, r"turn_rewards is \[1.0, None\], but there were 2 turns"),
        ({"turn_rewards": 1.0}, "turn_rewards is 1.0, which is no list; return one number per turn"),
        ({"turn_rewards": [1.0, "x"]}, "it returned 'x', which is not a number"),
        ({"rewards": 1.0}, "it returned a mapping with 'rewards'; give it 'reward' and 'turn_rewards' alone"),
    ],
)
def test_rewards_of_turns_that_cannot_be_read_are_refused(told: Any, message: str) -> None:
    def solve(base_url: str, api_key: str, prompt: str) -> Any:
        two_turns(base_url, api_key, prompt)
        return told

    with pytest.raises(ValueError, match=f"solve: {message}"):
        play(worker_of(solve), rows=[{"prompt": "Guess."}])


# ---- bad input ----------------------------------------------------------------------------------------


class Runless:
    pass


def deaf(api_key: str) -> None: ...


def named(base_url: str, api_key: str, number: int) -> None: ...


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (None, "it has no run; name a function, as in run: my_agent.py:solve"),
        (Runless, "class Runless has no method run; give a function, or a class with a method run"),
        (3, "run is 3, which is no function; give a function"),
        (deaf, "deaf has no parameter base_url, without which it cannot call the policy; add it"),
        ("missing.py:solve", "agent 'missing.py:solve': there is no file missing.py"),
    ],
)
def test_what_cannot_be_an_agent_is_refused(run: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"rollout.plugins agent: {message}"):
        fresh(Agent(run=run))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "?"}, "has no column 'number', which named requires"),
        (
            {"number": 1, "base_url": "x"},
            "has a column 'base_url', but the endpoint sets the parameter base_url of named; rename",
        ),
    ],
)
def test_rows_that_an_agent_cannot_take_are_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(UnusableRow, match=message):
        prompts_of(worker_of(named), [row])


def test_a_run_without_room_for_what_agents_say_is_refused() -> None:
    with pytest.raises(ValueError, match=r"what an agent says needs room, and max_observed of model\.sampling"):
        Agent(run=two_turns).check(RunFacts(4, 8, 64, 1))
    Agent(run=two_turns).check(RunFacts(4, 8, 64, 1, max_observed=9))
