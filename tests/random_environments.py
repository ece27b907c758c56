"""Random environments, tools and rows, and short runs with them that are cut off and go on from their checkpoints.

A case is all that follows from a seed: how an environment fails, what it answers and says as its state, how rows look,
in which mode the run samples. What a policy says, and what an environment answers to it, depend on the row, the sample
and the turn alone. So a case whose mode waits for all groups ends alike however often it is cut off.

As a script it plays cases in processes of their own, which it kills at random moments, but for the last of each::

    python tests/random_environments.py FOLDER SEED...
"""

from __future__ import annotations

import datetime
import decimal
import hashlib
import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from conversations import SAMPLING, Scripted, call, chat_tokenizer, prompts_of  # noqa: E402

from lit_grpo.budgets.history import PromptHistory  # noqa: E402
from lit_grpo.checkpoints import WholeFileIO, read  # noqa: E402
from lit_grpo.data.loaders import PromptLoader  # noqa: E402
from lit_grpo.environments import EnvironmentFailed, Environments  # noqa: E402
from lit_grpo.faults import Phases  # noqa: E402
from lit_grpo.plugins import RunFacts  # noqa: E402
from lit_grpo.ranks import Ranks  # noqa: E402
from lit_grpo.rewards import RewardFunction, RewardRunner  # noqa: E402
from lit_grpo.rollout.generator import StepEvents  # noqa: E402
from lit_grpo.rollout.rules import RolloutMode  # noqa: E402
from lit_grpo.rollout.session import RolloutSession  # noqa: E402
from lit_grpo.types import Completion, Episode, PassRule, PromptBatch, Request  # noqa: E402

NUM_ROWS, BATCH_SIZE, NUM_GENERATIONS, NUM_UPDATES = 5, 2, 2, 3
MODES = {
    "synchronous": None,
    "april": RolloutMode(batches_in_work=2, leftovers="keep", max_staleness=8),
    "sorted": RolloutMode(batches_in_work=2, refill="when_empty", leftovers="discard", max_staleness=4),
}
STATES = ("none", "plain", "numpy", "slow", "odd", "later", "raises", "lost")
"""None; as dicts and arrays; of a type that no checkpoint can hold, at once or later; that cannot be said; whose
``restore`` fails."""
FOREIGN: tuple[Callable[[], Any], ...] = (
    *(threading.Lock, lambda: lambda: 1, lambda: deque([1]), lambda: datetime.datetime(2020, 1, 1), lambda: Path("a")),
    lambda: np.array([object()]),
)
ANSWERS: tuple[Callable[[], Any], ...] = (
    *(lambda: None, lambda: 3.5, lambda: {"a": [1]}, lambda: b"\xff", lambda: [{"type": "text", "text": "block"}]),
    *(lambda: np.arange(3), lambda: "long " * 3000, lambda: "<tool_call>", lambda: "\x00\x1b[2J", lambda: float("nan")),
    *(lambda: {1, 2}, lambda: [], lambda: Exception("no"), lambda: np.str_("text"), lambda: ""),
)
ERRORS: tuple[Callable[[], BaseException], ...] = (
    *(lambda: ValueError("no"), lambda: KeyError(1), lambda: StopIteration(), lambda: AssertionError(), Exception),
    lambda: RecursionError("deep"),
)
FAILURES: tuple[Callable[[], BaseException], ...] = (
    *(lambda: ConnectionError("gone"), lambda: EnvironmentFailed("broken"), SystemExit, KeyboardInterrupt),
)
COLUMNS: tuple[Callable[[], Any], ...] = (
    *(lambda: datetime.datetime(2020, 1, 1), lambda: decimal.Decimal("0.1"), lambda: np.arange(4), lambda: None),
    *(lambda: {1: "a", "b": [2]}, lambda: "\ud800", lambda: Path("a"), lambda: b"", lambda: deque([1, [2]])),
)


class Killed(BaseException):
    """The process is gone, as far as a run in this one can tell."""


@dataclass(frozen=True)
class Case:
    """All that follows from a seed.

    Args:
        seed: Of it.
        mode: How rollouts and updates take turns.
        lock_step: Whether answers are waited for after each step.
        states: How the environment says its state.
        chances: Of what an answer is, by name; the rest are texts.
        rows: Of the data.
    """

    seed: int
    mode: str
    lock_step: bool
    states: str
    chances: dict[str, float]
    rows: list[dict[str, Any]] = field(compare=False)

    @classmethod
    def of(cls, seed: int) -> Case:
        """Draw a case."""
        rng = random.Random(f"case/{seed}")
        names = ("error", "failure", "odd", "slow", "reset", "reward")
        chances = {name: rng.choice([0.0, 0.0, 0.1, 0.3]) for name in names}
        rows = [
            {"prompt": f"Row {n}.", "number": n, "board": [[n]], "odd": rng.choice(COLUMNS)()} for n in range(NUM_ROWS)
        ]
        mode, states = rng.choice(["synchronous", *MODES]), rng.choice(STATES)
        return cls(seed, mode, rng.random() < 0.5, states, chances, rows)

    def draw(self, *what: Any) -> random.Random:
        """Random numbers for one thing, the same whenever it is asked."""
        return random.Random(f"{self.seed}/{'/'.join(map(str, what))}")

    @property
    def is_refused(self) -> bool:
        """Whether its environment's first state is one that no checkpoint can hold."""
        return self.states == "odd"

    @property
    def ends_alike(self) -> bool:
        """Whether it ends alike however it is cut off: the clock decides nothing, and nothing begins again."""
        is_restored = self.states in ("plain", "numpy", "slow")
        return self.mode == "synchronous" or (self.lock_step and (is_restored or self.mode == "sorted"))

    def environment(self) -> type:
        """Make the class of its environments."""
        case = self

        class Random:
            """Counts the calls that it has answered; each answer says how many."""

            def reset(self, number: int, board: list[list[int]], **columns: Any) -> str | None:
                draw = case.draw("reset", number)
                self.number, self.board, self.done = number, board, np.bool_(False)
                self.counts = np.zeros(2, np.int16) if case.states == "numpy" else [0, 0]
                self.board[0].append(len(self.board[0]))
                if draw.random() < case.chances["reset"]:
                    raise draw.choice(ERRORS)()
                return draw.choice([None, "", " Begin.", f" {len(self.board[0])}"])

            def act(self, token: str) -> Any:
                """Act.

                Args:
                    token: Says which turn of which sample it is.
                """
                draw = case.draw("act", self.number, token)
                if draw.random() < case.chances["slow"]:
                    time.sleep(draw.random() * 0.02)
                if draw.random() < case.chances["failure"]:
                    raise draw.choice(FAILURES)()
                self.counts[0] += 1
                self.board[0].append(self.counts[0])
                if draw.random() < case.chances["error"]:
                    raise draw.choice(ERRORS)()
                self.done = draw.choice([False, False, False, np.bool_(True)])
                return draw.choice(ANSWERS)() if draw.random() < case.chances["odd"] else f"{len(self.board[0])}"

            def get_reward(self) -> Any:
                draw = case.draw("reward", self.number)
                if draw.random() < case.chances["reward"]:
                    raise draw.choice(ERRORS)()
                return draw.choice([int, float, np.float32, np.int64])(self.counts[0])

        def state(self: Random) -> Any:
            said: dict[str, Any] = {"counts": self.counts, "number": self.number, "board": self.board}
            said["done"] = bool(self.done)
            if case.states == "slow":
                time.sleep(0.005)
            if case.states == "raises":
                raise RuntimeError("no state")
            draw = case.draw("state", self.number)
            if case.states == "odd" or (case.states == "later" and self.counts[0]):
                said["odd"] = (1, [draw.choice(FOREIGN)()])
            return said

        def restore(self: Random, state: Any) -> None:
            if case.states == "lost":
                raise KeyError("counts")
            assert type(state["counts"]) is (np.ndarray if case.states == "numpy" else list)
            vars(self).update(state)

        if case.states != "none":
            Random.state, Random.restore = state, restore
        return Random


def audit(completions: Any, board: Any, episodes: list[Episode], finish_reasons: list[str], **_: Any) -> list[float]:
    """Compare what environments say with what the conversations say, and write on what is given."""
    values = []
    for completion, each, episode, reason in zip(completions, board, episodes, finish_reasons, strict=True):
        answered = sum(message["role"] == "tool" for message in completion)
        counts = {answered, answered + (reason == "length")}  # an answer without room is left out
        right = len(each[0]) == 1 and episode.reward in counts
        each[0].append(99)
        completion.clear()
        values.append(float(right))
    return values


class CutOff(Scripted):
    """Ends the process, or what stands for it, at a step."""

    def __init__(self, says: Callable[[Request, int], str], at: int | None) -> None:
        super().__init__(chat_tokenizer(), says, num_slots=3)
        self.at = at

    def step(self) -> StepEvents:
        if self.at is not None and self.num_steps >= self.at:
            raise Killed
        return super().step()

    def sleep(self) -> dict[str, float]:
        return {}


class Play:
    """A run of a case, from its last checkpoint; it has what a session needs of a run.

    Args:
        case: The case.
        folder: Where its checkpoint is.
        cut_at: The decode step at which it is cut off; None for never.
    """

    sampling, num_generations, sampling_seed = SAMPLING, NUM_GENERATIONS, 0
    pass_rule = PassRule("audit")

    def __init__(self, case: Case, folder: Path, cut_at: int | None = None) -> None:
        self.case, self.path, self.ranks, self.phases = case, folder / "last.ckpt", Ranks(), Phases()
        plugin = Environments(factory=case.environment(), retries=1, lock_step=case.lock_step)
        mode = MODES[case.mode]
        self.session = RolloutSession({"environments": plugin} | ({} if mode is None else {"mode": mode}))
        worker: Any = self.session.plugins["environments"]
        worker.prepare(chat_tokenizer(), {})
        self.generator = CutOff(self._says, cut_at)
        self.loader = PromptLoader(prompts_of(worker, case.rows), BATCH_SIZE, seed=case.seed)
        self.session.prepare(RunFacts(BATCH_SIZE, NUM_GENERATIONS, SAMPLING.max_tokens, 1, SAMPLING.max_observed))
        self.loader.plug_in(None, None, on_demand=self.session.mode.carries)
        self.rewards = RewardRunner([*worker.rewards, RewardFunction.of(audit, "audit")])
        self.policy_version, self.trained_on, self.empty = 0, list[Any](), list[Any]()
        self.history = PromptHistory()
        if self.path.exists():
            saved = read(self.path)
            self.history.load_state_dict(saved["history"])
            self.policy_version, self.trained_on, self.empty = saved["version"], saved["trained_on"], saved["empty"]
            self.session.load_state_dict(saved["session"], self.ranks)
            self.loader.load_state_dict(saved["loader"])
        self.session.open(self.history, self.loader)
        self.session.rewards = self.rewards

    def _says(self, request: Request, turn: int) -> str:
        draw = self.case.draw("says", request.key, turn)
        return call("act", token=f"{request.path}/{turn}") if turn < 3 and draw.random() < 0.8 else "I am done."

    def run(self) -> list[Any]:
        """Go on to the end; return what was trained on, update by update."""
        try:
            batches = iter(self.loader)
            while self.policy_version < NUM_UPDATES:
                try:
                    batch = next(batches)
                except StopIteration:
                    batches = iter(self.loader)
                    continue
                self.generator.version = self.policy_version
                self.session.next_batch(self, batch)  # pyrefly: ignore[bad-argument-type]
                self._learn(batch)
        finally:
            self.session.close()
        return self.trained_on

    def _learn(self, batch: PromptBatch) -> None:
        self.empty += [list(group.key) for group in batch.groups if not group.rollouts]
        self.trained_on.append([_told(rollout.completion, rollout.rewards) for rollout in batch.rollouts])
        self.policy_version += 1
        self.session.end_update(self, batch)  # pyrefly: ignore[bad-argument-type]
        batch.trained = True
        loader, left = self.loader.state_dict(), self.session.buffer._groups
        told = {"trained_on": self.trained_on, "empty": self.empty, "open": list(map(list, left))}
        states = {"session": self.session.state_dict(self.ranks), "loader": loader, "version": self.policy_version}
        saved = {**states, **told, "history": self.history.state_dict(), "consumed": loader["prompts_consumed"]}
        WholeFileIO().save_checkpoint(saved, self.path)


def _told(completion: Completion, rewards: dict[str, float | None]) -> list[Any]:
    assert completion.episode is not None
    said = hashlib.sha256(json.dumps(completion.episode.messages, default=str).encode()).hexdigest()[:8]
    key = completion.request.key
    return [
        key[0],
        key[1],
        list(key[2]),
        completion.finish_reason,
        completion.num_tokens,
        said,
        sorted(rewards.items()),
    ]


def live(case: Case, folder: Path, rng: random.Random, kills: bool) -> int:
    """Play a case in a fork of this process, from its last checkpoint; return the exit code of the fork.

    Args:
        case: The case.
        folder: Where its checkpoint is.
        rng: Draws when the fork is killed.
        kills: Whether it is.
    """
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            play = Play(case, folder)
            os.write(writing, b"begins")
            play.run()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    os.read(reading, 6)
    if kills:
        time.sleep(rng.random() * 0.3)
        os.kill(pid, signal.SIGKILL)
    os.close(reading)
    os.close(writing)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    for seed in map(int, sys.argv[2:]):
        draws = random.Random(f"kills/{seed}")
        codes = [live(Case.of(seed), Path(sys.argv[1], str(seed)), draws, kills=life < 3) for life in range(4)]
        print(seed, *codes, flush=True)
