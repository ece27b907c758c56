"""Completions that begin within others in real runs, by the real command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import read_metrics, table_rows

from lit_grpo.cli.command_line import run

TOOL = "{environments: {tools: [lit_grpo.tasks.calculator.calculate], max_turns: 3, tool_timeout_s: 10}}"
UNSURE = "top: 2, depth: 0, low: 0.05, high: 0.3, rise: 0.0, unsure: 0.499"
RUNS = {
    "eptree": ("arithmetic", 6, "[{eptree: {tokens: 2, rounds: 1, branches: 2}}]", 30),
    "treepo": ("arithmetic", 4, "[{treepo: {width: 16, segment: 6}}]", 16),
    "latr": ("arithmetic", 4, "[{latr: {width: 16, least: 0.02, gap: 1.0, look_ahead: 6}}]", 16),
    "echo_tree": ("arithmetic", 4, f"[{{echo_tree: {{width: 16, {UNSURE}}}}}]", 16),
    "arpo": ("calculator", 4, f"[{TOOL}, {{arpo: {{width: 8}}}}]", 8),
    "aepo": ("calculator", 4, f"[{TOOL}, {{aepo: {{width: 8}}}}]", 8),
    "trace": ("calculator", 4, f"[{TOOL}, {{trace: {{width: 8}}}}]", 8),
}


@pytest.mark.parametrize("name", table_rows(RUNS, ("trace",)))
def test_two_updates(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, size, plugins, most = RUNS[name]
    monkeypatch.chdir(tmp_path)
    sizes = [
        "--data.batch_size",
        "4",
        "--data.train.init_args.num_rows",
        "16",
        "--model.num_generations",
        str(size),
        "--trainer.limit_val_batches",
        "0",
    ]
    run(["fit", "--config", config, "--trainer.max_steps", "2", *sizes, "--rollout.plugins", plugins])
    folder = tmp_path / "runs" / config
    rows = [row for row in read_metrics(folder / "metrics.csv") if row.get("rollout/branched_share")]
    assert len(rows) == 2
    shares = [float(row["rollout/branched_share"]) for row in rows]
    assert sum(shares) > 0.05 and max(shares) <= 1 - size / most + 1e-6
    assert sum(float(row["rollout/branched_tokens_saved"]) for row in rows) > 0
    assert all(float(row["grad_norm"]) > 0 and float(row["update/skipped"]) == 0 for row in rows)
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert samples
