"""Functions in processes of their own: the CPU time that a call uses ends it, and wall time is no more than a net."""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest
from conftest import random_policy
from hand_made import random_groups

from lit_grpo.process.calls import CallTimeout
from lit_grpo.process.processes import ProcessCall, ProcessEnded, TooMuchComputing
from lit_grpo.rewards import RewardError, RewardFunction, RewardRunner
from tests.doubles.computing import Of, Starts, burn, burn_beside, end, wait


@pytest.mark.parametrize("function", [burn, burn_beside])
def test_a_call_that_computes_for_too_long_is_ended_and_the_next_is_made(function: Any) -> None:
    call = ProcessCall(Of(function), timeout_s=600.0, cpu_s=0.3)
    with pytest.raises(TooMuchComputing, match=r"it used more than 0.3 s of CPU time"):
        call(cpu_s=600.0)
    assert [call(cpu_s=0.2), call(cpu_s=0.2), call(cpu_s=0.2)] == ["done"] * 3  # each has its own


def test_waiting_is_no_computing_and_the_start_is_no_call() -> None:
    assert ProcessCall(Of(wait), timeout_s=600.0, cpu_s=0.2)(seconds=0.5) == "done"
    assert ProcessCall(Starts, timeout_s=600.0, cpu_s=0.3)(cpu_s=0.1) == "done"


def test_wall_time_and_signals_are_told_apart_from_cpu_time() -> None:
    with pytest.raises(CallTimeout):
        ProcessCall(Of(wait), timeout_s=0.1, cpu_s=600.0)(seconds=600.0)
    for code in (signal.SIGKILL, signal.SIGSEGV):
        with pytest.raises(ProcessEnded) as caught:
            ProcessCall(Of(end), timeout_s=600.0, cpu_s=600.0)(code=code)
        assert caught.value.code == -code
    with pytest.raises(ProcessEnded):  # without a limit of CPU time it is a signal like any other
        ProcessCall(Of(end), timeout_s=600.0)(code=signal.SIGPROF)


def test_a_call_in_a_thread_that_takes_too_long_says_how_much_it_computed() -> None:
    over, errors = threading.Event(), []

    def computes(completion: str) -> float:
        while not over.is_set():
            pass
        return 0.0

    def waits(completion: str) -> float:
        over.wait()
        return 0.0

    for function in (computes, waits):
        over.clear()
        runner = RewardRunner([RewardFunction.of(function, "score")], "raise", timeout_s=0.3)
        with pytest.raises(RewardError) as caught:
            runner.score(random_groups(random_policy(), [[0.0]])[0])
        errors.append(caught.value.__cause__)
        over.set()
        runner.close()
    computing, waiting = errors
    assert isinstance(computing, CallTimeout) and isinstance(waiting, CallTimeout)
    assert computing.cpu_s > 0.0 and waiting.cpu_s < 0.1
