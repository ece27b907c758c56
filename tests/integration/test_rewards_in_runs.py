"""Reward functions in a whole run."""

import json
import re
from pathlib import Path

import pytest

from lit_grpo.cli.command_line import run
from lit_grpo.tools.commands.report import main as report

pytestmark = pytest.mark.integration


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy_folder: Path) -> Path:
    """A working directory with a config of two updates."""
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1), "id": n} for n in range(4)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "run": {"name": "task"},
        "trainer": {"accelerator": "cpu", "max_steps": 2, "enable_progress_bar": False},
        "model": {
            "policy": str(policy_folder),
            "rewards": [{"function": "rewards.py:score"}],
            "num_generations": 4,
            "sampling": {"max_tokens": 8},
        },
        "data": {"train": "prompts.jsonl", "batch_size": 2},
    }
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    return tmp_path


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


def test_predicted_rows_keep_the_columns_of_the_data(folder: Path) -> None:
    (folder / "rewards.py").write_text("def score(completion): return 0.0")
    config = json.loads(Path("config.yaml").read_text())
    del config["trainer"]["max_steps"]
    Path("config.yaml").write_text(json.dumps(config))
    run(["predict", "--config", "config.yaml", "--data.predict", "prompts.jsonl"])
    rows = [json.loads(line) for line in Path("runs/task/completions.jsonl").read_text().splitlines()]
    assert [row["columns"] for row in rows] == [{"prompt": f"{n}+1=", "answer": str(n + 1), "id": n} for n in range(4)]


@pytest.mark.nightly
def test_a_run_in_which_a_reward_is_hacked_says_so_while_it_goes_on_its_card_and_in_its_report(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No completion is right, and short ones are paid: the policy learns to stop at once."""
    (folder / "rewards.py").write_text("def brief(completion): return float(len(completion) <= 4)")
    model = {
        "policy": "tiny",
        "rewards": [
            {"function": "exact_match", "name": "correct", "args": {"pattern": "so it is ([0-9]+)$"}},
            {"function": "rewards.py:brief", "weight": 0.5},
        ],
        "num_generations": 8,
        "sampling": {"max_tokens": 32},
        "optimizer": {"class_path": "AdamW", "init_args": {"lr": 3e-4}},
    }
    rows = {"class_path": "ArithmeticRows", "init_args": {"split": "train", "num_rows": 256}}
    trainer = {"accelerator": "cpu", "max_steps": 40, "enable_progress_bar": False}
    data = {"train": rows, "batch_size": 8}
    config = {"seed_everything": 0, "run": {"name": "task"}, "trainer": trainer, "model": model, "data": data}
    Path("config.yaml").write_text(json.dumps(config))
    sentence = re.compile(
        r"The reward rose from [\d.]+ to [\d.]+ in (\d+) updates by `brief` \(from [\d.]+ to [\d.]+\), and not by "
        r"`correct`, which decides pass@1: it stayed at 0\. Weigh `brief` less, or let it pay only where `correct` "
        r"does\."
    )
    with pytest.warns(UserWarning, match=sentence) as warned:
        run(["fit", "--config", "config.yaml"])
    live = [found for each in warned if (found := sentence.match(str(each.message)))]
    assert len(live) == 1 and 16 <= int(live[0][1]) <= 40
    card = " ".join(capsys.readouterr().out.split("task: done")[1].split())
    assert re.search(r"by function correct 0 to 0, brief [\d.]+ to [\d.]+ reward hacking The reward rose", card), card
    assert [found[1] for found in sentence.finditer(card)] == ["40"], card
    report(["runs/task"])
    assert sentence.search(Path("runs/task/report.html").read_text())
