"""The plug-in ``agent``: a user's agent, as it is, that talks to the policy over HTTP."""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import TYPE_CHECKING, Any, ClassVar

from lit_grpo.data.rendering import with_added
from lit_grpo.environments.calls import CallFormatName
from lit_grpo.environments.contract import Kind, columns_of
from lit_grpo.environments.driver import TrajectoryDriver
from lit_grpo.environments.live import FAILURES, Failure, Limits
from lit_grpo.environments.plugin import ADDED, Seconds, Trajectories, check_room
from lit_grpo.limits import Count, Number
from lit_grpo.plugins import RunFacts
from lit_grpo.process.calls import USERS_LOOP, BrokenLoop, TooManyHang
from lit_grpo.process.signals import check_signals
from lit_grpo.process.terminal import error_text
from lit_grpo.rewards.function import read_value
from lit_grpo.rewards.loading import load_object
from lit_grpo.types import Completion, Request

if TYPE_CHECKING:
    from lit_grpo.data.chat import Message
    from lit_grpo.data.sources import Row
    from lit_grpo.environments.agent.dialogue import Dialogue
    from lit_grpo.environments.agent.endpoint import Endpoint

READING_S = 60.0
"""Seconds that reading a request may take before an idle rollout counts as a standstill."""
_LOOKS_S = 0.02
GIVEN = ("base_url", "api_key", "session_id")
"""Parameters that an agent may take in addition to a row's columns."""


@dataclass
class Agent(Trajectories):
    """Train the policy in your own agent, which calls it through an endpoint with the APIs of OpenAI and vLLM."""

    _more_counts: ClassVar[tuple[str, ...]] = ("refused_requests",)
    _shows_images = False
    role: ClassVar[str] = "what prompts are asked with"
    needs: ClassVar[frozenset[str]] = frozenset({"prompt_stream"})
    changes: ClassVar[Mapping[str, str]] = {
        "restorable_environments": "leaves an episode to an agent, which cannot be taken up midway"
    }

    run: str | Callable[..., Any] | None = None
    """Function, async or not, by its path as in ``my_agent.py:solve``, or a class with such a method ``run`` and, if
    the reward comes later, ``get_reward``. It is called with a row's columns, ``base_url`` and ``api_key``, and
    ``session_id`` if it has that parameter, once for each completion. When it returns, the completion is over, and its
    reward is the returned number, or with rewards of single turns ``{"reward": 1.0, "turn_rewards": [0.0, 0.5, 0.5]}``,
    for ``mt_grpo``, ``return_to_go`` or ``gigpo``.
    """
    timeout_s: Seconds = 60.0
    """Max seconds between two requests of an agent, before the first and after the last."""
    trajectory_timeout_s: Seconds = 600.0
    """Max seconds of an agent in all. Waiting for the policy does not count in either limit."""
    retries: Number = 2
    """Max number of restarts of a trajectory after failures of its agent. After that it is left out of its group: a
    failure does not count as a reward of 0.
    """
    num_threads: Count = 64
    """Number of threads for agents that are not async, and so the max number of their completions decoded at a time.
    Many threads with HTTP clients slow each other down: an async agent scales further.
    """
    calls: CallFormatName | None = None
    """Format of the policy's tool calls, as in the plug-in ``environments``."""

    def check(self, run: RunFacts) -> None:
        check_room(run, "what an agent says needs")

    def setup(self) -> None:
        """Load the agent."""
        limits = Limits(
            tool_timeout_s=self.timeout_s,
            trajectory_timeout_s=self.trajectory_timeout_s,
            retries=self.retries,
            reset_timeout_s=self.timeout_s,
        )
        try:
            kind = _kind(self.run)
        except ValueError as error:
            raise ValueError(f"rollout.plugins agent: {error}") from None
        from lit_grpo.environments.agent.endpoint import Endpoint

        self._endpoint = Endpoint()
        driver = functools.partial(AgentDriver, endpoint=self._endpoint)
        self.lead({None: kind}, limits, self.num_threads, self.calls, driver)

    def on_policy_start(self, eos_ids: Sequence[int]) -> None:
        super().on_policy_start(eos_ids)
        self._endpoint.ends = tuple(eos_ids)

    def adds(self, row: Mapping[str, Any]) -> bool:
        return True

    def alternatives(self, row: Row, messages: list[Message]) -> Sequence[tuple[list[Message], Mapping[str, Any]]]:
        """Return what an agent may write where the row has no prompt: anything, after a system message, with tools."""
        if messages[-1]["content"]:
            return []
        tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
        system = [] if messages[0]["role"] == "system" else [{"role": "system", "content": "x"}]
        return [
            *((with_added(messages, text), {}) for text in ADDED),
            ([*system, *messages], {}),
            (messages, {"tools": [tool]}),
        ]


@dataclass(frozen=True, kw_only=True)
class AgentKind(Kind):
    """A kind of agent: ``type`` is its class, None for a function.

    Args:
        run: The function or method.
        given: The parameters of :data:`GIVEN` that the agent takes.
    """

    run: Callable[..., Any]
    given: frozenset[str]

    @property
    def responds(self) -> bool:
        return True

    @property
    def can_be_restored(self) -> bool:
        return False

    @functools.cached_property
    def name(self) -> str:
        return self.run.__name__ if self.type is None else self.type.__name__

    @property
    def begins(self) -> str:
        return self.name

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.run)

    @property
    def gives_reward(self) -> bool:
        returns = inspect.signature(self.run).return_annotation
        return "get_reward" in self.methods or returns not in (None, NoneType, "None")

    def check_columns(self, columns: Mapping[str, Any]) -> None:
        """Check that a row has what the agent takes, and nothing in its place."""
        for name in self.given & columns.keys():
            raise ValueError(
                f"has a column {name!r}, but the endpoint sets the parameter {name} of {self.name}; rename it"
            )
        super().check_columns(columns)


def _kind(given: str | Callable[..., Any] | None) -> AgentKind:
    agent: Any = load_object(given, "agent") if isinstance(given, str) else given
    if agent is None:
        raise ValueError("it has no run; name a function, as in run: my_agent.py:solve.")
    is_class = inspect.isclass(agent)
    run = getattr(agent, "run", None) if is_class else agent
    if not inspect.isroutine(run):
        what = f"class {agent.__name__} has no method run" if is_class else f"run is {agent!r}, which is no function"
        raise ValueError(f"{what}; give a function, or a class with a method run.")
    check_signals(run, f"the agent {agent.__name__}", "leave it out, because timeout_s limits it")
    parameters = list(inspect.signature(run).parameters.values())[is_class:]
    for name in GIVEN[:2]:
        if name not in {parameter.name for parameter in parameters}:
            raise ValueError(
                f"{agent.__name__} has no parameter {name}, without which it cannot call the policy; add it."
            )
    columns, required = columns_of([parameter for parameter in parameters if parameter.name not in GIVEN])
    return AgentKind(
        type=agent if is_class else None,
        make=agent if is_class else lambda: None,
        tools={},
        columns=columns,
        required=required,
        methods=frozenset({"get_reward", "close"} & set(dir(agent))) if is_class else frozenset(),
        run=run,
        given=frozenset(GIVEN) & {parameter.name for parameter in parameters},
    )


class AgentDriver(TrajectoryDriver):
    """A trajectory and its agent: each HTTP request of the agent is answered by :meth:`sample`.

    Args:
        args: As for a trajectory.
        endpoint: The endpoint to which the agent sends its requests.
        kwargs: As for a trajectory.
    """

    def __init__(self, *args: Any, endpoint: Endpoint, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._endpoint = endpoint

    async def _attempt(self, request: Request, state: Mapping[str, Any] | None) -> Completion:
        """Let an agent begin, and wait for its end; between two of its requests it has so many seconds."""
        from lit_grpo.environments.agent.dialogue import Dialogue

        self.num_turns, self.turn_rewards = 0, []
        await self.environment.make()
        dialogue = Dialogue(self.request, self.chat, self.log, self.sample, self._apart_from_loop, self._endpoint.ends)
        self.messages = dialogue.messages
        base_url = await self._endpoint.serve(dialogue, self.calls.at_end)
        given = {"base_url": base_url, "api_key": self._endpoint.api_key, "session_id": dialogue.id}
        begun = asyncio.Event()
        agent = asyncio.create_task(self._run(given, begun))
        try:
            await _first(agent, begun, None)
            while dialogue.asked.is_set() or not agent.done():
                if dialogue.asked.is_set() and dialogue.reply is not None:
                    await asyncio.wait([dialogue.reply])  # however long the endpoint and the policy take
                else:
                    await self._wait_for_request(agent, dialogue.asked)
            return await self._end_with(dialogue, *agent.result())
        finally:
            self._endpoint.forget(dialogue)
            agent.cancel()

    async def sample(self, request: Request, state: Mapping[str, Any] | None = None) -> Completion:
        completion = await super().sample(request, state)
        self.num_turns += 1
        return completion

    async def _run(self, given: Mapping[str, str], begun: asyncio.Event) -> tuple[Any, BaseException | None]:
        """Call the agent; return what it returns, or what it raises."""
        assert isinstance(self.kind, AgentKind)
        kind, loop = self.kind, asyncio.get_running_loop()
        own = () if self.environment.object is None else (self.environment.object,)
        arguments = kind.arguments(self.request.prompt) | {name: given[name] for name in kind.given}

        def call() -> Any:
            loop.call_soon_threadsafe(begun.set)  # where there was no thread for it, it has waited
            return kind.run(*own, **arguments)

        if kind.is_async:
            begun.set()
        try:
            owner = f"agent {kind.name}"
            return await self.calls.call(call, kind.is_async, None, lambda _: None, owner, self._apart), None
        except (Exception, *FAILURES) as error:  # a user's function runs here: it must not end the loop
            return None, error

    async def _apart_from_loop(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of the endpoint in a thread; meanwhile no agent's time counts."""
        with self._endpoint.at_work(), self.calls.within(READING_S):
            return await asyncio.to_thread(function, *args)

    async def _wait_for_request(self, agent: asyncio.Task[Any], asked: asyncio.Event) -> None:
        """Wait for the agent's next request, or its end.

        Seconds in which the endpoint is at work, for whichever agent, do not count: they share a process.
        """
        began = time.monotonic() - self._endpoint.worked_s
        left_s = self.limits.trajectory_timeout_s - self.environment.spent_s
        limit_s = max(min(self.limits.tool_timeout_s, left_s), 0.0)
        taken_s = 0.0
        while not agent.done() and not asked.is_set() and (taken_s == 0.0 or taken_s < limit_s):
            wait_s = max(limit_s - taken_s, _LOOKS_S)
            with self.calls.within(wait_s):
                await _first(agent, asked, wait_s)
            taken_s = time.monotonic() - self._endpoint.worked_s - began
        self.environment.spend(taken_s)
        if not agent.done() and not asked.is_set():
            self.log.counts["timeouts"] += 1
            await USERS_LOOP.replace_if_blocked()
            raise Failure("takes too long until its next request")

    async def _end_with(self, dialogue: Dialogue, told: Any, error: BaseException | None) -> Completion:
        """End the trajectory with what the agent has returned or raised."""
        if isinstance(error, TooManyHang | BrokenLoop):
            raise error
        completion = dialogue.completion
        ran_out = dialogue.is_full and completion is not None  # it was refused for lack of room, and may raise
        if dialogue.fault is not None:
            raise Failure(f"has a turn that the endpoint cannot read ({error_text(dialogue.fault)})")
        if error is not None and not ran_out:
            raise Failure(f"fails ({error_text(error)})") from error
        if completion is None:
            raise Failure("ends without a request that the policy could answer")
        self.log.counts["cut_short"] += ran_out
        if "get_reward" in self.kind.methods:
            told = await self.environment.ask("get_reward")
        try:
            reward, self.turn_rewards = _earned(told, self.num_turns)
        except ValueError as wrong:
            raise ValueError(f"{self.kind.name}: {wrong}.") from None
        reason = "length" if ran_out else completion.finish_reason
        ended = self.request.after(completion).ended(reason, completion.text)
        ended.episode = self.episode(reward)
        return ended

    def stop(self) -> None:
        """End the trajectory: its agent is canceled if it is async, and its requests are refused."""
        self._is_over = True
        if self._played is not None:
            self._played.cancel()


EARNED = ("reward", "turn_rewards")


def _earned(told: Any, num_turns: int) -> tuple[float | None, list[float]]:
    """Read what an agent gives: the reward of the whole, and of each of its turns where it says so."""
    if not isinstance(told, Mapping):
        return read_value(told), []
    if unknown := [name for name in told if name not in EARNED]:
        raise ValueError(f"it returned a mapping with {unknown[0]!r}; give it {' and '.join(map(repr, EARNED))} alone")
    reward, given = read_value(told.get("reward")), told.get("turn_rewards") or []
    if not isinstance(given, list | tuple):
        raise ValueError(f"turn_rewards is {given!r:.80}, which is no list; return one number per turn")
    by_turn = [read_value(value) for value in given]
    if by_turn and (None in by_turn or len(by_turn) != num_turns):
        raise ValueError(
            f"turn_rewards is {by_turn!r:.80}, but there were {num_turns} turns; return one number per turn"
        )
    return reward, [value or 0.0 for value in by_turn]


async def _first(work: asyncio.Task[Any], event: asyncio.Event, timeout_s: float | None) -> None:
    """Wait until work is done or an event has come, no longer than that."""
    waits = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({work, waits}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waits.cancel()


PLUGINS = {"agent": Agent()}
