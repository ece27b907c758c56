"""Tasks in folders of their own, as the command line is given them, and what their runs have written."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def write_task(
    folder: Path,
    policy: str | Path,
    reward: str,
    rows: int | Sequence[dict[str, Any]] = 6,
    lr: float | None = None,
    **sections: dict[str, Any],
) -> Path:
    """Write ``prompts.jsonl``, ``rewards.py`` and ``config.yaml``; return the folder.

    Args:
        folder: An empty folder, or one whose task is to be replaced.
        policy: The value of ``model.policy``.
        reward: The code of ``rewards.py``, with a function ``score``.
        rows: The rows, or their number: each is then a sum to be completed.
        lr: Learning rate of AdamW; without it, the default optimizer.
        sections: Fields of the config by section, in addition to those that every task has, or instead of them.
    """
    rows = [{"prompt": f"{n}+{n + 1}="} for n in range(rows)] if isinstance(rows, int) else rows
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(reward)
    config: dict[str, dict[str, Any]] = {
        "run": {"name": "task"},
        "trainer": {"accelerator": "cpu", "enable_progress_bar": False},
        "model": {
            "policy": str(policy),
            "rewards": [{"function": "rewards.py:score"}],
            "num_generations": 4,
            "sampling": {"max_tokens": 8},
        },
        "data": {"train": "prompts.jsonl", "batch_size": 2},
        "rollout_timeline": {"every_n_updates": 0},  # a picture takes a tenth of the time of a short run
    }
    if lr is not None:
        config["model"]["optimizer"] = {"class_path": "torch.optim.AdamW", "init_args": {"lr": lr}}
    for name, section in sections.items():
        config[name] = config.get(name, {}) | section
    (folder / "config.yaml").write_text(json.dumps(config))
    return folder


def computed_metrics(run: Path) -> list[dict[str, str]]:
    """The rows of a run's ``metrics.csv`` without what measures time or memory: equal runs have equal ones."""
    measured = ("time/", "perf/", "memory/")
    with (run / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [{key: value for key, value in row.items() if not key.startswith(measured)} for row in rows]
