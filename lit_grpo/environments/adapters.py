"""Environments and tasks of other libraries, as environments and tasks of ours.

Each is a small class; one of your own says in its ``__init__`` what it stands for, in a file that a config names as
``factory: my_env.py:Gsm8k``::

    class Gsm8k(SkyRL):  # skyrl-gym
        def __init__(self):
            super().__init__(lambda row: skyrl_gym.make("gsm8k", extras=row))

    class Echo(OpenEnv):
        def __init__(self):
            super().__init__(EchoEnv("http://127.0.0.1:8000"), act=lambda text: EchoAction(message=text),
                             show=lambda seen: seen.echoed_message)

    class Hanoi(TextArena):
        def __init__(self):
            super().__init__(lambda: textarena.make("TowerOfHanoi-v0"))

    class Sums(Taskset):  # verifiers; data.train is {class_path: my_env.Sums}, and my_env.py:right the reward
        def __init__(self):
            super().__init__(MySums(MyConfig()))

    right = Sums().reward

An environment gets the text of a turn without its reasoning. None of these packages is needed here.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import random
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from lit_grpo.data.sources import RowSource

SELF = 0
"""The number that TextArena gives to the only player."""
OWN_MOVE = "PLAYER_ACTION"
"""The kind of a message by which TextArena repeats a move; some games send it in their own name."""
_RANDOMNESS = threading.Lock()
_SERVERS_ERROR = re.compile(r"\(code: (?P<code>\w+)\)\Z")
"""The end of an error message of OpenEnv's client, if its server has answered with an error."""


class _Earning:
    """A reward for each step, and their sum for the episode."""

    done = False

    def __init__(self) -> None:
        self._earned, self._last = 0.0, 0.0

    def _take(self, reward: Any, done: Any) -> None:
        self._last = float(reward or 0.0)
        self._earned += self._last
        self.done = bool(done)

    def turn_reward(self) -> float:
        """Return the reward of the last turn's step; 0 for a truncated turn, which made no step."""
        last, self._last = self._last, 0.0
        return last

    def get_reward(self) -> float:
        return self._earned


class SkyRL(_Earning):
    """An environment of skyrl-gym: ``init(prompt)``, ``step(action)``, ``close()`` of its ``BaseTextEnv``.

    Its ``postprocessed_action`` is not used: a turn stays as it was sampled.

    Args:
        make: Makes one for a row of the data, such as ``lambda row: skyrl_gym.make("gsm8k", extras=row)``.
    """

    def __init__(self, make: Callable[[dict[str, Any]], Any]) -> None:
        super().__init__()
        self._make, self._env = make, None

    def reset(self, prompt: Any = "", **columns: Any) -> str | None:
        """Begin; what the environment adds to the end of the prompt is added.

        Raises:
            ValueError: It changes the prompt in another way.
        """
        self._env = self._make({"prompt": prompt, **columns})
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        begins, _ = self._env.init([dict(message) for message in asked])
        before, after = (messages[-1]["content"] if messages else "" for messages in (asked, begins))
        if len(begins) != max(len(asked), 1) or list(begins[:-1]) != asked[:-1] or not after.startswith(before):
            raise ValueError(
                f"{type(self._env).__name__}.init changes the prompt, and may only add to the end of its last message; "
                "let the rows of the data have the prompt that it makes."
            )
        return after[len(before) :] or None

    def respond(self, text: str) -> str | None:
        assert self._env is not None, "reset comes first"
        said = self._env.step(text)
        self._take(said["reward"], said["done"])
        return "\n".join(str(message["content"]) for message in said["observations"]) or None

    def close(self) -> None:
        if self._env is not None:
            self._env.close()


class OpenEnv(_Earning):
    """A session with an OpenEnv server, by its async client (``reset``, ``step``, ``close`` of an ``EnvClient``).

    Args:
        client: Client that is not connected yet; each trajectory has one of its own.
        act: Makes the client's action of the text of a turn; a ValueError that it raises is told the policy.
        show: Makes text of an observation.
        columns: The columns of a row that the server's ``reset`` gets, where the row has them.
        mistakes: The server's errors that are the policy's mistakes, and told it, by their codes; any other one is a
            failure of the server. Add ``EXECUTION_ERROR`` where the server's ``step`` raises at a bad move.
    """

    def __init__(
        self,
        client: Any,
        act: Callable[[str], Any],
        show: Callable[[Any], str],
        columns: Sequence[str] = ("seed",),
        mistakes: Sequence[str] = ("VALIDATION_ERROR",),
    ) -> None:
        super().__init__()
        self._client, self._act, self._show, self._columns = client, act, show, columns
        self._mistakes = mistakes

    async def reset(self, **columns: Any) -> str | None:
        result = await self._client.reset(**{name: columns[name] for name in self._columns if name in columns})
        self.done = bool(result.done)
        return self._show(result.observation) or None

    async def respond(self, text: str) -> str | None:
        """Take a step, and return what is observed."""
        try:
            action = self._act(text)
        except ValueError as error:
            return str(error)
        try:
            result = await self._client.step(action)
        except RuntimeError as error:  # as the client raises what the server answers
            said = _SERVERS_ERROR.search(str(error))
            if said is None or said["code"] not in self._mistakes:
                raise
            return str(error)
        self._take(result.reward, result.done)
        return self._show(result.observation) or None

    async def close(self) -> None:
        await self._client.close()


class TextArena:
    """A game of TextArena for one player; the column ``seed`` decides which.

    What the game says since the last turn is observed, without the player's own move. Wrappers of actions act;
    wrappers of observations, which would say all of it again, do not.

    Its games draw from Python's global random numbers. Here each game keeps a state of its own, which is set for the
    time of each call. So a seed gives the same game whatever else is played meanwhile, and others' numbers stay theirs.

    Args:
        make: Makes the game, such as ``lambda: textarena.make("TowerOfHanoi-v0")``.
    """

    done = False

    def __init__(self, make: Callable[[], Any]) -> None:
        self._game, self._state, self._reward = make(), random.getstate(), 0.0
        self._speaker = self._game
        while "env" in vars(self._speaker):  # a wrapper
            self._speaker = self._speaker.env

    def reset(self, seed: int, **_: Any) -> str | None:
        """Begin; with the same seed it is the same game."""
        self._state = random.Random(seed).getstate()
        return self._play(lambda: self._game.reset(num_players=1, seed=seed))

    def respond(self, text: str) -> str | None:
        """Move, and return what is observed."""
        said = self._play(lambda: self._move(text))
        if self.done:
            rewards, _ = self._game.close()
            self._reward = float((rewards or {}).get(SELF, 0.0))
        return said

    def get_reward(self) -> float:
        """Return the reward of the game at its end; 0 if it has not ended."""
        return self._reward

    def _move(self, text: str) -> None:
        self.done, _ = self._game.step(action=text)

    def _play(self, act: Callable[[], Any]) -> str | None:
        """Do something with the game's own random numbers; return what is new to see."""
        with _RANDOMNESS:
            others = random.getstate()
            random.setstate(self._state)
            try:
                act()
                _, messages = self._speaker.get_observation()
            finally:
                self._state = random.getstate()
                random.setstate(others)
        return "\n".join(said for _, said, kind in messages if kind.name != OWN_MOVE) or None


class Taskset(RowSource):
    """A taskset of verifiers (``verifiers.v1``): its tasks are rows, and :meth:`reward` is a reward function.

    The tasks' own ``@vf.reward`` methods score a trace that is made of the conversation; none of verifiers' harnesses,
    tool servers or runtimes takes part, so rewards that need a runtime are left out. Rows have the columns ``prompt``
    and ``task``, the number of the task.

    Args:
        taskset: A configured ``vf.Taskset``, or a view of one: ``MySums(MyConfig()).shuffle(seed=0).take(100)``.
        most: The most tasks; a taskset may have no end.
    """

    def __init__(self, taskset: Any, most: int = 10_000) -> None:
        self._name, self._tasks = type(taskset).__name__, list(islice(taskset, most))
        if type(taskset).toolsets(taskset.config):
            raise ValueError(f"{self._name} {_HAS_TOOLS}.")

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield a row for each task."""
        for number, task in enumerate(self._tasks):
            if (why := _refusal(task)) is not None:
                raise ValueError(f"{self._name}: task {number} {why}.")
            yield {"prompt": _prompt(task.data), "task": number}

    def describe(self) -> str:
        return self._name

    async def reward(self, completions: Sequence[Any], task: Sequence[int]) -> list[float]:
        return list(await asyncio.gather(*map(self._score, completions, task)))

    async def _score(self, completion: Sequence[Mapping[str, Any]], number: int) -> float:
        import verifiers.v1 as vf  # pyrefly: ignore[missing-import]
        from verifiers.v1.graph import MessageNode  # pyrefly: ignore[missing-import]

        task = self._tasks[number]
        said = vf.TraceTask(type=type(task).__name__, data=task.data)
        trace = vf.Trace(agent=vf.AgentInfo(config=vf.AgentConfig()), task=said)
        asked, answered = _prompt(task.data), _answered(completion)
        for place, message in enumerate([*asked, *answered]):
            sampled = place >= len(asked) and message["role"] == "assistant"
            trace.nodes.append(MessageNode(parent=place - 1 if place else None, message=message, sampled=sampled))
        await task.score(trace)
        return float(trace.reward)


_HAS_TOOLS = "has tool servers, and none is started; take a taskset without, and give functions as tools"


def _refusal(task: Any) -> str | None:
    """Return why a task is not supported; None if it is."""
    if task.data.prompt is None:
        return "has no prompt, and nobody else asks; give it one"
    if task.NEEDS_CONTAINER:
        return "needs a container, and none is started; take a taskset without"
    if type(task).toolsets(task.config):
        return _HAS_TOOLS
    for name in ("setup", "finalize"):
        own = getattr(type(task), name, None)  # what verifiers' own Task has does nothing
        if own is not None and own.__module__ != "verifiers.v1.task":
            return (
                f"has a {name} of its own, {own.__qualname__}, and no rollout of verifiers runs it; take a taskset "
                "without, or ask through the plug-in agent"
            )
    rewards = task.hooks("reward")
    if rewards and all(map(_needs_runtime, rewards)) and not task.config.judges:
        return "has rewards that all need a runtime, and none is started; give one of them runtime=None as default"
    return None


def _needs_runtime(reward: Callable[..., Any]) -> bool:
    parameter = inspect.signature(reward).parameters.get("runtime")
    return parameter is not None and parameter.default is parameter.empty


def _prompt(data: Any) -> list[dict[str, Any]]:
    asked = [{"role": "user", "content": data.prompt}] if isinstance(data.prompt, str) else data.prompt
    messages = [each if isinstance(each, dict) else each.model_dump(exclude_none=True) for each in asked]
    return [*([{"role": "system", "content": data.system_prompt}] if data.system_prompt else []), *messages]


def _answered(completion: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages of a conversation as verifiers has them: calls have numbers, by which answers name them."""
    messages: list[dict[str, Any]] = []
    unanswered: deque[str] = deque()
    for message in completion:
        mine = {name: message[name] for name in ("role", "content", "reasoning_content") if name in message}
        if message["role"] == "tool":
            mine["tool_call_id"] = unanswered.popleft() if unanswered else "unknown"
        if calls := [call["function"] for call in message.get("tool_calls") or ()]:
            ids = [f"call-{len(messages)}-{number}" for number in range(len(calls))]
            unanswered = deque(ids)
            mine["tool_calls"] = [
                {"id": each, "name": call["name"], "arguments": json.dumps(call["arguments"])}
                for each, call in zip(ids, calls, strict=True)
            ]
        messages.append(mine)
    return messages
