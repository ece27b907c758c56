"""The conversation of an agent with the policy in one trajectory: accepting requests that continue it."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from lit_grpo.data.chat import EndlessTemplate, Message, UnusableRow
from lit_grpo.environments.agent.fields import Body, Refused, Route, read_body, read_messages, read_tools
from lit_grpo.environments.tools import Tool
from lit_grpo.process.terminal import counted, error_text
from lit_grpo.types import EMPTY, Completion, FinishReason, Request, Trajectory

if TYPE_CHECKING:
    from lit_grpo.environments.calls import Turn
    from lit_grpo.environments.chat import Chat
    from lit_grpo.environments.log import EnvironmentLog

AS_SAMPLED = "A trajectory is trained on as it was sampled: keep the earlier messages unchanged, and append new ones."
FULL = "context_length_exceeded"
"""As OpenAI names it."""
OVER = "This trajectory is over, or was never begun."
_NO_ROOM = "This trajectory is at its maximum context length"
SHORT, FEW = 2**16, 2**10
"""The number of characters, and of messages, up to which new messages are encoded whatever room is left."""
MOST_UNKNOWN = 20
"""Number of unknown fields of which the user is told."""
logger = logging.getLogger(__name__)


class Reply(NamedTuple):
    """A turn of the policy, as the reply to an agent's request.

    Args:
        asked: The fields of the request.
        before: The tokens that it was sampled after, those of the prompt among them.
        token_ids: Token ids of the reply, as they were sampled.
        logprobs: Log-probs of the tokens, in nats.
        message: The tokens as a message; arguments of tool calls are dicts.
        finish_reason: ``stop``, or ``length`` where the trajectory has no room left.
    """

    asked: Mapping[str, Any]
    before: list[int]
    token_ids: list[int]
    logprobs: list[float]
    message: Message
    finish_reason: FinishReason


class _Accepted(NamedTuple):
    """A request that continues the conversation.

    Args:
        body: Body of the request, with its checked fields.
        observed: The tokens that it adds.
        messages: The whole conversation; None where it was sent as token ids.
        new: The messages that it adds.
        tools: The tools of the conversation.
        told: What the user is told once.
    """

    body: Body
    observed: list[int]
    messages: list[Message] | None
    new: Sequence[Message]
    tools: dict[str, Tool]
    told: Sequence[str] = ()


class Dialogue:
    """One trajectory, as the endpoint knows it. Its public methods are called on one event loop.

    A request of the agent is answered by ``await sample(...)``, as a turn of any trajectory is. What takes long before
    and after that is a function without effects, and is called in a thread by ``apart``, because all trajectories share
    the event loop: reading the request, rendering and encoding its messages, and reading the turn.

    Args:
        request: The request of the whole trajectory.
        chat: Encodes messages and reads turns.
        log: Counts events, and warns the user of each thing once.
        sample: Samples a turn after a request's prefix, as a trajectory's driver does
            (:meth:`lit_grpo.environments.driver.TrajectoryDriver.sample`).
        apart: Calls a function with arguments in a thread.
        ends: The token ids at which the run ends a turn.

    Attributes:
        id: By which requests say which trajectory they belong to.
        asked: Set while a request is worked on: it is read, the policy samples a turn, and the turn is read.
        reply: The reply to the last request, once it is there; None before the first request.
        completion: The trajectory with the last turn; None before the first.
        messages: The conversation after the prompt.
        is_full: Whether the last request was refused because the trajectory has no room left.
        fault: The error at which a turn could not be read, so that nothing can follow it.
    """

    def __init__(
        self,
        request: Request,
        chat: Chat,
        log: EnvironmentLog,
        sample: Callable[[Request], Awaitable[Completion]],
        apart: Callable[..., Awaitable[Any]],
        ends: Sequence[int] = (),
    ) -> None:
        self.id = secrets.token_urlsafe(16)
        self.request, self.chat, self.log, self.apart = request, chat, log, apart
        self._sample, self._ends = sample, ends
        self.asked = asyncio.Event()
        self.reply: asyncio.Task[Reply] | None = None
        self.completion: Completion | None = None
        self.messages: list[Message] = []
        self.is_full = False
        self.fault: Exception | None = None
        self._known: list[Message] | None = []  # of the last request, and the turn after it; None with token ids
        self._tools: dict[str, Tool] = {}
        self._open: tuple[Route, bytes] | None = None  # the request that is worked on
        self._answered: tuple[tuple[Route, bytes], Reply] | None = None  # the last one with a reply
        self._is_over = False

    # ---- the agent's side ---------------------------------------------------------------------------

    async def answer(self, route: Route, data: bytes) -> Reply:
        """Have the policy answer a request.

        The last request that has a reply gets the same reply when it is sent again, as clients do that have waited for
        too long: it cannot be meant to continue the conversation, because it lacks that reply.

        Args:
            route: The route of the request.
            data: Body of the request, as bytes of JSON.

        Raises:
            Refused: It does not go on from what was said before, or there is no room for it.
        """
        if self._is_over:
            raise Refused(OVER, "over", 410)
        asked = route, data
        if self._answered is not None and self._answered[0] == asked:
            return self._answered[1]
        if not self.asked.is_set():
            self.asked.set()
            self._open, self.reply = asked, asyncio.ensure_future(self._answer(route, data))
        elif self._open != asked or self.reply is None:
            raise Refused(
                "This trajectory has an unanswered request, and only one request at a time is allowed; send the next "
                "one after the response.",
                "parallel",
            )
        return await asyncio.shield(self.reply)  # the turn is sampled even if its client has gone

    def fail(self, error: Exception) -> Refused:
        """Return the refusal of a request at which the endpoint itself has failed, and warn the user once."""
        logger.debug("The endpoint of agents failed.", exc_info=error)
        self.log.tell_once(
            "the endpoint of agents failed",
            "The endpoint failed at the request of an agent (%s) and answered with status 500. Only this trajectory is "
            "concerned; please report it with the request.",
            error_text(error),
        )
        return Refused(
            f"The endpoint failed at this request ({error_text(error)}); send another request, and report this one.",
            "server_error",
            500,
        )

    async def _answer(self, route: Route, data: bytes) -> Reply:
        try:
            accepted = await self._accept(route, data)
            reply = await self._read(accepted, await self._sample(self._after(accepted)))
            self._answered = (route, data), reply
            return reply
        except asyncio.CancelledError:
            raise Refused(OVER, "over", 410) from None
        except Refused as refused:
            self.is_full = self.is_full or refused.code == FULL
            raise
        except Exception as error:  # of a chat template, a tokenizer or ours: it concerns this trajectory alone
            raise self.fail(error) from error
        finally:
            self.asked.clear()

    async def _accept(self, route: Route, data: bytes) -> _Accepted:
        """Read a request, and tell the user of what it asks in vain."""
        if self.fault is not None:
            raise self.fault
        accepted: _Accepted = await self.apart(self._after_messages if route == "chat" else self._after_tokens, data)
        for sentence in accepted.told:
            self.log.tell(sentence)
        for name, sentence in accepted.body.told.items():
            self.log.tell_once(f"field {name} of agents", "%s", sentence)
        for name in accepted.body.unknown:
            sentence = f"An agent requests {name!r:.60}, which the endpoint does not know and ignores."
            self.log.tell_some("unknown field of agents", sentence, MOST_UNKNOWN)
        return accepted

    def _after(self, accepted: _Accepted) -> Request:
        """Return the request of the next turn."""
        begins = self.request.prompt.messages or []
        is_prompt = self.completion is None and [*map(_sense, accepted.new[: len(begins)])] == [*map(_sense, begins)]
        self.messages += accepted.new[len(begins) if is_prompt else 0 :]
        self._tools, self.is_full = accepted.tools, False
        so_far = self._so_far
        return self.request.after(so_far.followed_by(accepted.observed) if accepted.observed else so_far)

    async def _read(self, accepted: _Accepted, completion: Completion) -> Reply:
        """Read a turn."""
        self.completion = completion
        num_sampled, tokens = len(completion.turns[-1]), self._tokens()
        before, sampled = tokens[:-num_sampled], tokens[-num_sampled:]
        try:
            message, turn = await self.apart(self._message, sampled, before)
        except Exception as error:
            self.fault = error
            raise
        if turn is not None:
            num_calls = len(message.get("tool_calls", ()))
            self.log.counts["tool_calls"] += num_calls
            self.log.counts["broken_calls"] += len(turn.calls) - num_calls
        self._known = None if accepted.messages is None else [*accepted.messages, message]
        self.messages.append(message)
        logprobs: list[float] = completion.logprobs_T[-num_sampled:].tolist()
        return Reply(accepted.body.fields, before, sampled, logprobs, message, completion.finish_reason)

    # ---- reading a request, in a thread: nothing here is changed ---------------------------------------

    def _after_messages(self, data: bytes) -> _Accepted:
        """Read a request that has the conversation as ``messages``."""
        body = read_body(data, "chat", self.request.sampling, self._ends)
        conversation, shown = read_messages(body.fields.get("messages")), read_tools(body.fields.get("tools"))
        if self._known is None:
            raise Refused(
                f"Earlier requests of this trajectory sent token ids. Send token_ids again, not messages. {AS_SAMPLED}"
            )
        for number, (known, said) in enumerate(zip(self._known, conversation, strict=False)):
            if _sense(known) != _sense(said):
                raise Refused(f"messages[{number}] differs from the conversation so far. {AS_SAMPLED}", "history")
        new = conversation[len(self._known) :]
        if not new or conversation[-1]["role"] == "assistant":
            raise Refused(f"The request adds no message that the policy could answer. {AS_SAMPLED}", "history")
        told: Sequence[str] = ()
        try:
            if self.completion is not None:
                observed = self._following(new, shown)
            else:
                observed, told = self._beginning(new, shown)
        except (UnusableRow, EndlessTemplate) as error:
            raise Refused(f"The conversation {error}.") from error
        except ValueError as error:
            raise Refused(str(error)) from error
        self._check_room(len(observed))
        return _Accepted(body, observed, conversation, new, shown if self.completion is None else self._tools, told)

    def _after_tokens(self, data: bytes) -> _Accepted:
        """Read a request that has ``token_ids``, those of the prompt and of all earlier turns among them."""
        body = read_body(data, "tokens", self.request.sampling, self._ends)
        token_ids, most = body.fields.get("token_ids"), len(self.chat.tokenizer)
        if not token_ids or not 0 <= min(token_ids) <= max(token_ids) < most:
            raise Refused(f"token_ids must be a list of integers from 0 to {most - 1}.")
        known = self._tokens()
        if token_ids[: len(known)] != known:
            pairs = enumerate(zip(known, token_ids, strict=False))
            place = next((place for place, (mine, theirs) in pairs if mine != theirs), len(token_ids))
            what = "the row's prompt" if place < len(self.request.prompt.token_ids) else "the conversation so far"
            raise Refused(f"token_ids differ from {what} at position {place}. {AS_SAMPLED}", "history")
        observed = token_ids[len(known) :]
        if self.completion is not None and not observed:
            raise Refused(f"token_ids add nothing to the policy's last turn. {AS_SAMPLED}", "history")
        self._check_room(len(observed))
        return _Accepted(body, observed, None, [], self._tools)

    def _check_room(self, num_observed: int) -> None:
        """Check that there is room for so many more tokens, and for a turn after them."""
        so_far, sampling = self._so_far, self.request.sampling
        for kind, most, needed in (
            ("max_tokens", sampling.max_tokens, so_far.num_sampled + 1),
            ("max_observed", sampling.max_observed, so_far.num_observed + num_observed),
        ):
            if needed > most:
                raise Refused(f"{_NO_ROOM}: it needs {needed} tokens, but model.sampling.{kind} allows {most}.", FULL)

    def _check_length(self, messages: Sequence[Message]) -> None:
        """Check that new messages can fit, before they are encoded.

        A message has at least one token, and a token stands for at most as many characters as the longest one of the
        vocabulary has. Up to :data:`FEW` messages and :data:`SHORT` characters are encoded in any case, because some
        templates drop messages, and some tokenizers drop characters, such as repeated blanks, or read many as one.
        """
        self._check_room(0)
        room = self.request.sampling.max_observed - self._so_far.num_observed
        length = sum(len(message["content"] or "") for message in messages)
        if len(messages) > max(FEW, room) or length > max(SHORT, room * self.chat.longest_token):
            raise Refused(
                f"{_NO_ROOM}: {counted(len(messages), 'new message')} with {counted(length, 'character')} cannot fit "
                f"into the {counted(room, 'token')} that model.sampling.max_observed leaves.",
                FULL,
            )

    def _beginning(self, messages: Sequence[Message], tools: dict[str, Tool]) -> tuple[list[int], Sequence[str]]:
        """Return the tokens of the first messages after the prompt, and what the user is told of the tools."""
        schemas = [dict(tool.schema) for tool in tools.values()]
        prompt = self.request.prompt
        pairs = zip(prompt.messages or (), messages, strict=False)
        of_row = sum(1 for _ in itertools.takewhile(lambda pair: _sense(pair[0]) == _sense(pair[1]), pairs))
        self._check_length(messages[of_row:])
        told = self.chat.check_once(schemas) if tools else ()
        conversation = [*self.chat.conversation(prompt)[:of_row], *map(self.chat.cover, messages[of_row:])]
        observed = self.chat.beginning(prompt, conversation, schemas)
        if observed is None:
            raise Refused(
                f"The conversation does not begin with the prompt of row {prompt.prompt_id}. Begin the "
                "conversation with that prompt (with data.system_prompt, without tools), or remove the prompt from the "
                "rows, so that the agent writes the whole conversation.",
                "history",
            )
        return observed, told

    def _following(self, messages: Sequence[Message], tools: dict[str, Tool]) -> list[int]:
        if any(message["role"] == "assistant" for message in messages):
            raise Refused(
                f"The request adds an assistant message that the policy did not sample. {AS_SAMPLED}", "history"
            )
        if [tool.schema for tool in tools.values()] != [tool.schema for tool in self._tools.values()]:
            raise Refused(f"The tools differ from those of the first request. {AS_SAMPLED}", "history")
        self._check_length(messages)
        return self.chat.following([self._of_template(message) for message in messages], self._tokens()[-1])

    def _of_template(self, message: Message) -> Message:
        """Return a new message with what chat templates show of it; an answer of a tool gets the tool's name."""
        shown = {name: message[name] for name in ("role", "content", "name") if name in message}
        if message["role"] != "tool":
            return shown
        made = (call for each in self._known or () for call in each.get("tool_calls", ()))
        called = (call.get("function", call)["name"] for call in made if call.get("id") == message.get("tool_call_id"))
        name = next(called, None)
        if name is None:
            raise Refused(f"A tool message has the id of no tool call: {message.get('tool_call_id')!r:.80}.")
        return shown | {"name": name}

    @property
    def _so_far(self) -> Trajectory:
        return EMPTY if self.completion is None else self.completion

    def _tokens(self) -> list[int]:
        return [*self.request.prompt.token_ids, *self._so_far.token_ids_T.tolist()]

    def _message(self, sampled: list[int], before: list[int]) -> tuple[Message, Turn | None]:
        """Return what a turn says, and where tools are shown its calls apart."""
        if not self._tools:
            text = str(self.chat.tokenizer.decode(sampled, skip_special_tokens=True))
            return {"role": "assistant", "content": text}, None
        turn = self.chat.read(sampled, before, self._tools)
        message = turn.message
        for number, call in enumerate(message.get("tool_calls", ())):
            call["id"] = f"call_{len(before)}_{number}"
        return message, turn

    def close(self) -> None:
        self._is_over = True
        if self.reply is not None:
            self.reply.cancel()
            self.reply.add_done_callback(lambda reply: reply.cancelled() or reply.exception())  # counts as seen


def _sense(message: Message) -> tuple[Any, ...]:
    """Return what makes two messages one: what clients add to them, or leave out of a turn's ends, is no matter."""
    content = message.get("content") or ""
    calls = [(call.get("function", call)["name"], _arguments(call)) for call in message.get("tool_calls", ())]
    is_turn = message["role"] == "assistant"
    return message["role"], content.strip() if is_turn else content, calls, message.get("tool_call_id")


def _arguments(call: Mapping[str, Any]) -> Any:
    arguments = call.get("function", call).get("arguments")
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except json.JSONDecodeError:
        return arguments
