"""A server that answers as vLLM's does, with a policy of its own in this process, and may lie about its completions."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

from lit_grpo.policy.loading import load_policy, load_tokenizer
from lit_grpo.policy.spec import eos_token_ids
from lit_grpo.policy.weights import digest
from lit_grpo.rollout.vllm.guard import Guard

CHUNK = 3
"""Tokens of an event."""


class Sampled(NamedTuple):
    """A completion as the policy samples it, and what its request asks for."""

    name: str
    num_prompt: int
    token_ids: list[int]
    logprobs: list[float]
    reason: str
    version: str
    max_tokens: int

    def told(self, **changes: Any) -> list[dict[str, Any]]:
        """Return the events that vLLM sends of it, or of it with some changes."""
        self = self._replace(**changes)
        count, events = len(self.token_ids), list[dict[str, Any]]()
        for begin in range(0, max(count, 1), CHUNK):
            end, is_last = min(begin + CHUNK, count), begin + CHUNK >= count
            pairs = zip(self.token_ids[begin:end], self.logprobs[begin:end], strict=True)
            choice = {
                "index": 0,
                "token_ids": self.token_ids[begin:end],
                "logprobs": {"content": [{"token_id": token, "logprob": logprob} for token, logprob in pairs]},
                "finish_reason": self.reason if is_last else None,
                "weight_versions": [{"version": self.version, "start": 0, "end": count}] if is_last else None,
            }
            usage = {"prompt_tokens": self.num_prompt, "completion_tokens": end}
            events.append({"request_id": f"generate-tokens-{self.name}", "choices": [choice], "usage": usage})
        return [*events, {"request_id": f"generate-tokens-{self.name}", "choices": [], "usage": events[-1]["usage"]}]


Lie = Callable[["ScriptedServer", Sampled], Iterator[Any] | Sequence[Any]]
"""Makes what is sent of a completion: events, bytes as they are, or seconds to wait."""


def honest(server: ScriptedServer, sampled: Sampled) -> Sequence[Any]:
    """Tell a completion as it is."""
    return sampled.told()


class ScriptedServer:
    """An ASGI application with the routes of vLLM that a run asks for.

    A token's random number depends on its request's seed and its position alone, so that all such servers sample the
    same tokens.

    Attributes:
        lie: What is sent of a completion.
        refuses: Which prompts are answered with 400.
        sampled: The completions so far.
        drafts: The ``speculative_config`` that it was started with.
    """

    def __init__(self, folder: Path) -> None:
        self.policy, self.tokenizer = load_policy(str(folder)).eval(), load_tokenizer(str(folder))
        self.lie: Lie = honest
        self.refuses: Callable[[list[int]], bool] = lambda prompt: False
        self.sampled: list[Sampled] = []
        self.drafts: dict[str, Any] | None = None
        self._ends, self._version = eos_token_ids(self.policy, self.tokenizer), ""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request."""
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        asked = json.loads(body or b"{}")
        if scope["path"] == "/inference/v1/generate" and not self.refuses(asked["token_ids"]):
            await self._stream(asked, send)
            return
        status = 400 if scope["path"] == "/inference/v1/generate" else 200
        content = json.dumps(self._answer(scope["path"], asked)).encode()
        await _begin(send, status, b"application/json")
        await send({"type": "http.response.body", "body": content})

    def _answer(self, path: str, asked: Any) -> Any:
        match path:
            case "/version":
                return {"version": "0.32.0"}
            case "/server_info":
                cache = {"block_size": 16, "num_gpu_blocks": 1000}
                return {"vllm_config": {"model_config": {}, "cache_config": cache, "speculative_config": self.drafts}}
            case "/v1/models":
                return {"data": [{"id": "tiny", "max_model_len": 128}]}
            case "/tokenize":
                return {"tokens": self.tokenizer.encode(asked["prompt"], add_special_tokens=False)}
            case "/collective_rpc":
                return {"results": [self._work(asked["method"], **asked["kwargs"])]}
            case "/update_weight_version":
                self._version = asked["new_version"]
            case "/weight_info":
                return {"weight_version": self._version}
            case "/v1/completions":
                return {"choices": [self._score(n, ids) for n, ids in enumerate(asked["prompt"])]}
            case "/inference/v1/generate":
                return {"error": {"message": "max_tokens must be at least 1, got 0."}}
        return {}

    def _work(self, method: str, source: str = "", **_: Any) -> Any:
        if method != "reload":
            return "True"
        tensors = load_file(source)
        self.policy.load_state_dict(tensors, strict=False)
        return {name: digest(tensor) for name, tensor in tensors.items()}

    @torch.no_grad()
    def _logprobs(self, token_ids: list[int]) -> torch.Tensor:
        return self.policy(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0].float().log_softmax(-1)

    def _score(self, number: int, token_ids: list[int]) -> Any:
        logprobs_TV, told = self._logprobs(token_ids), list[Any]([None])
        for place, token in enumerate(token_ids[1:]):
            told.append({str(token): {"logprob": float(logprobs_TV[place, token])}})
        return {"index": number, "prompt_logprobs": told}

    def _sample(self, asked: Any) -> Sampled:
        fields, ids = asked["sampling_params"], list(asked["token_ids"])
        token_ids, logprobs, reason = list[int](), list[float](), ""
        while not reason:
            logprobs_V = self._logprobs(ids + token_ids)[-1]
            number = random.Random(f"{fields['seed']} {len(ids) + len(token_ids)}").random()
            token = int((logprobs_V.exp().double().cumsum(0) < number).sum().clamp(max=len(logprobs_V) - 1))
            token_ids.append(token)
            logprobs.append(float(logprobs_V[token]))
            text = self.tokenizer.decode(token_ids)
            if token in fields["stop_token_ids"] or any(stop in text for stop in fields["stop"]):
                reason = "stop"
            elif len(token_ids) == fields["max_tokens"]:
                reason = "length"
        name, version = asked["request_id"], self._version
        return Sampled(name, len(ids), token_ids, logprobs, reason, version, fields["max_tokens"])

    async def _stream(self, asked: Any, send: Any) -> None:
        await _begin(send, 200, b"text/event-stream")
        self.sampled.append(self._sample(asked))
        lie = self.lie
        for part in lie(self, self.sampled[-1]):
            if lie is not self.lie:
                return  # nobody waits for it
            if isinstance(part, float):
                await asyncio.sleep(part)
                continue
            content = part if isinstance(part, bytes) else f"data: {json.dumps(part)}\n\n".encode()
            await send({"type": "http.response.body", "body": content, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


async def _begin(send: Any, status: int, kind: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})


@contextmanager
def serving(server: ScriptedServer) -> Iterator[str]:
    """Have a server behind the guard of real ones, which takes its token from the environment; its URL."""
    import uvicorn

    with socket.create_server(("127.0.0.1", 0)) as listening:
        config = uvicorn.Config(Guard(server), log_level="critical", lifespan="off")
        running = uvicorn.Server(config)
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        while not running.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        running.should_exit = running.force_exit = True
        thread.join(10.0)
