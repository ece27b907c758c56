"""Observers, which only show or record a run: if one fails, the run continues."""

from __future__ import annotations

import functools
import inspect
import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import DeviceStatsMonitor, LearningRateMonitor, ModelSummary, ProgressBar
from lightning.pytorch.callbacks import ThroughputMonitor as LightningThroughputMonitor
from lightning.pytorch.loggers import Logger

from lit_grpo.faults.lost_ranks import lost_rank
from lit_grpo.foreign import begin_run, guard_hooks, owner_of
from lit_grpo.process.terminal import first_line, warn


class Observer(pl.Callback):
    """A callback that only shows, draws or writes what a run does: if one of its hooks fails, the run goes on.

    The first failure is a warning with the name of the callback; later hooks are called all the same. ``setup`` checks
    what must hold before a run begins, so its errors are raised, and so are those of what a checkpoint keeps. Derive
    your own callback from it if the callback does not change the training.
    """


LIGHTNING = (ProgressBar, ModelSummary, LearningRateMonitor, DeviceStatsMonitor, LightningThroughputMonitor)
"""Lightning's callbacks that only show or write a run."""
OF_CALLBACKS, OF_LOGGERS = ([name for name in dir(base) if not name.startswith("_")] for base in (pl.Callback, Logger))
OF_LOGGERS.append("experiment")  # Lightning asks for it where a logger has it
RAISED = {"setup", "state_dict", "load_state_dict", "on_save_checkpoint", "on_load_checkpoint"}
"""Hooks whose errors end a run, of observers too."""


class Observers:
    """Keeps failures of observers from ending a run.

    Attributes:
        failures: Number of failures of each observer, by name.
    """

    def __init__(self) -> None:
        self.failures: Counter[str] = Counter()

    def guard(self, parts: Iterable[object]) -> None:
        """Guard the hooks of others' callbacks and loggers, and let those of observers and of all loggers fail."""
        begin_run()
        for part in parts:
            if vars(part).get("_guarded_by") is not self:
                guard_hooks(part, *(("logger", OF_LOGGERS) if isinstance(part, Logger) else ("callback", OF_CALLBACKS)))
            if not isinstance(part, (Observer, Logger, *LIGHTNING)) or vars(part).get("_guarded_by") is self:
                continue
            vars(part)["_guarded_by"] = self
            for name, _ in inspect.getmembers(type(part), inspect.isfunction):
                if not name.startswith("_") and name not in RAISED:
                    setattr(part, name, self._guarded(part, getattr(part, name)))

    def _guarded(self, part: object, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*arguments: Any, **named: Any) -> Any:
            with self.may_fail(type(part).__name__, f" in {method.__name__}"):
                return method(*arguments, **named)

        return call

    @contextmanager
    def may_fail(self, name: str, where: str = "") -> Iterator[None]:
        """Continue after an error of the code within; the first error of each name is logged as a warning.

        The error of a collective is raised, because another rank is gone.

        Args:
            name: Name of the observer.
            where: Action during which it failed, for the warning.
        """
        try:
            yield
        except Exception as error:
            if lost_rank(error):
                raise
            self.failures[name] += 1
            if self.failures[name] > 1:
                return
            if os.environ.get("LIT_GRPO_TRACEBACK"):
                traceback.print_exc()
            said = first_line(error)
            said = said if said == type(error).__name__ else f"{type(error).__name__}: {said}"
            owner = owner_of(error) or ""
            said = f"{owner}: {said}" if owner and name not in owner else said
            warn(
                f"{name} failed{where} ({said}). It only shows or writes the run, so the run goes on; further failures "
                "of it are counted, not shown (LIT_GRPO_TRACEBACK=1 shows where).",
                stacklevel=2,
            )
