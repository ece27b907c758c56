"""The README and the page of a task of one's own, followed literally as a new user would."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import read_metrics

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
OWN_TASK = (ROOT / "docs" / "own_task.md").read_text()


def block(name: str) -> str:
    """Return the code block that the page of a task of one's own marks with ``name``."""
    found = re.search(rf"<!-- own-task: {re.escape(name)} -->\n```\w+\n(.*?)```", OWN_TASK, re.DOTALL)
    assert found, name
    return found.group(1)


@pytest.mark.nightly
def test_own_task_page_trains_and_the_reward_rises(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    for name in ("my_prompts.jsonl", "my_rewards.py"):
        (tmp_path / name).write_text(block(name))
    command = block("command").strip().replace("python -m", f"{sys.executable} -m")
    done = subprocess.run(
        command.split(), cwd=tmp_path, capture_output=True, text=True, timeout=500, env={**os.environ}
    )
    assert done.returncode == 0, done.stderr
    rewards = [
        float(row["reward"]) for row in read_metrics(tmp_path / "runs" / "own-task" / "metrics.csv") if row["reward"]
    ]
    # Every batch holds all eight prompts, 128 rollouts; the first is sampled before any update.
    assert sum(rewards[-3:]) / 3 > rewards[0] + 0.2, rewards


@pytest.mark.nightly
def test_doctor_finds_nothing_to_warn_of_in_the_own_task_page(tmp_path: Path) -> None:
    for name in ("my_prompts.jsonl", "my_rewards.py"):
        (tmp_path / name).write_text(block(name))
    command = [sys.executable, "-m", "lit_grpo", "doctor", "--config", "own_task"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0 and "warn" not in done.stdout, done.stdout


def test_every_file_that_the_readme_names_is_there() -> None:
    for path in re.findall(r"`((?:configs|benchmarks|callbacks|lit_grpo)/[\w./-]+\.\w+)`", README + OWN_TASK):
        assert (ROOT / path).exists(), path
