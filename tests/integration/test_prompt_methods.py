"""Methods that choose prompts, completions and steps: two updates of the demo by the real command, and identities."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest
import torch
from conftest import table_rows
from sampled_runs import describe
from test_budgets import BATCH, sizes, train

from lit_grpo.cli.command_line import run

pytestmark = pytest.mark.integration

LOGGED: dict[str, tuple[str, ...]] = {
    "[{dps: {candidates: 2}}]": ("prompts/partly_expected", "prompts/partly_passed", "prompts/skipped"),
    "[{xrpo: {base: 3}}, novelty]": ("budget/further_completions", "budget/frac_flat_first"),
    "[{prompt_gdro: {bins: 3}}, rollout_gdro]": ("prompts/loss_of_bin/0", "prompts/loss_of_bin/2", "prompts/skipped"),
    "[noise_scale]": ("noise/signal", "noise/trace", "noise/prompts"),
    "[{norm_test: {eta: 0.1, warm_up: 1, most: 6, smoothing: 1.0}}]": ("noise/prompts", "noise/step_scale"),
    "[{goodput: {warm_up: 1, most: 8}}]": ("noise/prompts", "noise/step_scale"),
}
"""What is logged, by plug-ins."""
PLAIN = ["dps:candidates=1", "xrpo:base=4", "novelty:weight=0", "prompt_gdro:exploration=1", "rollout_gdro:bins=1"]
"""Settings at which a method is plain GRPO."""


@pytest.mark.parametrize("plugins", table_rows(LOGGED, [*LOGGED][1:4:2]))
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


@pytest.mark.parametrize("plugin", table_rows(PLAIN, PLAIN[:2]))
def test_a_setting_is_plain_grpo(plugin: str, policy_folder: Path, tmp_path: Path) -> None:
    runs = [train(policy_folder, {"plugins": plugins}, tmp_path / str(len(plugins))) for plugins in ([], [plugin])]
    one, other = (module for _, module, _ in runs)
    for mine, theirs in zip(one.policy.parameters(), other.policy.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_batches_grow_by_the_norm_test_and_go_on_so_from_a_checkpoint(policy_folder: Path, tmp_path: Path) -> None:
    rule = {"plugins": ["norm_test:eta=0.3,most=6,warm_up=2,smoothing=0.2"]}
    trained, module, _ = train(policy_folder, rule, tmp_path / "whole")
    prompts = [len(counts) for counts in sizes(trained)]
    assert prompts[0] == BATCH and prompts == sorted(prompts) and prompts[-1] > BATCH
    assert prompts == [log["noise/prompts"] for log in trained.logs]
    assert [log["noise/step_scale"] ** 2 * BATCH for log in trained.logs] == pytest.approx(prompts)
    for version in (2, 6):
        checkpoint = str(tmp_path / "whole" / f"{version}.ckpt")
        again, resumed, _ = train(policy_folder, rule, tmp_path / str(version), checkpoint)
        for number, batch in again.batches.items():
            assert describe(batch) == describe(trained.batches[number])
        for one, other in zip(module.policy.parameters(), resumed.policy.parameters(), strict=True):
            assert torch.equal(one, other)
