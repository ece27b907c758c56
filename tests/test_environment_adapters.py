"""Environments of other libraries: by classes of their contracts, and by the libraries where they are installed."""

from __future__ import annotations

import asyncio
import importlib
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from test_environments import call, only, play, text_of, worker_of

from lit_grpo.data import RowSource
from lit_grpo.environments.adapters import OpenEnv, SkyRL, Taskset, TextArena
from lit_grpo.rewards.function import RewardFunction, RewardSpec
from lit_grpo.types import Completion

# ---- skyrl-gym ----------------------------------------------------------------------------------------


class HigherLower:
    """As ``BaseTextEnv``: a row's answer is to be guessed in three turns."""

    closed = 0

    def __init__(self, extras: dict[str, Any]) -> None:
        self.answer, self.turns = extras["answer"], 0

    def init(self, prompt: list[dict[str, str]]) -> tuple[list[dict[str, str]], dict[str, Any]]:
        prompt[-1]["content"] += " It is below 10."
        return prompt, {}

    def step(self, action: str) -> dict[str, Any]:
        self.turns += 1
        right = action == str(self.answer)
        done = right or self.turns == 3
        observations = [] if done else [{"role": "user", "content": "no"}, {"role": "user", "content": "Again."}]
        return {"observations": observations, "reward": 1.0 if right else 0.125, "done": done, "metadata": {}}

    def close(self) -> None:
        type(self).closed += 1


class Higher(SkyRL):
    def __init__(self) -> None:
        super().__init__(HigherLower)


ROW = {"prompt": "Guess.", "answer": 2}


def test_a_skyrl_gym_environment_is_one() -> None:
    worker = worker_of(Higher)
    before = HigherLower.closed
    (group,) = play(worker, lambda _, turn: str(turn + 1), [ROW])
    (rollout,) = group.rollouts
    assert text_of(rollout.completion) == (
        "<|im_start|>user\nGuess. It is below 10.<|im_end|>\n<|im_start|>assistant\n1<|im_end|>\n"
        "<|im_start|>user\nno\nAgain.<|im_end|>\n<|im_start|>assistant\n2<|im_end|>"
    )
    assert rollout.turn_rewards == (0.125, 1.0) and [each.name for each in worker.rewards] == ["Higher"]
    assert rollout.completion.episode is not None and rollout.completion.episode.reward == 1.125
    assert HigherLower.closed == before + 1


def test_a_prompt_that_is_changed_is_refused() -> None:
    class Rewriting(HigherLower):
        def init(self, prompt: Any) -> Any:
            return [{"role": "user", "content": "Something else."}], {}

    with pytest.raises(ValueError, match=r"Rewriting\.init changes the prompt, and may only add to the end of its l"):
        SkyRL(Rewriting).reset(**ROW)
    conversation = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Guess."}]
    assert SkyRL(HigherLower).reset(prompt=conversation, answer=1) == " It is below 10."
    assert conversation[-1]["content"] == "Guess."


def test_gsm8k_of_skyrl_gym() -> None:
    skyrl_gym = pytest.importorskip("skyrl_gym")
    environment = SkyRL(lambda row: skyrl_gym.make("gsm8k", extras=row))
    assert environment.reset("2+3?", reward_spec={"method": "rule", "ground_truth": "5"}) is None
    assert environment.respond("#### 5") is None
    assert environment.done and environment.turn_reward() == environment.get_reward() == 1.0
    environment.close()


# ---- OpenEnv ------------------------------------------------------------------------------------------


@dataclass
class Counting:
    """As an ``EnvClient``: async, and on one event loop."""

    seeds: list[Any] = field(default_factory=list)
    total: int = 0
    closed: bool = False
    loop: Any = None

    async def reset(self, **kwargs: Any) -> SimpleNamespace:
        self.loop = asyncio.get_running_loop()
        self.seeds.append(kwargs)
        return SimpleNamespace(observation=SimpleNamespace(total=0), reward=None, done=False)

    async def step(self, action: int) -> SimpleNamespace:
        assert asyncio.get_running_loop() is self.loop
        await asyncio.sleep(0)
        self.total += action
        return SimpleNamespace(observation=SimpleNamespace(total=self.total), reward=0.5 * action, done=self.total >= 3)

    async def close(self) -> None:
        self.closed = True


CLIENTS: list[Counting] = []


class Count(OpenEnv):
    def __init__(self) -> None:
        CLIENTS.append(Counting())
        super().__init__(CLIENTS[-1], act=int, show=lambda seen: f"The sum is {seen.total}.")


def test_a_client_of_openenv_is_one() -> None:
    CLIENTS.clear()
    rows = [{"prompt": "Count.", "seed": 7, "other": "x"}, {"prompt": "Count."}]
    groups = play(worker_of(Count), lambda *_: "2", rows)
    for group in groups:
        (rollout,) = group.rollouts
        assert "Count.The sum is 0." in text_of(rollout.completion) and "The sum is 2." in text_of(rollout.completion)
        assert rollout.turn_rewards == (1.0, 1.0) and len(rollout.completion.turns) == 2
        assert rollout.completion.episode is not None and rollout.completion.episode.reward == 2.0
    assert sorted(map(str, (client.seeds for client in CLIENTS))) == ["[{'seed': 7}]", "[{}]"]
    assert all(client.closed for client in CLIENTS)


def test_a_server_of_openenv_that_is_gone_is_no_reward_of_0() -> None:
    class Lost(Counting):
        async def step(self, action: int) -> SimpleNamespace:
            raise ConnectionError("the socket is closed")

    class Gone(OpenEnv):
        def __init__(self) -> None:
            super().__init__(Lost(), act=int, show=str)

    worker = worker_of(Gone, retries=1)
    (group,) = play(worker, lambda *_: "2", [{"prompt": "Count."}])
    assert group.rollouts == [] and worker.metrics()["environments/failures"] == 2


def test_a_text_that_is_no_action_is_answered_by_its_error() -> None:
    """A policy at the beginning writes many; they are no failures of the server."""
    worker = worker_of(Count)
    (group,) = play(worker, lambda _, turn: "2" if turn else "two", [{"prompt": "Count."}])
    assert group.rollouts[0].turn_rewards == (0.0, 1.0, 1.0) and worker.metrics()["environments/failures"] == 0
    told = said(group.rollouts[0].completion)[1]
    assert told == {"role": "user", "content": "invalid literal for int() with base 10: 'two'"}


@pytest.mark.parametrize(
    ("code", "failures"), [("VALIDATION_ERROR", 0), ("EXECUTION_ERROR", 0), ("SESSION_ERROR", 2), (None, 2)]
)
def test_an_action_that_a_server_refuses_is_answered_by_its_error(code: str | None, failures: int) -> None:
    """It is the policy's mistake, and no failure of the server; how the client of OpenEnv 0.10 says so."""
    refusal = f"Server error: Invalid message (code: {code})" if code else "no running event loop"

    class Strict(Counting):
        async def step(self, action: int) -> SimpleNamespace:
            if action > 2:
                raise RuntimeError(refusal)
            return await super().step(action)

    class Refusing(OpenEnv):
        def __init__(self) -> None:
            mistakes = ("VALIDATION_ERROR", "EXECUTION_ERROR") if code == "EXECUTION_ERROR" else ("VALIDATION_ERROR",)
            super().__init__(Strict(), act=int, show=lambda seen: str(seen.total), mistakes=mistakes)

    worker = worker_of(Refusing, retries=1)
    (group,) = play(worker, lambda _, turn: "2" if turn else "9", [{"prompt": "Count."}])
    assert worker.metrics()["environments/failures"] == failures and len(group.rollouts) == (failures == 0)
    for rollout in group.rollouts:
        assert rollout.turn_rewards == (0.0, 1.0, 1.0)
        assert said(rollout.completion)[1] == {"role": "user", "content": refusal}


@contextmanager
def adding_server() -> Iterator[type]:
    """A server of OpenEnv on loopback; yields an environment that adds with it."""
    pytest.importorskip("openenv")
    from openenv.core.env_client import EnvClient, StepResult  # pyrefly: ignore[missing-import]
    from openenv.core.env_server import create_fastapi_app  # pyrefly: ignore[missing-import]
    from openenv.core.env_server.interfaces import Environment  # pyrefly: ignore[missing-import]
    from openenv.core.env_server.types import Action, Observation, State  # pyrefly: ignore[missing-import]

    class Add(Action):
        number: int

    class Total(Observation):
        total: int = 0

    class Adding(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Total:
            self.total = 0
            return Total(total=0, done=False, reward=None)

        def step(self, action: Add, timeout_s: float | None = None, **_: Any) -> Total:
            self.total += action.number
            return Total(total=self.total, done=self.total >= 3, reward=0.5 * action.number)

        @property
        def state(self) -> State:
            return State()

    class Client(EnvClient):
        def _step_payload(self, action: Add) -> dict[str, Any]:
            return action.model_dump()

        def _parse_result(self, payload: dict[str, Any]) -> Any:
            seen = Total(**payload["observation"])
            return StepResult(observation=seen, reward=payload.get("reward"), done=payload.get("done", False))

        def _parse_state(self, payload: dict[str, Any]) -> State:
            return State(**payload)

    import uvicorn

    server = uvicorn.Server(
        uvicorn.Config(
            create_fastapi_app(Adding, Add, Total, max_concurrent_envs=16), host="127.0.0.1", port=0, log_level="error"
        )
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.05)
    port = server.servers[0].sockets[0].getsockname()[1]

    class Sum(OpenEnv):
        def __init__(self) -> None:
            client = Client(f"http://127.0.0.1:{port}")
            act = lambda text: Add.model_construct(number=int(text) if text.isdigit() else text)  # noqa: E731
            super().__init__(client, act, lambda seen: f"The sum is {seen.total}.")

    try:
        yield Sum
    finally:
        server.should_exit = True
        thread.join(10)


# ---- TextArena ----------------------------------------------------------------------------------------


Said = Enum("Said", ["PROMPT", "PLAYER_ACTION", "GAME_MESSAGE"])


class Dice:
    """As an ``Env`` of TextArena, whose games draw from Python's global random numbers."""

    def reset(self, num_players: int, seed: int | None = None) -> None:
        assert num_players == 1
        random.seed(seed)
        self.news = [(-1, f"The die shows {random.randrange(1000)}.", Said.PROMPT)]
        self.turns, self.done = 0, False

    def get_observation(self) -> tuple[int, Any]:
        seen, self.news = self.news, []
        return 0, seen

    def step(self, action: str) -> tuple[bool, dict[str, Any]]:
        self.turns += 1
        shows = f"Now it shows {random.randrange(1000)}."
        self.news = [(-1, action, Said.PLAYER_ACTION), (-1, shows, Said.GAME_MESSAGE)]
        return self.turns == 3, {}

    def close(self) -> tuple[dict[int, float], dict[int, Any]]:
        return {0: 0.75}, {}


class Retold:
    """As its wrappers: an action gets brackets, and an observation is a text of all that has happened."""

    def __init__(self, env: Any) -> None:
        self.env = env

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)

    def step(self, action: str) -> Any:
        return self.env.step(f"[{action}]")

    def get_observation(self) -> tuple[int, Any]:
        raise AssertionError("what is new is not in it by itself")


class Die(TextArena):
    def __init__(self) -> None:
        super().__init__(Dice)


def test_a_game_of_textarena_is_one() -> None:
    completion = only(play(worker_of(Die), lambda _, turn: f"[{turn}]", [{"prompt": "Roll.", "seed": 5}]))
    assert len(completion.turns) == 3 and completion.finish_reason == "stop"
    assert completion.episode is not None and completion.episode.reward == 0.75
    game = random.Random(5)
    shown = [game.randrange(1000) for _ in range(4)]
    assert f"Roll.The die shows {shown[0]}." in text_of(completion)
    assert [message["content"] for message in completion.episode.messages if message["role"] == "user"] == [
        f"Now it shows {number}." for number in shown[1:]
    ]


def test_wrappers_of_a_game_act_and_do_not_tell_it_again() -> None:
    game = TextArena(lambda: Retold(Retold(Dice())))
    assert str(game.reset(seed=5)).startswith("The die shows ")
    for _ in range(2):
        said = game.respond("1")
        assert said is not None and said.startswith("Now it shows ") and "\n" not in said


def test_games_with_one_seed_are_equal_whatever_else_is_played_and_leave_the_numbers_of_others_alone() -> None:
    random.seed(11)
    expected = random.Random(11).random()
    rows = [{"prompt": "Roll.", "seed": seed} for seed in range(6)]
    groups = play(worker_of(Die), lambda _, turn: f"[{turn}]", rows, num_generations=8)
    for group in groups:
        assert len({str(said(rollout.completion)) for rollout in group.rollouts}) == 1
    assert len({str(said(group.rollouts[0].completion)) for group in groups}) == 6
    assert random.random() == expected


def said(completion: Completion) -> list[dict[str, Any]]:
    assert completion.episode is not None
    return completion.episode.messages


def test_towers_of_hanoi_of_textarena() -> None:
    textarena = pytest.importorskip("textarena")
    game = TextArena(lambda: textarena.make("TowerOfHanoi-v0"))
    assert str(game.reset(seed=1)).startswith("You are playing Tower of Hanoi with 3 disks.")
    assert game.respond("A C") == (
        "You moved disk 1 from A to C.\nCurrent Board: \nA: [3, 2]\nB: []\nC: [1]\n."  # without brackets, and no echo
    )
    for move in ("A B", "C B", "A C", "B A", "B C", "A C"):
        assert not game.done and game.get_reward() == 0
        game.respond(move)
    assert game.done and game.get_reward() == 1.0


@pytest.mark.parametrize(
    ("name", "moves"),
    [
        ("Mastermind-v0", ["[1 2 3 4]", "[6 5 4 3]"]),
        ("2048-v0-3x3", ["left", "up", "right", "down"]),
        ("GuessTheNumber-v0", ["[5]", "[10]", "[15]"]),
    ],
)
def test_games_of_textarena_are_one_for_one_seed(name: str, moves: list[str]) -> None:
    textarena = pytest.importorskip("textarena")

    def told(seed: int) -> str:
        game = TextArena(lambda: textarena.make(name))
        return str([game.reset(seed=seed), *(game.respond(move) for move in moves)])

    games = [told(seed) for seed in range(8)]
    assert games == [told(seed) for seed in range(8)] and len(set(games)) > 1


# ---- verifiers ----------------------------------------------------------------------------------------


@pytest.fixture
def verifiers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for the parts of verifiers 0.4 that a trace is made of."""
    v1, graph = ModuleType("verifiers.v1"), ModuleType("verifiers.v1.graph")
    for name in ("AgentConfig", "AgentInfo", "TraceTask"):
        setattr(v1, name, type(name, (SimpleNamespace,), {}))
    v1.Trace = Trace  # type: ignore[attr-defined]
    graph.MessageNode = type("MessageNode", (SimpleNamespace,), {})  # type: ignore[attr-defined]
    package = ModuleType("verifiers")
    package.v1 = v1  # type: ignore[attr-defined]
    for module in (package, v1, graph):
        monkeypatch.setitem(sys.modules, module.__name__, module)


class Trace(SimpleNamespace):
    def __init__(self, **fields: Any) -> None:
        super().__init__(nodes=[], rewards={}, **fields)

    @property
    def reward(self) -> float:
        return sum(self.rewards.values())

    @property
    def last_reply(self) -> str:
        return [node.message["content"] for node in self.nodes if node.sampled][-1]


SCORED: list[Any] = []


class SumTask:
    """As a ``vf.Task``; its rewards have weights."""

    NEEDS_CONTAINER = False
    config = SimpleNamespace(judges=[])

    @classmethod
    def toolsets(cls, config: Any) -> list[Any]:
        return []

    def hooks(self, attr: str) -> list[Any]:
        assert attr == "reward"
        return []

    def __init__(self, prompt: Any, answer: str, system_prompt: str | None = None) -> None:
        self.data = SimpleNamespace(prompt=prompt, answer=answer, system_prompt=system_prompt)

    async def score(self, trace: Any, runtime: Any = None) -> None:
        SCORED.append(trace)
        trace.rewards["right"] = 1.0 * (trace.last_reply == self.data.answer)
        trace.rewards["short"] = 0.25 * (len(trace.last_reply) < 3)


class Sums:
    """As a ``vf.Taskset`` without an end."""

    config = None

    def __init__(self, *tasks: Any) -> None:
        self.tasks = tasks or (
            SumTask(f"{number}+1=", str(number + 1), "Be short." if number == 1 else None) for number in count()
        )

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tasks)

    @classmethod
    def toolsets(cls, config: Any) -> list[Any]:
        return []


def test_a_taskset_of_verifiers_is_rows_and_a_reward(verifiers: None) -> None:
    tasks = Taskset(Sums(), most=3)
    rows = list(tasks.rows())
    assert rows[0] == {"prompt": [{"role": "user", "content": "0+1="}], "task": 0}
    assert [message["role"] for message in rows[1]["prompt"]] == ["system", "user"] and len(rows) == 3
    answers = [[{"role": "assistant", "content": text}] for text in ("3", "4", "too long")]
    assert asyncio.run(tasks.reward(answers, [2, 2, 2])) == [1.25, 0.25, 0.0]
    nodes = SCORED[-3].nodes
    assert [(node.parent, node.sampled, node.message["role"]) for node in nodes] == [
        (None, False, "user"),
        (0, True, "assistant"),
    ]


def test_calls_of_a_conversation_are_scored_as_verifiers_has_them(verifiers: None) -> None:
    worker = worker_of(tools=[double])
    tasks = Taskset(Sums(), most=2)
    says: Callable[..., str] = lambda _, turn: call("double", n=4) * 2 if not turn else "8"  # noqa: E731
    messages = said(only(play(worker, says, list(tasks.rows())[:1])))
    asyncio.run(tasks.reward([messages], [0]))
    _, turn, first, second, last = [node.message for node in SCORED[-1].nodes]
    ids = [each["id"] for each in turn["tool_calls"]]
    assert turn["tool_calls"][0] == {"id": ids[0], "name": "double", "arguments": '{"n": 4}'} and len(set(ids)) == 2
    assert [first, second] == [{"role": "tool", "content": "8", "tool_call_id": each} for each in ids]
    assert last == {"role": "assistant", "content": "8"}


def double(n: int) -> int:
    """Double a number.

    Args:
        n: The number.
    """
    return 2 * n


class InContainer(SumTask):
    NEEDS_CONTAINER = True


class Sandboxed(SumTask):
    def hooks(self, attr: str) -> list[Any]:
        return [lambda trace, runtime: 1.0]


class Preparing(SumTask):
    async def setup(self, trace: Any, runtime: Any) -> None:
        raise AssertionError("it is not run")


class Finishing(SumTask):
    async def finalize(self, trace: Any, runtime: Any) -> None:
        raise AssertionError("it is not run")


class WithTools(SumTask):
    @classmethod
    def toolsets(cls, config: Any) -> list[Any]:
        return ["search"]


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (SumTask(None, "1"), "has no prompt, and nobody else asks; give it one"),
        (InContainer("?", "1"), "needs a container, and none is started; take a taskset without"),
        (WithTools("?", "1"), "has tool servers, and none is started; take a taskset without, and give functions"),
        (Preparing("?", "1"), r"has a setup of its own, Preparing\.setup, and no rollout of verifiers runs it; take a"),
        (Finishing("?", "1"), r"has a finalize of its own, Finishing\.finalize, and no rollout of verifiers runs it;"),
        (
            Sandboxed("?", "1"),
            "has rewards that all need a runtime, and none is started; give one of them runtime=None",
        ),
    ],
)
def test_a_task_that_cannot_be_asked_is_refused(task: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^Sums: task 0 {message}"):
        list(Taskset(Sums(task)).rows())


def test_a_taskset_whose_tasks_share_tool_servers_is_refused() -> None:
    class Searching(Sums):
        @classmethod
        def toolsets(cls, config: Any) -> list[Any]:
            return ["search"]

    with pytest.raises(ValueError, match=r"^Searching has tool servers, and none is started; take a taskset without"):
        Taskset(Searching())


def test_a_file_of_ones_own_names_rows_and_reward(
    verifiers: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a config does: ``data.train`` by class path, the reward by file and name."""
    (tmp_path / "my_sums.py").write_text(
        "from test_environment_adapters import Sums\nfrom lit_grpo.environments.adapters import Taskset\n"
        "class Rows(Taskset):\n    def __init__(self):\n        super().__init__(Sums(), most=2)\n"
        "right = Rows().reward\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    source = importlib.import_module("my_sums").Rows()
    assert isinstance(source, RowSource) and [row["task"] for row in source.rows()] == [0, 1]
    function = RewardFunction.load(RewardSpec(f"{tmp_path / 'my_sums.py'}:right"))
    assert function.name == "right" and function.on_group and function.is_async and function.needs == ["task"]


def sums_of_verifiers() -> Any:
    """A taskset of the package: sums as text and as messages, with a reward that needs a runtime among its rewards."""
    vf = pytest.importorskip("verifiers.v1")

    class Data(vf.TaskData):
        answer: str

    class Adds(vf.Task[Data]):
        @vf.reward(weight=2.0)
        async def right(self, trace: Any) -> float:
            return float(trace.last_reply == self.data.answer)

        @vf.reward
        async def called(self, trace: Any) -> float:
            return sum(len(getattr(node.message, "tool_calls", None) or ()) for node in trace.nodes) / 8

        @vf.reward
        async def clean(self, trace: Any, runtime: Any) -> float:
            raise AssertionError("there is no runtime")

    class Adding(vf.Taskset[Adds, vf.TasksetConfig]):
        INFINITE = True

        def load(self) -> Iterator[Any]:
            for n in count():
                asked = f"{n}+1="
                prompt = [vf.SystemMessage(content="Be short."), vf.UserMessage(content=asked)] if n % 2 else asked
                yield Adds(Data(prompt=prompt, answer=str(n + 1)), self.config.task)

    return Adding(vf.TasksetConfig())
