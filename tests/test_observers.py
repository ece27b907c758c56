"""What only shows or writes a run may fail, and the run goes on."""

from __future__ import annotations

import functools
import io
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from conftest import read_metrics
from hand_made import differing, weights_of
from lightning.pytorch.callbacks import DeviceStatsMonitor

import lit_grpo
from lit_grpo.callbacks import (
    GRPOProgressBar,
    MemoryMonitor,
    RolloutTimeline,
    RunSummary,
    SampleLogger,
    ThroughputMonitor,
)
from lit_grpo.display.screen import the_console
from lit_grpo.faults.observers import Observer
from lit_grpo.training.loggers import MetricsCSV, TensorBoard

OBSERVERS = (GRPOProgressBar, RunSummary, SampleLogger, RolloutTimeline, MemoryMonitor, ThroughputMonitor)
HOOKS = (
    "on_train_start",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_validation_end",
    "on_train_end",
    "teardown",
)


class Drawing(Observer):
    """An observer of the user's own."""

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        raise ZeroDivisionError


def train(policy: Path, folder: Path, *callbacks: pl.Callback) -> torch.Tensor:
    rows = [{"prompt": f"{number}+1="} for number in range(4)]
    options = {"num_generations": 2, "sampling": {"max_tokens": 3}, "trainer": {"accelerator": "cpu"}}
    run = lit_grpo.train(
        str(policy), rows, differing, max_steps=2, batch_size=2, dir=str(folder), callbacks=callbacks, **options
    )
    assert run.module.policy_version == 2
    return weights_of(run.module)


def test_a_run_goes_on_whatever_observers_and_loggers_fail(
    policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(policy_folder, tmp_path / "whole")

    def fails(self: object, *_: Any, **__: Any) -> None:
        raise RuntimeError(f"{type(self).__name__} is broken")

    for kind in (*OBSERVERS, DeviceStatsMonitor):
        for name in HOOKS:
            if name in vars(kind):
                monkeypatch.setattr(kind, name, fails)
    for kind in (MetricsCSV, TensorBoard):
        for name in ("log_metrics", "save", "finalize"):
            monkeypatch.setattr(kind, name, fails)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        weights = train(policy_folder, tmp_path / "broken", DeviceStatsMonitor(), Drawing())
    assert torch.equal(weights, whole)
    said = [str(one.message) for one in caught]
    for kind in (*OBSERVERS, DeviceStatsMonitor, MetricsCSV, TensorBoard):
        assert sum(f"{kind.__name__} is broken" in each for each in said) == 1, kind
    assert sum("Drawing failed in on_train_batch_end (ZeroDivisionError)" in each for each in said) == 1


def test_an_estimate_of_memory_that_fails_costs_no_metric(
    policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> dict[str, Any]:
        raise ZeroDivisionError

    monkeypatch.setattr(MemoryMonitor, "forecast", functools.partial(fails))
    with pytest.warns(match=r"MemoryMonitor failed in on_train_start \(ZeroDivisionError"):
        train(policy_folder, tmp_path)
    told = json.loads((tmp_path / "grpo" / "memory.json").read_text())
    assert told["forecast"] is None and told["measured"]["weights"] > 0
    rows = read_metrics(tmp_path / "grpo" / "metrics.csv")
    assert all(float(row["memory/update_peak_gib"]) > 0 for row in rows) and len(rows) == 2


def test_an_error_of_the_training_still_ends_a_run(policy_folder: Path, tmp_path: Path) -> None:
    class Training(pl.Callback):
        def on_train_batch_end(self, *_: Any, **__: Any) -> None:
            raise ZeroDivisionError("a callback that is no observer")

    with pytest.raises(ZeroDivisionError, match="no observer"):
        train(policy_folder, tmp_path, Training())


def test_a_run_whose_output_is_a_closed_pipe_goes_on(
    policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    the_console.cache_clear()
    with monkeypatch.context() as here, pytest.warns(match=r"RunSummary failed in on_\w+ \(BrokenPipeError"):
        here.setattr(sys, "stdout", io.TextIOWrapper(io.FileIO(writing, "w"), write_through=True))
        train(policy_folder, tmp_path)
    the_console.cache_clear()
