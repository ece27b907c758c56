"""Commands around a run that are stopped or killed at any moment leave nothing begun, and lose nothing finished."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forks import Forked

from lit_grpo.process.files import PrivateFolder

SMALL = ["--trainer.max_steps", "1", "--data.batch_size", "2", "--model.num_generations", "2"]
COMMANDS = {
    "evaluate": ["tiny", "runs/made", "--samples", "1", "--output", "made"],
    "export": ["runs/made/checkpoints/last.ckpt", "made"],
    "finish": ["runs/made", "--output", "made"],
}
KILLS = [(command, number) for command in COMMANDS for number in range(12)]
FINISHED = {"evaluate": "evaluation.json", "export": "config.json", "finish": "README.md"}
"""A file that is written when the command has done its work."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with a run, and a folder for temporary files."""
    folder = tmp_path_factory.mktemp("killed")
    (folder / "tmp").mkdir()
    run = start(folder, "fit", "--config", "arithmetic", "--run.name", "made", "--validate_first", "false", *SMALL)
    assert run.wait() == 0
    return folder


@pytest.fixture(scope="module")
def seconds(folder: Path) -> dict[str, float]:
    """The seconds that each command takes here, which kills are spread over."""
    return {}


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "lit_grpo", *arguments]
    environment = os.environ | {"TMPDIR": str(folder / "tmp"), "HF_HUB_OFFLINE": "1"}
    options = {"text": True, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return Forked(command, cwd=folder, env=environment, start_new_session=True, **options)


@pytest.mark.nightly
@pytest.mark.parametrize(("command", "number"), KILLS)
def test_what_is_killed_leaves_nothing_begun(
    command: str, number: int, folder: Path, seconds: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    given = [command, *COMMANDS[command]]
    if command not in seconds:
        began = time.monotonic()
        assert start(folder, *given).wait() == 0
        seconds[command] = time.monotonic() - began
        clear(folder)
    kind = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)[number % 3]
    process = start(folder, *given)
    try:
        code = process.wait(timeout=random.Random(number).uniform(0.2, 1) * seconds[command])
    except subprocess.TimeoutExpired:
        process.send_signal(kind)
        code = process.wait(timeout=120)
    made = folder / "made"
    if code == 0:
        assert (made / FINISHED[command]).is_file()
    if kind is signal.SIGKILL and code:  # the next command of the kind removes what is left
        for parent, prefix in ((folder / "tmp", "lit_grpo-evaluate-"), (folder, ".made.writing-")):
            PrivateFolder(prefix, str(parent)).remove()
    begun = [path.name for place in (folder, folder / "tmp") for path in place.iterdir()]
    assert sorted({*begun} - {"made"}) == ["runs", "tmp"], (kind, code)
    if made.exists() and command == "evaluate":
        for path in made.glob("*.json*"):
            assert [json.loads(line) for line in path.read_text().splitlines()] if path.suffix == ".jsonl" else True
        assert not list(made.glob(".*"))
    elif made.exists():
        assert (made / FINISHED[command]).is_file()
    deadline = time.monotonic() + 60  # a child sees that its parent has ended
    while alive := [pid for pid in Path("/proc").glob("[0-9]*") if group_of(pid) == process.pid]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.1)
    clear(folder)


def clear(folder: Path) -> None:
    subprocess.run(["rm", "-rf", folder / "made"], check=True)


def group_of(process: Path) -> int | None:
    """Return the group of a process that has not ended, as ``/proc`` tells it."""
    try:
        fields = (process / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[2])
