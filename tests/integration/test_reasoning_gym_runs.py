"""Runs on questions of reasoning-gym, with their reward and a curriculum."""

from __future__ import annotations

import csv
from importlib import util
from pathlib import Path
from typing import Any

import pytest
from conftest import random_policy
from test_conversations import save_tokenizer

from lit_grpo.cli.command_line import run

pytestmark = pytest.mark.skipif(util.find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed")

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
SMALL = ["--trainer.val_check_interval", "3", "--data.validation.init_args.num_rows", "4"]
SMALL += ["--data.train.init_args.num_rows", "48", "--model.sampling.max_tokens", "8", "--data.batch_size", "4"]


def rows_of(folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.glob("runs/*/metrics.csv")
    return [row for row in csv.DictReader(path.open()) if row["reward"]]


@pytest.fixture
def policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A random policy of bytes, with a chat template."""
    monkeypatch.chdir(tmp_path)
    random_policy(vocab_size=257, max_position_embeddings=1024).save_pretrained(tmp_path / "policy")
    return save_tokenizer(tmp_path / "policy", TEMPLATE)


def test_a_level_rises_where_everybody_passes_and_a_run_that_goes_on_knows_it(policy: str, tmp_path: Path) -> None:
    (tmp_path / "easy.py").write_text("def good(completion, level):\n    return 1.0 if level == 0 else 0.5\n")
    command = ["fit", "--config", "reasoning_gym", "--model.policy", policy, *SMALL, "--run.name", "rising"]
    command += [f"--data.{split}.init_args.tasks=gcd" for split in ("train", "validation")]
    command += ["--model.rewards", '[{"function": "easy.py:good"}]']
    command += ["--rollout.plugins", '[{"curriculum": {"batches": 1, "raise_at": 0.5, "lower_at": 0}}]']
    run([*command, "--trainer.max_steps", "1"])
    run([*command, "--trainer.max_steps", "2", "--ckpt_path", "runs/rising/checkpoints/last.ckpt"])
    levels = [{row[name] for name in row if name.startswith("prompts/level/")} for row in rows_of(tmp_path)]
    assert levels == [{"0.0"}, {"1.0"}]
