from pathlib import Path

import pytest

from lit_grpo.training.run_folder import RunConfig, make_loggers, prepare_folder


def test_earlier_runs_are_moved_aside_one_by_one(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for number in range(3):
        moved = prepare_folder(folder, resumes=False)
        assert moved == (None if number == 0 else tmp_path / f"run-{number}")
        (folder / "metrics.csv").write_text(str(number))
    assert [(tmp_path / name / "metrics.csv").read_text() for name in ("run-1", "run-2", "run")] == ["0", "1", "2"]


def test_resumed_run_keeps_its_folder(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("rows")
    assert prepare_folder(tmp_path, resumes=True) is None
    assert (tmp_path / "metrics.csv").read_text() == "rows"


def test_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"run folder .* is not writable .*; choose another with run\.dir"):
        prepare_folder(tmp_path / "file" / "run", resumes=False)


def test_loggers_write_into_the_run_folder(tmp_path: Path) -> None:
    loggers = make_loggers(RunConfig(name="one", dir=str(tmp_path)))
    assert [type(logger).__name__ for logger in loggers] == ["MetricsCSV", "TensorBoardLogger"]
    assert {Path(str(logger.log_dir)) for logger in loggers} == {tmp_path / "one"}
