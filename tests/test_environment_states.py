"""What an environment says as its state: kept as it is, refused at the first rollout, or counted."""

from __future__ import annotations

import datetime
import threading
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conversations import SAMPLING, Scripted, call, chat_tokenizer, only, play, prompts_of
from test_environments import worker_of

from lit_grpo.checkpoints import WholeFileIO, read
from lit_grpo.environments.plugin import Trajectories
from lit_grpo.rollout.buffer import RolloutBuffer, group_requests
from lit_grpo.rollout.generator import StepEvents
from lit_grpo.rollout.loop import RolloutLoop
from lit_grpo.rollout.rules import ReleaseRule

RULE = ReleaseRule(num_groups=1, leftovers="keep", max_staleness=9)


class Counter:
    """Counts its calls on a board; the third ends the episode."""

    _odd: Any = ()
    _odd_from = 0

    def reset(self, **_: Any) -> str:
        self.board, self.rng = np.zeros((1, 2), np.int8), np.random.default_rng(3)
        return " Count."

    def count(self) -> str:
        """Count."""
        self.board[0, 1] += 1
        return f"{self.board[0, 1]}: {self.rng.integers(100)}"

    @property
    def done(self) -> bool:
        return bool(self.board[0, 1] >= 3)

    def get_reward(self) -> float:
        return float(self.board[0, 1])

    def state(self) -> dict[str, Any]:
        odd = {"odd": self._odd[0]} if self._odd and self.board[0, 1] >= self._odd_from else {}
        return {"board": self.board, "rng": self.rng.bit_generator.state, "seen": (np.float32(0.5), {1}), **odd}

    def restore(self, state: dict[str, Any]) -> None:
        assert state["board"].dtype == np.int8 and state["seen"] == (np.float32(0.5), {1})
        self.board, self.rng = state["board"], np.random.default_rng()
        self.rng.bit_generator.state = state["rng"]


def says(request: Any, turn: int) -> str:
    return call("count")


def cut_off(factory: Any, num_samples: int = 1) -> tuple[Trajectories, RolloutBuffer]:
    """A rollout that stops when each trajectory has taken a turn and none is away."""
    worker, buffer = worker_of(factory), RolloutBuffer(RULE)
    buffer.open(group_requests(prompts_of(worker, [{"prompt": "?"}]), num_samples, SAMPLING, 0))

    def in_the_middle(_: int) -> bool:
        return bool(worker.drivers) and all(each.num_turns and not each.waits for each in worker.drivers.values())

    class OneTurn(Scripted):
        """Decodes nothing more of a trajectory that has its turn, so that all stop at the same place."""

        def step(self) -> StepEvents:
            later = {key: self.rows.pop(key) for key, row in list(self.rows.items()) if row.prefix.num_sampled}
            if self.rows:
                events = super().step()
                self.rows |= later
                return events
            self.rows = later
            return StepEvents(len(later), len(later))

    RolloutLoop(OneTurn(chat_tokenizer(), says), buffer, listeners=[worker]).run(in_the_middle)
    buffer.end_update()
    return worker, buffer


def test_a_state_with_arrays_of_numpy_is_restored_as_it_was(tmp_path: Path) -> None:
    alone = only(play(worker_of(Counter), says, [{"prompt": "?"}])).episode
    worker, buffer = cut_off(Counter)
    saved = {"worker": worker.state_dict(), "buffer": buffer.state_dict()}
    worker.close()
    WholeFileIO().save_checkpoint(saved, tmp_path / "last.ckpt")
    kept = read(tmp_path / "last.ckpt")
    worker, buffer = worker_of(Counter), RolloutBuffer(RULE)
    worker.load_state_dict(kept["worker"])
    buffer.load_state_dict(kept["buffer"])
    RolloutLoop(Scripted(chat_tokenizer(), says), buffer, listeners=[worker]).run(lambda _: not buffer.asks)
    resumed = only(buffer.take()).episode
    assert worker.metrics()["environments/restarted"] == 0
    assert alone is not None and resumed is not None and resumed.messages == alone.messages and resumed.reward == 3.0
    worker.close()


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        (deque([1]), r"is a collections\.deque \(deque\(\[1\]\)\)"),
        (datetime.date(2020, 1, 1), r"is a datetime\.date \(datetime\.date\(2020, 1, 1\)\)"),
        (lambda: 1, r"is a function"),
        (threading.Lock(), r"is a _thread\.lock"),
    ],
)
def test_a_first_state_that_no_checkpoint_can_hold_is_refused_with_class_and_type(odd: Any, why: str) -> None:
    kind = type("Odd", (Counter,), {"_odd": [odd]})
    sentence = (
        rf"environment Odd returns a state that no checkpoint can hold: state\(\)\['odd'\] {why}.*; have it return"
    )
    with pytest.raises(ValueError, match=sentence):
        play(worker_of(kind), says, [{"prompt": "?"}])


@pytest.mark.parametrize("odd", [deque([1]), lambda: 1, threading.Lock()])
def test_a_later_state_that_cannot_be_kept_is_told_once_with_a_count(
    odd: Any, caplog: pytest.LogCaptureFixture
) -> None:
    worker, buffer = cut_off(type("Odd", (Counter,), {"_odd": [odd], "_odd_from": 1}), num_samples=2)
    states = worker.state_dict(), worker.state_dict()
    assert all({state for _, state in places} == {None} for kept in states for _, places in kept["trajectories"])
    (told,) = [record.getMessage() for record in caplog.records if "cannot be kept" in record.getMessage()]
    assert told.startswith(
        "2 of 2 unfinished trajectories cannot be kept in a checkpoint, and begin again where the run"
    )
    assert "the environment Odd returns a state that no checkpoint can hold: state()['odd'] is a " in told
    assert worker.metrics()["environments/unkept"] == 2
    assert buffer.unfinished
    worker.close()


class Forgets(Counter):
    """Restores something else than it says."""

    def restore(self, state: dict[str, Any]) -> None:
        self.board = state["Board"]


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Counter, None),
        (Forgets, r"environment Forgets fails when it is restored \(KeyError: 'Board'\); mend its state and restore"),
        (type("Odd", (Counter,), {"_odd": [deque()], "_odd_from": 3}), r"state\(\)\['odd'\] is a collections\.deque"),
    ],
)
def test_a_check_up_has_fresh_environments_restore_the_states_at_the_end(kind: type, why: str | None) -> None:
    worker = worker_of(kind)
    loop = RolloutLoop(Scripted(chat_tokenizer(), says), listeners=[worker])
    loop.collect(prompts_of(worker, [{"prompt": "?"}]), 2, SAMPLING, seed=0)
    if why is None:
        assert worker.try_states() == 2
    else:
        with pytest.raises(ValueError, match=why):
            worker.try_states()
    worker.close()
