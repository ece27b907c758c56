"""Cases that are measured in processes of their own: starting them, what they answer, and what their fits share."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.report import ROOT

if TYPE_CHECKING:
    import lightning.pytorch as pl

Figures = dict[str, Any]
LEAN = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
}
"""One thread and one arena, and freed blocks go back to the system soon, so that the resident set is what is in use."""
LEAN_TEXT = " ".join(f"{name}={value}" for name, value in LEAN.items())


class CaseProcess:
    """A process that measures a case, and answers with figures, a line of JSON each time.

    Args:
        module: What is run, with the case as its argument in JSON.
        case: A dataclass.
        environment: Variables of the process beside those of this one.
        root: The checkout that is measured.
    """

    def __init__(self, module: str, case: Any, environment: Mapping[str, str] | None = None, root: Path = ROOT) -> None:
        self._case = case
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed by __exit__
        command = [sys.executable, "-m", module, json.dumps(asdict(case))]
        self._process = subprocess.Popen(
            command,
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(root), **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def __enter__(self) -> CaseProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def go_on(self, with_this: Any = None) -> None:
        """Let it measure once more, and read ``with_this``, as JSON, where it has a use for it."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, and its answer is why
            self._process.stdin.write(json.dumps(with_this) + "\n")
            self._process.stdin.flush()

    def answer(self) -> Figures:
        """Wait for its next figures.

        Raises:
            RuntimeError: It has ended without.
        """
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        self._errors.seek(0)
        raise RuntimeError(f"The case {self._case} failed:\n{self._errors.read()[-2000:]}")


def measured(module: str, case: Any, environment: Mapping[str, str] | None = None) -> Figures:
    """Run a case in a process of its own and return its only figures."""
    with CaseProcess(module, case, environment) as process:
        return process.answer()


def tell(figures: Figures) -> None:
    """Answer with figures, from within the process of a case."""
    print(json.dumps(figures), flush=True)


def is_case() -> bool:
    """Whether this process is told a case, as :class:`CaseProcess` tells one."""
    return sys.argv[1:2] != [] and sys.argv[1].startswith("{")


def read_case() -> dict[str, Any]:
    """Return the fields of the case that this process measures, which from now on keeps quiet about all else."""
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return json.loads(sys.argv[1])


def stay_on(cores: Collection[int]) -> None:
    """Keep this process, all of its threads and those that it begins on these cores, where the system can do that."""
    if hasattr(os, "sched_setaffinity"):
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), cores)


def quiet_trainer(device: str, callbacks: list[pl.Callback], **options: Any) -> pl.Trainer:
    """Return a trainer that shows, logs and saves nothing."""
    import lightning.pytorch as pl

    return pl.Trainer(
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=options.pop("devices", 1),
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        **options,
    )
