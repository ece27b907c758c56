"""One trajectory with its environment: from reset to the last turn, beside decoding."""

from __future__ import annotations

import asyncio
import copy
import inspect
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from lit_grpo.data.chat import UnusableRow
from lit_grpo.environments.calls import BrokenCall, Call
from lit_grpo.environments.contract import EnvironmentFailed, Kind
from lit_grpo.process.calls import Calls, CallTimeout, TooManyHang
from lit_grpo.process.loops import BrokenLoop
from lit_grpo.process.terminal import error_text
from lit_grpo.process.values import PLAIN, find_foreign, from_written, to_written
from lit_grpo.rewards.function import read_value
from lit_grpo.types import EMPTY, Completion, Episode, FinishReason, Request, Trajectory

if TYPE_CHECKING:
    from lit_grpo.data.chat import Message
    from lit_grpo.environments.chat import Chat


@dataclass(frozen=True)
class Limits:
    """What a trajectory may take.

    Args:
        tool_timeout_s: Seconds of one call.
        trajectory_timeout_s: Seconds of all calls together.
        retries: How often a trajectory begins again with a fresh environment after its environment has failed.
        reset_timeout_s: Seconds of making an environment, and of its reset.
        max_turns: Turns of the policy; None for as many as its tokens allow.
        max_answer_tokens: The most tokens of one answer of a tool or the user.
    """

    tool_timeout_s: float
    trajectory_timeout_s: float
    retries: int
    reset_timeout_s: float
    max_turns: int | None = None
    max_answer_tokens: int = 512


@dataclass(frozen=True)
class Outcome:
    """What has become of a request that is away: one of the first five, or none where it is to be dropped.

    ``state`` is what the trajectory is then, where others may begin within it.
    """

    goes_on: Request | None = None
    rewritten: Request | None = None
    begins: Request | None = None
    finished: Completion | None = None
    error: BaseException | None = None
    state: dict[str, Any] | None = None


class Failure(Exception):
    """The environment of a trajectory has failed; the message goes on after its name."""


class ForeignState(Failure):
    """An environment's state holds a value that no checkpoint can hold."""


FAILURES = (EnvironmentFailed, ConnectionError, SystemExit, KeyboardInterrupt, GeneratorExit)
"""What a call raises where not the policy is at fault."""


@dataclass(eq=False)
class Session:
    """A trajectory and its environment.

    Its coroutines run on the loop of ``calls``. What comes of them is put into ``outcomes``, where the rollout takes it
    between two steps.

    Args:
        request: As it was asked for.
        kind: Of its environment.
        chat: Makes tokens of what the environment says.
        limits: What it may take.
        calls: Makes calls of the environment.
        outcomes: What has come of trajectories that are away.
        counts: What has happened in this rollout, by name.
        keeps_states: Whether others may begin within it, from the states that its outcomes have.
        apart: Whether its calls have threads of their own.
        tried: Names of the kinds whose first state has been looked at; trajectories share it.

    Attributes:
        said: What the environment has said at its reset.
        asked: The text of the prompt with that.
        token_ids: What it had come to when the environment or the rollout was last told of the other.
        waits: Whether the environment is at work, or what came of it has not been taken.
        waited_s: Seconds in which the environment was at work.
        work: What is done beside decoding, or was done last.
    """

    request: Request
    kind: Kind
    chat: Chat
    limits: Limits
    calls: Calls
    outcomes: deque[tuple[Session, Outcome]]
    counts: Counter[str]
    keeps_states: bool = False
    apart: bool = False
    tried: set[str] = field(default_factory=set)
    environment: Any = None
    messages: list[Message] = field(default_factory=list)
    turn_rewards: list[float] = field(default_factory=list)
    said: str = ""
    asked: str = ""
    num_turns: int = 0
    token_ids: list[int] = field(default_factory=list)
    num_failed: int = 0
    waits: bool = False
    waited_s: float = 0.0
    began: float = field(default_factory=time.monotonic)
    told: Callable[[str], None] = lambda _: None
    told_failure: Callable[[str], None] = lambda _: None
    called: Callable[[str, str | None], None] = lambda _, error: None
    work: Future[None] | None = None
    _is_over: bool = False
    _spent_s: float = 0.0  # of trajectory_timeout_s
    _has_sampled: bool = False  # since the request has begun

    # ---- the rollout's side ---------------------------------------------------------------------------

    def open(self) -> None:
        """Begin an episode; the request goes on once the environment has said what it begins with."""
        self._do(self._opened())

    def take_turn(self, completion: Completion) -> None:
        """Let the environment answer a turn."""
        self.token_ids, self._has_sampled = completion.token_ids_T.tolist(), True
        self._do(self._answered(completion))

    def took(self) -> None:
        """The rollout has taken what has come of the last turn, or of the reset."""
        self.waits = False

    def whole(self, completion: Completion) -> Completion:
        """Return all that the trajectory has come to, of what a request has."""
        return completion

    def close(self) -> Future[None] | None:
        """Let go of the environment for good; return what it is closed by, where it has a ``close``.

        A call that is being made comes to its end first, and no other one is made.
        """
        self.stop()
        if self.work is None or self.work.done():
            return self._let_go()
        return self.calls.start(self._closed_after(self.work))

    def stop(self) -> None:
        """The trajectory has ended; its environment is kept until it has been scored."""
        self._is_over = True

    def _let_go(self) -> Future[None] | None:
        environment, self.environment = self.environment, None
        if environment is None or "close" not in self.kind.methods:
            return None
        return self.calls.start(self._closed(environment))

    def episode(self, reward: float | None = None) -> Episode:
        """Return what there is to say of it so far."""
        return Episode(
            self.environment, self.messages, self.kind.name, reward, tuple(self.turn_rewards), self.said, self.asked
        )

    def ask_state(self) -> Future[dict[str, Any]] | None:
        """Begin to ask for what a checkpoint keeps; return None where the trajectory cannot go on from one.

        The future raises a :class:`Failure` where the environment cannot say it.
        """
        has_environment = self.kind.type is not None
        if not self.kind.can_be_restored or self.waits or (has_environment and self.environment is None):
            return None
        return self.calls.start(self._state())

    def restore(self, state: Mapping[str, Any], request: Request) -> None:
        """Go on from a checkpoint, with a fresh environment that is told its state; ``request`` then goes on."""
        self.token_ids, self._has_sampled = request.prefix.token_ids_T.tolist(), True
        self._do(self._restored(state, request))

    # ---- beside decoding ------------------------------------------------------------------------------

    def _do(self, work: Any) -> None:
        self.waits = True
        self.work = self.calls.start(self._told(work))
        self.work.add_done_callback(self._broke)

    def _broke(self, work: Future[None]) -> None:
        if not work.cancelled() and (error := work.exception()) is not None:  # of the loop: others are told
            self.outcomes.append((self, Outcome(error=error)))

    async def _told(self, work: Any) -> None:
        """Do some work, and tell what has come of it."""
        began = time.monotonic()
        try:
            outcome = await work
        except Exception as error:  # what is no failure of an environment ends the run
            outcome = Outcome(error=error)
        self.waited_s += time.monotonic() - began
        self.outcomes.append((self, outcome))

    async def _opened(self) -> Outcome:
        """Reset a fresh environment, as often as may be."""
        while True:
            try:
                return await self._reset()
            except Failure as failure:
                if not self._retries(failure):
                    return Outcome()

    async def _reset(self) -> Outcome:
        self._spent_s, self.num_turns, self.messages, self.turn_rewards = 0.0, 0, [], []
        said = self.said = self.asked = ""
        if self.kind.type is not None:
            self.environment = await self._guarded("is made", self.kind.make, False, self.limits.reset_timeout_s)
            reset, arguments = self.environment.reset, self.kind.arguments(self.request.prompt)
            is_async = _is_async(self.kind, "reset")
            told = await self._guarded("is reset", lambda: reset(**arguments), is_async, self.limits.reset_timeout_s)
            said = self.said = "" if told is None else await self._said(told, "reset")
            await self._try_state()
        observed = self.chat.opening(self.request.prompt, said, self.kind.schemas)
        most = self.request.sampling.max_observed
        if len(observed) > most:
            raise ValueError(
                f"{self.kind.name}.reset says so much for {self.request.prompt.prompt_id} that {len(observed)} tokens "
                f"are observed, and model.sampling.max_observed allows {most}; raise it, or say less."
            )
        if said:
            self.asked = str(self.chat.tokenizer.decode([*self.request.prompt.token_ids, *observed]))
        request = self.request.after(EMPTY.followed_by(observed) if observed else EMPTY)
        begins, self._has_sampled = self._has_sampled, False
        outcome = Outcome(begins=request) if begins else Outcome(goes_on=request)
        return await self._with_state(outcome)

    async def _restored(self, state: Mapping[str, Any], request: Request) -> Outcome:
        """Give a fresh environment its state; where that fails, begin again."""
        try:
            if self.kind.type is not None:
                self.environment = await self._guarded("is made", self.kind.make, False, self.limits.reset_timeout_s)
                restore = self.environment.restore
                is_async = _is_async(self.kind, "restore")
                await self._guarded("is restored", lambda: restore(state["environment"]), is_async)
        except Failure as failure:
            return await self._opened() if self._retries(failure) else Outcome()
        for name in ("messages", "turn_rewards", "num_turns"):
            setattr(self, name, copy.deepcopy(state[name]))
        self.said, self.asked = state.get("said", ""), state.get("asked", "")  # an earlier version has not kept them
        return Outcome(goes_on=request, state=copy.deepcopy(dict(state)) if self.keeps_states else None)

    async def _answered(self, completion: Completion) -> Outcome:
        """Answer a turn; where the environment fails, begin again with a fresh one."""
        try:
            return await self._turn(completion)
        except Failure as failure:
            if not self._retries(failure):
                return Outcome()
        return await self._opened()

    async def _turn(self, completion: Completion) -> Outcome:
        self.num_turns += 1
        if completion.finish_reason != "stop":
            return await self._over(completion, completion.finish_reason)
        token_ids: list[int] = completion.token_ids_T.tolist()
        sampled = completion.turns[-1]
        before = [*completion.request.prompt.token_ids, *token_ids[: len(token_ids) - len(sampled)]]
        turn = self.chat.read(sampled, before, self.kind.tools)
        self.messages.append(turn.message)
        answers = await self._call_all(turn.calls) if turn.calls else await self._respond(turn.content)
        await self._reward_turn()
        self.messages += answers
        if not answers or await self._is_done():
            return await self._over(completion, "stop")
        outcome = self._goes_on(completion, self.chat.following(answers, sampled[-1]))
        is_full = completion.num_sampled >= completion.request.sampling.max_tokens
        if self.num_turns == self.limits.max_turns or is_full or outcome is None:
            self.counts["cut_short"] += 1
            del self.messages[len(self.messages) - len(answers) :]
            return await self._over(completion, "length")
        return await self._with_state(outcome)

    async def _with_state(self, outcome: Outcome) -> Outcome:
        """Have an outcome say what the trajectory is then, where others may begin within it."""
        return replace(outcome, state=await self._state()) if self.keeps_states else outcome

    async def _state(self) -> dict[str, Any]:
        """Return a copy of what the trajectory has come to, for :meth:`restore`.

        Raises:
            Failure: The environment cannot say it, or no checkpoint can hold it.
        """
        own = {name: getattr(self, name) for name in ("messages", "turn_rewards", "num_turns", "said", "asked")}
        if self.kind.type is None:
            return copy.deepcopy(own | {"environment": None})
        is_async = _is_async(self.kind, "state")
        told = await self._guarded("is asked for its state", self.environment.state, is_async, at_once=True)
        if (found := find_foreign(told)) is not None:
            raise ForeignState(f"returns a state that no checkpoint can hold: state(){found.place} {found}")
        try:
            return copy.deepcopy(own | {"environment": told})
        except Exception as error:  # such as a tensor with a gradient
            raise Failure(f"returns a state that cannot be copied ({error_text(error)})") from error

    async def _try_state(self) -> None:
        """Look at the first state of each kind of environment.

        Raises:
            ValueError: No checkpoint can hold it.
        """
        if "state" not in self.kind.methods or self.kind.name in self.tried:
            return
        self.tried.add(self.kind.name)
        try:
            await self._state()
        except ForeignState as failure:
            raise ValueError(f"The environment {self.kind.name} {failure}; have it return {PLAIN}.") from None
        except Failure as failure:
            self.told(
                f"The environment {self.kind.name} {failure}; where that is so as a checkpoint is saved, a resumed run "
                "begins the trajectory again."
            )

    async def try_restore(self) -> None:
        """Have the environment say its state, and a fresh one take it as it comes back from a checkpoint.

        Raises:
            Failure: One of them cannot.
        """
        state = from_written(to_written((await self._state())["environment"]))
        fresh = await self._guarded("is made", self.kind.make, False, at_once=True)
        try:
            is_async = _is_async(self.kind, "restore")
            await self._guarded("is restored", lambda: fresh.restore(state), is_async, at_once=True)
        finally:
            if "close" in self.kind.methods:
                await self._closed(fresh)

    def _goes_on(self, completion: Completion, observed: Sequence[int]) -> Outcome | None:
        """Go on after a turn and what follows it; None where more would be observed than may be."""
        if completion.num_observed + len(observed) > completion.request.sampling.max_observed:
            return None
        return Outcome(goes_on=completion.request.after(completion.followed_by(observed)))

    async def _over(self, completion: Completion, reason: FinishReason) -> Outcome:
        """Let the environment give its reward, and end."""
        if completion.finish_reason != "stop":
            self.messages.append({"role": "assistant", "content": self._text(completion)})
            await self._reward_turn()
        reward = None
        if "get_reward" in self.kind.methods:
            told = await self._ask("get_reward")
            try:
                reward = read_value(told)
            except ValueError as error:
                raise ValueError(f"{self.kind.name}.get_reward: {error}.") from None
        ended = completion.request.after(completion).ended(reason, completion.text)
        ended.episode = self.episode(reward)
        return Outcome(finished=ended)

    def _text(self, completion: Completion) -> str:
        return str(self.chat.tokenizer.decode(completion.turns[-1], skip_special_tokens=True))

    # ---- what an environment is asked ------------------------------------------------------------------

    async def _call_all(self, calls: Sequence[Call | BrokenCall]) -> list[Message]:
        """Make the calls of a turn in their order; return an answer to each, up to the end of the episode."""
        answers: list[Message] = []
        for call in calls:
            if isinstance(call, BrokenCall):
                self.counts["broken_calls"] += 1
                name, result = "unknown", {"error": f"the call cannot be read: {call.why}"}
            else:
                name, result = call.name, await self._call(call)
            content = text_of(result, name)
            answers.append({"role": "tool", "name": name, "content": self._shortened(content)})
            if await self._is_done():
                break
        return answers

    async def _call(self, call: Call) -> Any:
        """Make one call; return its result, or the error that the policy is told of."""
        self.counts["tool_calls"] += 1
        tool = self.kind.tools.get(call.name)
        if tool is None:
            self.counts["tool_failures"] += 1
            return {"error": f"there is no tool {call.name!r}; the tools are {', '.join(self.kind.tools)}"}
        own = (self.environment,) if tool.is_method else ()
        try:
            arguments = copy.deepcopy(call.arguments)  # the conversation keeps those that the policy wrote
            result = await self._within(lambda: tool.function(*own, **arguments), tool.is_async)
            if not isinstance(result, str):  # printing it is a call of the user's code too
                result = await self._within(lambda: text_of(result, f"the tool {call.name}"), False)
        except CallTimeout:
            self.counts["tool_timeouts"] += 1
            limit = f"the call took longer than {self.limits.tool_timeout_s:g} s"
            self.called(call.name, limit)
            if tool.is_method:  # the call goes on, and holds the environment
                raise Failure(f"hangs in {call.name}") from None
            self.counts["tool_failures"] += 1
            return {"error": limit}
        except (TooManyHang, NotText, BrokenLoop):
            raise
        except FAILURES as error:
            self.called(call.name, error_text(error))
            raise Failure(f"fails in {call.name} ({error_text(error)})") from error
        except Exception as error:  # a tool's error is an answer
            self.counts["tool_failures"] += 1
            self.called(call.name, error_text(error))
            return {"error": str(error)}
        self.called(call.name, None)
        return result

    async def _respond(self, content: str) -> list[Message]:
        """Return the user's answer to a turn without a call; none where there is none."""
        if "respond" not in self.kind.methods or await self._is_done():
            return []
        respond = self.environment.respond
        said = await self._guarded("is asked to respond", lambda: respond(content), _is_async(self.kind, "respond"))
        if said is None:
            return []
        return [{"role": "user", "content": self._shortened(await self._said(said, "respond"))}]

    async def _said(self, said: Any, method: str) -> str:
        """Return what a method has returned as text."""
        who = f"{self.kind.name}.{method}"
        if isinstance(said, str):
            return text_of(said, who)
        return await self._guarded(f"has what {method} returned printed", lambda: text_of(said, who), False)

    async def _reward_turn(self) -> None:
        if "turn_reward" in self.kind.methods:
            told = await self._ask("turn_reward")
            try:
                value = read_value(told)
            except ValueError as error:
                raise ValueError(f"{self.kind.name}.turn_reward: {error}.") from None
            self.turn_rewards.append(value or 0.0)

    async def _is_done(self) -> bool:
        if not hasattr(self.kind.type, "done") and "done" not in getattr(self.environment, "__dict__", {}):
            return False
        done = await self._guarded("is asked for done", lambda: self.environment.done, False)
        return done if isinstance(done, bool) else await self._guarded("is asked for done", lambda: bool(done), False)

    async def _ask(self, name: str) -> Any:
        return await self._guarded(f"is asked for {name}", getattr(self.environment, name), _is_async(self.kind, name))

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
                return await self.calls.at_once(function, is_async, self.limits.tool_timeout_s)
            return await self._within(function, is_async, timeout_s)
        except CallTimeout:
            self.counts["timeouts"] += 1
            raise Failure(f"takes too long when it {what}") from None
        except (TooManyHang, NotText, BrokenLoop):
            raise
        except (Exception, *FAILURES) as error:  # a user's function runs here, and may fail in any way
            raise Failure(f"fails when it {what} ({error_text(error)})") from error

    async def _within(self, function: Callable[[], Any], is_async: bool, timeout_s: float | None = None) -> Any:
        """Make a call within its limit and that of the trajectory."""
        if self._is_over:
            raise asyncio.CancelledError
        limit_s = self.limits.tool_timeout_s if timeout_s is None else timeout_s
        left_s = self.limits.trajectory_timeout_s - self._spent_s
        return await self.calls.call(function, is_async, max(min(limit_s, left_s), 0.0), self._spend, self.apart)

    def _spend(self, seconds: float) -> None:
        self._spent_s += seconds

    # ---- failures -------------------------------------------------------------------------------------

    def _retries(self, failure: Failure) -> bool:
        """Count a failure; return whether the trajectory begins again."""
        self.counts["failures"] += 1
        self.num_failed += 1
        self.told_failure(f"{self.kind.name} {failure}")
        self._let_go()
        if self.num_failed > self.limits.retries:
            self.counts["dropped"] += 1
            return False
        self.counts["retries"] += 1
        return True

    async def _closed_after(self, work: Future[None]) -> None:
        await asyncio.wait([asyncio.wrap_future(work)])
        if (closing := self._let_go()) is not None:
            await asyncio.wrap_future(closing)

    async def _closed(self, environment: Any) -> None:
        limit_s, is_async = self.limits.reset_timeout_s, _is_async(self.kind, "close")
        try:  # what it takes is not the time of the fresh one
            await self.calls.call(environment.close, is_async, limit_s, lambda _: None, self.apart)
        except (Exception, *FAILURES) as error:  # nothing depends on it
            self.told_failure(f"{self.kind.name} fails when it is closed ({error_text(error)})")

    def _shortened(self, text: str) -> str:
        text, is_cut = self.chat.shorten(text, self.limits.max_answer_tokens)
        self.counts["shortened_answers"] += is_cut
        return text


class _Before(NamedTuple):
    """What a trajectory has come to before a turn.

    Args:
        turns: Those before it, and what followed them.
        text: What they say.
        contexts: Of these turns and of the one that is sampled.
    """

    turns: Trajectory = EMPTY
    text: str = ""
    contexts: tuple[tuple[int, ...], ...] = ((),)


@dataclass(eq=False)
class RewritingSession(Session):
    """A trajectory whose conversation is written by the chat template again before each turn.

    The request of a turn has the conversation as its prefix, all of it observed, and random numbers of its own. What
    the trajectory has come to is put together here: the turns as they were sampled, each with the conversation before
    it among :attr:`lit_grpo.types.Trajectory.contexts`, and between two of them what the answer added to the first.
    """

    _before: _Before = field(default_factory=_Before)
    _next: _Before = field(default_factory=_Before)  # once the rollout has taken the outcome

    def took(self) -> None:
        """The next turn begins."""
        super().took()
        self._before = self._next

    def whole(self, completion: Completion) -> Completion:
        """Return all turns, of what the request of the last one has; as many tokens as may be sampled of it."""
        before, begin = self._before, len(self._before.contexts[-1])
        sampled: list[int] = completion.token_ids_T[begin:].tolist()
        room = self.request.sampling.max_tokens - before.turns.num_sampled
        is_cut = len(sampled) > room
        logprobs: list[float] = completion.logprobs_T[begin : begin + room].tolist()
        turns = before.turns.followed_by(sampled[:room], logprobs, completion.newest_version or 0)
        turns.contexts = before.contexts if sampled else before.contexts[:-1]
        said = "" if is_cut else completion.text
        said = said or str(self.chat.tokenizer.decode(sampled[:room], skip_special_tokens=True))
        reason = "length" if is_cut else completion.finish_reason
        return Completion.of(self.request, turns, reason, before.text + said)

    async def _reset(self) -> Outcome:
        outcome = await super()._reset()
        request = outcome.begins or outcome.goes_on
        assert request is not None, "a reset lets the trajectory begin"
        self._next = _Before(contexts=(tuple(request.prefix.token_ids_T.tolist()),))
        return outcome

    async def _turn(self, completion: Completion) -> Outcome:
        return await super()._turn(self.whole(completion))

    def _goes_on(self, completion: Completion, observed: Sequence[int]) -> Outcome | None:
        context = self._written()
        if context is None or len(context) > completion.request.sampling.max_observed:
            return None
        contexts = (*self._before.contexts, tuple(context))
        self._next = _Before(turns=completion.followed_by(observed), text=completion.text, contexts=contexts)
        seed = self.request.seed + self.num_turns  # a turn may stand where an earlier one has stood
        request = replace(self.request, seed=seed, prefix=EMPTY.followed_by(context))
        return Outcome(rewritten=request)

    def _written(self) -> list[int] | None:
        """Return the tokens of the conversation after those of the prompt.

        None where the chat template refuses what the policy has said, such as two calls in one turn: then the
        trajectory ends there.

        Raises:
            ValueError: The chat template changes the prompt.
        """
        prompt = self.request.prompt
        try:
            messages = self.chat.conversation(prompt, self.said, self.messages)
            context = self.chat.beginning(prompt, messages, self.kind.schemas)
        except UnusableRow as error:
            self.told(f"What the policy has said {error} Such trajectories end there, and count as cut short.")
            return None
        if context is None:
            raise ValueError(
                f"The chat template changes the prompt of {prompt.prompt_id} once the conversation has gone on, and a "
                "trajectory keeps its prompt; leave history of the plug-in environments at appended."
            )
        return context


class NotText(ValueError):
    """A tool or environment returns what no conversation can hold, which ends the run."""


def text_of(said: Any, who: str) -> str:
    r"""Return what a tool or environment says as text: content blocks joined, and anything else as Python prints it.

    A lone surrogate, which no tokenizer takes, is written as ``\ud800``.

    Raises:
        NotText: A content block is no text.
        Exception: Whatever printing it raises.
    """
    is_blocks = isinstance(said, list) and said and all(isinstance(block, dict) and "type" in block for block in said)
    for block in said if is_blocks else ():
        if block["type"] != "text":
            raise NotText(f"{who} returns content that is not text, and conversations are text alone; return text.")
        if not isinstance(block.get("text"), str):
            raise NotText(f"{who} returns a content block without a text; write it as {{'type': 'text', 'text': ...}}.")
    if is_blocks:
        said = "".join(block["text"] for block in said)
    text = str.__str__(said) if isinstance(said, str) else str(said)  # of no class of its own, for checkpoints
    return text.encode("utf-8", "backslashreplace").decode()


def _is_async(kind: Kind, name: str) -> bool:
    return inspect.iscoroutinefunction(getattr(kind.type, name, None))
