"""How many files, functions and classes one update runs through: what a reader has to know to follow it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[2]
TRACED = r"""
import json, sys
from lit_grpo import callbacks
from lit_grpo.cli.command_line import run

files, functions, classes, num_updates = set(), set(), set(), 0
scheduler, sync = callbacks.RolloutScheduler, callbacks.WeightSync
places = (sys.argv[1] + "/lit_grpo/", sys.argv[1] + "/callbacks/")
begin, end = scheduler.on_train_batch_start, sync.on_train_batch_end

def trace(frame, event, argument):
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(places):
        files.add(code.co_filename)
        if not code.co_name.startswith("<"):  # comprehensions, which are functions in Python 3.11 alone, and lambdas
            functions.add((code.co_filename, code.co_qualname))
        owner = frame.f_locals.get("self")
        if type(owner).__module__.startswith("lit_grpo"):
            classes.add(type(owner))

def on_start(self, *arguments, **options):
    global num_updates
    num_updates += 1
    sys.setprofile(trace if num_updates == 3 else None)
    return begin(self, *arguments, **options)

def on_end(self, *arguments, **options):
    ended = end(self, *arguments, **options)
    sys.setprofile(None)
    return ended

scheduler.on_train_batch_start, sync.on_train_batch_end = on_start, on_end
run(sys.argv[2:])
print(json.dumps([len(files), len(functions), len(classes)]))
"""


def traced(config: str, folder: Path) -> tuple[int, int, int]:
    """Return the number of files, functions and classes that the third update runs through, in the main thread."""
    options = {"trainer.max_steps": 3, "trainer.val_check_interval": 3, "data.batch_size": 4, "run.dir": folder}
    settings = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    command = [sys.executable, "-c", TRACED, str(ROOT), "fit", "--config", f"configs/{config}.yaml", *settings]
    command += ["--model.num_generations", "4"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert told.returncode == 0, told.stderr[-2000:]
    files, functions, classes = json.loads(told.stdout.splitlines()[-1])
    return files, functions, classes


def test_an_update_runs_through_no_more_files_functions_and_classes_than_it_did(tmp_path: Path) -> None:
    """Lower these bounds where the code gets lighter; a feature that is off adds nothing to them."""
    files, functions, classes = traced("arithmetic", tmp_path)
    assert files <= 95 and functions <= 618 and classes <= 106, (files, functions, classes)


@pytest.mark.nightly
def test_environments_add_few_files_and_classes_to_an_update(tmp_path: Path) -> None:
    (files, _, classes), (more_files, _, more_classes) = (
        traced(name, tmp_path) for name in ("arithmetic", "calculator")
    )
    assert more_files <= files + 8 and more_classes <= classes + 12, (more_files, more_classes)
