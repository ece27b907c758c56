"""One run of the demo, with all that shows and logs it, or without: ``python -m benchmarks.display_cost_case``."""

from __future__ import annotations

import functools
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lit_grpo.callbacks import GRPOProgressBar, RolloutTimeline, RunSummary, SampleLogger, ThroughputMonitor
from lit_grpo.cli.command_line import run
from lit_grpo.training.loggers import MetricsCSV, TensorBoard, WandB

SHOWN = (GRPOProgressBar, RolloutTimeline, RunSummary, SampleLogger, MetricsCSV, TensorBoard, WandB)
LOGS = ("log_metrics", "log_table", "log_image", "log_hyperparams", "save")
HEARD = ("begin", "step", "finish", "whole", "end")
NOTHING = [
    *("--trainer.logger", "false", "--trainer.enable_progress_bar", "false"),
    *("--sample_logger.every_n_updates", "0", "--rollout_timeline.every_n_updates", "0"),
]


class Stopwatch:
    """Adds up the seconds in some functions by whose they are; of the inner where one calls another."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._callers: list[str] = []
        self._since = 0.0

    def timed(self, whose: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, timed."""

        @functools.wraps(function)
        def inner(*args: Any, **kwargs: Any) -> Any:
            self._note()
            self._callers.append(whose)
            try:
                return function(*args, **kwargs)
            finally:
                self._note()
                self._callers.pop()

        return inner

    def _note(self) -> None:
        """Count the time since the last note for the one that is at work."""
        now = time.perf_counter()
        if self._callers:
            self.seconds[self._callers[-1]] += now - self._since
        self._since = now


def main(shown: bool, output: Path, arguments: list[str]) -> None:
    """Run, and write the seconds of each step and of what was shown in it."""
    watch, steps = Stopwatch(), []
    for kind in SHOWN if shown else ():
        for name in dir(kind):
            function, ours = getattr(kind, name), name in LOGS or name in vars(kind)
            if ours and (name.startswith("on_") or name in (*LOGS, *HEARD)) and callable(function):
                setattr(kind, name, watch.timed(kind.__name__, function))

    log_step = ThroughputMonitor.on_train_batch_end

    def noted(self: ThroughputMonitor, trainer: pl.Trainer, *rest: Any) -> None:
        log_step(self, trainer, *rest)
        steps.append((float(trainer.callback_metrics["time/step_s"]), dict(watch.seconds)))

    setattr(ThroughputMonitor, log_step.__name__, noted)
    sys.argv = ["lit_grpo", "fit", "--config", "arithmetic", *arguments, *([] if shown else NOTHING)]
    run()
    output.write_text(json.dumps(steps))


if __name__ == "__main__":
    main(sys.argv[1] == "shown", Path(sys.argv[2]), sys.argv[3:])
