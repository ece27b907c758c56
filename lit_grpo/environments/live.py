"""The environment of one trajectory: its methods and tools, each call within limits, counted, and read as text."""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lit_grpo.environments.calls import MalformedCall, ToolCall, Turn
from lit_grpo.environments.contract import EnvironmentFailed, Kind
from lit_grpo.policy.architecture.vision import read_image
from lit_grpo.process.calls import BrokenLoop, Calls, CallTimeout, TooManyHang
from lit_grpo.process.terminal import error_text
from lit_grpo.process.values import PLAIN, find_foreign, from_written, to_written
from lit_grpo.rewards.function import read_value

if TYPE_CHECKING:
    from lit_grpo.data.chat import Message
    from lit_grpo.environments.chat import Chat, Content
    from lit_grpo.environments.log import EnvironmentLog
    from lit_grpo.types import Prompt


@dataclass(frozen=True)
class Limits:
    """The limits of a trajectory.

    Args:
        tool_timeout_s: Max seconds per call.
        trajectory_timeout_s: Max seconds of all calls of a trajectory together.
        retries: Max number of restarts of a trajectory with a fresh environment after failures.
        reset_timeout_s: Max seconds for constructing an environment, and for its reset.
        max_turns: Max turns of the policy; None for as many as the trajectory's tokens allow.
        max_answer_tokens: Max tokens of one answer of a tool or the user.
    """

    tool_timeout_s: float
    trajectory_timeout_s: float
    retries: int
    reset_timeout_s: float
    max_turns: int | None = None
    max_answer_tokens: int = 512


class Failure(Exception):
    """The environment of a trajectory has failed; the message continues a sentence that begins with its name."""


class ForeignState(Failure):
    """An environment's state holds a value that no checkpoint can hold."""


class NotShown(ValueError):
    """A tool or environment returns what the policy cannot be shown. The run ends."""


COMPUTED = 0.9
"""Fraction of ``tool_timeout_s`` that a function has used as CPU time if the policy is to read that it took too long.

A call that has used less has waited, for a busy machine or for somebody else: that is a failure, and decides no score.
"""
FAILURES = (EnvironmentFailed, ConnectionError, SystemExit, KeyboardInterrupt, GeneratorExit)
"""Exceptions of a tool that are the environment's fault, not the policy's."""


class LiveEnvironment:
    """The environment of one attempt at a trajectory.

    Whatever a method of the environment raises, and a method that takes too long, is a :class:`Failure`. An error of a
    tool is an answer to the policy.

    Args:
        kind: Class, tools and optional methods of the environment.
        limits: Time limits and the max length of an answer.
        calls: Makes the calls, in threads or on the event loop of users' coroutines.
        log: Counts calls and failures.
        apart: Whether the calls have threads of their own.
        is_over: Whether the trajectory has ended: then no further call is made, and the next one raises
            ``asyncio.CancelledError``.

    Attributes:
        object: The user's object; None before :meth:`make`, and for tools without an environment.
        spent_s: Seconds of all calls so far.
    """

    def __init__(
        self,
        kind: Kind,
        limits: Limits,
        calls: Calls,
        log: EnvironmentLog,
        apart: bool,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self.kind, self.limits = kind, limits
        self.object: Any = None
        self.spent_s = 0.0
        self._owner = f"environment {kind.name}"
        self._calls, self._log, self._apart, self._is_over = calls, log, apart, is_over

    # ---- beginning and end --------------------------------------------------------------------------------

    async def make(self) -> None:
        if self.kind.type is not None:
            self.object = await self._guarded("is made", self.kind.make, False, self.limits.reset_timeout_s)

    async def reset(self, prompt: Prompt, sees: bool = False) -> Content:
        """Construct and reset the environment; return what it adds to the prompt. Images only for one that ``sees``."""
        await self.make()
        if self.kind.type is None:
            return ""
        given, arguments = self.object, self.kind.arguments(prompt)
        said = await self._guarded(
            "is reset", lambda: given.reset(**arguments), self._is_async("reset"), self.limits.reset_timeout_s
        )
        content: Content = "" if said is None else await self._content(said, "reset", sees)
        await self._try_state()
        return content

    async def restore(self, state: Any) -> None:
        await self.make()
        if self.kind.type is not None:
            given = self.object
            await self._guarded("is restored", lambda: given.restore(state), self._is_async("restore"))

    async def state(self) -> Any:
        """Return the environment's state, or raise a :class:`Failure`; None for tools without an environment."""
        if self.kind.type is None:
            return None
        state = await self.ask("state", "its state", at_once=True)
        if (found := find_foreign(state)) is not None:
            raise ForeignState(f"returns a state that no checkpoint can hold: state(){found.place} {found}")
        return state

    async def _try_state(self) -> None:
        """Refuse an environment whose first state no checkpoint can hold."""
        name = self.kind.name
        if "state" not in self.kind.methods or name in self._log.tried_states:
            return
        self._log.tried_states.add(name)
        try:
            copied(await self.state())
        except ForeignState as failure:
            raise ValueError(f"The environment {name} {failure}; have it return {PLAIN}.") from None
        except Failure as failure:
            self._log.tell(
                f"The environment {name} {failure}; if this happens while a checkpoint is saved, a resumed run "
                "restarts the trajectory."
            )

    async def try_restore(self) -> None:
        """Have a fresh environment take the state as it is read from a checkpoint."""
        state = from_written(to_written(copied(await self.state())))
        fresh = LiveEnvironment(self.kind, self.limits, self._calls, self._log, self._apart)
        fresh.object = await self._guarded("is made", self.kind.make, False, at_once=True)
        given = fresh.object
        try:
            await self._guarded("is restored", lambda: given.restore(state), self._is_async("restore"), at_once=True)
        finally:
            await fresh.close()

    async def close(self) -> None:
        """Let go of the user's object, and call its ``close`` if it has one. No error is raised."""
        given, self.object = self.object, None
        if given is None or "close" not in self.kind.methods:
            return
        limit_s = self.limits.reset_timeout_s
        try:
            await self._calls.call(
                lambda: given.close(), self._is_async("close"), limit_s, lambda _: None, self._owner, self._apart
            )
        except (Exception, *FAILURES) as error:  # nothing depends on it
            self._log.tell_failure(f"{self.kind.name} fails when it is closed ({error_text(error)})")

    # ---- answers to a turn of the policy ---------------------------------------------------------------------

    async def answer(self, turn: Turn, chat: Chat) -> list[Message]:
        """Return the tools' results, or the user's answer to a turn without a call; no message ends the episode."""
        if turn.calls:
            return await self._call_all(turn.calls, chat)
        if "respond" not in self.kind.methods or await self.is_done():
            return []
        given, content = self.object, turn.content
        said = await self._guarded("is asked to respond", lambda: given.respond(content), self._is_async("respond"))
        if said is None:
            return []
        content = await self._content(said, "respond", chat.shows_images)
        return [{"role": "user", "content": self._shortened(content, chat)}]

    async def _call_all(self, calls: Sequence[ToolCall | MalformedCall], chat: Chat) -> list[Message]:
        """Make the calls of a turn in their order; return an answer to each, up to the end of the episode."""
        answers: list[Message] = []
        for call in calls:
            if isinstance(call, MalformedCall):
                self._log.counts["broken_calls"] += 1
                name, result = "unknown", {"error": f"the call cannot be read: {call.why}"}
            else:
                name, result = call.name, await self._call(call, chat.shows_images)
            content = result if isinstance(result, list) else text_of(result)
            answers.append({"role": "tool", "name": name, "content": self._shortened(content, chat)})
            if await self.is_done():
                break
        return answers

    async def _call(self, call: ToolCall, sees: bool) -> Any:
        """Call one tool; return its result as text or parts, or the error that the policy reads."""
        counts, called = self._log.counts, self._log.called
        counts["tool_calls"] += 1
        tool = self.kind.tools.get(call.name)
        if tool is None:
            counts["tool_failures"] += 1
            return {"error": f"there is no tool {call.name!r}; the tools are {', '.join(self.kind.tools)}"}
        own = (self.object,) if tool.is_method else ()
        try:
            arguments = copy.deepcopy(call.arguments)  # the conversation keeps those that the policy wrote
            result = await self._within(lambda: tool.function(*own, **arguments), tool.is_async)
            if not isinstance(result, str):  # printing it is a call of the user's code too
                result = await self._within(lambda: content_of(result, f"the tool {call.name}", sees), False)
        except CallTimeout as error:
            counts["tool_timeouts"] += 1
            limit = f"the call took longer than {self.limits.tool_timeout_s:g} s"
            called(call.name, limit)
            computed = error.cpu_s >= COMPUTED * self.limits.tool_timeout_s
            if tool.is_method or not computed:  # a method goes on, and holds the environment
                raise Failure(f"hangs in {call.name}") from None
            counts["tool_failures"] += 1
            return {"error": limit}
        except (TooManyHang, NotShown, BrokenLoop):
            raise
        except FAILURES as error:
            called(call.name, error_text(error))
            raise Failure(f"fails in {call.name} ({error_text(error)})") from error
        except Exception as error:  # a tool's error is an answer
            counts["tool_failures"] += 1
            called(call.name, error_text(error))
            return {"error": str(error)}
        called(call.name, None)
        return result

    async def is_done(self) -> bool:
        if not hasattr(self.kind.type, "done") and "done" not in getattr(self.object, "__dict__", {}):
            return False
        done = await self._guarded("is asked for done", lambda: self.object.done, False)
        return done if isinstance(done, bool) else await self._guarded("is asked for done", lambda: bool(done), False)

    async def reward(self, name: str = "get_reward") -> float | None:
        """Return what a method (``get_reward`` or ``turn_reward``) gives; None if there is no such method."""
        if name not in self.kind.methods:
            return None
        value = await self.ask(name)
        try:
            return read_value(value)
        except ValueError as error:
            raise ValueError(f"{self.kind.name}.{name}: {error}.") from None

    async def ask(self, name: str, what: str = "", at_once: bool = False) -> Any:
        """Return what a method without arguments returns; ``what`` is that in messages."""
        given = self.object
        return await self._guarded(
            f"is asked for {what or name}", lambda: getattr(given, name)(), self._is_async(name), at_once=at_once
        )

    async def _content(self, said: Any, method: str, sees: bool) -> Content:
        if isinstance(said, str):
            return text_of(said)
        who = f"{self.kind.name}.{method}"
        return await self._guarded(f"has what {method} returned printed", lambda: content_of(said, who, sees), False)

    def _shortened(self, content: Content, chat: Chat) -> Content:
        """Cut texts that are too long, each part by itself; images stay whole."""
        if isinstance(content, list):
            return [
                part | {"text": self._shortened(part["text"], chat)} if "text" in part else part for part in content
            ]
        text, is_cut = chat.shorten(content, self.limits.max_answer_tokens)
        self._log.counts["shortened_answers"] += is_cut
        return text

    # ---- calls ------------------------------------------------------------------------------------------------

    async def _guarded(
        self,
        what: str,
        function: Callable[[], Any],
        is_async: bool,
        timeout_s: float | None = None,
        at_once: bool = False,
    ) -> Any:
        """Make a call that may not fail: whatever it raises, and its hanging, is a failure of the environment."""
        try:
            if at_once:
                return await self._calls.at_once(function, is_async, self.limits.tool_timeout_s, self._owner)
            return await self._within(function, is_async, timeout_s)
        except CallTimeout:
            self._log.counts["timeouts"] += 1
            raise Failure(f"takes too long when it {what}") from None
        except (TooManyHang, NotShown, BrokenLoop):
            raise
        except (Exception, *FAILURES) as error:  # a user's function runs here, and may fail in any way
            raise Failure(f"fails when it {what} ({error_text(error)})") from error

    async def _within(self, function: Callable[[], Any], is_async: bool, timeout_s: float | None = None) -> Any:
        """Make a call within its limit and that of the trajectory."""
        if self._is_over():
            raise asyncio.CancelledError
        limit_s = self.limits.tool_timeout_s if timeout_s is None else timeout_s
        left_s = self.limits.trajectory_timeout_s - self.spent_s
        limit_s = max(min(limit_s, left_s), 0.0)
        return await self._calls.call(function, is_async, limit_s, self.spend, self._owner, self._apart)

    def spend(self, seconds: float) -> None:
        self.spent_s += seconds

    def _is_async(self, name: str) -> bool:
        return inspect.iscoroutinefunction(getattr(self.kind.type, name, None))


def copied(state: Any) -> Any:
    """Return a deep copy of a state, or raise a :class:`Failure` if it cannot be copied."""
    try:
        return copy.deepcopy(state)
    except Exception as error:  # such as a tensor with a gradient
        raise Failure(f"returns a state that cannot be copied ({error_text(error)})") from error


_IN_PARTS = "return parts, {'type': 'text', 'text': ...} and {'type': 'image', 'image': ...}"


def content_of(said: Any, who: str, sees: bool) -> Content:
    """Return what a tool or environment says: content parts, joined if all are texts, and else as Python prints it.

    An image becomes a file of its own, which nobody changes afterwards.

    Args:
        said: The value that a user's method or tool has returned.
        who: Who returned it, for messages.
        sees: Whether the policy sees images in observations.

    Raises:
        NotShown: A part is neither a text nor an image, or an image where the policy sees none.
        EnvironmentFailed: An image cannot be decoded.
        Exception: Whatever printing it raises.
    """
    is_list = isinstance(said, list) and bool(said)
    if not is_list or not all(isinstance(each, dict) and "type" in each for each in said):
        loose = said if isinstance(said, list | tuple) else said.values() if isinstance(said, dict) else [said]
        if any(hasattr(each, "mode") and hasattr(each, "getpixel") for each in loose):
            raise NotShown(f"{who} returns an image by itself; {_IN_PARTS}.")
        return text_of(said)
    parts: list[dict[str, Any]] = []
    for part in said:
        match part["type"]:
            case "text" if isinstance(part.get("text"), str):
                parts.append({"type": "text", "text": text_of(part["text"])})
            case "text":
                raise NotShown(
                    f"{who} returns a content block without a text; write it as {{'type': 'text', 'text': ...}}."
                )
            case "image" if not sees:
                raise NotShown(
                    f"{who} returns an image, and the policy sees none in observations; return text, or set "
                    "model.vision and take model.generator slots."
                )
            case "image" if part.get("image") is None:
                raise NotShown(f"{who} returns a part of type image without one; {_IN_PARTS}.")
            case "image":
                try:
                    parts.append({"type": "image", "image": read_image(part["image"], "an image")})
                except ValueError as error:
                    raise EnvironmentFailed(f"in what {who} returns {error}") from None
            case _:
                raise NotShown(f"{who} returns content that is neither text nor an image; {_IN_PARTS}.")
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def text_of(said: Any) -> str:
    r"""Return a text, or else what Python prints of it; a lone surrogate, which no tokenizer takes, as ``\ud800``."""
    text = str.__str__(said) if isinstance(said, str) else str(said)  # of no class of its own, for checkpoints
    return text.encode("utf-8", "backslashreplace").decode()
