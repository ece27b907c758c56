"""Reward functions in a whole run."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lit_grpo.cli.command_line import run
from tests.doubles.judge_server import JudgeServer, judge_server, scores_by
from tests.task_folders import write_task


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


def judged(server: JudgeServer, **settings: Any) -> list[dict[str, Any]]:
    args = {"url": server.url, "model": "m", "cache": "judge.sqlite", **settings}
    return [{"function": "relative_judge", "name": "judge", "args": args}]


def columns(names: Sequence[str]) -> dict[str, list[float]]:
    """Columns of the run's table, of updates alone."""
    rows = list(csv.DictReader(Path("runs/task/metrics.csv").read_text().splitlines()))
    return {name: [float(row[name]) for row in rows if row["reward"]] for name in names}


def test_a_run_is_rewarded_by_a_judge_that_compares_each_group_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with judge_server(scores_by(lambda place, said: round(1 / (1 + len(said)), 3))) as server:
        rows = [{"prompt": prompt} for prompt in ("095%12=", "147%15=", "088%13=", "261%21=")]
        write_task(
            tmp_path,
            "tiny",
            "",
            rows,
            trainer={"max_steps": 3},
            model={"rewards": judged(server), "sampling": {"max_tokens": 48}},
        )
        run(["fit", "--config", "config.yaml", "--model.num_generations", "8"])
        names = ["calls", "prompt_tokens", "completion_tokens", "cache_hits", "failures", "mean"]
        logged = columns([f"rewards/judge/{name}" for name in names])
        assert list(logged.values())[:5] == [[2.0] * 3, [200.0] * 3, [20.0] * 3, [0.0] * 3, [0.0] * 3]
        assert len(server.seen) == 6
        shown = [each["completion"] for seen in server.documents for each in seen["completions"]]
        samples = [json.loads(line) for line in Path("runs/task/samples.jsonl").read_text().splitlines()]
        for sample in samples:
            assert sample["completion"] in shown
            assert sample["rewards/judge"] == round(1 / (1 + len(sample["completion"])), 3)
        assert samples
        assert logged["rewards/judge/mean"] == columns(["reward"])["reward"]


def test_a_run_whose_judge_reaches_its_limit_is_saved_and_resumes_without_asking_again(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with judge_server(scores_by(lambda place, said: len(said) / 100)) as server:
        config = json.loads((folder / "config.yaml").read_text())
        config["model"]["rewards"] = judged(server, call_limit=3)
        (folder / "config.yaml").write_text(json.dumps(config))
        with pytest.raises(SystemExit):
            run(["fit", "--config", "config.yaml"])
        said = capsys.readouterr()
        assert "has used the 3 calls of this run (call_limit); raise the limit and resume" in said.err + said.out
        config["model"]["rewards"] = judged(server, call_limit=4)
        (folder / "config.yaml").write_text(json.dumps(config))
        run(["fit", "--config", "config.yaml", "--ckpt_path", "runs/task/checkpoints/last.ckpt"])
        logged = columns(["rewards/judge/calls", "rewards/judge/cache_hits"])
        assert logged == {"rewards/judge/calls": [2.0, 1.0], "rewards/judge/cache_hits": [0.0, 1.0]}
        assert len(server.seen) == 4
