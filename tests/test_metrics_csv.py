from __future__ import annotations

import csv
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from lit_grpo.training.loggers import MetricsCSV


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_all_that_is_logged_at_a_step_stands_in_one_row(tmp_path: Path) -> None:
    log = MetricsCSV(tmp_path / "metrics.csv")
    log.log_metrics({"val": 0.5}, step=0)
    log.log_metrics({"reward": 1.0}, step=1)
    log.log_metrics({"loss": 2.0}, step=1)
    log.log_metrics({"reward": 3.0}, step=2)
    assert read(log.path) == [
        {"step": "0", "val": "0.5", "reward": "", "loss": ""},
        {"step": "1", "val": "", "reward": "1.0", "loss": "2.0"},
        {"step": "2", "val": "", "reward": "3.0", "loss": ""},
    ]


def test_a_validation_that_is_repeated_on_resuming_stands_in_the_row_of_its_update(tmp_path: Path) -> None:
    first = MetricsCSV(tmp_path / "metrics.csv")
    first.log_metrics({"reward": 1.0}, step=2)
    second = MetricsCSV(first.path)
    second.log_metrics({"val": 0.5}, step=2)
    second.log_metrics({"reward": 3.0}, step=4)
    assert read(second.path) == [
        {"step": "2", "reward": "1.0", "val": "0.5"},
        {"step": "4", "reward": "3.0", "val": ""},
    ]


def test_half_a_line_at_the_end_gives_no_row(tmp_path: Path) -> None:
    first = MetricsCSV(tmp_path / "metrics.csv")
    for step in range(3):
        first.log_metrics({"reward": step + 0.25}, step=step)
    whole = first.path.read_bytes()
    for num_bytes in range(len(whole)):
        first.path.write_bytes(whole[:num_bytes])
        again = MetricsCSV(first.path)
        again.log_metrics({"reward": 7.5}, step=9)
        rows = read(again.path)
        assert rows[-1] == {"step": "9", "reward": "7.5"}
        assert rows[:-1] == [{"step": str(n), "reward": str(n + 0.25)} for n in range(len(rows) - 1)]


def test_lines_that_are_no_rows_are_left_out_of_a_resumed_file(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,reward\n1,0.5\nx,1\n2\n3,1,2\n4,0.75\n")
    log = MetricsCSV(tmp_path / "metrics.csv")
    log.log_metrics({"reward": 1.0}, step=5)
    assert [row["step"] for row in read(log.path)] == ["1", "4", "5"]


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.write_text("photo,place\n1,here\n")])
def test_what_is_no_file_of_metrics_is_not_replaced(make: Any, tmp_path: Path) -> None:
    make(tmp_path / "metrics.csv")
    with pytest.raises(ValueError, match=r"is a pipe, and not a file|begins with 'photo'"):
        MetricsCSV(tmp_path / "metrics.csv").log_metrics({"reward": 1.0}, step=5)
    assert not (tmp_path / "metrics.csv").is_file() or "here" in (tmp_path / "metrics.csv").read_text()


def test_a_new_column_leaves_the_file_whole_if_it_cannot_be_written(tmp_path: Path) -> None:
    log = MetricsCSV(tmp_path / "metrics.csv")
    log.log_metrics({"reward": 1.0}, step=0)
    (tmp_path / ".metrics.csv.writing").mkdir()  # what cannot be written
    with pytest.raises(OSError):
        log.log_metrics({"loss": 1.0}, step=1)
    assert read(log.path) == [{"step": "0", "reward": "1.0"}]


def test_tensorboard_takes_what_comes_after_it_has_been_closed(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from lit_grpo.training.loggers import TensorBoard

    logger = TensorBoard(str(tmp_path), {}, resumes=False, name="", version="run")
    logger.log_metrics({"reward": 0.5}, 1)
    logger.finalize("success")
    logger.log_metrics({"val/pass@1": 0.25}, 2)
    logger.finalize("success")
    assert len(list((tmp_path / "run").glob("events*"))) >= 1


def test_the_file_aside_of_the_table_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / ".metrics.csv.writing").symlink_to("mine")
    MetricsCSV(tmp_path / "metrics.csv").log_metrics({"reward": 1.0}, 1)
    assert (tmp_path / "mine").read_text() == "mine" and not (tmp_path / "metrics.csv").is_symlink()


def test_the_rows_of_a_long_run_are_not_kept_in_memory(tmp_path: Path) -> None:
    log = MetricsCSV(tmp_path / "metrics.csv")

    def log_rows(steps: range) -> None:
        for step in steps:
            log.log_metrics({f"metric_{number}": step + number / 7 for number in range(80)}, step=step)

    log_rows(range(10))
    tracemalloc.start()
    log_rows(range(10, 400))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 100_000  # the rows are 2.5 MB of numbers
    log.log_metrics({"new": 1.0}, step=400)
    assert [row["step"] for row in read(log.path)] == [str(step) for step in range(401)]
    assert read(log.path)[7]["metric_3"] == str(7 + 3 / 7) and read(log.path)[7]["new"] == ""


def test_rows_after_one_that_could_not_be_written_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = MetricsCSV(tmp_path / "metrics.csv")
    for step in range(2):
        log.log_metrics({"reward": float(step)}, step=step)
    opened = Path.open

    class Full:
        """A file on a disk that takes three bytes more."""

        def __init__(self, file: Any) -> None:
            self.file = file

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def write(self, data: bytes) -> None:
            self.file.write(data[:3])
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "open", lambda path, *mode: Full(opened(path, *mode)))
    with pytest.raises(OSError, match="No space"):
        log.log_metrics({"reward": 2.0}, step=2)
    monkeypatch.setattr(Path, "open", opened)
    log.log_metrics({"reward": 3.0}, step=3)
    assert [(row["step"], row["reward"]) for row in read(log.path)] == [("0", "0.0"), ("1", "1.0"), ("3", "3.0")]
