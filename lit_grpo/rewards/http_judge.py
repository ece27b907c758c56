"""A language model on a server that scores completions."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import re
import string
from typing import Any
from urllib.parse import urlsplit

from lit_grpo.limits import Positive, checks_arguments
from lit_grpo.process.calls import EventLoop
from lit_grpo.rewards.builtin import compile_pattern, last_answer

PLACES = ("prompt", "completion")
MOST_BYTES = 4 * 2**20
"""The most bytes of a judge's reply."""


def is_on_loopback(url: str) -> bool:
    """Whether a URL is of this machine, which no proxy can reach: ``localhost``, 127.x.y.z or ::1."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


class HTTPJudge:
    r"""The score that a judge, a language model, gives a completion, over OpenAI's chat completions protocol.

    The call fails if the judge cannot be reached, answers with an error or gives no score. ``retries`` of the reward
    repeats the call, and ``on_reward_error`` says what a failure does to the run. ``reward_workers`` limits the
    requests at a time. Proxies of the environment are used, except for a judge on this machine.

    Args:
        url: The server's base URL, such as ``https://api.openai.com/v1``; ``/chat/completions`` is added.
        model: The judge's name on the server.
        template: The question to the judge, with ``{prompt}``, ``{completion}`` and columns of the data such as
            ``{answer}``. Write ``{{`` for a brace.
        pattern: Regular expression; group 1 of its last match in the judge's reply is the score, a number.
        api_key_env: The environment variable with the API key, if the server requires one.
        timeout_s: The most seconds of a whole call, from the connection to the last byte of the reply.
        scale: The divisor of the score: 10 for a judge that gives marks out of ten.
        options: Further fields of the request, such as ``{"temperature": 0, "max_tokens": 64}``.
    """

    @checks_arguments()
    def __init__(
        self,
        url: str,
        model: str,
        template: str,
        pattern: str = r"(-?\d+(?:\.\d+)?)",
        api_key_env: str | None = None,
        timeout_s: Positive = 30.0,
        scale: float = 1.0,
        options: dict[str, Any] | None = None,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url must begin with http:// or https://, not {url!r}.")
        if not scale:
            raise ValueError("scale must not be 0, because it divides the score.")
        if api_key_env is not None and not os.environ.get(api_key_env):
            raise ValueError(f"api_key_env names {api_key_env}, which is not set in the environment; export it.")
        self.url = url.rstrip("/").removesuffix("/chat/completions") + "/chat/completions"
        self.model, self.template, self.scale, self.options = model, template, scale, options or {}
        self.api_key_env = api_key_env
        self.columns = tuple(name for name in _names(template) if name not in PLACES)
        self._pattern = compile_pattern("pattern", pattern, re.DOTALL, needs_group=True)
        import httpx

        limits = httpx.Limits(max_connections=None)
        self._client = httpx.AsyncClient(timeout=None, limits=limits, trust_env=not is_on_loopback(self.url))
        self._timeout_s, self._loop = timeout_s, EventLoop("lit_grpo-judge")

    def __call__(self, completion: str, prompt: str, **columns: Any) -> float:
        """Ask the judge.

        Raises:
            RuntimeError: The judge does not answer, or answers with an error.
            ValueError: The reply holds no score.
        """
        asked = self.template.format(**(columns | {"prompt": prompt, "completion": completion}))
        reply = self._ask(asked)
        score = last_answer(self._pattern, reply)
        try:
            return float(score or "") / self.scale
        except ValueError:
            raise ValueError(f"the judge's reply {reply!r:.80} holds no score that pattern matches") from None

    def _ask(self, text: str) -> str:
        import httpx

        try:
            status, reply = self._loop.run(self._answer(text))
        except TimeoutError as error:
            said = f"the judge at {self.url} does not answer within {self._timeout_s:g} s (timeout_s)"
            raise RuntimeError(said) from error
        except httpx.HTTPError as error:
            what = f"{type(error).__name__} {error}".strip()
            raise RuntimeError(f"the judge at {self.url} does not answer ({what})") from error
        if len(reply) > MOST_BYTES:
            raise RuntimeError(f"the judge at {self.url} answers more than {MOST_BYTES // 2**20} MiB; limit max_tokens")
        shown = reply[:200].decode("utf-8", "replace")
        if status != 200:
            raise RuntimeError(f"the judge at {self.url} answers {status}: {shown!r:.120}")
        try:
            return str(json.loads(reply)["choices"][0]["message"]["content"])
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise RuntimeError(f"the judge at {self.url} answers no chat completion: {shown!r:.120}") from error

    async def _answer(self, text: str) -> tuple[int, bytes]:
        """Return the status of the judge's reply, and its first ``MOST_BYTES`` and a few more.

        Raises:
            TimeoutError: The whole call takes longer than ``timeout_s``.
            httpx.HTTPError: The judge cannot be reached, or breaks off.
        """
        key = None if self.api_key_env is None else os.environ[self.api_key_env]
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        asked = {"model": self.model, "messages": [{"role": "user", "content": text}], **self.options}
        reply = bytearray()
        async with asyncio.timeout(self._timeout_s):
            async with self._client.stream("POST", self.url, json=asked, headers=headers) as response:
                async for chunk in response.aiter_bytes():
                    reply += chunk
                    if len(reply) > MOST_BYTES:
                        break
        return response.status_code, bytes(reply)


def _names(template: str) -> list[str]:
    """Return the names in a template's braces.

    Raises:
        ValueError: One is no name, or ``{completion}`` is missing.
    """
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ValueError(f"template {template!r:.60} is malformed ({error}); write a lone brace twice.") from error
    for name in names:
        if not name.isidentifier():
            raise ValueError(f"template holds {{{name}}}, which is no column; write a lone brace twice.")
    if "completion" not in names:
        raise ValueError("template has no {completion}, so every completion would score the same; put it in.")
    return names
