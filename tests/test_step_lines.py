"""Lines of Python that run in a step of a rollout in which nothing ends: as many whatever the number of rows."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import FrameType
from typing import Any
from unittest import mock

import numpy as np
import pytest

from benchmarks import host_cost_case
from benchmarks.random_policies import random_qwen3
from lit_grpo.faults import Phases
from lit_grpo.rollout.buffer import group_requests
from lit_grpo.rollout.loop import RolloutLoop
from lit_grpo.scheduling.jobs import Job, NoLengths
from lit_grpo.types import Prompt, SamplingParams

FIRST, LAST = 8, 24


class Short(NoLengths):
    """Expects completions to be so short that all of them fit."""

    def estimate(self, jobs: Sequence[Job]) -> np.ndarray:
        return np.full(len(jobs), 40.0)


def lines_run(num_rows: int, is_scarce: bool) -> Counter[str]:
    """Count the lines that run in each function of lit_grpo from one step to another, those of loops once a turn."""
    case = host_cost_case.HostCase(num_rows, ends=False, is_scarce=is_scarce, num_steps=LAST - FIRST)
    with mock.patch.object(host_cost_case, "SIZES", replace(host_cost_case.SIZES, layers=2)):
        generator = host_cost_case.decoder(case, random_qwen3(host_cost_case.SIZES))
    counts: Counter[str] = Counter()
    taken: list[int] = []

    def count(frame: FrameType, event: str, _: Any) -> Any:
        module = frame.f_globals.get("__name__", "")
        counts[f"{module}.{frame.f_code.co_qualname}"] += event == "line"
        return count if module.startswith("lit_grpo.") else None

    def until(num_steps: int) -> bool:
        if num_steps == FIRST:
            sys.settrace(count)
        elif num_steps == LAST:
            sys.settrace(None)
            taken.append(len(loop.buffer.ledger.decoding))
        return num_steps == LAST

    prompts = [Prompt(f"prompt {number}", (3, 4, 5), "") for number in range(num_rows // 8)]
    loop = RolloutLoop(generator, lengths=Short(), listeners=[Phases(), host_cost_case.Watching()])
    loop.buffer.open(group_requests(prompts, 8, SamplingParams(max_tokens=host_cost_case.MAX_TOKENS), seed=0))
    try:
        loop.run(until)
    finally:
        sys.settrace(None)
    assert taken == [num_rows] and counts["lit_grpo.rollout.loop.RolloutLoop._take"] >= LAST - FIRST
    return +counts


@pytest.mark.parametrize("is_scarce", [False, True], ids=["much memory", "scarce memory"])
def test_a_step_in_which_nothing_ends_runs_as_many_lines_whatever_the_number_of_rows(is_scarce: bool) -> None:
    few, many = lines_run(8, is_scarce), lines_run(1024, is_scarce)
    assert few == many
    if is_scarce:  # several steps are looked at together
        assert 0 < many["lit_grpo.scheduling.ledger.RequestLedger._held"] < LAST - FIRST
