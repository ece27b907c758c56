"""Replay in real runs: successes come again with what they were sampled with, and runs resume exactly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from conftest import table_rows
from sampled_runs import train_on_sums
from test_two_ranks import SlotsBeside

from lit_grpo.callbacks import RolloutScheduler
from lit_grpo.module import GRPOModule
from lit_grpo.rewards import RewardSpec
from lit_grpo.types import PromptBatch, RolloutGroup
from lit_grpo.update.objective.corrections import Correction
from lit_grpo.update.objective.objective import Objective

pytestmark = pytest.mark.filterwarnings("ignore")

NUM_PROMPTS, BATCH, GROUP, BATCHES = 4, 2, 4, 8
CORRECTED = Objective(correction=Correction("token_truncate"))
RUNS: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "repo, two steps a batch, corrected": {"plugins": ["repo:members=3"], "objective": CORRECTED, "num_minibatches": 2},
    "april": {"plugins": ["rlep", "april:max_staleness=3"]},
    "recomputed, two steps a batch": {"objective": Objective(proximal="recomputed"), "num_minibatches": 2},
    "rounds and a selection": {
        "plugins": ["rlep:members=3,share=0.6,kept=4", "balanced:rounds=2,passed=1,failed=1", "pods:keep=4"],
    },
    "groups are replaced": {"plugins": ["rlep", "replace_flat:most=2"]},
}


def rarely(completion: str) -> float:
    return float(sum(map(ord, completion)) % 4 == 0)


class Batches(pl.Callback):
    """Keeps the groups of each batch once they have been trained on, and what was logged."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, list[RolloutGroup]]] = []
        self.logs: list[dict[str, float]] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: PromptBatch, batch_idx: int) -> None:
        self.version = pl_module.policy_version

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: PromptBatch, batch_idx: int
    ) -> None:
        self.batches.append((self.version, list(batch.groups)))
        self.logs.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def train(
    policy_folder: Path, folder: Path, options: dict[str, Any], checkpoint: str | None = None, **settings: Any
) -> tuple[Batches, GRPOModule, RolloutScheduler]:
    own: dict[str, Any] = {"plugins": ["rlep"], "rewards": [RewardSpec(f"{__file__}:rarely")]} | options | settings
    steps = BATCHES * options.get("num_minibatches", 1)
    sizes: dict[str, Any] = {
        "num_prompts": NUM_PROMPTS,
        "batch_size": BATCH,
        "max_steps": steps,
        "num_generations": GROUP,
    }
    recorded = Batches()
    module, _, scheduler = train_on_sums(policy_folder, folder, recorded, checkpoint=checkpoint, **own, **sizes)
    return recorded, module, scheduler


def check_replays(recorded: Batches, share: float = 0.5, selects: bool = False) -> None:
    """What is replayed is a success of an earlier visit that had been trained on, with all that it had then.

    Where its log-probs are recomputed, it has those of the policy that learns from it.
    """
    known: dict[tuple[str, bytes], list[tuple[list[float], list[int]]]] = {}
    num_replayed = 0
    for version, groups in recorded.batches:
        ages, num_trained = [], 0
        for group in groups:
            replayed = [rollout for rollout in group.rollouts if rollout.replayed]
            num_trained += sum(rollout.kept for rollout in group.rollouts)
            assert len(replayed) <= share * len(group.rollouts)
            keys = [rollout.completion.request.key for rollout in group.rollouts]
            assert len({*keys}) == len(keys) and not any(path[0] < 0 for *_, path in keys[: len(group.fresh)])
            for rollout in replayed:
                completion = rollout.completion
                found = known[group.prompt.prompt_id, completion.token_ids_T.numpy().tobytes()]
                assert rollout.reward == 1.0 and (selects or math.isfinite(rollout.advantage))
                if rollout.recompute:
                    assert {version} == {*completion.versions_T.tolist()}
                    ages.append(version - min(found[-1][1]))
                    continue
                assert (completion.logprobs_T.tolist(), completion.versions_T.tolist()) in found
                assert completion.newest_version is not None and completion.newest_version < version
                ages.append(version - (completion.oldest_version or 0))
        log = recorded.logs[[v for v, _ in recorded.batches].index(version)]
        assert log["replay/members"] == pytest.approx(len(ages) / num_trained if num_trained else 0.0)
        assert (log["replay/age"] == pytest.approx(sum(ages) / len(ages))) if ages else math.isnan(log["replay/age"])
        num_replayed += len(ages)
        for rollout in (rollout for group in groups for rollout in group.fresh):
            if rollout.reward == 1.0:
                of = rollout.prompt.prompt_id, rollout.completion.token_ids_T.numpy().tobytes()
                had = rollout.completion.logprobs_T.tolist(), rollout.completion.versions_T.tolist()
                known.setdefault(of, []).append(had)
        assert log["replay/prompts"] <= len({prompt_id for prompt_id, _ in known})
    assert num_replayed >= 3


def describe(groups: Sequence[RolloutGroup]) -> list[Any]:
    return [
        (
            rollout.completion.request.key,
            rollout.completion.token_ids_T.tolist(),
            rollout.completion.logprobs_T.tolist(),
            rollout.completion.versions_T.tolist(),
            rollout.reward,
            rollout.replayed,
            repr(rollout.advantage),
        )
        for group in groups
        for rollout in group.rollouts
    ]


@pytest.mark.parametrize("name", table_rows(RUNS, ("repo, two steps a batch, corrected",)))
def test_successes_come_again_and_a_run_resumes_exactly(policy_folder: Path, tmp_path: Path, name: str) -> None:
    recorded, module, scheduler = train(policy_folder, tmp_path / "whole", RUNS[name])
    selects = "pods:keep=4" in RUNS[name].get("plugins", [])
    check_replays(recorded, 0.6 if selects else 0.5, selects)
    history = module.learner.history.records
    groups = [group for _, some in recorded.batches for group in some]
    assert sum(record.num_visits for record in history.values()) == len(groups)
    versions = [version for version, _ in recorded.batches]
    for place in (4, 5):
        checkpoint = str(tmp_path / "whole" / f"{versions[place]}.ckpt")
        again, resumed, other = train(policy_folder, tmp_path / f"from-{place}", RUNS[name], checkpoint)
        assert [version for version, _ in again.batches] == versions[place:]
        for (_, expected), (_, actual) in zip(recorded.batches[place:], again.batches, strict=True):
            assert describe(actual) == describe(expected)
        for one, two in zip(module.policy.parameters(), resumed.policy.parameters(), strict=True):
            assert torch.equal(one, two)
        assert resumed.learner.history.records == history
        assert repr(other.state_dict()["plugins"]) == repr(scheduler.state_dict()["plugins"])


@pytest.mark.parametrize("mode", table_rows(["periodic", "asynchronous:max_staleness=1"], ["periodic"]))
def test_successes_come_again_where_others_decode_beside_the_update(
    policy_folder: Path, tmp_path: Path, mode: str
) -> None:
    options: dict[str, Any] = {"plugins": ["rlep", mode]}
    recorded, _, _ = train(policy_folder, tmp_path, options, generator=SlotsBeside(lag=0, num_slots=6))
    assert len(recorded.batches) == BATCHES
    check_replays(recorded)
