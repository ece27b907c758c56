"""Methods beside plain GRPO: the figures of a run, gains with their intervals, and what is kept."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import methods
from benchmarks.learning_runs import Curves
from benchmarks.methods import METHODS, TASKS, learning_run, summary
from lit_grpo.cli.parsing.sentences import shipped_config
from lit_grpo.methods import make_plugins, shipped
from scripts.methods_page import T_975, paired_gain


def curves(tokens: list[float], exact: list[float]) -> Curves:
    """Curves of these tokens and this exact match by update, NaN where nothing was validated."""
    tokens_U, one_U = np.array(tokens), np.ones(len(tokens))
    return Curves(np.array(exact), one_U, one_U, tokens_U, one_U, one_U, one_U, one_U, one_U, one_U)


def test_the_mean_over_a_run_is_that_of_its_straight_lines() -> None:
    draw = np.random.default_rng(0)
    tokens = np.concatenate([[0], draw.integers(1, 50, 12).cumsum()])
    exact, budget = draw.random(13), int(tokens[-2]) + 1
    found = summary(curves(tokens.tolist(), exact.tolist()), budget)
    fine = np.linspace(0, budget, 200_001)
    assert found["over_run"] == pytest.approx(float(np.interp(fine, tokens, exact).mean()), abs=1e-4)


@pytest.mark.parametrize("degrees", range(1, len(T_975) + 1))
def test_quantiles_are_those_of_students_t(degrees: int) -> None:
    x = torch.linspace(-T_975[degrees - 1], T_975[degrees - 1], 100_001, dtype=torch.float64)
    density = torch.distributions.StudentT(torch.tensor(float(degrees), dtype=torch.float64)).log_prob(x).exp()
    assert torch.trapezoid(density, x).item() == pytest.approx(0.95, abs=1e-4)


def test_an_interval_holds_the_true_gain_in_95_of_100_tries() -> None:
    draw = np.random.default_rng(1)
    hits = 0
    for _ in range(4000):
        common_S = draw.normal(0, 5, 3)  # what a seed does to both runs
        gain = paired_gain((common_S + 1 + draw.normal(0, 0.5, 3)).tolist(), common_S.tolist())
        hits += abs(gain.mean - 1) <= gain.reach
    assert hits / 4000 == pytest.approx(0.95, abs=0.012)


@pytest.mark.parametrize("method", METHODS)
def test_a_method_is_set_as_the_command_line_takes_it(method: str) -> None:
    beside = METHODS[method]
    assert set(beside.tasks) <= set(TASKS)
    for task in beside.tasks:
        assert Path(shipped_config(TASKS[task].config)).is_file()
        run = learning_run(TASKS[task], method, 0)
        plugins = json.loads(run.arguments[-1])
        if methods._here([method]):
            assert len(make_plugins(plugins)) == len(plugins)
    assert "pods" in shipped()
