"""The guard around others' code: what it changes for the process is put back and told, and its errors name it."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from conftest import table_rows
from lightning.pytorch.loggers import CSVLogger, Logger
from lit_grpo.callbacks.run_checkpoint import run_name  # pyrefly: ignore[missing-import]
from test_reward_runner import make_group

from lit_grpo import foreign
from lit_grpo.cli import command_line
from lit_grpo.faults.observers import OF_LOGGERS, Observer, Observers
from lit_grpo.foreign import ForeignExit, owner_of
from lit_grpo.plugins import CannotGoOn, Plugin, ask
from lit_grpo.process import calls
from lit_grpo.process.terminal import warn
from lit_grpo.rewards import RewardFunction, RewardRunner

HELD: list[Any] = []
"""Contexts that are left open; one whose object is freed may end with it."""


def leave_open(context: Any) -> None:
    HELD.append(context)
    context.__enter__()


OF_PROCESS: dict[str, Callable[[], Any]] = {
    "set_float32_matmul_precision": lambda: torch.set_float32_matmul_precision("high"),
    "fp32_precision of one backend": lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "fp32_precision of all": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
    "cuda.matmul.allow_tf32": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "cudnn.allow_tf32": lambda: setattr(torch.backends.cudnn, "allow_tf32", False),
    "bf16 reductions": lambda: setattr(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
    "cudnn.benchmark": lambda: setattr(torch.backends.cudnn, "benchmark", True),
    "mkldnn": lambda: setattr(torch.backends.mkldnn, "enabled", False),
    "kinds of attention": lambda: torch.backends.cuda.enable_math_sdp(False),
    "deterministic algorithms": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "detect_anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "simplefilter": lambda: warnings.simplefilter("error"),
    "filterwarnings": lambda: warnings.filterwarnings("error", category=UserWarning),
    "recursion limit": lambda: sys.setrecursionlimit(sys.getrecursionlimit() + 1),
    "logging.disable": lambda: logging.disable(logging.CRITICAL),
}
OF_THREAD: dict[str, Callable[[], Any]] = {
    "no_grad": lambda: leave_open(torch.no_grad()),
    "set_grad_enabled": lambda: torch.set_grad_enabled(False),
    "inference_mode": lambda: leave_open(torch.inference_mode()),
    "autocast": lambda: leave_open(torch.autocast("cpu", torch.bfloat16)),
    "autocast, off": lambda: leave_open(torch.autocast("cpu", enabled=False)),
    "autocast dtype": lambda: torch.set_autocast_dtype("cpu", torch.float16),
    "default device": lambda: torch.set_default_device("meta"),
    "a device's context": lambda: leave_open(torch.device("meta")),
    "number of threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "numpy's errors": lambda: np.seterr(all="raise"),
}
OF_MAIN: dict[str, Callable[[], Any]] = {"default dtype": lambda: torch.set_default_dtype(torch.float64)}
SETTINGS = ("set_float32_matmul_precision", "cudnn.benchmark", "deterministic algorithms", "number of threads")


def values() -> list[Any]:
    return [(state.name, state.read()) for states in foreign._states() for state in states]


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Leave nothing of a test that has failed to the next one."""
    foreign.begin_run()
    before = [(state, state.read()) for states in foreign._states() for state in states]
    yield
    for state, value in before:
        if state.read() != value:
            state.write(value)


class Mine(Plugin):
    """Does in a hook what it is told."""

    def __init__(self, do: Callable[[], Any]) -> None:
        self.do = do

    def on_batch_start(self) -> None:
        self.do()

    def setup(self) -> None:
        self.do()


@pytest.mark.parametrize("change", [*OF_PROCESS, *OF_THREAD, *OF_MAIN])
def test_what_a_hook_changes_for_the_process_is_put_back_and_told_once(change: str) -> None:
    plugin, before = Mine((OF_PROCESS | OF_THREAD | OF_MAIN)[change]), values()
    with pytest.warns(UserWarning) as caught:
        ask(plugin, "on_batch_start")
        assert values() == before
        ask(plugin, "on_batch_start")
    assert values() == before
    said = [str(each.message) for each in caught if "The run puts it back each time" in str(each.message)]
    assert said and len(said) == len({*said})
    assert all(each.startswith("plug-in test_foreign.Mine, hook on_batch_start: it changes ") for each in said)


@pytest.mark.parametrize("change", table_rows([*OF_PROCESS, *OF_THREAD], ["simplefilter", "no_grad"]))
def test_what_a_reward_changes_for_the_process_is_put_back_and_told_once(change: str) -> None:
    def score(completion: str) -> float:
        (OF_PROCESS | OF_THREAD)[change]()
        return 1.0

    runner, before = RewardRunner([RewardFunction.of(score, "score")], num_workers=1), values()
    with pytest.warns(UserWarning, match=r"^reward 'score' \(.*score\): it changes .* The run puts it back") as caught:
        runner.score(make_group("a", "bb"))
    runner.close()
    assert values() == before
    said = [str(each.message) for each in caught]
    assert len(said) == len({*said})


def test_a_setting_may_be_changed_in_setup_and_a_context_may_not_be_left_open() -> None:
    for change in SETTINGS:
        before = values()
        with pytest.warns(match=r"hook setup: it changes .* It stays so, because this was done in the set-up"):
            ask(Mine((OF_PROCESS | OF_THREAD)[change]), "setup")
        assert values() != before, change
    for change in ("no_grad", "autocast", "simplefilter", "default device"):
        before = values()
        with pytest.warns(match=r"hook setup: it changes .* The run puts it back"):
            ask(Mine((OF_PROCESS | OF_THREAD)[change]), "setup")
        assert values() == before, change


def test_a_hook_that_uses_a_context_as_it_should_is_not_told_of() -> None:
    def tidy() -> None:
        with torch.no_grad(), torch.autocast("cpu"), warnings.catch_warnings(), np.errstate(all="raise"):
            warnings.simplefilter("error")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ask(Mine(tidy), "on_batch_start")


# ---- calls at a time -------------------------------------------------------------------------------------


def test_what_one_call_changes_while_it_lasts_is_left_to_it_by_others_that_end_meanwhile() -> None:
    changed, ended = threading.Event(), threading.Event()
    seen: list[int] = []

    def for_a_while(completion: str) -> float:
        before = sys.getrecursionlimit()
        sys.setrecursionlimit(before + 7)
        changed.set()
        assert ended.wait(10)
        seen.append(sys.getrecursionlimit() - before)
        sys.setrecursionlimit(before)
        return 1.0

    def short() -> None:
        assert changed.wait(10)

    made = calls.Calls(2, "tools", "wait")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        long = made.start(made.call_all([lambda: for_a_while("")], False, 20.0, "tool 'long'"))
        made.start(made.call_all([short], False, 20.0, "tool 'short'")).result(20)
        ended.set()
        assert long.result(20)[0].error is None
    made.stop()
    assert seen == [7]


def test_a_change_that_is_left_names_the_calls_at_whose_end_it_was_seen_first() -> None:
    began, ended = threading.Event(), threading.Event()

    def long() -> None:
        began.set()
        assert ended.wait(10)

    def changes() -> None:
        assert began.wait(10)
        sys.setrecursionlimit(sys.getrecursionlimit() + 7)

    made, before = calls.Calls(2, "tools", "wait"), sys.getrecursionlimit()
    with pytest.warns(match=r"^(tool 'long' or tool 'changes'): it changes sys.setrecursionlimit"):
        first = made.start(made.call_all([long], False, 20.0, "tool 'long'"))
        assert began.wait(10)
        made.start(made.call_all([changes], False, 20.0, "tool 'changes'")).result(20)
        ended.set()
        first.result(20)
    made.stop()
    assert sys.getrecursionlimit() == before


def test_a_call_that_never_ends_keeps_no_change_of_later_calls_from_being_put_back() -> None:
    free, before = threading.Event(), sys.getrecursionlimit()
    made = calls.Calls(2, "tools", "wait")
    made.start(made.call_all([lambda: free.wait(20)], False, 0.05, "tool 'hangs'")).result(20)
    with pytest.warns(match=r"^tool 'changes': it changes sys.setrecursionlimit"):
        change = [lambda: sys.setrecursionlimit(before + 7)]
        made.start(made.call_all(change, False, 20.0, "tool 'changes'")).result(20)
    free.set()
    made.stop()
    assert sys.getrecursionlimit() == before


def test_what_coroutines_leave_open_on_their_loop_is_closed_once_none_is_left() -> None:
    modes: list[bool] = []

    async def opens() -> None:
        leave_open(torch.no_grad())
        await asyncio.sleep(0)

    async def looks() -> None:
        modes.append(torch.is_grad_enabled())

    made = calls.Calls(1, "tools", "wait")
    with pytest.warns(match=r"^tool 'opens': it changes torch.set_grad_enabled"):
        made.start(made.call_all([opens, opens], True, 5.0, "tool 'opens'")).result(20)
    made.start(made.call_all([looks], True, 5.0, "tool 'looks'")).result(20)
    made.stop()
    assert modes == [True]


# ---- errors, and the end of the process --------------------------------------------------------------------


class Broken(pl.Callback):
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        raise KeyError("missing")

    @property
    def state_key(self) -> str:
        raise KeyError("missing")


class Sending(Logger):
    """A logger whose parts do what they are told."""

    def __init__(self, do: Callable[[], Any]) -> None:
        super().__init__()
        self.do = do

    @property
    def name(self) -> str:
        self.do()
        return "sending"

    @property
    def version(self) -> str:
        return ""

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.do()

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        pass


def divides() -> None:
    print(1 / 0)  # pyrefly: ignore[division-by-zero]


def test_an_error_names_the_hook_that_raises_it_and_stays_what_it_is() -> None:
    callback, logger = Broken(), Sending(divides)
    Observers().guard([callback, logger])
    with pytest.raises(ZeroDivisionError) as raised:
        ask(Mine(divides), "on_batch_start")
    assert owner_of(raised.value) == "plug-in test_foreign.Mine, hook on_batch_start"
    with pytest.raises(KeyError) as of_callback:
        callback.on_train_start(None, None)
    assert owner_of(of_callback.value) == "callback test_foreign.Broken, hook on_train_start"
    with pytest.raises(KeyError) as of_key:
        print(callback.state_key)
    assert owner_of(of_key.value) == "callback test_foreign.Broken, hook state_key"
    with pytest.raises(ZeroDivisionError) as of_logger:
        print(logger.name)
    assert owner_of(of_logger.value) == "logger test_foreign.Sending, hook name"
    with pytest.warns(match=r"Sending failed in log_metrics \(ZeroDivisionError: division by zero\)"):
        logger.log_metrics({})
    assert isinstance(callback, Broken) and type(callback).__name__ == "Broken"


def test_the_owner_of_an_error_is_that_of_its_cause_and_the_innermost_one() -> None:
    inner = Mine(divides)

    def asks() -> None:
        try:
            ask(inner, "setup")
        except ZeroDivisionError as error:
            raise RuntimeError("further out") from error

    with pytest.raises(RuntimeError) as raised:
        ask(Mine(asks), "on_batch_start")
    assert owner_of(raised.value) == "plug-in test_foreign.Mine, hook setup"
    assert owner_of(RuntimeError()) is None


def test_callbacks_and_loggers_of_lightning_and_of_this_package_stay_as_they_are() -> None:
    from lightning.pytorch.callbacks import EarlyStopping

    from lit_grpo.callbacks import RunCheckpoint

    parts = [EarlyStopping("reward"), CSVLogger("."), RunCheckpoint()]
    kinds = [type(each) for each in parts]
    Observers().guard(parts)
    assert [type(each) for each in parts] == kinds


def fails(*_: Any, **__: Any) -> Any:
    raise KeyError("missing")


class Forms(Sending):
    """A logger whose parts have forms of every kind."""

    save = staticmethod(fails)
    finalize = classmethod(fails)
    log_graph = functools.partialmethod(fails, "graph")
    experiment = functools.cached_property(fails)

    def __init__(self) -> None:
        super().__init__(divides)
        self.after_save_checkpoint = fails
        self.log_hyperparams = functools.partial(fails, "settings")


@pytest.mark.parametrize(
    "hook", ["save", "finalize", "log_graph", "experiment", "after_save_checkpoint", "log_hyperparams"]
)
def test_a_part_of_a_logger_is_guarded_in_any_form(hook: str) -> None:
    logger = Forms()
    foreign.guard_hooks(logger, "logger", OF_LOGGERS)
    foreign.guard_hooks(logger, "logger", OF_LOGGERS)  # of the next run
    with pytest.raises(KeyError) as raised:
        getattr(logger, hook)("success")
    assert owner_of(raised.value) == f"logger test_foreign.Forms, hook {hook}"
    assert raised.value.__notes__ == [f"Raised by logger test_foreign.Forms, hook {hook}."]


def test_functions_that_a_callback_of_lightning_is_given_are_guarded_and_its_own_are_not() -> None:
    from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback

    callback, stopping = LambdaCallback(on_train_start=fails), EarlyStopping("reward")
    callback.on_train_end = stopping.on_validation_end
    Observers().guard([callback, stopping])
    with pytest.raises(KeyError) as raised:
        callback.on_train_start(None, None)  # pyrefly: ignore[bad-argument-type]
    owner = "callback lightning.pytorch.callbacks.lambda_function.LambdaCallback, hook on_train_start"
    assert owner_of(raised.value) == owner
    assert callback.on_train_end == stopping.on_validation_end


def test_a_logger_of_others_is_not_asked_for_the_name_of_a_run_that_ends() -> None:
    trainer: Any = SimpleNamespace(default_root_dir="/runs/a/b", loggers=[Sending(divides), CSVLogger("/runs", "a/b")])
    assert run_name(trainer) == "a/b"


def test_an_observer_and_a_logger_of_others_are_guarded_too() -> None:
    class Drawing(Observer):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            torch.set_grad_enabled(False)

    drawing, logger = Drawing(), Sending(lambda: torch.set_grad_enabled(False))
    Observers().guard([drawing, logger])
    with pytest.warns(match=r"callback .*Drawing, hook on_train_start: it changes torch.set_grad_enabled"):
        drawing.on_train_start(None, None)
    with pytest.warns(match=r"logger .*Sending, hook log_metrics: it changes torch.set_grad_enabled"):
        logger.log_metrics({})
    assert torch.is_grad_enabled()


class Wild(BaseException):
    pass


def raises_wildly() -> None:
    raise Wild("w")


@pytest.mark.parametrize("ends", [lambda: sys.exit(0), lambda: os._exit(0), raises_wildly])
def test_a_hook_cannot_end_the_process(ends: Callable[[], Any]) -> None:
    with pytest.raises(ForeignExit, match="which would end the process; raise an error that is an Exception") as raised:
        ask(Mine(ends), "on_batch_start")
    assert owner_of(raised.value) == "plug-in test_foreign.Mine, hook on_batch_start"


def test_a_signal_that_comes_while_a_hook_runs_ends_the_run_as_elsewhere() -> None:
    class Stopped(SystemExit):
        pass

    def stops() -> None:
        raise Stopped(143)

    with pytest.raises(Stopped):
        ask(Mine(stops), "on_batch_start")
    with pytest.raises(KeyboardInterrupt):
        ask(Mine(lambda: exec("raise KeyboardInterrupt")), "on_batch_start")


def test_a_function_that_calls_exit_is_an_error_of_its_call_and_its_forked_child_may() -> None:
    def ends() -> None:
        os._exit(3)

    async def ends_too() -> None:
        os._exit(4)

    def forks() -> int:
        child = os.fork()
        if child == 0:
            os._exit(5)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    made = calls.Calls(1, "tools", "wait")
    results = made.start(made.call_all([ends, forks], False, 10.0, "tool 'ends'")).result(20)
    results += made.start(made.call_all([ends_too], True, 10.0, "tool 'ends'")).result(20)
    made.stop()
    assert [repr(each.error) for each in results] == ["SystemExit('os._exit(3)')", "None", "SystemExit('os._exit(4)')"]
    assert results[1].value == 5


def test_a_warning_of_ours_is_printed_where_filters_make_errors_of_warnings(capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn("it goes on")
    assert capfd.readouterr().err == "warning: it goes on\n"


@pytest.mark.parametrize(
    ("raises", "said"),
    [
        (divides, "error: plug-in test_foreign.Mine, hook on_batch_start: ZeroDivisionError: division by zero."),
        (
            lambda: Path("/no/such/file").read_text(),
            "hook on_batch_start: FileNotFoundError: [Errno 2] No such file or directory",
        ),
        (lambda: sys.exit(0), "hook on_batch_start: ForeignExit: SystemExit: 0, which would end the process; raise"),
    ],
)
def test_a_command_ends_with_the_owner_and_the_error_in_one_sentence(
    raises: Callable[[], Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended, command_line._owners_named():
        ask(Mine(raises), "on_batch_start")
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error


@pytest.mark.parametrize("error", [CannotGoOn("no"), torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_an_error_that_has_a_sentence_of_its_own_keeps_it(error: BaseException) -> None:
    def raises() -> None:
        raise error

    with pytest.raises(type(error)), command_line._owners_named():
        ask(Mine(raises), "on_batch_start")
