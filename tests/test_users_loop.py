"""Users' async functions share one event loop for as long as the process lives."""

from __future__ import annotations

import asyncio
import logging
import os
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from conversations import call, only
from test_environments import play, worker_of
from test_reward_runner import make_group, rewards_of

from lit_grpo.process.calls import USERS_LOOP, BrokenLoop, EventLoop
from lit_grpo.rewards import RewardFunction, RewardRunner, RewardSpec


class Echo(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        while line := self.rfile.readline():
            self.wfile.write(line)


@pytest.fixture
def port() -> Iterator[int]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


class Client:
    """As a module keeps one: it connects at its first call, and asks one thing after another."""

    def __init__(self, port: int) -> None:
        self.port, self.lock = port, asyncio.Lock()
        self.streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, text: str) -> str:
        async with self.lock:
            self.streams = self.streams or await asyncio.open_connection("127.0.0.1", self.port)
            reader, writer = self.streams
            writer.write(f"{text}\n".encode())
            return (await reader.readline()).decode().strip()


def test_a_kept_client_serves_rewards_and_tools_in_validation_and_in_training(port: int) -> None:
    client = Client(port)

    async def score(completion: str) -> float:
        return float(len(await client.ask(completion)))

    async def lookup(key: str) -> str:
        """Look something up.

        Args:
            key: Its name.
        """
        return await client.ask(key)

    seen = []
    for _ in ("validation", "training"):
        worker = worker_of(tools=[lookup])
        episode = only(play(worker, lambda _, turn: "Done." if turn else call("lookup", key="two"))).episode
        assert episode is not None
        runner, group = RewardRunner([RewardFunction.of(score, "score")]), make_group("ab", "abcd")
        runner.score(group)
        runner.close()
        seen += [episode.messages[1]["content"], *rewards_of(group)]
    assert seen == ["two", 2.0, 4.0] * 2


def test_a_reward_in_a_process_keeps_its_client(port: int, tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(
        "import asyncio\nstreams = []\n"
        "async def score(completion):\n"
        f"    streams[:] = streams or await asyncio.open_connection('127.0.0.1', {port})\n"
        "    streams[1].write((completion + '\\n').encode())\n"
        "    return float(len(await streams[0].readline()) - 1)\n"
    )
    spec = RewardSpec(f"{tmp_path / 'judge.py'}:score", process=True)
    runner, group = RewardRunner([RewardFunction.load(spec, 20.0)], num_workers=1), make_group("a", "abc")
    runner.score(group)
    runner.close()
    assert rewards_of(group) == [1.0, 3.0]


def test_a_function_that_blocks_the_loop_is_named_and_later_calls_have_another(
    caplog: pytest.LogCaptureFixture,
) -> None:
    release = threading.Event()

    async def blocks() -> None:
        release.wait(120)

    watching = EventLoop()
    before = USERS_LOOP.begin(_loop()).result()
    USERS_LOOP.begin(blocks())
    with caplog.at_level(logging.WARNING):
        where = watching.run(USERS_LOOP.replace_if_blocked())
    assert where.startswith("test_users_loop.py:") and where.endswith(" (blocks)") and where in caplog.text
    assert USERS_LOOP.begin(_loop()).result(120) is not before
    assert watching.run(USERS_LOOP.replace_if_blocked()) == ""
    release.set()
    watching.close()


async def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


def test_what_a_closed_runner_awaits_is_cancelled() -> None:
    began, canceled = threading.Event(), threading.Event()

    async def waits(completion: str) -> float:
        began.set()
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            canceled.set()
            raise
        return 1.0

    runner = RewardRunner([RewardFunction.of(waits, "waits")], timeout_s=None)
    runner.submit(make_group("a"))
    assert began.wait(300)
    runner.close()
    assert canceled.wait(300)


def test_a_loop_whose_descriptors_are_closed_fails_what_runs_on_it_and_another_takes_its_place() -> None:
    async def close() -> None:
        os.close(asyncio.get_running_loop()._selector.fileno())  # pyrefly: ignore[missing-attribute]

    loop = EventLoop("test")
    waiting = loop.begin(asyncio.Event().wait())
    loop.begin(close())
    with pytest.raises(BrokenLoop, match=r"closed file descriptors of the run \(Bad file descriptor\); have it close"):
        waiting.result(timeout=120)
    assert loop.run(asyncio.sleep(0, "works")) == "works"
    loop.close()
