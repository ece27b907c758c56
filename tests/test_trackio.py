"""Runs in trackio: metrics by the names of the pages, settings and completions, without a network."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import pytest

import lit_grpo
from lit_grpo.tasks import ArithmeticRows
from lit_grpo.tools.dashboard import sections
from lit_grpo.training.loggers import Trackio

pytest.importorskip("trackio", reason="trackio is not installed (the extra trackio)")
from trackio import sqlite_storage, utils  # needs trackio
from trackio.sqlite_storage import SQLiteStorage


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let trackio's files be in a folder of the test."""
    for module in (sqlite_storage, utils):
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    monkeypatch.chdir(tmp_path)


def kept() -> list[tuple[str, dict[str, Any], list[dict[str, Any]]]]:
    """The name, the config and the logs of each run that trackio has on the disk."""
    storage: Any = SQLiteStorage
    return [
        (row["name"], storage.get_run_config("proj", run_id=row["id"]), storage.get_logs("proj", run_id=row["id"]))
        for row in storage.get_run_records("proj")
    ]


def score(completion: str) -> float:
    return float(len(completion))


def test_a_run_in_trackio_has_the_values_of_its_table() -> None:
    run = lit_grpo.train(
        "tiny",
        ArithmeticRows(num_rows=8),
        [score],
        max_steps=2,
        batch_size=2,
        num_generations=4,
        sampling={"max_tokens": 8},
        callbacks={"sample_logger": {"every_n_updates": 1}},
        trainer={"logger": Trackio("proj", "one"), "accelerator": "cpu", "enable_progress_bar": False},
    )
    ((name, _, logs),) = kept()
    rows = list(csv.DictReader((run.folder / "metrics.csv").read_text().splitlines()))
    assert name == "one" and [row["step"] for row in rows] == ["1", "2"]
    for metric in ("reward", "loss", "completions/clipped_ratio", "time/update_s"):
        logged = {log["step"]: log[metric] for log in logs if log.get(metric) is not None}
        assert logged == {int(row["step"]): pytest.approx(float(row[metric])) for row in rows}, metric
    (first, *_) = (log["samples"] for log in logs if "samples" in log)
    assert {"prompt", "completion", "reward"} <= first["_value"][0].keys()


def test_a_run_goes_on_under_its_name_if_asked_to() -> None:
    for step, settings in ((1, {}), (2, {"resume": "allow"}), (1, {})):
        logger = Trackio("proj", "one", settings)
        logger.log_hyperparams({"lr": 0.1})
        logger.log_metrics({"reward": float(step), "loss": math.nan}, step)
        logger.finalize("success")
    runs = kept()
    assert sorted([log["step"] for log in logs] for _, _, logs in runs) == [[1], [1, 2]]
    assert [(name, config["lr"]) for name, config, _ in runs] == [("one", "0.1")] * 2


def test_no_metric_has_a_name_that_trackio_changes() -> None:
    names = {metric.name for section in sections() for metric in section.metrics}
    assert names and not [name for name in names if name in utils.RESERVED_KEYS or name.startswith("__")]


def test_without_the_package_one_sentence_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_grpo.process.packages.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"Trackio, and trackio is not installed; install lit_grpo\[trackio\]\."):
        Trackio()
