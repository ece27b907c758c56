"""Running reward functions over groups: values, errors, time limits and threads."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forks
import pytest
import torch

from lit_grpo.rewards import RewardError, RewardFunction, RewardRunner, RewardSpec, TrainerState
from lit_grpo.types import Completion, Prompt, Request, Rollout, RolloutGroup, SamplingParams


def make_group(*texts: str, prompt_id: str = "train/17", **columns: Any) -> RolloutGroup:
    """A group whose completions have one token a character."""
    prompt = Prompt(prompt_id, (1, 2), "What is it?", columns)
    rollouts = []
    for sample_id, text in enumerate(texts):
        request = Request(prompt, (sample_id,), SamplingParams(max_tokens=9))
        tokens = torch.zeros(len(text), dtype=torch.int64)
        completion = Completion(request, tokens, tokens.float(), tokens, "stop", text)
        rollouts.append(Rollout(prompt, completion))
    return RolloutGroup(prompt, rollouts)


def rewards_of(group: RolloutGroup) -> list[float]:
    return [rollout.reward for rollout in group.rollouts]


def values_of(group: RolloutGroup, name: str) -> list[float | None]:
    return [rollout.rewards[name] for rollout in group.rollouts]


MakeRunner = Callable[..., RewardRunner]


@pytest.fixture
def make_runner() -> Iterator[MakeRunner]:
    """Makes runners of plain functions, under their own names, and closes them."""
    runners: list[RewardRunner] = []

    def make(*calls: Callable[..., Any], **options: Any) -> RewardRunner:
        runners.append(RewardRunner([RewardFunction.of(call, call.__name__) for call in calls], **options))
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()


def length(completion: str) -> float:
    return float(len(completion))


def ratio(completion: str) -> float:
    return 6 / len(completion)


def lengths(completions: list[str]) -> list[float | None]:
    return [float(len(completion)) or None for completion in completions]


async def slow_length(completion: str) -> float:
    await asyncio.sleep(0.05)
    return float(len(completion))


class Together:
    """Holds the calls of a function until so many of them are being made."""

    def __init__(self, count: int) -> None:
        self.count, self.begun, self.all_begun = count, 0, threading.Event()
        self.lock = threading.Lock()

    def begin(self) -> None:
        with self.lock:
            self.begun += 1
            if self.begun == self.count:
                self.all_begun.set()

    async def score_async(self, completion: str) -> float:
        self.begin()
        while not self.all_begun.is_set():
            await asyncio.sleep(0.01)
        return float(len(completion))

    def score(self, completion: str) -> float:
        self.begin()
        assert self.all_begun.wait(300)
        return float(len(completion))


def test_a_function_of_weight_zero_makes_no_reward_of_its_own() -> None:
    """It is logged alone: where nothing else applies there is no reward, rather than one of 0."""

    def long_only(completion: str) -> float | None:
        return 1.0 if len(completion) > 2 else None

    functions = [RewardFunction.of(length, "length", 0.0), RewardFunction.of(long_only, "long", 10.0)]
    runner, group = RewardRunner(functions), make_group("a", "abcd")
    runner.score(group)
    runner.close()
    assert [rollout.rewards["length"] for rollout in group.rollouts] == [1.0, 4.0]
    assert math.isnan(rewards_of(group)[0]) and rewards_of(group)[1] == 10.0


def test_all_columns_are_given_to_columns_but_those_that_args_bind(tmp_path: Any, make_runner: MakeRunner) -> None:
    (tmp_path / "seen.py").write_text("def score(completion, scale, **columns): return scale + columns['level']")
    spec = RewardSpec(f"{tmp_path / 'seen.py'}:score", args={"scale": 10})
    group = make_group("a", level=3, scale=500)
    runner = RewardRunner([RewardFunction.load(spec)])
    runner.score(group)
    runner.close()
    assert rewards_of(group) == [13.0]


def test_async_functions_of_a_group_are_awaited_at_once(make_runner: MakeRunner) -> None:
    group = make_group(*["ab"] * 1000)
    make_runner(Together(1000).score_async).score(group)
    assert rewards_of(group) == [2.0] * 1000


def test_values_do_not_depend_on_which_thread_is_first(make_runner: MakeRunner) -> None:
    def uneven(completion: str) -> float:
        time.sleep(0.002 * (len(completion) % 3))
        return float(len(completion))

    runner = make_runner(uneven, slow_length, lengths, num_workers=3)
    groups = [make_group(*["x" * (1 + (i + j) % 5) for j in range(4)]) for i in range(12)]
    for group in groups:
        runner.submit(group)
    runner.gather()
    assert [rewards_of(group) for group in groups] == [[3.0 * (1 + (i + j) % 5) for j in range(4)] for i in range(12)]


def test_at_most_num_workers_sync_functions_run_at_a_time(make_runner: MakeRunner) -> None:
    lock, running, most = threading.Lock(), 0, 0

    def score(completion: str) -> float:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.02)
        with lock:
            running -= 1
        return 0.0

    runner = make_runner(score, num_workers=2)
    for _ in range(6):
        runner.submit(make_group("a"))
    runner.gather()
    assert most == 2


def test_error_names_function_prompt_and_sample_and_has_the_original_as_cause(make_runner: MakeRunner) -> None:
    with pytest.raises(RewardError) as caught:
        make_runner(ratio).score(make_group("ab", ""))
    assert str(caught.value) == (
        "reward 'ratio' (ratio) failed on prompt 'train/17', sample 1: ZeroDivisionError: division by zero."
    )
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_first_error_in_order_is_raised_and_groups_before_it_are_scored(make_runner: MakeRunner) -> None:
    groups = [make_group("ab"), make_group("", prompt_id="train/1"), make_group("", prompt_id="train/2")]
    runner = make_runner(slow_length, ratio)
    for group in groups:
        runner.submit(group)
    with pytest.raises(RewardError, match="'train/1'"):
        runner.gather()
    assert rewards_of(groups[0]) == [5.0]
    assert groups[1].rollouts[0].rewards == {}
    runner.score(groups[0])  # the runner goes on after an error


def test_error_that_counts_as_no_reward_leaves_the_other_rollouts_alone(
    make_runner: MakeRunner, caplog: pytest.LogCaptureFixture
) -> None:
    runner, group = make_runner(ratio, length, on_error="none"), make_group("ab", "", "abc")
    with caplog.at_level(logging.WARNING):
        runner.score(group)
        runner.score(make_group("", prompt_id="train/18"))
    assert values_of(group, "ratio") == [3.0, None, 2.0]
    assert rewards_of(group) == [5.0, 0.0, 5.0]
    assert runner.num_errors == 2
    assert [record.message for record in caplog.records] == [
        "reward 'ratio' (ratio) failed on prompt 'train/17', sample 1: ZeroDivisionError: division by zero. "
        "It counts as no reward, and further errors of this kind are only counted."
    ]


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (math.nan, "it returned nan; return a finite number, or None where it does not apply"),
        (-math.inf, "it returned -inf; return a finite number, or None where it does not apply"),
        (10**400, "it returned inf; return a finite number, or None where it does not apply"),
        (1e308, "it returned 1e+308; return a number from -1e+09 to 1e+09"),
        (-(10**10), "it returned -10000000000.0; return a number from -1e+09 to 1e+09"),
        ("1.0", "it returned '1.0', which is not a number; return a float or None"),
        ([1.0], "it returned [1.0], which is not a number; return a float or None"),
    ],
)
def test_value_that_is_no_finite_number_is_an_error(make_runner: MakeRunner, value: Any, problem: str) -> None:
    def score(completion: str) -> Any:
        return value

    with pytest.raises(RewardError) as caught:
        make_runner(score).score(make_group("a"))
    assert str(caught.value) == f"reward 'score' (score) failed on prompt 'train/17', sample 0: ValueError: {problem}."


@pytest.mark.parametrize("value", [True, 1, 1.0, torch.tensor(1.0), torch.tensor(True)])
def test_bools_and_scalars_are_numbers(make_runner: MakeRunner, value: Any) -> None:
    def score(completion: str) -> Any:
        return value

    group = make_group("a")
    make_runner(score).score(group)
    assert values_of(group, "score") == [1.0]


def test_nan_in_one_element_of_a_group_costs_only_that_rollout(make_runner: MakeRunner) -> None:
    def score(completions: list[str]) -> list[float]:
        return [1.0, math.nan, 3.0]

    runner, group = make_runner(score, on_error="none"), make_group("a", "b", "c")
    runner.score(group)
    assert values_of(group, "score") == [1.0, None, 3.0]
    assert runner.num_errors == 1
    with pytest.raises(RewardError, match=r"sample 1: ValueError: it returned nan;"):
        make_runner(score).score(group)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ([1.0], "it returned 1 values for 2 completions; return one each"),
        (1.0, "it returned a float; return a list with one value a completion"),
        (None, "it returned a NoneType; return a list with one value a completion"),
    ],
)
def test_wrong_number_of_values_is_an_error_of_the_whole_group(
    make_runner: MakeRunner, values: Any, problem: str
) -> None:
    def score(completions: list[str]) -> Any:
        return values

    with pytest.raises(RewardError) as caught:
        make_runner(score).score(make_group("a", "b"))
    assert str(caught.value).endswith(f"samples 0 to 1: ValueError: {problem}.")
    runner, group = make_runner(score, on_error="none"), make_group("a", "b")
    runner.score(group)
    assert (values_of(group, "score"), runner.num_errors) == ([None, None], 2)


def test_sync_call_that_is_overdue_is_abandoned_and_the_others_are_scored(make_runner: MakeRunner) -> None:
    over = threading.Event()

    def stuck(completion: str) -> float:
        if completion == "stuck":
            over.wait()
        return 1.0

    runner, group = (make_runner(stuck, on_error="none", timeout_s=1.0, num_workers=1), make_group("a", "stuck", "b"))
    runner.score(group)
    assert values_of(group, "stuck") == [1.0, None, 1.0]
    assert runner.num_errors == 1
    with pytest.raises(
        RewardError, match=r"sample 1: it took longer than 1 s; make it faster, or raise its time limit.$"
    ):
        make_runner(stuck, timeout_s=1.0).score(group)
    over.set()


def test_async_call_that_is_overdue_is_canceled_and_the_others_are_scored(make_runner: MakeRunner) -> None:
    canceled = threading.Event()

    async def score(completion: str) -> float:
        try:
            await asyncio.sleep(600 if completion == "stuck" else 0)
        except asyncio.CancelledError:
            canceled.set()
            raise
        return 1.0

    runner, group = make_runner(score, on_error="none", timeout_s=1.0), make_group("a", "stuck", "b")
    runner.score(group)
    assert values_of(group, "score") == [1.0, None, 1.0]
    assert canceled.wait(300)


def test_async_function_that_blocks_its_loop_is_found_out(make_runner: MakeRunner) -> None:
    over = threading.Event()

    async def blocks(completion: str) -> float:
        over.wait()
        return 1.0

    with pytest.raises(RewardError, match=r"an async function blocks the event loop at .* \(blocks\); await in it"):
        make_runner(blocks, timeout_s=0.1).score(make_group("a"))
    over.set()


@pytest.mark.parametrize("is_async", [False, True])
def test_function_that_exits_is_an_error_and_not_the_end(make_runner: MakeRunner, is_async: bool) -> None:
    def leave(completion: str) -> float:
        raise SystemExit(3)

    async def leave_async(completion: str) -> float:
        raise SystemExit(3)

    runner = make_runner(leave_async if is_async else leave, timeout_s=300)
    for _ in range(2):
        with pytest.raises(RewardError, match=r"SystemExit: 3.$"):
            runner.score(make_group("a"))


def test_stuck_functions_do_not_keep_the_process_from_exiting() -> None:
    code = """
        import asyncio, time, types
        import torch
        from lit_grpo.rewards import RewardFunction, RewardRunner
        from lit_grpo.types import Completion, Prompt, Request, Rollout, RolloutGroup, SamplingParams

        def stuck(completion): time.sleep(60)
        async def stuck_async(completion): await asyncio.sleep(60)

        prompt = Prompt("train/0", (1,), "p")
        request, no = Request(prompt, (0,), SamplingParams()), torch.empty(0)
        completion = Completion(request, no, no, no, "stop")
        group = RolloutGroup(prompt, [Rollout(prompt, completion)])
        functions = [RewardFunction.of(stuck, "stuck"), RewardFunction.of(stuck_async, "stuck_async")]
        runner = RewardRunner(functions, on_error="none", timeout_s=0.1)
        runner.score(group)
        RewardRunner(functions, timeout_s=None).submit(group)
        print(group.rollouts[0].rewards, runner.num_errors)
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=55,  # below the minute that they are stuck for
    )
    assert (done.stdout, done.stderr.count("Traceback"), done.returncode) == (
        "{'stuck': None, 'stuck_async': None} 2\n",
        0,
        0,
    )


def test_close_ends_the_threads_and_a_later_group_starts_them_again(make_runner: MakeRunner) -> None:
    others = set(threading.enumerate())

    def loops() -> list[str]:
        names = [thread.name for thread in threading.enumerate() if thread not in others]
        return [name for name in names if name == "lit_grpo-calls"]

    runner, group = make_runner(length, slow_length), make_group("ab")
    runner.score(group)
    assert loops() == ["lit_grpo-calls"]
    runner.submit(make_group("dropped"))
    runner.close()
    assert loops() == []
    runner.score(group)
    assert rewards_of(group) == [4.0]


def test_runner_needs_functions_of_different_names() -> None:
    with pytest.raises(ValueError, match=r"rewards is empty; name at least one reward function."):
        RewardRunner([])
    with pytest.raises(ValueError, match="2 rewards have the name 'length'"):
        RewardRunner([RewardFunction.of(length, "length")] * 2)


# ---- TRL's signature ------------------------------------------------------------------------------------


def test_a_function_written_for_trl_gets_all_that_trl_gives(make_runner: MakeRunner) -> None:
    seen = {}

    def score(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
        seen.update(kwargs, prompts=prompts, completions=completions)
        return [0.0] * len(completions)

    runner, group = make_runner(score), make_group("ab", "c", answer=4, prompt="row", completion="row")
    runner.state = TrainerState(3, 10, 0.5)
    runner.score(group)
    state, log_metric, log_extra = (seen.pop(name) for name in ("trainer_state", "log_metric", "log_extra"))
    assert (state.global_step, state.max_steps, state.epoch) == (3, 10, 0.5)
    assert callable(log_metric) and callable(log_extra)
    assert seen == {
        "prompts": ["What is it?"] * 2,
        "completions": ["ab", "c"],
        "completion_ids": [[0, 0], [0]],
        "answer": [4, 4],
    }


def test_a_conversation_has_messages_for_prompts_and_completions(make_runner: MakeRunner) -> None:
    seen = []

    def score(prompts: Any, completions: Any) -> list[float]:
        seen.append((prompts, completions))
        return [float(completion[0]["content"] == "b") for completion in completions]

    messages = [{"role": "user", "content": "What?"}]
    group = make_group("a", "b")
    prompt = dataclasses.replace(group.prompt, messages=messages)
    group = RolloutGroup(prompt, [Rollout(prompt, rollout.completion) for rollout in group.rollouts])
    make_runner(score).score(group)
    assert seen == [
        ([messages] * 2, [[{"role": "assistant", "content": "a"}], [{"role": "assistant", "content": "b"}]])
    ]
    assert rewards_of(group) == [0.0, 1.0]


def test_logged_metrics_are_means_and_extras_go_to_their_rollouts(make_runner: MakeRunner) -> None:
    def by_group(completions: list[str], log_metric: Any, log_extra: Any) -> list[float]:
        log_metric("mean_length", len(completions[0]))
        log_extra("first", [completion[:1] for completion in completions])
        return [0.0] * len(completions)

    def by_rollout(completion: str, trainer_state: Any, log_metric: Any, log_extra: Any) -> float:
        log_metric("ends", float(completion.endswith("b")))
        log_extra("step", trainer_state.global_step)
        return 0.0

    runner, groups = make_runner(by_group, by_rollout), [make_group("ab", "c"), make_group(), make_group("abcd", "b")]
    for group in groups:
        runner.submit(group)
    runner.gather()
    assert runner.take_metrics() == {"mean_length": 3.0, "ends": 0.5}
    assert runner.take_metrics() == {}
    assert [rollout.extra for rollout in groups[-1].rollouts] == [{"first": "a", "step": 0}, {"first": "b", "step": 0}]


def test_feedback_goes_to_its_completion_in_the_order_of_the_functions(make_runner: MakeRunner) -> None:
    def by_group(completions: list[str], log_feedback: Any) -> list[float]:
        log_feedback([None, "  ", "too short"])
        return [0.0] * len(completions)

    def by_rollout(completion: str, log_feedback: Any) -> float:
        log_feedback("the last call counts")
        log_feedback(f"ends in {completion[-1]}")
        return 0.0

    group = make_group("ab", "abc", "d")
    make_runner(by_group, by_rollout).score(group)
    assert [rollout.feedback for rollout in group.rollouts] == ["ends in b", "ends in c", "too short\nends in d"]
    assert group.rollouts[0].extra == {"feedback/by_rollout": "ends in b"}


def test_feedback_that_is_no_text_for_each_completion_is_an_error(make_runner: MakeRunner) -> None:
    cases: list[tuple[Any, str]] = [
        ("wrong", "log_feedback was given one text for 2 completions; give a list with one each"),
        (["wrong"], "log_feedback was given 1 texts for 2 completions"),
        (["wrong", 7], "log_feedback was given 7 of type int; give a text, or None"),
        ([None, "\ud83d"], "log_feedback was given the lone surrogate"),
    ]
    for texts, sentence in cases:

        def score(completions: list[str], log_feedback: Any, texts: Any = texts) -> list[float]:
            log_feedback(texts)
            return [0.0] * len(completions)

        with pytest.raises(RewardError, match=sentence):
            make_runner(score).score(make_group("a", "b"))


def test_an_extra_column_of_another_length_is_an_error(make_runner: MakeRunner) -> None:
    def score(completions: list[str], log_extra: Any) -> list[float]:
        log_extra("judge", ["good"])
        return [0.0] * len(completions)

    with pytest.raises(RewardError, match=r"log_extra\('judge'\) was given 1 values for 2 completions; give one each"):
        make_runner(score).score(make_group("a", "b"))


# ---- several calls at a time ----------------------------------------------------------------------------


def test_sync_calls_of_one_group_run_at_the_same_time(make_runner: MakeRunner) -> None:
    group = make_group(*("x" * number for number in range(64)))
    make_runner(Together(32).score, num_workers=32).score(group)
    assert rewards_of(group) == [float(number) for number in range(64)]


def flaky(failures: int) -> Callable[[str], float]:
    calls = 0

    def score(completion: str) -> float:
        nonlocal calls
        calls += 1
        if calls <= failures:
            raise ConnectionError(f"call {calls}")
        return 1.0

    return score


@pytest.mark.parametrize("is_async", [False, True])
def test_a_call_that_fails_is_made_again_after_a_pause(is_async: bool) -> None:
    score = flaky(2)

    async def score_async(completion: str) -> float:
        return score(completion)

    function = RewardFunction.of(score_async if is_async else score, "judge")
    runner, group = RewardRunner([dataclasses.replace(function, retries=2, retry_pause_s=0.05)]), make_group("a")
    began_s = time.monotonic()
    runner.score(group)
    runner.close()
    assert rewards_of(group) == [1.0]
    assert time.monotonic() - began_s >= 0.15


def test_retries_are_bounded_and_the_last_error_is_raised() -> None:
    function = dataclasses.replace(RewardFunction.of(flaky(9), "judge"), retries=2, retry_pause_s=0.0)
    runner = RewardRunner([function])
    with pytest.raises(RewardError, match=r"ConnectionError: call 3.$"):
        runner.score(make_group("a"))
    runner.close()
    with pytest.raises(ValueError, match=r"reward function 'a.b': retries must be from 0 to 10, not 11."):
        RewardSpec("a.b", retries=11)
    with pytest.raises(ValueError, match=r"reward function 'a.b': retry_pause_s must be from 0 to 60, not -1."):
        RewardSpec("a.b", retry_pause_s=-1)


# ---- processes ------------------------------------------------------------------------------------------

WILD = """
import os, signal, time
def score(completion, answer, log_metric, log_extra, log_feedback):
    log_metric("length", len(completion))
    log_feedback("said " + completion)
    log_extra("pid", os.getpid())
    print("not a reply")
    if completion == "exit":
        os._exit(7)
    if completion == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if completion == "fork":
        os.fork() and os.wait()
    if completion == "stuck":
        time.sleep(60)
    if completion == "raise":
        raise KeyError("no such key")
    return float(completion == answer)
"""


@pytest.fixture
def score_in_processes(tmp_path: Path) -> Callable[..., RewardRunner]:
    (tmp_path / "wild.py").write_text(WILD)

    def score(group: RolloutGroup, timeout_s: float = 20.0) -> RewardRunner:
        spec = RewardSpec(f"{tmp_path / 'wild.py'}:score", process=True)
        runner = RewardRunner([RewardFunction.load(spec, timeout_s)], "none", 30.0, num_workers=2)
        runner.score(group)
        runner.close()
        return runner

    return score


def test_a_function_in_a_process_scores_logs_and_is_not_this_process(score_in_processes: Any) -> None:
    group = make_group("a", "fork", "b", answer="b")
    runner = score_in_processes(group)
    assert (rewards_of(group), runner.num_errors) == ([0.0, 0.0, 1.0], 0)
    assert runner.take_metrics() == {"length": 2.0}
    assert os.getpid() not in {rollout.extra["pid"] for rollout in group.rollouts}
    assert [rollout.feedback for rollout in group.rollouts] == ["said a", "said fork", "said b"]


def test_a_function_that_ends_its_process_costs_its_rollout_alone(
    score_in_processes: Any, caplog: pytest.LogCaptureFixture
) -> None:
    group = make_group("exit", "b", "kill", "raise", "b", answer="b")
    runner = score_in_processes(group)
    assert values_of(group, "score") == [None, 1.0, None, None, 1.0]
    assert runner.num_errors == 3
    assert "sample 0: its process ended with code 7. It counts as no reward" in caplog.text


def test_a_process_that_takes_too_long_is_ended(score_in_processes: Any, caplog: pytest.LogCaptureFixture) -> None:
    group = make_group("stuck", "b", answer="b")
    score_in_processes(group, timeout_s=5.0)
    assert values_of(group, "score") == [None, 1.0]
    assert "sample 0: it took longer than 5 s; make it faster" in caplog.text


CLOSES = """
import os, sys
from test_reward_runner import make_group
from lit_grpo.rewards import RewardFunction, RewardRunner

def python(completion):
    sys.stdout.close()
    return 1.0

def descriptors(completion):
    os.close(1)
    os.close(2)
    return 1.0

for function in (python, descriptors):
    runner = RewardRunner([RewardFunction.of(function, function.__name__)], num_workers=1)
    runner.score(make_group("text"))
    print("after", function.__name__, flush=True)
    print("error after", function.__name__, file=sys.stderr, flush=True)
    runner.close()
"""


def test_a_function_that_closes_standard_output_silences_nobody() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = forks.run([sys.executable, "-c", CLOSES], 60, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "after python\nafter descriptors\n"
    assert "error after descriptors" in done.stderr and "A reward function closed stdout" in done.stderr
