"""Environments of completions that begin within others: each goes on from the state of that moment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from conversations import call, chat_tokenizer, play
from test_environments import Guess, add, worker_of

from lit_grpo.environments import EnvironmentFailed
from lit_grpo.methods import make_plugins
from lit_grpo.methods.arpo import ARPO
from lit_grpo.methods.eptree import EPTree
from lit_grpo.plugins import Answer, Listener, RunFacts, fresh
from lit_grpo.rollout.session import RolloutSession
from lit_grpo.types import Completion, Request, RolloutGroup, SamplePath, alone


def rewards_of(group: RolloutGroup) -> dict[SamplePath, Any]:
    """What environments gave, by path."""
    completions = [rollout.completion for rollout in group.rollouts]
    return {each.request.path: each.episode.reward for each in completions if each.episode is not None}


class Counting(Guess):
    """Its number is 100 more than the last one's, and nobody says it; its reward is its number and all guesses."""

    num_reset = num_asked = 0

    def reset(self, number: int = 0, **_: Any) -> str:
        type(self).num_reset += 1
        self.number, self.guesses = 100 * type(self).num_reset, []
        return ""

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: Your guess.
        """
        self.guesses.append(number)
        return "no"

    def get_reward(self) -> float:
        return float(self.number + sum(self.guesses))

    def state(self) -> dict[str, Any]:
        type(self).num_asked += 1
        return vars(self)  # the lists themselves

    def restore(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


@pytest.fixture
def kind() -> type[Counting]:
    return type("Counting", (Counting,), {"num_reset": 0, "num_asked": 0})


class Forks(Listener):
    """Forks the first path of a group as it ends, at the beginnings of its turns or in the middle of them."""

    traits = frozenset({"forks"})

    def __init__(self, inside: int = 0, path: SamplePath = (0,)) -> None:
        self.inside, self.path = inside, path
        self.begun: dict[SamplePath, int] = {}  # the turn in which each fork begins

    def on_completion(self, completion: Completion) -> Answer | None:
        request = completion.request
        if request.path != self.path:
            return None
        prefixes = [completion.until(start + self.inside) for start, _, _ in completion.places_of_turns]
        begun = [prefix for prefix in prefixes if prefix.num_tokens]
        made = [replace(request, path=(*self.path, n), prefix=prefix) for n, prefix in enumerate(begun)]
        self.begun = {each.path: len(completion.turns) - len(made) + n for n, each in enumerate(made)}
        return Answer(submit=made)


def says(request: Request, turn: int) -> str:
    """Each path guesses a digit of its own three times; what is in a turn already is not said again."""
    return call("guess", number=1 + sum(request.path)) if turn < 3 else "I am done."


ROWS: Sequence[dict[str, Any]] = ({"prompt": "Guess."},)


def test_a_fork_after_an_answer_has_the_environment_of_that_moment(kind: type[Counting]) -> None:
    forks = Forks()
    worker = worker_of(kind)
    (group,) = play(worker, says, ROWS, num_generations=2, listeners=[forks])
    rewards = rewards_of(group)
    first, second = rewards[0,], rewards[1,]
    assert {first, second} == {103.0, 206.0} or {first, second} == {203.0, 106.0}
    number = first - 3  # of the parent's environment, which a fork does not make again
    assert forks.begun == {(0, 0): 0, (0, 1): 1, (0, 2): 2, (0, 3): 3}
    for path, turn in forks.begun.items():
        assert rewards[path] == number + turn + (3 - turn) * (1 + sum(path))
    assert kind.num_reset == 2 and worker.metrics()["environments/restarted"] == 0
    for rollout in group.rollouts:
        messages = rollout.completion.episode.messages  # pyrefly: ignore[missing-attribute]
        assert [message["role"] for message in messages] == ["assistant", "tool"] * 3 + ["assistant"]
        assert len(rollout.completion.turns) == 4


def test_a_fork_within_a_turn_has_the_environment_of_the_turns_beginning(kind: type[Counting]) -> None:
    forks = Forks(inside=3)

    def goes_on(request: Request, turn: int) -> str:
        whole = says(replace(request, path=(0,)), 0)
        if len(request.path) == 1:
            return whole if turn < 3 else "I am done."
        begun = request.prefix.num_tokens == begins.setdefault(request.path, request.prefix.num_tokens)
        part = chat_tokenizer()(whole, add_special_tokens=False)["input_ids"][3:]
        return chat_tokenizer().decode(part) if begun and forks.begun[request.path] < 3 else "I am done."

    begins: dict[SamplePath, int] = {}
    (group,) = play(worker_of(kind), goes_on, ROWS, listeners=[forks])
    rewards = rewards_of(group)
    assert forks.begun == {(0, 0): 0, (0, 1): 1, (0, 2): 2, (0, 3): 3}
    assert rewards == {(0,): 103.0, (0, 0): 101.0, (0, 1): 102.0, (0, 2): 103.0, (0, 3): 103.0}
    assert kind.num_reset == 1


def test_forks_of_forks_find_the_state_of_the_path_that_they_come_from(kind: type[Counting]) -> None:
    class Twice(Forks):
        def on_completion(self, completion: Completion) -> Answer | None:
            answer = super().on_completion(completion)
            if answer is not None and self.path == (0,):
                self.path = (0, 2)
            return answer

    (group,) = play(worker_of(kind), says, ROWS, listeners=[Twice()])
    rewards = rewards_of(group)
    assert rewards[0, 2] == 100 + 1 + 1 + 3 and rewards[0, 3] == 100 + 1 + 1 + 1
    assert rewards[0, 2, 1] == 100 + 1 + 4 + 4 and rewards[0, 2, 3] == 100 + 1 + 1 + 3


def test_stateless_tools_go_with_forks() -> None:
    def adds(request: Request, turn: int) -> str:
        return call("add", first=turn, second=sum(request.path)) if turn < 2 else "I am done."

    forks = Forks()
    (group,) = play(worker_of(tools=[add]), adds, ROWS, listeners=[forks])
    said = {
        each.completion.request.path: [message.get("content") for message in each.completion.episode.messages]  # pyrefly: ignore[missing-attribute]
        for each in group.rollouts
    }
    assert len(said) == 3 and said[0, 0][3] == "1" and said[0,][3] == "1" and said[0, 1][1::2] == ["0", "1"]
    assert [each.completion.finish_reason for each in group.rollouts] == ["stop"] * 3


def test_states_are_kept_only_where_something_forks_and_as_long_as_a_group_is_open(kind: type[Counting]) -> None:
    worker = worker_of(kind)
    play(worker, says, ROWS, num_generations=2)
    assert kind.num_asked == 1  # the first of the run is looked at
    worker = worker_of(kind)
    play(worker, says, ROWS, num_generations=2, listeners=[Forks()])
    assert kind.num_asked > 0 and not any(each.begun for each in worker.records.values())


def test_arpo_branches_with_an_environment(kind: type[Counting]) -> None:
    brancher = fresh(ARPO(width=7, threshold=1.0))
    (group,) = play(worker_of(kind), says, ROWS, num_generations=2, listeners=[brancher])
    assert len(group.rollouts) == 7 and kind.num_reset == 2
    for rollout in group.rollouts:
        completion = rollout.completion
        guesses = [int(message["tool_calls"][0]["function"]["arguments"]["number"]) for message in _calls(completion)]
        assert completion.episode is not None and completion.episode.reward is not None
        assert completion.episode.reward % 100 == sum(guesses) and len(guesses) == 3
    assert brancher.metrics(alone)["rollout/branched_share"] == 5 / 7


def _calls(completion: Completion) -> list[dict[str, Any]]:
    assert completion.episode is not None
    return [message for message in completion.episode.messages if message.get("tool_calls")]


def test_eptree_forks_within_turns_with_an_environment(kind: type[Counting]) -> None:
    grower = fresh(EPTree(tokens=3, rounds=2, branches=1))
    (group,) = play(worker_of(kind), says, ROWS, num_generations=2, listeners=[grower])
    assert len(group.rollouts) == 2 * 7 and kind.num_reset == 2


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        (
            {"environments": {"factory": Guess}},
            "environments has Guess, to which state and restore would have to be add",
        ),
        (
            {"agent": {"run": lambda base_url, api_key: None}},
            "agent leaves an episode to an agent, which cannot be taken up",
        ),
    ],
)
def test_an_environment_that_cannot_be_restored_is_refused_where_something_forks(plugin: Any, message: str) -> None:
    session = RolloutSession(make_plugins([plugin, "arpo"]))
    with pytest.raises(
        ValueError, match=f"arpo needs environments that can be restored in the middle of an episode, but .*{message}"
    ):
        session.check(RunFacts(4, 8, 64, 1, max_observed=64), [])


class FailsOnce(Counting):
    """Fails after the first guess of its first attempt."""

    has_failed = False

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: Your guess.
        """
        if not type(self).has_failed and self.guesses:
            type(self).has_failed = True
            raise EnvironmentFailed("gone")
        return super().guess(number)


def test_a_fork_goes_on_from_the_attempt_that_its_parent_is() -> None:
    forks = Forks()
    (group,) = play(worker_of(FailsOnce), says, ROWS, listeners=[forks])
    rewards = rewards_of(group)
    assert {path: rewards[path] // 100 for path in rewards} == dict.fromkeys(rewards, 2.0) and len(rewards) > 2
