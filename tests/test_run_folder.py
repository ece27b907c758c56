import multiprocessing
import threading
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
from conftest import table_rows

from lit_grpo.tools.dashboard.tensorboard import tag
from lit_grpo.training.loggers import make_loggers
from lit_grpo.training.run_folder import RunConfig, RunFolder


def open_run(folder: Path, resumes: bool = False) -> Path | None:
    """Start a run and end it; return where an earlier one was moved to."""
    with RunFolder() as run:
        run.claim(folder, resumes)
        assert run.path == folder
        return run.open()


def test_earlier_runs_are_moved_aside_one_by_one(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for number in range(3):
        assert open_run(folder) == (None if number == 0 else tmp_path / f"run-{number}")
        (folder / "metrics.csv").write_text(str(number))
    assert [(tmp_path / name / "metrics.csv").read_text() for name in ("run-1", "run-2", "run")] == ["0", "1", "2"]


def test_inputs_in_the_folder_that_would_be_moved_are_refused_before_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a file, a function of a file, nor a link may lead there; outputs and what is not there do not count."""
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/demo")
    (folder / "policy").mkdir(parents=True)
    for name in ("metrics.csv", "rows.jsonl", "rewards.py"):
        (folder / name).touch()
    Path("link").symlink_to(folder / "policy")
    inside = ["runs/demo/policy", folder / "rows.jsonl", str(folder.resolve() / "rewards.py") + ":score", "link"]
    outside = ["runs/demo", "runs/demo/other", "runs/demo-1", "tiny", "x" * 5000, "a\0b", "", None, 3]
    with RunFolder() as run:
        run.claim(folder, resumes=False)
        run.check_inputs({"model": {"policy": outside, "rewards": [{"function": one} for one in outside]}})
        for one in inside:
            for settings in ({"model": {"teacher": {"policy": one}}}, {"model": {"teacher": [{"policy": one}]}}):
                with pytest.raises(ValueError, match=r"^model\.teacher\.policy is .* give this run another run\.name"):
                    run.check_inputs(settings)
    with RunFolder() as run:
        run.claim(folder, resumes=True)
        run.check_inputs({"policy": inside})


def test_a_run_that_still_goes_on_is_not_resumed(tmp_path: Path) -> None:
    with RunFolder() as first, RunFolder() as second:
        first.claim(tmp_path / "run", resumes=False)
        with pytest.raises(ValueError, match=r"still goes on, so it cannot be resumed there; .* with run\.name"):
            second.claim(tmp_path / "run", resumes=True)


def test_runs_of_two_experiments_have_folders_of_their_own(tmp_path: Path) -> None:
    runs = [RunConfig(f"{experiment}/seed0", str(tmp_path)) for experiment in ("exp1", "exp2")]
    with RunFolder() as first, RunFolder() as second, RunFolder() as again:
        for folder, run in ((first, runs[0]), (second, runs[1]), (again, runs[0])):
            folder.claim(run.folder, resumes=False)
            folder.open()
            (folder.path / "metrics.csv").write_text("rows")
        assert [run.name_of(folder.path) for run, folder in zip(runs, (first, second), strict=True)] == [
            "exp1/seed0", "exp2/seed0"
        ]  # fmt: skip
        assert runs[0].name_of(again.path) == "exp1/seed0-1"
    assert open_run(runs[0].folder) == tmp_path / "exp1" / "seed0-2"


def test_loggers_write_into_the_run_folder(tmp_path: Path) -> None:
    loggers = make_loggers(RunConfig(name="one", dir=str(tmp_path)), {})
    assert [type(logger).__name__ for logger in loggers] == ["MetricsCSV", "TensorBoard"]
    assert {Path(str(logger.log_dir)) for logger in loggers} == {tmp_path / "one"}


NUM_RUNS = 20


def begin_run(folder: Path, number: int, together: Barrier, at_once: bool) -> None:
    """Be a run that writes its number; ``at_once`` it lives as long as all others."""
    together.wait()
    with RunFolder() as run:
        run.claim(folder, resumes=False)
        if at_once:
            together.wait()
        run.open()
        (run.path / "metrics.csv").write_text(f"{number}\n")
        with (run.path / "metrics.csv").open("a") as file:
            file.write(f"{number}\n")
        if at_once:
            together.wait()


@pytest.mark.parametrize("at_once", table_rows([True, False], [True]))
def test_twenty_runs_of_one_name_begun_together_have_folders_of_their_own(tmp_path: Path, at_once: bool) -> None:
    context = multiprocessing.get_context("fork")  # which starts at once, without an import
    together = context.Barrier(NUM_RUNS)
    runs = [
        context.Process(target=begin_run, args=(tmp_path / "task", number, together, at_once))
        for number in range(NUM_RUNS)
    ]
    for run in runs:
        run.start()
    for run in runs:
        run.join(timeout=60)
    assert [run.exitcode for run in runs] == [0] * NUM_RUNS
    written = sorted(path.read_text().split() for path in tmp_path.glob("task*/metrics.csv"))
    assert written == sorted([str(number)] * 2 for number in range(NUM_RUNS))


@pytest.mark.parametrize("number", [0, 7, 8, 9])
def test_updates_that_are_taken_again_take_the_place_of_the_first_in_tensorboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A run is killed after its fourth update and resumed from its second, whose validation was missing.

    TensorBoard reads files in the order of their names: a second, then a number that counts a process's files, so that
    of two files of one second "10" comes before "9".
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer import event_file_writer

    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(number))

    def log(resumes: bool, *rows: tuple[int, dict[str, float]]) -> None:
        _, logger = make_loggers(RunConfig("run", str(tmp_path)), {}, resumes)
        for step, metrics in rows:
            logger.log_metrics(metrics, step)
            logger.save()

    log(False, *((step, {"reward": 0.1 * step, "time/step_s": 1.0}) for step in (1, 2, 3, 4)))
    log(True, (2, {"val/pass@1": 0.5}), (3, {"reward": 0.3, "time/step_s": 2.0}), (4, {"reward": 0.4}))
    log(True, (4, {"reward": 0.4, "time/step_s": 3.0}), (5, {"reward": 0.5}))
    seen = EventAccumulator(str(tmp_path / "run"))
    seen.Reload()

    def values(name: str) -> list[tuple[int, float]]:
        return [(event.step, round(event.value, 3)) for event in seen.Scalars(tag(name))]

    assert values("reward") == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4), (5, 0.5)]
    assert values("time/step_s") == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 3.0)]
    assert values("val/pass@1") == [(2, 0.5)]


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../../x", "/tmp/x", "a//b", "a/", "a/../b", "~", "~/x", ".a.lock", "a\nb", "a\x1b[2J", "\ud800"],
)
def test_a_name_that_leads_elsewhere_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"run\.name is .*; give"):
        RunConfig(name)


def test_a_run_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").symlink_to("a")
    with RunFolder() as run, pytest.raises(ValueError, match=r"'.*/b' is a link to .*/a"):
        run.claim(tmp_path / "b", resumes=False)


def test_one_folder_of_runs_is_one_by_any_way_to_it(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "link").symlink_to("runs")
    with RunFolder() as first, RunFolder() as second:
        first.claim(tmp_path / "runs" / "a", resumes=False)
        second.claim(tmp_path / "link" / "a", resumes=False)
        assert second.path.name == "a-1"


def test_no_run_lies_within_another(tmp_path: Path) -> None:
    with RunFolder() as outer, RunFolder() as inner:
        outer.claim(tmp_path / "a", resumes=False)
        with pytest.raises(ValueError, match=r"'.*/a/policy' lies in the folder of another run, .*/a"):
            inner.claim(tmp_path / "a" / "policy", resumes=False)
    open_run(tmp_path / "b" / "c")
    with RunFolder() as outer, pytest.raises(ValueError, match=r"'.*/b' holds other runs, such as c"):
        outer.claim(tmp_path / "b", resumes=False)


def test_a_home_in_the_place_of_all_runs_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert RunConfig("a", "~/runs").folder == Path("/home/somebody/runs/a")


def test_a_run_that_is_refused_leaves_nothing(tmp_path: Path) -> None:
    with RunFolder() as refused:
        refused.claim(tmp_path / "runs/group/demo", resumes=False)
    assert not list(tmp_path.iterdir())
    with RunFolder() as opened:
        opened.claim(tmp_path / "runs/group/demo", resumes=False)
        opened.open()
        with RunFolder() as refused:
            refused.claim(tmp_path / "runs/group/demo", resumes=False)
            assert refused.path == tmp_path / "runs/group/demo-1"
    assert sorted(path.name for path in (tmp_path / "runs/group").iterdir()) == [".demo.lock", "demo"]


def test_of_many_runs_that_start_together_one_has_the_folder(tmp_path: Path) -> None:
    taken, most = [0], [0]
    guard = threading.Lock()

    def run() -> None:
        for _ in range(200):
            with RunFolder() as folder:
                folder.claim(tmp_path / "runs/demo", resumes=False)
                if folder.path.name == "demo":
                    with guard:
                        taken[0] += 1
                        most[0] = max(most[0], taken[0])
                    with guard:
                        taken[0] -= 1

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] and not [path for path in tmp_path.rglob("*") if path.is_file()]
