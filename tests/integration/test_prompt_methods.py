"""Methods that choose prompts, completions and steps: two updates of the demo by the real command, and identities."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest
import torch
from test_budgets import train

from lit_grpo.cli.command_line import run

pytestmark = pytest.mark.integration

LOGGED: dict[str, tuple[str, ...]] = {
    "[{dps: {candidates: 2}}]": ("prompts/partly_expected", "prompts/partly_passed", "prompts/skipped"),
    "[{xrpo: {base: 3}}, novelty]": ("budget/further_completions", "budget/frac_flat_first"),
    "[{prompt_gdro: {bins: 3}}, rollout_gdro]": ("prompts/loss_of_bin/0", "prompts/loss_of_bin/2", "prompts/skipped"),
}
"""What is logged, by plug-ins."""
PLAIN = ["dps:candidates=1", "xrpo:base=4", "novelty:weight=0", "prompt_gdro:exploration=1", "rollout_gdro:bins=1"]
"""Settings at which a method is plain GRPO."""


@pytest.mark.parametrize("plugins", LOGGED)
def test_two_updates_of_the_demo(plugins: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = {"data.batch_size": 4, "data.train.init_args.num_rows": 16, "data.validation.init_args.num_rows": 4}
    small = [text for name, number in sizes.items() for text in (f"--{name}", str(number))]
    steps = ["--trainer.max_steps", "2", "--trainer.val_check_interval", "2"]
    run(["fit", "--config", "arithmetic", *small, *steps, "--rollout.plugins", plugins])
    with (tmp_path / "runs" / "arithmetic" / "metrics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["reward"]]
    assert len(rows) == 2
    for row in rows:
        assert all(math.isfinite(float(row[name])) for name in LOGGED[plugins]), row


@pytest.mark.parametrize("plugin", PLAIN)
def test_a_setting_is_plain_grpo(plugin: str, policy_folder: Path, tmp_path: Path) -> None:
    runs = [train(policy_folder, {"plugins": plugins}, tmp_path / str(len(plugins))) for plugins in ([], [plugin])]
    one, other = (module for _, module, _ in runs)
    for mine, theirs in zip(one.policy.parameters(), other.policy.parameters(), strict=True):
        assert torch.equal(mine, theirs)
