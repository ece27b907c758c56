"""Environments in TRL's shape and with what may be added: what they are asked, what is read of them, and what fails."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conversations import SAMPLING, Scripted, call, chat_tokenizer, only, prompts_of, text_of
from conversations import play as play_with
from lit_grpo.callbacks.sample_logger import _row  # pyrefly: ignore[missing-import]

from lit_grpo.checks import check_prompt_lengths
from lit_grpo.data.chat import UnusableRow
from lit_grpo.environments import EnvironmentFailed, Environments
from lit_grpo.environments.log import EnvironmentLog
from lit_grpo.environments.plugin import Trajectories
from lit_grpo.plugins import Answer, CannotGoOn, GroupBatch, Listener, fresh
from lit_grpo.rewards import RewardRunner, TrainerState
from lit_grpo.rewards.function import RewardFunction
from lit_grpo.rewards.runner import Surroundings, group_inputs, rollout_inputs
from lit_grpo.rollout import buffer as buffers
from lit_grpo.rollout.buffer import RolloutBuffer, group_requests
from lit_grpo.rollout.loop import RolloutLoop
from lit_grpo.rollout.rules import ReleaseRule
from lit_grpo.types import PassRule, Request, RolloutGroup, SamplingParams


class Guess:
    """A number is to be guessed; as in TRL, an error of a tool is the tool's answer."""

    def reset(self, number: int, **_: Any) -> str:
        self.number, self.tries, self.right = number, 0, False
        return " It is below 10."

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: Your guess.
        """
        self._before(number)
        if self.right:
            raise ValueError("Game over.")
        self.tries += 1
        self.right = number == self.number
        return "right" if self.right else "more" if number < self.number else "less"

    def _before(self, number: int) -> None:
        """What a kind of this game does before it answers a guess."""

    async def peek(self) -> str:
        """Look at the number."""
        await asyncio.sleep(0)
        return str(self.number)

    def get_reward(self) -> float:
        return float(self.right)


class DropsAway(Listener):
    """Leaves out what is away, once it is told to."""

    def __init__(self, told: threading.Event) -> None:
        self.told = told

    def on_rollout_start(self, ledger: Any) -> None:
        self.ledger = ledger

    def on_idle(self) -> Answer | None:
        return Answer(drop=list(self.ledger.awaiting_env)) if self.told.is_set() else None


@pytest.mark.parametrize("fails", [False, True])
def test_an_environment_whose_trajectory_is_dropped_is_closed_after_its_call_and_asked_no_more(fails: bool) -> None:
    happened: list[str] = []
    calling, goes_on, closed = threading.Event(), threading.Event(), threading.Event()

    class Slow(Guess):
        @property
        def done(self) -> bool:
            happened.append("done")
            return False

        def reset(self, number: int, **_: Any) -> str:
            happened.append("reset")
            return super().reset(number)

        def _before(self, number: int) -> None:
            calling.set()
            goes_on.wait(120)
            happened.append("guessed")
            if fails:
                raise ConnectionError("gone")

        def close(self) -> None:
            time.sleep(0.2)  # whoever ends the run meanwhile waits for it
            happened.append("closed")
            closed.set()

    worker = worker_of(Slow)
    loop = RolloutLoop(Scripted(chat_tokenizer(), counting), listeners=[worker, DropsAway(calling)])
    (group,), _ = loop.collect(prompts_of(worker, [{"prompt": "?", "number": 3}]), 1, SAMPLING, seed=0)
    assert group.rollouts == [] and not worker.drivers and happened == ["reset"]
    goes_on.set()
    worker.close()
    assert closed.is_set() and happened == ["reset", "guessed", "closed"]


def counting(request: Request, turn: int) -> str:
    """Guess one number after another, and stop at the third."""
    return call("guess", number=turn + 1) if turn < 3 else "I am done."


def worker_of(factory: Any = None, **options: Any) -> Trajectories:
    worker = fresh(Environments(factory=factory, **options))
    worker.prepare(chat_tokenizer(), {})
    return worker


def buffer_of(
    worker: Trajectories, number: int = 9, num_generations: int = 1, sampling: SamplingParams = SAMPLING, **rule: Any
) -> RolloutBuffer:
    """A buffer that keeps its only prompt, whose environment has ``number`` to be guessed, until all have ended."""
    usual: dict[str, Any] = {"num_groups": 1, "leftovers": "keep", "max_staleness": 9}
    buffer = RolloutBuffer(ReleaseRule(**usual | rule))
    prompts = prompts_of(worker, [{"prompt": "?", "number": number}])
    buffer.open(group_requests(prompts, num_generations, sampling, 0))
    return buffer


def run_on(worker: Trajectories, buffer: RolloutBuffer, says: Any, until: Any = None, *listeners: Any) -> None:
    """Play what a buffer has, until there is nothing left, or until ``until`` says so."""
    loop = RolloutLoop(Scripted(chat_tokenizer(), says), buffer, listeners=[worker, *listeners])
    loop.run(until or (lambda _: not buffer.asks))


def play(
    worker: Trajectories,
    says: Callable[[Request, int], str] = counting,
    rows: Sequence[dict[str, Any]] = ({"prompt": "Guess.", "number": 3},),
    **options: Any,
) -> list[RolloutGroup]:
    return play_with(worker, says, rows, **options)


def test_the_environment_of_the_page_is_one(tmp_path: Path) -> None:
    """As its reader would copy it into a file."""
    page = (Path(__file__).parents[1] / "docs" / "environments.md").read_text(encoding="utf-8")
    (tmp_path / "my_env.py").write_text(page.split("```python\n")[1].split("```")[0])
    worker = worker_of(f"{tmp_path / 'my_env.py'}:Guess")
    completion = only(play(worker))
    assert "more" in text_of(completion) and len(completion.turns) == 3
    assert completion.episode is not None and completion.episode.reward == 1.0
    assert [reward.name for reward in worker.rewards] == ["Guess"]


def test_async_tools_several_calls_of_a_turn_and_errors_are_answered_in_their_order() -> None:
    def says(request: Request, turn: int) -> str:
        calls = [call("peek"), call("guess", number=3), call("guess", number=3), call("fly"), call("guess", n=1)]
        return "Now:" + "".join(calls) + "<tool_call>{oops</tool_call>" if turn == 0 else "Done."

    worker = worker_of(Guess)
    messages = only(play(worker, says)).episode.messages  # pyrefly: ignore[missing-attribute]
    assert [message["content"] for message in messages[1:-1]] == [
        "3",
        "right",
        "{'error': 'Game over.'}",
        "{'error': \"there is no tool 'fly'; the tools are guess, peek\"}",
        "{'error': \"Guess.guess() got an unexpected keyword argument 'n'\"}",
        messages[6]["content"],
    ]
    assert messages[6]["content"].startswith("{'error': 'the call cannot be read: it is no JSON")
    assert messages[0]["content"] == "Now:<tool_call>{oops</tool_call>"
    metrics = worker.metrics()
    assert metrics["environments/tool_calls"] == 5 and metrics["environments/tool_failures"] == 3
    assert metrics["environments/broken_calls"] == 1 and metrics["environments/turns"] == 2


class Done(Guess):
    @property
    def done(self) -> bool:
        return self.right


def test_an_environment_ends_its_episode() -> None:
    completion = only(play(worker_of(Done)))
    assert len(completion.turns) == 3 and completion.finish_reason == "stop"
    assert completion.episode is not None and completion.episode.messages[-1]["content"] == "right"
    assert text_of(completion).endswith('"number": 3}}</tool_call><|im_end|>')


def test_turns_are_limited_and_what_is_cut_short_is_counted() -> None:
    worker = worker_of(Guess, max_turns=2)
    completion = only(play(worker))
    assert len(completion.turns) == 2 and completion.finish_reason == "length"
    assert completion.episode is not None and completion.episode.messages[-1]["role"] == "assistant"
    assert worker.metrics()["environments/cut_short"] == 1
    short = SamplingParams(max_tokens=400, max_observed=60)
    assert len(only(play(worker_of(Guess), sampling=short)).turns) == 2


class Talk:
    """The user's side, and rewards by turn."""

    done = False

    def reset(self) -> None:
        self.said: list[str] = []

    def respond(self, text: str) -> str | None:
        self.said.append(text)
        return None if text == "bye" else f"You said {text}"

    def turn_reward(self) -> float:
        return float(len(self.said[-1]))


def test_the_user_answers_and_turns_are_rewarded() -> None:
    worker = worker_of(Talk)
    (group,) = play(worker, lambda _, turn: ("one", "three", "bye")[turn])
    (rollout,) = group.rollouts
    assert text_of(rollout.completion).endswith(
        "one<|im_end|>\n<|im_start|>user\nYou said one<|im_end|>\n<|im_start|>assistant\nthree<|im_end|>\n"
        "<|im_start|>user\nYou said three<|im_end|>\n<|im_start|>assistant\nbye<|im_end|>"
    )
    assert rollout.turn_rewards == (3.0, 5.0, 3.0)


def add(first: int, second: int) -> int:
    """Add two numbers.

    Args:
        first: A number.
        second: Another.
    """
    return first + second


def test_functions_are_tools_without_an_environment() -> None:
    worker = worker_of(tools=[add])
    completion = only(play(worker, lambda _, turn: call("add", first=2, second=3) if not turn else "5"))
    assert completion.episode is not None and completion.episode.messages[1]["content"] == "5"
    prompt = completion.request.prompt
    assert text_of(completion).startswith(prompt.text) and prompt.text.endswith("<|im_start|>assistant\n")
    assert not worker.rewards


# ---- rewards ------------------------------------------------------------------------------------------


class Fixed(Guess):
    def get_reward(self) -> float:
        return 0.5


def test_rewards_are_named_after_classes_and_apply_to_their_own_rows() -> None:
    worker = worker_of({"guess": Guess, "fixed": Fixed, "also": Fixed, "talk": Talk})
    assert [reward.name for reward in worker.rewards] == ["Guess", "Fixed"]
    seen: list[Any] = []

    def watch(completions: Any, environments: Any, environment: Any, **others: Any) -> list[float | None]:
        seen.append((completions, environments, environment))
        return [None for _ in completions]

    runner = RewardRunner([*worker.rewards, RewardFunction.of(watch, "watch")])
    rows = [{"prompt": "?", "number": 3, "environment": name} for name in ("guess", "fixed", "talk")]
    says = lambda request, turn: "bye" if request.prompt.prompt_id == "train/2" else counting(request, turn)  # noqa: E731
    groups = play(worker, says, rows, listeners=[runner])
    runner.close()
    rewards = [group.rollouts[0].rewards for group in groups]
    assert rewards == [
        {"Guess": 1.0, "Fixed": None, "watch": None},
        {"Guess": None, "Fixed": 0.5, "watch": None},
        {"Guess": None, "Fixed": None, "watch": None},
    ]
    assert [group.rollouts[0].reward for group in groups][:2] == [1.0, 0.5]
    completions, environments, names = max(seen, key=lambda each: each[2][0] == "guess")
    assert isinstance(environments[0], Guess) and names == ["guess"]
    assert [message["role"] for message in completions[0]][:2] == ["assistant", "tool"]


# ---- what fails ---------------------------------------------------------------------------------------


class Fragile(Guess):
    """Fails as ``plan`` says: at the n-th reset, and at the n-th guess over all environments."""

    failing_resets: tuple[int, ...] = ()
    failing_guesses: tuple[int, ...] = ()
    resets = guesses = 0
    lock = threading.Lock()

    def reset(self, number: int, **columns: Any) -> str:
        with self.lock:
            type(self).resets += 1
            mine = type(self).resets
        if mine in self.failing_resets:
            raise ConnectionError("no server")
        return super().reset(number)

    def _before(self, number: int) -> None:
        type(self).guesses += 1
        if type(self).guesses in self.failing_guesses:
            raise EnvironmentFailed("the server is gone")


def fragile(resets: Sequence[int] = (), guesses: Sequence[int] = ()) -> type[Fragile]:
    return type("Fragile", (Fragile,), {"failing_resets": tuple(resets), "failing_guesses": tuple(guesses)})


def test_a_reset_that_fails_is_tried_again_with_a_fresh_environment() -> None:
    worker = worker_of(fragile(resets=[1, 2]))
    assert text_of(only(play(worker))) == text_of(only(play(worker_of(Guess))))
    metrics = worker.metrics()
    assert metrics["environments/failures"] == metrics["environments/retries"] == 2
    assert metrics["environments/dropped"] == 0


def test_a_trajectory_whose_environment_dies_begins_again() -> None:
    worker = worker_of(fragile(guesses=[2]))
    completion = only(play(worker))
    assert text_of(completion) == text_of(only(play(worker_of(Guess))))
    assert completion.episode is not None and completion.episode.reward == 1.0
    assert worker.metrics()["environments/retries"] == 1


def test_a_trajectory_that_keeps_failing_leaves_its_group_and_is_no_reward_of_0() -> None:
    worker = worker_of(fragile(resets=[1, 2, 3]), num_threads=1)  # one after another
    (group,) = play(worker, num_generations=3)
    assert len(group.rollouts) + worker.metrics()["environments/dropped"] == 3
    worker = worker_of(fragile(resets=range(1, 99)))
    (group,) = play(worker, num_generations=2)
    assert group.rollouts == [] and worker.metrics()["environments/dropped"] == 2


class Hanging(Guess):
    """The first call waits until the test is over."""

    over = threading.Event()

    def _before(self, number: int) -> None:
        if number == 1:
            self.over.wait()


def test_an_environment_that_hangs_is_left_alone_and_replaced() -> None:
    Hanging.over = threading.Event()
    worker = worker_of(Hanging, tool_timeout_s=0.1, retries=1)
    (group,) = play(worker)
    assert group.rollouts == []
    assert worker.metrics()["environments/tool_timeouts"] == 2
    Hanging.over.set()


def sleepy(seconds: float) -> str:
    """Sleep.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)
    return "awake"


async def async_sleepy(seconds: float) -> str:
    """Sleep.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return "awake"


@pytest.mark.parametrize("tool", [sleepy, async_sleepy])
def test_a_tool_that_waits_for_too_long_is_a_failure_and_its_policy_has_no_reward(tool: Any) -> None:
    worker = worker_of(tools=[tool], tool_timeout_s=0.1, retries=1)
    says = lambda _, turn: "ok" if turn else call(tool.__name__, seconds=20)  # noqa: E731
    (group,) = play(worker, says)
    metrics = worker.metrics()
    assert group.rollouts == [] and metrics["environments/tool_timeouts"] == 2
    assert metrics["environments/dropped"] == 1 and metrics["environments/tool_failures"] == 0


def test_a_tool_that_computes_for_too_long_is_the_policys_fault_and_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that sleeps counts as one that computes here, so that no test computes for as long as it may."""
    monkeypatch.setattr("lit_grpo.environments.live.COMPUTED", 0.0)
    worker = worker_of(tools=[sleepy], tool_timeout_s=0.1)
    says = lambda _, turn: "ok" if turn else call("sleepy", seconds=20)  # noqa: E731
    messages = only(play(worker, says)).episode.messages  # pyrefly: ignore[missing-attribute]
    assert messages[1]["content"] == "{'error': 'the call took longer than 0.1 s'}"


class Apart(BaseException):
    """No Exception."""


async def cancels() -> str:
    """Cancel what it waits for."""
    task = asyncio.create_task(asyncio.sleep(9))
    task.cancel()
    await task
    return "never"


def canceled() -> str:
    """Raise what ends coroutines."""
    raise asyncio.CancelledError("by a tool")


def apart() -> str:
    """Raise no Exception."""
    raise Apart("own")


async def async_apart() -> str:
    """Raise no Exception."""
    raise Apart("own")


@pytest.mark.parametrize(
    ("tool", "told"),
    [
        (cancels, "CancelledError"),
        (canceled, "CancelledError: by a tool"),
        (apart, "Apart: own"),
        (async_apart, "Apart: own"),
    ],
)
def test_an_error_that_would_end_what_waits_for_it_is_an_answer_too(tool: Any, told: str) -> None:
    worker, found = worker_of(tools=[tool]), []
    says = lambda _, turn: "ok" if turn else call(tool.__name__)  # noqa: E731
    rollout = threading.Thread(target=lambda: found.extend(play(worker, says)), daemon=True)
    rollout.start()
    rollout.join(120)  # it waited for ever
    (group,) = found
    assert only([group]).episode.messages[1]["content"] == f"{{'error': '{told}'}}"  # pyrefly: ignore[missing-attribute]


class ClosesSlowly(Guess):
    """The first one fails, and takes longer to close than a trajectory may."""

    made = 0
    closed = threading.Event()

    def __init__(self) -> None:
        type(self).made += 1
        self.number_made = type(self).made

    def _before(self, number: int) -> None:
        if self.number_made == 1:
            raise ConnectionError("gone")

    def close(self) -> None:
        if self.number_made == 1:
            time.sleep(3.0)
            self.closed.set()


def test_what_a_failed_environment_takes_to_close_is_not_the_next_ones_time() -> None:
    ClosesSlowly.made, ClosesSlowly.closed = 0, threading.Event()
    worker = worker_of(ClosesSlowly, trajectory_timeout_s=1.0, retries=1)

    def slowly(request: Request, turn: int) -> str:
        assert ClosesSlowly.made == 1 or ClosesSlowly.closed.wait(300)  # before the last calls
        return counting(request, turn)

    assert only(play(worker, slowly)).episode.reward == 1.0  # pyrefly: ignore[missing-attribute]


def test_all_calls_of_a_trajectory_together_are_limited() -> None:
    worker = worker_of(tools=[sleepy], trajectory_timeout_s=0.5, retries=0)
    says = lambda _, turn: call("sleepy", seconds=0.2) if turn < 9 else "ok"  # noqa: E731
    (group,) = play(worker, says)
    assert group.rollouts == [] and worker.metrics()["environments/tool_timeouts"] == 1


def test_a_long_answer_is_cut_in_the_middle_and_says_so() -> None:
    def long() -> str:
        """Say much."""
        return "begin " + "x" * 1_000_000 + " end"

    worker = worker_of(tools=[long], max_answer_tokens=40)
    content = only(play(worker, lambda _, turn: call("long") if not turn else "ok")).episode.messages[1]["content"]  # pyrefly: ignore[missing-attribute]
    assert content.startswith("begin xxx") and content.endswith("xxx end")
    assert "characters are left out here" in content and len(content) < 200
    assert worker.metrics()["environments/shortened_answers"] == 1


def test_what_is_no_failure_of_an_environment_ends_the_run() -> None:
    class Wordy(Guess):
        def reset(self, number: int, **_: Any) -> str:
            return "much " * 1000

    class Odd(Guess):
        def get_reward(self) -> Any:
            return "much"

    with pytest.raises(ValueError, match=r"Wordy\.reset returned too much text .*train/0: \d+ tokens, .*max_observed"):
        play(worker_of(Wordy))
    with pytest.raises(ValueError, match=r"Odd\.get_reward: it returned 'much', which is not a number"):
        play(worker_of(Odd))

    def picture() -> list[dict[str, Any]]:
        """Show a picture."""
        return [{"type": "image", "image": 0}]

    with pytest.raises(ValueError, match=r"the tool picture returns an image, and the policy sees none"):
        play(worker_of(tools=[picture]), lambda *_: call("picture"))


# ---- beside decoding ----------------------------------------------------------------------------------


def test_the_rollout_does_not_wait_for_one_while_others_can_decode() -> None:
    """Of two trajectories one waits for a slow tool; the other takes all its turns meanwhile, in the only slot."""
    order: list[str] = []
    other_ended = threading.Event()

    def slow(waits: bool) -> str:
        """Wait for the other trajectory.

        Args:
            waits: Whether to.
        """
        return str(other_ended.wait(300) if waits else True)

    def says(request: Request, turn: int) -> str:
        order.append(f"{request.path[0]}:{turn}")
        if order[-1] == "1:3":
            other_ended.set()
        return call("slow", waits=order[-1] == "0:0") if turn < 3 else "ok"

    play(worker_of(tools=[slow], tool_timeout_s=600), says, num_generations=2, num_slots=1)
    assert order.index("1:3") < order.index("0:1") and len(order) == 8


@pytest.mark.parametrize("lock_step", [False, True])
def test_in_lock_step_every_answer_is_taken_after_the_same_step(lock_step: bool) -> None:
    """The first sample's answers are slow in one rollout, the second's in the other."""

    def taken(slow: int) -> list[tuple[int, list[Any]]]:
        class Slow(Guess):
            def _before(self, number: int) -> None:
                time.sleep(0.05 * (number % 2 == slow))

        def says(request: Request, turn: int) -> str:
            decoded.append((generator.num_steps, [*request.path, turn]))
            return call("guess", number=request.path[0]) if turn < 3 else "I am done."

        decoded: list[tuple[int, list[Any]]] = []
        worker, generator = worker_of(Slow, lock_step=lock_step), Scripted(chat_tokenizer(), says)
        loop = RolloutLoop(generator, listeners=[worker])
        loop.collect(prompts_of(worker, [{"prompt": "?", "number": 9}]), 2, SAMPLING, seed=0)
        worker.close()
        return decoded

    assert (taken(slow=0) == taken(slow=1)) == lock_step


def test_a_rollout_that_fails_leaves_no_session() -> None:
    def says(request: Request, turn: int) -> str:
        raise KeyboardInterrupt

    worker = worker_of(Guess)
    with pytest.raises(KeyboardInterrupt):
        play(worker, says, num_generations=4)
    assert not worker.drivers


# ---- over several rollouts ----------------------------------------------------------------------------


class Kept(Guess):
    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        self.closed = False

    def state(self) -> dict[str, Any]:
        return {"number": self.number, "tries": self.tries, "right": self.right}

    def restore(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("restored", [True, False])
def test_trajectories_go_on_after_a_kill_where_their_environments_can(restored: bool) -> None:
    """What a checkpoint has of a rollout that was cut off in the middle, in a process that knows nothing else."""
    kind, sampling = Kept if restored else Guess, SamplingParams(max_tokens=2000, max_observed=2000)

    def says(request: Request, turn: int) -> str:
        return call("guess", number=turn + 1) if turn < 9 else "I am done."

    def cut_off() -> tuple[Trajectories, RolloutBuffer] | None:
        """Return what there is when both trajectories have turns and neither is away; None if that did not happen."""
        worker = worker_of(kind)
        buffer = buffer_of(worker, num_generations=2, sampling=sampling)

        def in_the_middle(_: int) -> bool:
            turns = [session.num_turns for session in worker.drivers.values()]
            return (not buffer.away and len(turns) == 2 and all(turns)) or not buffer.asks

        run_on(worker, buffer, says, in_the_middle)
        if len(worker.drivers) == 2:
            return worker, buffer
        worker.close()
        return None

    worker, buffer = next(found for found in (cut_off() for _ in range(50)) if found is not None)
    buffer.end_update()  # else a checkpoint has what there was before the rollout
    kept, saved = worker.state_dict(), buffer.state_dict()
    assert [[state is not None for _, state in places] for _, places in kept["trajectories"]] == [[restored]] * 2
    worker.close()

    worker, buffer = worker_of(kind), RolloutBuffer(buffer.rule)
    worker.load_state_dict(kept)
    buffer.load_state_dict(saved)
    run_on(worker, buffer, says)
    (group,) = buffer.take()
    assert [each.completion.episode.reward for each in group.rollouts] == [1.0, 1.0]  # pyrefly: ignore[missing-attribute]
    assert {len(each.completion.turns) for each in group.rollouts} == {10}
    assert worker.metrics()["environments/restarted"] == (0 if restored else 2)
    worker.close()


class Counts(Kept):
    """Rewards each guess that it has heard."""

    def get_reward(self) -> float:
        return float(self.tries)


class Cut(SystemExit):
    """Ends a rollout in its middle."""


@pytest.mark.parametrize("cut", ["after", "within", "again"])
def test_a_checkpoint_before_a_batch_is_trained_on_has_environments_of_before_its_rollout(cut: str) -> None:
    """As it has their completions: after the rollout, or where that is cut off, or once it was resumed from one."""
    says = lambda _, turn: call("guess", number=1) if turn < 9 else "I am done."  # noqa: E731
    worker = worker_of(Counts)
    buffer = buffer_of(worker, 99, sampling=SamplingParams(max_tokens=2000, max_observed=2000))

    def run(num_turns: int, stops: bool = False) -> None:
        def until(_: int) -> bool:
            there = all(each.num_turns >= num_turns and not each.waits for each in worker.drivers.values())
            if stops and there and worker.drivers:
                raise Cut
            return there and bool(worker.drivers) and not buffer.away

        run_on(worker, buffer, says, until)

    def resume() -> tuple[Trajectories, RolloutBuffer]:
        states = worker.state_dict(), buffer.state_dict()
        worker.close()
        resumed, again = worker_of(Counts), RolloutBuffer(buffer.rule)
        resumed.load_state_dict(states[0])
        again.load_state_dict(states[1])
        return resumed, again

    run(2)
    buffer.end_update()
    worker.on_update_end(GroupBatch([], 1, PassRule("Counts"), lambda own: [own]))
    if cut == "within":
        with pytest.raises(Cut):
            run(5, stops=True)
    else:
        run(5)
    worker, buffer = resume()
    if cut == "again":
        run(5)
        worker, buffer = resume()
    assert [len(request.prefix.turns) for request in buffer.unfinished] == [2]
    run_on(worker, buffer, says)
    episode = only(buffer.take()).episode
    assert episode is not None and episode.reward == 9.0 and len(episode.messages) == 19
    assert worker.metrics()["environments/restarted"] == 0
    worker.close()


class Unsaid(Kept):
    """Cannot say its state."""

    def state(self) -> dict[str, Any]:
        raise RuntimeError("no")


def test_a_state_that_cannot_be_said_does_not_keep_a_checkpoint_from_being_saved() -> None:
    worker = worker_of(Unsaid)
    buffer = buffer_of(worker)
    begun = lambda _: any(each.num_turns and not each.waits for each in worker.drivers.values())  # noqa: E731
    run_on(worker, buffer, counting, begun)
    ((_, places),) = worker.state_dict()["trajectories"]
    assert {state for _, state in places} == {None}
    worker.close()


def test_environments_are_there_until_their_groups_have_been_scored() -> None:
    """However many rollouts the others of a group take, and whatever is validated meanwhile."""
    seen: list[list[int]] = []

    def tries(environments: list[Any], **_: Any) -> list[float]:
        seen.append([each.tries for each in environments])
        return [0.0 for _ in environments]

    def says(request: Request, turn: int) -> str:
        return call("guess", number=turn + 1) if turn < (1 if request.path == (0,) else 6) else "I am done."

    runner = RewardRunner([RewardFunction.of(tries, "tries")])
    worker = worker_of(Kept)
    buffer = buffer_of(worker, num_generations=2, max_staleness=2)
    (prompt,) = prompts_of(worker, [{"prompt": "?", "number": 9}])
    ended = lambda: [each for each in worker.records.values() if each.completion is not None]  # noqa: E731
    run_on(worker, buffer, says, lambda _: len(ended()) == 1 and not buffer.away, runner)
    buffer.end_update()
    for number in range(2):
        held_out = replace(prompt, prompt_id=f"validation/{number}")
        RolloutLoop(Scripted(chat_tokenizer(), lambda *_: "no"), listeners=[worker]).collect([held_out], 1, SAMPLING, 0)
    run_on(worker, buffer, says, None, runner)
    assert seen == [[1, 6]]
    kept: list[Any] = [each.driver.environment.object for each in ended() if each.driver is not None]
    assert not any(each.closed for each in kept)
    runner.close()
    worker.close()
    assert all(each.closed for each in kept)


class Lazy(Guess):
    """Takes its time for a guess of 2."""

    def _before(self, number: int) -> None:
        time.sleep(0.4 if number == 2 else 0)


def _is_at_work(worker: Trajectories) -> Callable[[int], bool]:
    return lambda _: any(session.waits and session.num_turns == 2 for session in worker.drivers.values())


def test_answers_that_come_during_another_rollout_are_kept_for_their_own() -> None:
    """As where a validation stands between two training rollouts of a mode that keeps groups open."""
    worker = worker_of(Lazy)
    buffer = buffer_of(worker, 3)
    run_on(worker, buffer, counting, _is_at_work(worker))
    buffer.end_update()
    (prompt,) = prompts_of(worker, [{"prompt": "?", "number": 3}])
    held_out = replace(prompt, prompt_id="validation/0")
    loop = RolloutLoop(Scripted(chat_tokenizer(), counting), listeners=[worker])
    (other,), _ = loop.collect([held_out], 1, SAMPLING, 0)
    run_on(worker, buffer, counting)
    (group,) = buffer.take()
    assert len(other.rollouts[0].completion.turns) == len(group.rollouts[0].completion.turns) == 4
    worker.close()


def test_an_answer_to_what_has_been_discarded_is_not_taken() -> None:
    worker, generator = worker_of(Lazy), Scripted(chat_tokenizer(), counting)
    buffer = buffer_of(worker, 3, max_staleness=1)
    RolloutLoop(generator, buffer, listeners=[worker]).run(_is_at_work(worker))
    buffer.end_update()
    generator.version = 5  # so that what was sampled is too old
    RolloutLoop(generator, buffer, listeners=[worker]).run(lambda _: not buffer.asks)
    completion = only(buffer.take())
    assert len(completion.turns) == 4 and completion.episode is not None and completion.episode.reward == 1.0
    assert completion.oldest_version == 5
    worker.close()


def test_environments_are_closed_once_they_have_been_scored() -> None:
    worker = worker_of(Kept)
    (prompt,) = prompts_of(worker, [{"prompt": "?", "number": 3}])
    loop = RolloutLoop(Scripted(chat_tokenizer(), counting), listeners=[worker])
    (first,) = loop.collect([prompt], 1, SAMPLING, 0)[0]
    environment = first.rollouts[0].completion.episode.environment  # pyrefly: ignore[missing-attribute]
    loop.collect([replace(prompt, visit=1)], 1, SAMPLING, 0)
    assert not environment.closed
    loop.collect([replace(prompt, visit=2)], 1, SAMPLING, 0)
    _until(lambda: environment.closed)
    assert first.rollouts[0].completion.episode.environment is None  # pyrefly: ignore[missing-attribute]
    worker.close()


def _until(so: Callable[[], bool]) -> None:
    end = time.monotonic() + 300
    while not so() and time.monotonic() < end:
        time.sleep(0.01)
    assert so()


# ---- bad input ----------------------------------------------------------------------------------------


class Unhinted(Guess):
    def fly(self, where) -> str:
        """Fly."""
        return ""


class Silent(Guess):
    def fly(self) -> str:
        return ""


class Undescribed(Guess):
    def fly(self, where: str) -> str:
        """Fly."""
        return ""


class NoReset:
    def look(self) -> str:
        """Look."""
        return ""


class Half(Guess):
    def state(self) -> int:
        return 0


class Method(Guess):
    def done(self) -> bool:
        return False


class Mute:
    def reset(self) -> None: ...


def broken() -> Any:
    raise OSError("no")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "it has neither a factory nor tools; give one, as in factory: my_env.py:Game"),
        ({"factory": Unhinted}, r"Unhinted\.fly cannot be a tool .*give each argument a type hint and a line under"),
        (
            {"factory": Silent},
            r"Silent\.fly cannot be a tool .*has no docstring.*a line under Args: in a Google docstring",
        ),
        (
            {"factory": Undescribed},
            r"Undescribed\.fly cannot be a tool .*'where'.*a line under Args: in a Google docstr",
        ),
        ({"factory": NoReset}, "environment NoReset has no method reset; add one"),
        ({"factory": Half}, "environment Half has only one of the methods state and restore; give it both, or none"),
        ({"factory": Method}, r"Method\.done is a method, but must be an attribute or a property"),
        ({"factory": Mute}, r"environment Mute has neither a tool \(a public method\) nor a method respond"),
        ({"factory": broken}, r"cannot be created \(OSError: no\); fix it"),
        ({"factory": {}}, "factory is an empty mapping"),
        ({"factory": "missing.py:Game"}, "environment 'missing.py:Game': there is no file missing.py"),
        ({"factory": 3}, "environment 3 is a int; name a class, or a function"),
        ({"tools": [add, add]}, r"Two tools have the name 'add' \(add and add\); rename one"),
        ({"tools": ["json"]}, "tool 'json' names no function"),
        ({"tools": [3]}, "tools has 3, which cannot be called"),
    ],
)
def test_what_cannot_be_an_environment_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fresh(Environments(**options))


def test_an_environment_that_never_ends_is_cut_short_and_the_user_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Endless(Guess):
        def respond(self, text: str) -> str:
            return "Go on."

    with caplog.at_level(logging.WARNING):
        for max_turns in (3, None):  # by turns, or by tokens
            worker = worker_of(Endless, max_turns=max_turns)
            (group,) = play(worker, lambda *_: "Well.", num_generations=2)
            assert [rollout.completion.finish_reason for rollout in group.rollouts] == ["length"] * 2
            told = [record.message for record in caplog.records if "cut short" in record.message]
            assert len(told) == 1 + (max_turns is None)
            assert told[0].startswith(
                "All 2 trajectories of a rollout were cut short by max_turns, max_tokens or max_obs"
            )
        caplog.clear()
        worker = worker_of(Guess)
        play(worker, num_generations=2)
    assert "cut short" not in caplog.text


def test_answers_that_do_not_fit_in_the_context_are_refused_before_anything_is_sampled() -> None:
    (prompt,) = prompts_of(worker_of(Guess), [{"prompt": "Guess.", "number": 1}])
    sampling, room = SamplingParams(max_tokens=30, max_observed=40), 70 + len(prompt.token_ids)
    assert check_prompt_lengths({"train": [prompt]}, sampling, sampling, room) == room
    remedy = r"lower sampling\.max_tokens, sampling\.max_observed or data\.max_prompt_tokens"
    with pytest.raises(ValueError, match=rf"up to 70 may follow, but the model's context is {room - 1}; {remedy}"):
        check_prompt_lengths({"train": [prompt]}, sampling, sampling, room - 1)


@pytest.mark.parametrize(
    ("factory", "row", "message"),
    [
        (
            Guess,
            {"prompt": "?"},
            "has no column 'number', which Guess.reset requires .it has 'prompt'.; add the column",
        ),
        (Guess, {"prompt": [{"role": "system", "content": "?"}], "number": 1}, "has no user message to which"),
        (
            {"a": Guess},
            {"prompt": "?", "number": 1, "environment": "chess"},
            "has 'chess' in column 'environment', which names none of the environments",
        ),
    ],
)
def test_rows_that_an_environment_cannot_begin_with_are_refused(
    factory: Any, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnusableRow, match=message):
        prompts_of(worker_of(factory), [row])


# ---- an environment that is gone for good ---------------------------------------------------------------


class Gone(Guess):
    """Its server is away from the first reset on."""

    def reset(self, number: int, **_: Any) -> str:
        raise ConnectionError("no server")


class Strict(Guess):
    def reset(self, number: int, **columns: Any) -> str:
        warnings.simplefilter("error")
        torch.set_float32_matmul_precision("medium")
        return super().reset(number, **columns)


def test_what_an_environment_changes_for_the_whole_process_is_put_back_and_told() -> None:
    before = torch.get_float32_matmul_precision()
    with pytest.warns() as caught:
        play(worker_of(Strict))
        assert not [each for each in warnings.filters if each[0] == "error"]
    assert torch.get_float32_matmul_precision() == before
    told = [str(each.message).partition(" for the whole")[0] for each in caught]
    assert "environment Strict: it changes torch.set_float32_matmul_precision or fp32_precision" in told
    assert "environment Strict: it changes the filters that make errors of warnings" in told


class NeverDone(Guess):
    @property
    def done(self) -> bool:
        raise RuntimeError("no game")


@pytest.mark.parametrize(
    ("factory", "why"),
    [
        (Gone, r"Gone fails when it is reset \(ConnectionError: no server\)"),
        (NeverDone, r"NeverDone fails when it is asked for done \(RuntimeError: no game\)"),
    ],
)
def test_batches_of_which_all_trajectories_are_dropped_end_the_run_with_the_cause(factory: Any, why: str) -> None:
    worker = worker_of(factory, retries=0)
    others = [(1, 0, True)]  # another rank, one of whose trajectories ends at first
    gather = lambda own: [own, *(others if isinstance(own, tuple) else [""])]  # noqa: E731
    batch = GroupBatch([], 1, PassRule("Guess"), gather)

    def play_one() -> None:
        assert play(worker, num_generations=2)[0].rollouts == []
        worker.on_update_end(batch)

    play_one()
    others[:] = [(0, 0, True)]
    play_one()
    play_one()
    sentence = f"All trajectories of the last 3 batches were dropped after their retries, because the .*: {why}\\."
    with pytest.raises(CannotGoOn, match=sentence + " Fix the environment, or the service it connects to, and resume"):
        play_one()
    assert re.search(sentence, worker.findings()[0].sentence)
    others[:] = [(1, 0, True)]  # one trajectory of any rank is enough
    play_one()
    assert worker.findings() == []


def test_a_first_batch_of_which_all_trajectories_are_dropped_ends_the_run() -> None:
    worker = worker_of(Gone, retries=0)
    play(worker, num_generations=2)
    with pytest.raises(CannotGoOn, match=r"All trajectories of the last batch were dropped .*: Gone fails when it is"):
        worker.on_update_end(GroupBatch([], 1, PassRule("Guess"), lambda own: [own]))


def test_a_batch_that_is_dropped_after_a_trajectory_has_ended_does_not_end_the_run() -> None:
    log = EnvironmentLog([])  # also an agent's, which has no environment to reset
    log.end(num_turns=1, num_rows=1, waited_s=0.0, lasted_s=1.0)
    log.note_batch(lambda own: [own])
    for _ in range(2):
        log.counts.clear()
        log.counts["dropped"] = 2
        log.note_batch(lambda own: [own])
    with pytest.raises(CannotGoOn, match="All trajectories of the last 3 batches were dropped"):
        log.note_batch(lambda own: [own])


def test_rewards_samples_and_checkpoints_have_what_reset_added_to_the_prompt() -> None:
    (group,) = play(worker_of(Guess))
    (rollout,) = group.rollouts
    said = Guess().reset(7)
    assert said and rollout.said == said
    surroundings = Surroundings(TrainerState(), lambda name, value: None)
    assert rollout_inputs(rollout, surroundings)["prompt"] == (
        "<|im_start|>user\nGuess. It is below 10.<|im_end|>\n<|im_start|>assistant\n"
    )
    (messages,) = group_inputs(group, surroundings)["prompts"]
    assert messages[-1] == {"role": "user", "content": f"Guess.{said}"}
    assert group.prompt.messages is not None and group.prompt.messages[-1]["content"] == "Guess."
    again = buffers._completion(rollout.prompt, buffers._completion_state(rollout.completion))
    assert again.episode is not None and (again.episode.said, again.episode.asked) == (said, rollout.asked)
    assert _row(1, rollout)["prompt"] == rollout.asked
