"""The conversation of an agent with the policy in one trajectory: accepting requests that continue it."""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from lit_grpo.data.chat import EndlessTemplate, Message, UnusableRow, read_message
from lit_grpo.environments.tools import Tool
from lit_grpo.types import EMPTY, Completion, FinishReason, Request, Trajectory

if TYPE_CHECKING:
    from lit_grpo.environments.chat import Chat

AS_SAMPLED = "A trajectory is trained on as it was sampled: keep the earlier messages unchanged, and append new ones."
FULL = "context_length_exceeded"
"""As OpenAI names it."""
OVER = "This trajectory is over, or was never begun."


class Refused(Exception):
    """A refused request of an agent, with the reason and the remedy.

    Args:
        sentence: Error message for the agent's author.
        code: Error code, one word.
        status: Status of the HTTP answer. Clients of ``openai`` repeat a request after a 409, so 409 is never sent.
    """

    def __init__(self, sentence: str, code: str = "invalid_request", status: int = 400) -> None:
        super().__init__(sentence)
        self.code, self.status = code, status


class Reply(NamedTuple):
    """A turn of the policy, as the reply to an agent's request.

    Args:
        before: The tokens that it was sampled after, those of the prompt among them.
        token_ids: Token ids of the reply, as they were sampled.
        logprobs: Log-probs of the tokens, in nats.
        message: The tokens as a message; arguments of tool calls are dicts.
        finish_reason: ``stop``, or ``length`` where the trajectory has no room left.
    """

    before: list[int]
    token_ids: list[int]
    logprobs: list[float]
    message: Message
    finish_reason: FinishReason


class Dialogue:
    """One trajectory, as the endpoint knows it. All of its methods are called on one event loop.

    A request of the agent is answered by ``await sample(...)``, as a turn of any trajectory is.

    Args:
        request: The request of the whole trajectory.
        chat: Encodes messages and reads turns.
        counts: Counts of events in this rollout, by name.
        tell: Warns the user of something, once.
        sample: Samples a turn after a request's prefix, as a trajectory's driver does
            (:meth:`lit_grpo.environments.driver.TrajectoryDriver.sample`).

    Attributes:
        id: By which requests say which trajectory they belong to.
        asked: Set while the policy samples a turn.
        reply: The answer to the last request, once the turn is there; None before the first request.
        completion: The trajectory with the last turn; None before the first.
        messages: The conversation after the prompt.
        is_full: Whether a request was refused because the trajectory has no room left.
    """

    def __init__(
        self,
        request: Request,
        chat: Chat,
        counts: MutableMapping[str, float],
        tell: Callable[[str], None],
        sample: Callable[[Request], Awaitable[Completion]],
    ) -> None:
        self.id = secrets.token_urlsafe(16)
        self.request, self.chat, self.counts, self.tell, self._sample = request, chat, counts, tell, sample
        self.asked = asyncio.Event()
        self.reply: asyncio.Task[Reply] | None = None
        self.completion: Completion | None = None
        self.messages: list[Message] = []
        self.is_full = False
        self._known: list[Message] | None = []  # of the last request, and the turn after it; None with token ids
        self._tools: dict[str, Tool] = {}
        self._body: Mapping[str, Any] = {}  # of the last request
        self._is_over = False

    # ---- the agent's side ---------------------------------------------------------------------------

    async def after_messages(self, body: Mapping[str, Any]) -> Reply:
        """Have the policy answer a conversation, the ``messages`` of a request.

        Raises:
            Refused: It does not go on from what was said before, or there is no room for it.
        """
        self._check_free()
        conversation, shown = _read_messages(body.get("messages")), _read_tools(body.get("tools"))
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
        try:
            observed = self._following(new, shown) if self.completion else self._beginning(new, shown)
        except (UnusableRow, EndlessTemplate) as error:
            raise Refused(f"The conversation {error}.") from error
        except ValueError as error:
            raise Refused(str(error)) from error
        return await self._turn(observed, body, conversation, new)

    async def after_tokens(self, body: Mapping[str, Any]) -> Reply:
        """Have the policy go on after ``token_ids``, those of the prompt and of all earlier turns among them.

        Raises:
            Refused: As for :meth:`after_messages`.
        """
        self._check_free()
        token_ids, most = body.get("token_ids"), len(self.chat.tokenizer)
        if not isinstance(token_ids, list) or any(type(each) is not int or not 0 <= each < most for each in token_ids):
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
        return await self._turn(observed, body, None, [])

    async def again(self, body: Mapping[str, Any]) -> Reply | None:
        """Return the answer to the last request, which a client sends again; None where it is another one."""
        return None if self.reply is None or self._body != body else await asyncio.shield(self.reply)

    def refuse(self, refused: Refused) -> None:
        """Count a request that was refused, unless it came when there was nothing left to go on with."""
        self.counts["refused_requests"] += refused.code not in ("over", FULL)

    def _check_free(self) -> None:
        if self._is_over:
            raise Refused(OVER, "over", 410)
        if self.asked.is_set():
            raise Refused(
                "This trajectory has an unanswered request, and only one request at a time is allowed; send the next "
                "one after the response.",
                "parallel",
            )

    def _beginning(self, messages: Sequence[Message], tools: dict[str, Tool]) -> list[int]:
        schemas = [dict(tool.schema) for tool in tools.values()]
        for sentence in self.chat.check_once(schemas) if tools else ():
            self.tell(sentence)
        prompt = self.request.prompt
        pairs = zip(prompt.messages or (), messages, strict=False)
        of_row = sum(1 for _ in itertools.takewhile(lambda pair: _sense(pair[0]) == _sense(pair[1]), pairs))
        conversation = [*self.chat.conversation(prompt)[:of_row], *map(self.chat.cover, messages[of_row:])]
        observed = self.chat.beginning(prompt, conversation, schemas)
        if observed is None:
            raise Refused(
                f"The conversation does not begin with the prompt of row {prompt.prompt_id}. Begin the "
                "conversation with that prompt (with data.system_prompt, without tools), or remove the prompt from the "
                "rows, so that the agent writes the whole conversation.",
                "history",
            )
        self._tools = tools
        return observed

    def _following(self, messages: Sequence[Message], tools: dict[str, Tool]) -> list[int]:
        if any(message["role"] == "assistant" for message in messages):
            raise Refused(
                f"The request adds an assistant message that the policy did not sample. {AS_SAMPLED}", "history"
            )
        if [tool.schema for tool in tools.values()] != [tool.schema for tool in self._tools.values()]:
            raise Refused(f"The tools differ from those of the first request. {AS_SAMPLED}", "history")
        return self.chat.following([self._of_template(message) for message in messages], self._tokens()[-1])

    def _of_template(self, message: Message) -> Message:
        """Return a new message with what chat templates show of it; an answer of a tool gets the tool's name."""
        shown = {"role": message["role"], "content": message["content"]}
        if message["role"] != "tool":
            return shown
        made = (call for each in self._known or () for call in each.get("tool_calls", ()))
        called = (call.get("function", call)["name"] for call in made if call.get("id") == message.get("tool_call_id"))
        name = next(called, None)
        if name is None:
            raise Refused(f"A tool message has the id of no tool call: {message.get('tool_call_id')!r}.")
        return shown | {"name": name}

    async def _turn(
        self, observed: list[int], body: Mapping[str, Any], messages: list[Message] | None, new: Sequence[Message]
    ) -> Reply:
        """Have the policy sample a turn after more tokens, if there is room for both."""
        so_far, sampling = self._so_far, self.request.sampling
        for kind, most, needed in (
            ("max_tokens", sampling.max_tokens, so_far.num_sampled + 1),
            ("max_observed", sampling.max_observed, so_far.num_observed + len(observed)),
        ):
            if needed > most:
                self.counts["cut_short"] += not self.is_full
                self.is_full = True
                raise Refused(
                    f"This trajectory is at its maximum context length: it needs {needed} tokens, but "
                    f"model.sampling.{kind} allows {most}.",
                    FULL,
                )
        begins = self.request.prompt.messages or []
        is_prompt = self.completion is None and list(map(_sense, new[: len(begins)])) == list(map(_sense, begins))
        self.messages += new[len(begins) if is_prompt else 0 :]
        self.asked.set()
        request = self.request.after(so_far.followed_by(observed) if observed else so_far)
        self._body, self.reply = body, asyncio.ensure_future(self._replied(request, messages))
        return await asyncio.shield(self.reply)  # the turn is sampled even if its client has gone

    async def _replied(self, request: Request, messages: list[Message] | None) -> Reply:
        """Wait for a turn, and read it."""
        try:
            completion = self.completion = await self._sample(request)
        except asyncio.CancelledError:
            raise Refused(OVER, "over", 410) from None
        finally:
            self.asked.clear()
        num_sampled, tokens = len(completion.turns[-1]), self._tokens()
        before, sampled = tokens[:-num_sampled], tokens[-num_sampled:]
        message = self._message(sampled, before)
        self._known = None if messages is None else [*messages, message]
        self.messages.append(message)
        logprobs: list[float] = completion.logprobs_T[-num_sampled:].tolist()
        return Reply(before, sampled, logprobs, message, completion.finish_reason)

    @property
    def _so_far(self) -> Trajectory:
        return EMPTY if self.completion is None else self.completion

    def _tokens(self) -> list[int]:
        return [*self.request.prompt.token_ids, *self._so_far.token_ids_T.tolist()]

    def _message(self, sampled: list[int], before: list[int]) -> Message:
        """Return what a turn says: all of it where no tools are shown, else its calls apart."""
        if not self._tools:
            return {"role": "assistant", "content": str(self.chat.tokenizer.decode(sampled, skip_special_tokens=True))}
        turn = self.chat.read(sampled, before, self._tools)
        message = turn.message
        for number, call in enumerate(message.get("tool_calls", ())):
            call["id"] = f"call_{len(before)}_{number}"
        num_calls = len(message.get("tool_calls", ()))
        self.counts["tool_calls"] += num_calls
        self.counts["broken_calls"] += len(turn.calls) - num_calls
        return message

    def close(self) -> None:
        """Answer nothing any more."""
        self._is_over = True
        if self.reply is not None:
            self.reply.cancel()
            self.reply.add_done_callback(lambda reply: reply.cancelled() or reply.exception())  # counts as seen


def _read_messages(given: Any) -> list[Message]:
    if not isinstance(given, list) or not given:
        raise Refused("messages must be a list of chat messages.")
    try:
        return [read_message(message) for message in given]
    except UnusableRow as error:
        raise Refused(f"The request {error}.") from error


def _read_tools(given: Any) -> dict[str, Tool]:
    try:
        return {each["function"]["name"]: Tool(str(each["function"]["name"]), _elsewhere, each) for each in given or ()}
    except (KeyError, TypeError, IndexError) as error:
        raise Refused('tools must be a list of {"type": "function", "function": {"name": text, ...}}.') from error


def _elsewhere(**arguments: Any) -> None:
    """Stand for a tool that the agent calls itself."""


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
