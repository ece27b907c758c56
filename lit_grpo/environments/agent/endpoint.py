"""An endpoint on loopback that speaks as OpenAI's and vLLM's servers do, and is answered by the run's generator."""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aiohttp import web

from lit_grpo.environments.agent.dialogue import OVER, Dialogue, Refused

if TYPE_CHECKING:
    from lit_grpo.data.chat import Message
    from lit_grpo.environments.agent.dialogue import Reply

HOST = "127.0.0.1"
MAX_BYTES = 16 * 2**20
"""The largest request that is read."""
MODEL = "policy"
OWN = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "max_completion_tokens")
"""Sampling fields that a request may have; the run's settings are used, and a warning is logged if they differ."""
ONLY: Mapping[str, Sequence[Any]] = {
    "n": [1],
    "tool_choice": ["auto"],
    "response_format": [{"type": "text"}],
    "chat_template_kwargs": [{}],
    "logit_bias": [{}],
    "presence_penalty": [0],
    "frequency_penalty": [0],
    "repetition_penalty": [1],
    "ignore_eos": [False],
    "min_tokens": [0],
}
"""Fields with their allowed values; another value is refused, because sampling would not follow it."""


class Endpoint:
    """Serves ``/v1/chat/completions``, ``/v1/models`` and vLLM's ``/inference/v1/generate``.

    Each trajectory has an address of its own, ``http://127.0.0.1:PORT/ID/v1``; at the address without an id, the header
    ``X-Session-ID`` says which it is. It runs on the event loop that :meth:`serve` is called on.

    A run that is resumed has another port and another ``api_key``. So it refuses what an agent of the run before still
    asks, which a kill may have left at work in a process of its own.

    Attributes:
        api_key: Bearer token that clients have to send.
        ends: The tokens that end a turn.
    """

    def __init__(self) -> None:
        self.api_key = secrets.token_urlsafe(32)
        self.ends: tuple[int, ...] = ()
        self._dialogues: dict[str, Dialogue] = {}
        self._started: asyncio.Future[web.AppRunner] | None = None

    async def serve(self, dialogue: Dialogue, at_end: Callable[[Callable[[], Coroutine[Any, Any, None]]], None]) -> str:
        """Take requests of a trajectory; return its address. The server is stopped by what ``at_end`` is given."""
        if self._started is None:
            self._started = asyncio.ensure_future(self._start())
            at_end(self.stop)
        runner = await asyncio.shield(self._started)
        self._dialogues[dialogue.id] = dialogue
        return f"http://{HOST}:{runner.addresses[0][1]}/{dialogue.id}/v1"

    def forget(self, dialogue: Dialogue) -> None:
        """Take no more requests of a trajectory."""
        self._dialogues.pop(dialogue.id, None)
        dialogue.close()

    async def stop(self) -> None:
        """Close the port."""
        started, self._started = self._started, None
        if started is not None and started.done() and not started.cancelled():
            await started.result().cleanup()

    async def _start(self) -> web.AppRunner:
        app = web.Application(middlewares=[self._guard], client_max_size=MAX_BYTES)
        for place in ("", "/{session}"):
            app.router.add_get(f"{place}/v1/models", self._models)
            app.router.add_post(f"{place}/v1/chat/completions", self._chat)
            app.router.add_post(f"{place}/inference/v1/generate", self._generate)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, HOST, 0).start()
        return runner

    # ---- what every request goes through ---------------------------------------------------------------

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        shown = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(shown, f"Bearer {self.api_key}".encode()):
            return _error("The bearer token is not the api_key that the agent was given.", "unauthorized", 401)
        try:
            return await handler(request)
        except Refused as refused:
            return _error(str(refused), refused.code, refused.status)
        except web.HTTPException as error:
            return _error(error.text or error.reason, "http", error.status)

    def _dialogue(self, request: web.Request) -> Dialogue:
        session = request.match_info.get("session") or request.headers.get("X-Session-ID", "")
        if session not in self._dialogues:
            raise Refused(f"{OVER} Use the base_url that the agent was given, or its X-Session-ID.", "over", 404)
        return self._dialogues[session]

    async def _ask(
        self, request: web.Request, turn: Callable[[Dialogue, dict[str, Any]], Awaitable[Reply]]
    ) -> tuple[Dialogue, dict[str, Any], Reply]:
        """Read a request, and have it answered; one that a client of ``openai`` sends again gets the same answer."""
        dialogue = self._dialogue(request)
        try:
            body = json.loads(await request.read())
        except (ValueError, RecursionError):
            body = None
        try:
            if not isinstance(body, dict):
                raise Refused("The request must be a JSON object.")
            for asked in (body, body.get("sampling_params")):
                _check_sampling(asked, dialogue, self.ends)
            is_sent_again = request.headers.get("X-Stainless-Retry-Count", "0") != "0"
            reply = await dialogue.again(body) if is_sent_again else None
            return dialogue, body, reply or await turn(dialogue, body)
        except Refused as refused:
            dialogue.refuse(refused)
            raise

    # ---- routes -----------------------------------------------------------------------------------------

    async def _models(self, request: web.Request) -> web.Response:
        room = {}
        if "session" in request.match_info:
            asked = self._dialogue(request).request
            room = {"max_model_len": len(asked.prompt.token_ids) + asked.sampling.room}
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "lit_grpo", **room}
        return web.json_response({"object": "list", "data": [model]})

    async def _generate(self, request: web.Request) -> web.Response:
        dialogue, body, reply = await self._ask(request, Dialogue.after_tokens)
        choice = {
            "index": 0,
            "token_ids": reply.token_ids,
            "finish_reason": reply.finish_reason,
            "logprobs": {"content": _logprobs(reply, [f"token_id:{token}" for token in reply.token_ids])},
        }
        name = body.get("request_id") or f"{dialogue.id}-{len(reply.before)}"
        return web.json_response({"request_id": name, "choices": [choice]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        dialogue, body, reply = await self._ask(request, Dialogue.after_messages)
        message = _of_wire(reply.message)
        given = {"logprobs": None, "finish_reason": "tool_calls" if "tool_calls" in message else reply.finish_reason}
        if body.get("logprobs"):
            decode = dialogue.chat.tokenizer.decode
            given["logprobs"] = {"content": _logprobs(reply, [str(decode([token])) for token in reply.token_ids])}
        prompt_ids = {}
        if body.get("return_token_ids"):
            given["token_ids"], prompt_ids = reply.token_ids, {"prompt_token_ids": reply.before}
        counts = {"prompt_tokens": len(reply.before), "completion_tokens": len(reply.token_ids)}
        usage = {"usage": counts | {"total_tokens": sum(counts.values())}}
        whole = {
            "id": f"chatcmpl-{dialogue.id}-{len(reply.before)}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": body.get("model") or MODEL,
            **prompt_ids,
        }
        if not body.get("stream"):
            return web.json_response({**whole, "choices": [{"index": 0, "message": message, **given}], **usage})
        whole["object"] = "chat.completion.chunk"
        for number, call in enumerate(message.get("tool_calls", ())):
            call["index"] = number
        chunks = [{**whole, "choices": [{"index": 0, "delta": message, **given, "finish_reason": None}]}]
        chunks += [{**whole, "choices": [{"index": 0, "delta": {}, "finish_reason": given["finish_reason"]}]}]
        if (body.get("stream_options") or {}).get("include_usage"):
            chunks += [{**whole, "choices": [], **usage}]
        return await _stream(request, [*map(json.dumps, chunks), "[DONE]"])


def _check_sampling(asked: Any, dialogue: Dialogue, ends: Sequence[int]) -> None:
    """Check that the run samples as a request asks, and tell of what it asks in vain.

    Raises:
        Refused: It does not.
    """
    if not isinstance(asked, dict):
        return
    own = dialogue.request.sampling
    for name, allowed in ONLY.items():
        if asked.get(name) is not None and asked[name] not in allowed:
            raise Refused(f"{name} must be {allowed[0]!r} here, not {asked[name]!r}; leave it out.")
    stop = asked.get("stop") or []
    if unknown := {*([stop] if isinstance(stop, str) else map(str, stop))} - {*own.stop}:
        raise Refused(f"The run does not stop at {sorted(unknown)}; name them in model.sampling.stop.")
    ids = asked.get("stop_token_ids") or []
    if unknown := [each for each in (ids if isinstance(ids, list) else [ids]) if each not in ends]:
        raise Refused(
            f"The run does not stop at the token ids {unknown} of stop_token_ids, but at {list(ends)}; leave them out, "
            "or add them to eos_token_id of the policy's generation_config."
        )
    for name in OWN:
        held = getattr(own, {"max_completion_tokens": "max_tokens"}.get(name, name))
        if asked.get(name) not in (None, held, -1):  # which is none, for top_k
            dialogue.tell(
                f"An agent requests {name} {asked[name]!r}, but gets {held}, the value of model.sampling, because all "
                "completions of a run are sampled with the same parameters."
            )


def _logprobs(reply: Reply, names: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {"token": name, "logprob": logprob, "bytes": None, "top_logprobs": []}
        for name, logprob in zip(names, reply.logprobs, strict=True)
    ]


def _of_wire(message: Message) -> dict[str, Any]:
    """Return a turn with arguments of calls as JSON text."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, **({"tool_calls": calls} if calls else {})}


async def _stream(request: web.Request, events: Sequence[str]) -> web.StreamResponse:
    """Send a turn as server-sent events; all of them at once, because tokens come when the turn is over."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    await response.write("".join(f"data: {event}\n\n" for event in events).encode())
    await response.write_eof()
    return response


def _error(sentence: str, code: str, status: int) -> web.Response:
    said = {"message": sentence, "type": "invalid_request_error", "param": None, "code": code}
    return web.json_response({"error": said}, status=status)
