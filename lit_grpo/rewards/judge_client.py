"""The client of judges: a chat completions server with a cache, limits and counts."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import math
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast
from urllib.parse import urlsplit

from lit_grpo.limits import Count, Limit, Number, Positive, checks_arguments
from lit_grpo.process.calls import EventLoop
from lit_grpo.process.urls import is_on_loopback, is_url, masked, read_secret
from lit_grpo.rewards.function import StatefulReward

T = TypeVar("T")
MOST_BYTES = 4 * 2**20
"""The most bytes of a judge's reply."""
MOST_PAUSE_S = 60.0
"""The longest pause before a retry that a server may ask for."""
_WORTH_A_RETRY = (408, 409, 425, 429)  # beside 500 and above


class JudgeError(RuntimeError):
    """A judge gave no score.

    Attributes:
        retry_after_s: Min seconds before a retry; infinity if a retry cannot help.
    """

    def __init__(self, sentence: str, retry_after_s: float = 0.0) -> None:
        super().__init__(masked(sentence))
        self.retry_after_s = retry_after_s


class PartlyRead(ValueError):
    """A reply has only some of the values that were asked for.

    Args:
        values: Those that it has, by name.
        problems: What is wrong with each of the others, by name; the text follows the reply.
    """

    def __init__(self, values: Mapping[str, Any], problems: Mapping[str, str]) -> None:
        super().__init__("; it ".join(problems.values()))
        self.values, self.problems = values, problems


class JudgeLimitReached(JudgeError):
    """The calls or tokens of a run are used up."""


class Judge(StatefulReward):
    """A client of a chat completions server that caches replies, counts calls and tokens, and stops at a limit.

    A call fails if the server cannot be reached, answers with an error, or gives no score that can be read.
    ``retries`` of the reward repeats it, with a pause that doubles or that the server asks for (``Retry-After``), and
    ``on_reward_error`` says what a failure does to the run. ``reward_workers`` limits the requests at a time. Proxies
    of the environment are used, except for a server on this machine.

    A request that was answered before is not sent again, and neither is one that another thread is waiting for.
    An update logs calls, prompt and completion tokens, cache hits and failures of this process (``rewards/NAME/...``).

    Args:
        url: The server's base URL, such as ``https://api.openai.com/v1``; ``/chat/completions`` is added.
        model: The judge's name on the server.
        api_key_env: The environment variable with the API key, if the server requires one.
        timeout_s: Max seconds of a whole call, from the connection to the last byte of the reply.
        options: Further fields of the request, such as ``{"temperature": 0, "max_tokens": 64}``. ``null`` leaves a
            field out, such as ``{"response_format": null}`` for a server without structured output.
        call_limit: Max number of requests of a run. When it is reached, every further one fails.
        token_limit: Max number of prompt and completion tokens of a run, by the server's ``usage``. When it is reached,
            every further request fails; those that are in flight then are still paid for.
        cache: SQLite file that keeps replies and the spent calls and tokens, so that a resumed run continues with them
            and processes of one machine share them. A relative path is in the run's folder. By default both are kept in
            memory, by each process for itself.
        cache_size: Max number of replies in the cache; the oldest are dropped first.
        plain_http: Allow ``http://`` to another machine: what is sent, an API key too, can then be read on the way.
    """

    retries = 3
    """Default of the reward's ``retries``."""

    @checks_arguments()
    def __init__(
        self,
        url: str,
        model: str,
        api_key_env: str | None = None,
        timeout_s: Positive = 30.0,
        options: dict[str, Any] | None = None,
        call_limit: Count | None = None,
        token_limit: Annotated[int, Limit(ge=1, le=2**53)] | None = None,
        cache: str | None = None,
        cache_size: Number = 10_000,
        plain_http: bool = False,
    ) -> None:
        if not is_url(url):
            raise ValueError(f"url must begin with http:// or https://, not {url!r}.")
        if "@" in urlsplit(url).netloc:
            raise ValueError("url holds a user name or password, which messages would show; name api_key_env.")
        if url.startswith("http://") and not is_on_loopback(url) and not plain_http:
            raise ValueError(
                f"url {url!r} is of another machine and not encrypted; use https://, or set plain_http to true for a "
                "network that you trust."
            )
        if api_key_env is not None:
            read_secret(api_key_env, "api_key_env")
        self.url = url.rstrip("/").removesuffix("/chat/completions") + "/chat/completions"
        self.model, self.options, self.api_key_env = model, options or {}, api_key_env
        self.limits = {"calls": call_limit, "tokens": token_limit}
        self._timeout_s, self._cache = timeout_s, cache
        self._replies = _Replies(None, cache_size)
        self._lock = threading.Lock()  # guards the next two
        self._counts: Counter[str] = Counter()
        self._asking: dict[str, threading.Lock] = {}
        import httpx

        limits = httpx.Limits(max_connections=None)
        self._client = httpx.AsyncClient(timeout=None, limits=limits, trust_env=not is_on_loopback(self.url))
        self._loop = EventLoop("lit_grpo-judge")

    def begin(self, device: object, folder: Path) -> None:
        if self._cache is not None:
            self._replies = _Replies(folder / self._cache, self._replies.size)

    def take_counts(self) -> dict[str, float]:
        """Return the counts since the last call, by name, and forget them."""
        names = ("calls", "prompt_tokens", "completion_tokens", "cache_hits", "failures")
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return {name: float(counts[name]) for name in names}

    def ask(self, messages: list[dict[str, str]], read: Callable[[str], T], **fields: Any) -> T:
        """Return what ``read`` makes of the judge's reply to ``messages``, or of the reply in the cache.

        Args:
            messages: As in a chat completions request.
            read: Reads a reply's text. A reply for which it raises a ``ValueError`` is not cached. If that is a
                :class:`PartlyRead`, its values are returned, with a :class:`JudgeError` in place of each other.
            fields: Further fields of the request; ``options`` may override them.

        Raises:
            JudgeError: The server gives no reply that ``read`` accepts, or a limit is reached.
        """
        body = {"model": self.model, "messages": messages, **fields, **self.options}
        body = {name: value for name, value in body.items() if value is not None}
        key = hashlib.sha256(json.dumps([self.url, body], sort_keys=True).encode()).hexdigest()
        with self._once(key):
            cached = self._replies.get(key)
            if cached is not None:
                with suppress(ValueError, RecursionError):  # another reader has accepted it
                    value = read(cached)
                    self._count(cache_hits=1)
                    return value
            try:
                reply, is_whole = self._reply(body)
                try:
                    value = read(reply)
                except (ValueError, RecursionError) as error:
                    cut = "" if is_whole else "; it was cut off at max_tokens, so raise that in options"
                    said = f"the judge's reply {reply!r:.80}"
                    if not isinstance(error, PartlyRead):
                        raise JudgeError(f"{said} {error}{cut}") from error
                    self._count(failures=1)
                    missing = {name: JudgeError(f"{said} {what}{cut}") for name, what in error.problems.items()}
                    return cast(T, {**error.values, **missing})
            except BaseException:
                self._count(failures=1)
                raise
            self._replies.put(key, reply)
            return value

    @contextmanager
    def _once(self, key: str) -> Iterator[None]:
        """Let one thread at a time ask with a key; the others then find its reply in the cache."""
        with self._lock:
            own = self._asking.setdefault(key, threading.Lock())
        try:
            with own:
                yield
        finally:
            with self._lock:
                self._asking.pop(key, None)

    def _count(self, **numbers: int) -> None:
        with self._lock:
            self._counts.update(numbers)

    def _spend_call(self) -> None:
        """Count a call before it is made."""
        reached = self._replies.spend_call(self.limits)
        if reached is None:
            self._count(calls=1)
            return
        raise JudgeLimitReached(
            f"the judge at {self.url} has used the {self.limits[reached]:,} {reached} of this run "
            f"({reached.removesuffix('s')}_limit); raise the limit and resume, or train without this reward",
            math.inf,
        )

    def _reply(self, body: dict[str, Any]) -> tuple[str, bool]:
        """Ask the server; return the reply's text, and whether it ended by itself."""
        import httpx

        self._spend_call()
        try:
            status, wait, data = self._loop.run(self._answer(body))
        except TimeoutError as error:
            raise JudgeError(
                f"the judge at {self.url} does not answer within {self._timeout_s:g} s (timeout_s)"
            ) from error
        except httpx.HTTPError as error:
            what = f"{type(error).__name__} {error}".strip()
            raise JudgeError(f"the judge at {self.url} does not answer ({what})") from error
        if len(data) > MOST_BYTES:
            raise JudgeError(f"the judge at {self.url} answers more than {MOST_BYTES // 2**20} MiB; limit max_tokens")
        shown = masked(data[:10_000].decode("utf-8", "replace"))
        if status != 200:
            pause_s = _pause_s(wait) if status in _WORTH_A_RETRY or status >= 500 else math.inf
            late = f", and asks to wait {pause_s:g} s" if MOST_PAUSE_S < pause_s < math.inf else ""
            raise JudgeError(
                f"the judge at {self.url} answers {status}{late}: {shown!r:.120}",
                math.inf if pause_s > MOST_PAUSE_S else pause_s,
            )
        try:
            answer = json.loads(data)
            choice = answer["choices"][0]
            text, is_whole = choice["message"]["content"], choice.get("finish_reason") != "length"
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise JudgeError(f"the judge at {self.url} answers no chat completion: {shown!r:.120}") from error
        self._count_tokens(answer.get("usage"))
        if not isinstance(text, str):
            raise JudgeError(f"the judge at {self.url} answers without text: {shown!r:.120}")
        return masked(text), is_whole  # so that no part of a key is quoted, cached or read

    def _count_tokens(self, usage: Any) -> None:
        """Count the tokens of a call, as the server reports them."""
        usage = usage if isinstance(usage, dict) else {}
        names = ("prompt_tokens", "completion_tokens")
        numbers = {name: usage.get(name) for name in names}
        counted = {name: number for name, number in numbers.items() if type(number) is int and 0 <= number < 2**31}
        self._count(**counted)
        self._replies.spend_tokens(sum(counted.values()))
        if len(counted) < len(names) and self.limits["tokens"] is not None:
            raise JudgeError(
                f"the judge at {self.url} reports no usage, by which token_limit counts; set call_limit instead",
                math.inf,
            )

    async def _answer(self, body: dict[str, Any]) -> tuple[int, str, bytes]:
        """Return the status of the judge's reply, its Retry-After, and its first ``MOST_BYTES`` and a few more.

        Raises:
            TimeoutError: The whole call takes longer than ``timeout_s``.
            httpx.HTTPError: The judge cannot be reached, or breaks off.
        """
        key = None if self.api_key_env is None else read_secret(self.api_key_env, "api_key_env")
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        data = bytearray()
        async with asyncio.timeout(self._timeout_s):
            async with self._client.stream("POST", self.url, json=body, headers=headers) as response:
                async for chunk in response.aiter_bytes():
                    data += chunk
                    if len(data) > MOST_BYTES:
                        break
        return response.status_code, response.headers.get("Retry-After", ""), bytes(data)


def _pause_s(wait: str) -> float:
    """Return the seconds of a ``Retry-After`` header, a number or a date; 0 if it is neither."""
    try:
        seconds = float(wait)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(wait).timestamp() - time.time()
        except (ValueError, OverflowError):
            return 0.0
    return max(seconds, 0.0) if math.isfinite(seconds) else 0.0


class _Replies:
    """Replies by the hash of their request, and what has been spent, in memory or in a file that processes share."""

    def __init__(self, file: Path | None, size: int) -> None:
        self.size, self._file, self._lock = size, file, threading.Lock()
        with self._using() as base:
            base.executescript(
                "CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply TEXT NOT NULL);"
                "CREATE TABLE IF NOT EXISTS spent (calls INTEGER NOT NULL, tokens INTEGER NOT NULL);"
                "INSERT INTO spent SELECT 0, 0 WHERE NOT EXISTS (SELECT 1 FROM spent);"
            )

    @functools.cached_property
    def _base(self) -> sqlite3.Connection:
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
        place = ":memory:" if self._file is None else self._file
        return sqlite3.connect(place, timeout=30.0, isolation_level=None, check_same_thread=False)

    @contextmanager
    def _using(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                yield self._base
            except (sqlite3.Error, OSError) as error:
                raise ValueError(
                    f"the cache {self._file} cannot be used ({error}); free its disk, delete the file, or name another"
                ) from error

    def get(self, key: str) -> str | None:
        with self._using() as base:
            row = base.execute("SELECT reply FROM replies WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def put(self, key: str, reply: str) -> None:
        with self._using() as base:
            base.execute("INSERT OR REPLACE INTO replies VALUES (?, ?)", (key, reply))
            base.execute("DELETE FROM replies WHERE rowid <= (SELECT max(rowid) FROM replies) - ?", (self.size,))

    def spend_call(self, limits: Mapping[str, int | None]) -> str | None:
        """Count a call, or return the name of the limit that is reached."""
        most = {name: 2**62 if limit is None else limit for name, limit in limits.items()}
        with self._using() as base:
            spent = "UPDATE spent SET calls = calls + 1 WHERE calls < :calls AND tokens < :tokens"
            if base.execute(spent, most).rowcount:
                return None
            calls = base.execute("SELECT calls FROM spent").fetchone()[0]
        return "calls" if calls >= most["calls"] else "tokens"

    def spend_tokens(self, number: int) -> None:
        with self._using() as base:
            base.execute("UPDATE spent SET tokens = tokens + ?", (number,))
