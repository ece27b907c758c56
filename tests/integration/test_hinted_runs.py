"""Hints in real runs: they are in samples, and resume exactly. How they fall and rise is in ``test_hints.py``."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import table_rows
from hand_made import sgd
from sampled_runs import Trained, check_log_probs, describe, train_on_sums

from lit_grpo.callbacks import SampleLogger
from lit_grpo.data.module import PromptDataModule
from lit_grpo.methods.hints import Hint, HintRecord
from lit_grpo.module import GRPOModule
from lit_grpo.rewards import RewardSpec
from lit_grpo.rollout.slots.generator import SlotGenerator
from lit_grpo.types import SamplingParams
from lit_grpo.update.advantages.estimator import Advantages

NUM_PROMPTS, BATCH, GROUP, UPDATES = 6, 3, 4, 12
RUNS: dict[str, dict[str, Any]] = {
    "reference": {"plugins": ["reference_hint"]},
    "reference, replaced groups, phases": {
        "plugins": ["reference_hint:after=2", "phases:batches=2", "replace_flat:most=2"]
    },
    "reference, dcpo, while prompts stay open": {"plugins": ["reference_hint", "april"], "estimator": "dcpo"},
    "strategy": {"plugins": ['strategy_hint:say=plan,between=" "']},
}


def begins(completion: str, prompt: str, solution: str) -> float:
    """A reward that nobody earns who is not told how to begin; of every third prompt half of all completions."""
    assert prompt.endswith("=")
    if int(prompt[-4]) % 3 == 0:
        return float(sum(map(ord, completion)) % 2)
    return float(completion.startswith(solution[:3]))


class Recorded(Trained):
    """Keeps groups that are not trained on too."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.policies[pl_module.policy_version] = copy.deepcopy(pl_module.policy).double().eval()
        self.batches[pl_module.policy_version] = list(batch.rollouts)


def train(
    policy_folder: Path, run: dict[str, Any], folder: Path, checkpoint: str | None = None
) -> tuple[Recorded, GRPOModule, PromptDataModule]:
    own: dict[str, Any] = {"plugins": run.get("plugins"), "rewards": [RewardSpec(f"{__file__}:begins")]}
    own |= {"advantages": Advantages(run.get("estimator", "grpo")), "sampling": SamplingParams(max_tokens=16)}
    own |= {"generator": SlotGenerator(7), "optimizer": sgd(0.1), "checkpoint": checkpoint}
    sizes: dict[str, Any] = {
        "num_prompts": NUM_PROMPTS,
        "batch_size": BATCH,
        "max_steps": UPDATES,
        "num_generations": GROUP,
    }
    trained = Recorded()
    samples = SampleLogger(every_n_updates=1)
    module, data, _ = train_on_sums(policy_folder, folder, trained, samples, **own, **sizes)
    return trained, module, data


@pytest.mark.parametrize("name", table_rows(RUNS, ("reference",)))
def test_a_run_with_hints_resumes_exactly(policy_folder: Path, tmp_path: Path, name: str) -> None:
    trained, module, data = train(policy_folder, RUNS[name], tmp_path / "whole")
    check_log_probs(trained)
    assert any(rollout.prompt.extra.get("hint") for rollout in trained.rollouts)
    check_samples(tmp_path / "whole", "reference" in name)
    history = module.learner.history
    for version in (5, 6):
        checkpoint = str(tmp_path / "whole" / f"{version}.ckpt")
        again, resumed, resumed_data = train(policy_folder, RUNS[name], tmp_path / f"from-{version}", checkpoint)
        assert list(again.batches) == list(range(version, UPDATES))
        for number, batch in again.batches.items():
            assert describe(batch) == describe(trained.batches[number])
            assert [one.prompt for one in batch] == [one.prompt for one in trained.batches[number]]
        for one, other in zip(module.policy.parameters(), resumed.policy.parameters(), strict=True):
            assert torch.equal(one, other)
        assert resumed.learner.history.records == history.records
        assert resumed_data.state_dict() == data.state_dict()
        assert known_of_hints(resumed_data) == known_of_hints(data)


def known_of_hints(data: PromptDataModule) -> dict[str, HintRecord]:
    rewrite: Any = data.train_dataloader().rewrite
    hinter = rewrite.keywords["rules"][0]
    assert isinstance(hinter, Hint) and hinter.known
    return hinter.known


def check_samples(folder: Path, in_the_prompt: bool) -> None:
    """What users are shown is what the policy was asked."""
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    hinted = [row for row in rows if row.get("hint")]
    assert hinted
    if in_the_prompt:
        assert all(row["prompt"] in row["columns/prompt"] + row["columns/solution"] for row in hinted)
    assert all(row["prompt"] != row["columns/prompt"] for row in hinted)
    assert all(row["prompt"] == row["columns/prompt"] for row in rows if not row.get("hint"))
