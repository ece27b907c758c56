"""Rules of advantages in real runs: they learn, and a run that is broken off goes on exactly."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import table_rows
from sampled_runs import check_log_probs, describe
from test_budgets import UPDATES, train

pytestmark = pytest.mark.integration

RULES: dict[str, dict[str, Any]] = {
    "drpo": {"plugins": ["drpo"]},
    "poise": {"plugins": ["poise:at=4"]},
    "majority vote": {"plugins": [{"majority_vote": {"pattern": "^(.)"}}]},
    "copo": {"plugins": [{"copo": {"pattern": "^(.)", "rho": 0.9}}]},
}


@pytest.mark.parametrize("name", table_rows(RULES, ["poise"]))
def test_a_run_with_a_rule_of_advantages_resumes_exactly(policy_folder: Path, tmp_path: Path, name: str) -> None:
    trained, module, _ = train(policy_folder, RULES[name], tmp_path / "whole")
    check_log_probs(trained)
    plain, other_module, _ = train(policy_folder, {}, tmp_path / "plain")
    assert describe(trained.batches[0]) == describe(plain.batches[0])
    differences = [
        float((one - other).detach().abs().max())
        for one, other in zip(module.policy.parameters(), other_module.policy.parameters(), strict=True)
    ]
    assert max(differences) > 0 and all(math.isfinite(difference) for difference in differences)
    version = 4
    checkpoint = str(tmp_path / "whole" / f"{version}.ckpt")
    again, resumed, _ = train(policy_folder, RULES[name], tmp_path / "resumed", checkpoint)
    assert list(again.batches) == list(range(version, UPDATES))
    for number, batch in again.batches.items():
        assert describe(batch) == describe(trained.batches[number])
    for one, other in zip(module.policy.parameters(), resumed.policy.parameters(), strict=True):
        assert torch.equal(one, other)
