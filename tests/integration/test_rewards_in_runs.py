"""Reward functions in a whole run."""

import json
from pathlib import Path

import pytest

from lit_grpo.cli.command_line import run
from tests.task_folders import write_task

pytestmark = pytest.mark.integration


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy_folder: Path) -> Path:
    """A working directory with a config of two updates."""
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1), "id": n} for n in range(4)]
    return write_task(tmp_path, policy_folder, "", rows, trainer={"max_steps": 2})


def test_a_reward_function_of_trl_sees_training_and_logs(folder: Path) -> None:
    (folder / "rewards.py").write_text(
        "def score(prompts, completions, completion_ids, trainer_state, log_metric, log_extra, **kwargs):\n"
        "    log_metric('judge/step', trainer_state.global_step)\n"
        "    log_metric('judge/epoch', trainer_state.epoch)\n"
        "    log_metric('judge/max_steps', trainer_state.max_steps)\n"
        "    log_extra('expected', kwargs['answer'])\n"
        "    return [len(ids) % 3 for ids in completion_ids]\n"
    )
    run(["fit", "--config", "config.yaml"])
    header, *rows = [line.split(",") for line in Path("runs/task/metrics.csv").read_text().splitlines()]
    logged = [[float(row[header.index(f"judge/{name}")]) for name in ("step", "epoch", "max_steps")] for row in rows]
    assert logged == [[0.0, 0.0, 2.0], [1.0, 0.5, 2.0]]
    samples = [json.loads(line) for line in Path("runs/task/samples.jsonl").read_text().splitlines()]
    assert all(sample["expected"] in {"1", "2", "3", "4"} for sample in samples)
