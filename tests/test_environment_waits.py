"""What a run does while environments are at work: it is no standstill, nothing is lost, and memory stays flat."""

from __future__ import annotations

import asyncio
import gc
import time
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
from conversations import Scripted, chat_tokenizer
from test_environments import Guess, call, play, prompts_of, worker_of

from lit_grpo.faults import Phases, StallWatch
from lit_grpo.methods import make_plugins
from lit_grpo.plugins import Answer, Listener
from lit_grpo.rollout.session import RolloutSession
from lit_grpo.types import Completion, Key, PromptBatch, Request, SamplingParams

SAMPLING = SamplingParams(max_tokens=400, max_observed=800)
STALL_S = 0.12


def evaluate(plugins: list[Any], *listeners: Listener) -> PromptBatch:
    """Fill a batch as a validation does, watched for standstills."""
    session = RolloutSession(make_plugins(plugins))
    says = lambda _, turn: call("guess", number=turn + 1) if turn < 3 else "I am done."  # noqa: E731
    run = SimpleNamespace(generator=Scripted(chat_tokenizer(), says), sampling_seed=0, phases=Phases())
    worker = cast(Any, session.plugins.get("environments")) or worker_of(Guess)
    worker.prepare(chat_tokenizer(), {})
    batch = PromptBatch(prompts_of(worker, [{"prompt": "Guess.", "number": 3}]))
    watch = StallWatch(lambda: run.phases, minutes=STALL_S / 60, rank=0)
    try:
        session.evaluate(cast(Any, run), batch, 2, SAMPLING, listeners)
    finally:
        watch.stop()
        session.close()
        worker.close()
    return batch


class Slow(Guess):
    """Takes its time, for which nothing can be decoded."""

    def guess(self, number: int) -> str:
        """Guess.

        Args:
            number: Your guess.
        """
        time.sleep(8 * STALL_S if number == 1 else 0)
        return super().guess(number)


def test_waiting_for_environments_within_their_limits_is_no_standstill(capsys: pytest.CaptureFixture[str]) -> None:
    batch = evaluate([{"environments": {"factory": Slow, "tool_timeout_s": 30}}])
    assert len(batch.groups[0].rollouts) == 2
    assert capsys.readouterr().err == ""


class Forgetful(Listener):
    """Holds turns for a time that nothing limits."""

    def __init__(self) -> None:
        self.held: list[Key] = []

    def on_turn(self, completion: Completion) -> Answer:
        self.held.append(completion.request.key)
        self.until = time.monotonic() + 8 * STALL_S
        return Answer(hold=self.held[-1:])

    def on_idle(self) -> Answer | None:
        return None if time.monotonic() < self.until else Answer(drop=self.held)


def test_waiting_for_what_nothing_limits_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    evaluate([], Forgetful())
    assert "Rank 0 has not moved for" in capsys.readouterr().err


# ---- a thousand at once -----------------------------------------------------------------------------


NUM = 1000
MEGABYTE = 2**20
KINDS = ("hang", "raise", "die", "lose", "megabyte", *["answer"] * 5)


class Crowd:
    """A tool of which no call goes on before all have begun; then each does its own."""

    def __init__(self) -> None:
        self.begun = self.num_said = 0
        self.all_begun = asyncio.Event()

    def tool(self) -> Any:
        async def act(kind: str) -> str:
            """Do something.

            Args:
                kind: What.
            """
            self.begun += 1
            if self.begun == NUM:
                self.all_begun.set()
            await self.all_begun.wait()
            if kind == "hang":
                await asyncio.sleep(600)
            if kind == "raise":
                raise RuntimeError("oops")
            if kind == "die":
                raise SystemExit(3)
            if kind == "lose":
                raise ConnectionError("no server")
            if kind == "megabyte":
                self.num_said += 1
                await asyncio.sleep(0.03 * self.num_said)  # one after another
                return "x" * MEGABYTE
            return "fine"

        return act


class Pulse(Listener):
    """Notes how long the rollout was not heard of."""

    def __init__(self) -> None:
        self.last, self.longest_s, self.count = time.monotonic(), 0.0, 0

    def on_rollout_start(self, ledger: Any) -> None:
        self.last = time.monotonic()

    def _beat(self, *_: Any) -> None:
        now = time.monotonic()
        self.longest_s, self.last, self.count = max(self.longest_s, now - self.last), now, self.count + 1

    on_step = on_idle = _beat  # type: ignore[assignment]


TIMEOUT_S = 8.0
"""How long a call that hangs may take, and a rollout that waited for it would not be heard of."""


def crowded() -> Pulse:
    """A thousand calls at once, of ten one each hangs, raises, ends its thread, loses its server, says a megabyte."""

    def says(request: Request, turn: int) -> str:
        return "ok" if turn else call("act", kind=KINDS[request.path[0] % len(KINDS)])

    crowd, pulse = Crowd(), Pulse()
    worker = worker_of(tools=[crowd.tool()], tool_timeout_s=TIMEOUT_S, retries=0, max_answer_tokens=48)
    (group,) = play(worker, says, num_generations=NUM, num_slots=64, listeners=[pulse])
    assert crowd.begun == NUM  # all were away at a time
    answers = {each.completion.request.path[0]: said(each.completion) for each in group.rollouts}
    failing = ("hang", "die", "lose")
    assert sorted(answers) == [path for path in range(NUM) if KINDS[path % len(KINDS)] not in failing]
    errors = {"raise": "{'error': 'oops'}"}
    for path, answer in answers.items():
        kind = KINDS[path % len(KINDS)]
        if kind == "megabyte":
            assert "characters are left out" in answer and len(answer) < 999
        else:
            assert answer == errors.get(kind, "fine")
    metrics = worker.metrics()
    assert metrics["environments/tool_timeouts"] == metrics["environments/shortened_answers"] == NUM / 10
    assert metrics["environments/dropped"] == metrics["environments/failures"] == 3 * NUM / 10
    return pulse


@pytest.mark.nightly
def test_a_thousand_calls_at_once_lose_nothing_keep_nothing_and_stop_nothing() -> None:
    process, in_use = psutil.Process(), []
    for _ in range(2):
        pulse = crowded()
        gc.collect()
        in_use.append(process.memory_info().rss)
        assert pulse.longest_s < TIMEOUT_S and pulse.count > 100
    assert in_use[1] - in_use[0] < 30 * MEGABYTE  # of 100 that were said


def said(completion: Completion) -> str:
    assert completion.episode is not None
    return str(completion.episode.messages[1]["content"])
