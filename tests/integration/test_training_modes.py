"""Rollouts and updates that take turns in other ways: every mode trains, loses nothing, and resumes exactly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from conftest import table_rows
from hand_made import by_text, chosen, make_module, make_trainer, plugin
from sampled_runs import Trained, check_log_probs, describe, train_on_sums

from lit_grpo.callbacks import RolloutScheduler, WeightSync
from lit_grpo.data.module import PromptDataModule
from lit_grpo.methods.snapshots import Snapshots
from lit_grpo.metrics import STALENESS
from lit_grpo.module import GRPOModule
from lit_grpo.types import OBSERVED, PromptBatch
from lit_grpo.update.advantages.estimator import Advantages
from lit_grpo.update.objective.corrections import Correction
from lit_grpo.update.objective.objective import Objective
from lit_grpo.update.plugin import Batch

NUM_PROMPTS, BATCH, GROUP, UPDATES = 5, 2, 4, 7
MODES = [
    None,
    "april",
    "april:max_staleness=3",
    "april:unit=completion,batches_in_work=1.5",
    "sortedrl:batches_in_work=3",
    "sortedrl:unit=group,batches_in_work=2,max_restarts=1",
    "sortedrl_partial:batches_in_work=3,max_staleness=2",
    "chunked:tokens_per_update=5",
]


def train(
    policy_folder: Path,
    mode: str | None,
    folder: Path,
    checkpoint: str | None = None,
    callbacks: Sequence[pl.Callback] = (),
    method: str | None = None,
    **settings: Any,
) -> tuple[Trained, GRPOModule, RolloutScheduler]:
    own: dict[str, Any] = {"plugins": chosen(mode, method), "checkpoint": checkpoint, "rewards": [by_text()]}
    sizes: dict[str, Any] = {
        "num_prompts": NUM_PROMPTS,
        "batch_size": BATCH,
        "max_steps": UPDATES,
        "num_generations": GROUP,
    }
    trained = Trained()
    module, _, scheduler = train_on_sums(policy_folder, folder, trained, *callbacks, **own, **sizes, **settings)
    return trained, module, scheduler


QUICK = (*(None, "sortedrl_partial:batches_in_work=3,max_staleness=2"),)


@pytest.mark.parametrize("mode", table_rows(MODES, QUICK))
def test_nothing_is_lost_and_every_token_is_of_its_version_and_resuming_is_exact(
    policy_folder: Path, tmp_path: Path, mode: str
) -> None:
    trained, module, scheduler = train(policy_folder, mode, tmp_path / "whole")
    cap = plugin(mode).max_staleness if mode else 0
    check_staleness(trained, cap)
    check_log_probs(trained)
    check_stream(trained, scheduler)
    for version in (2, 4):
        checkpoint = str(tmp_path / "whole" / f"{version}.ckpt")
        again, resumed, _ = train(policy_folder, mode, tmp_path / f"from-{version}", checkpoint)
        assert list(again.batches) == list(range(version, UPDATES))
        for number, batch in again.batches.items():
            assert describe(batch) == describe(trained.batches[number])
        for one, other in zip(module.policy.parameters(), resumed.policy.parameters(), strict=True):
            assert torch.equal(one, other)


def check_staleness(trained: Trained, cap: int) -> None:
    """No token is older than the mode allows, and where it allows older ones, there are some."""
    seen = set()
    for version, batch in trained.batches.items():
        for rollout in batch:
            versions = rollout.completion.versions_T
            seen.update((version - versions[versions != OBSERVED]).tolist())
    assert min(seen) == 0 and max(seen) <= cap
    assert bool(cap) == (max(seen) > 0)
    assert [max(log["staleness/max"] for log in trained.logs)] == [max(seen)]
    for log in trained.logs if cap else ():
        shares = [log["staleness/fresh"], *(log[f"staleness/share_{name}"] for name in STALENESS)]
        assert sum(shares) == pytest.approx(1) and (shares[0] < 1) == (log["staleness/max"] > 0)


def check_stream(trained: Trained, scheduler: RolloutScheduler) -> None:
    """Every sample of every prompt that was drawn is trained on once, or still open; an epoch has each prompt once."""
    keys = [rollout.completion.request.key for rollout in trained.rollouts]
    assert len(keys) == len(set(keys))
    (state,) = scheduler.state_dict()["ranks"]
    open_groups = {(group["prompt"]["prompt_id"], group["prompt"]["visit"]) for group in state["buffer"]["groups"]}
    assert trained.logs[-1].get("rollout/open_prompts", 0) == len(open_groups)
    groups = {key[:2] for key in keys}
    assert all(sum(key[:2] == group for key in keys) == GROUP for group in groups - open_groups)
    drawn = sorted(visit for _, visit in groups | open_groups)
    epochs = len(drawn) // NUM_PROMPTS
    assert drawn == sorted([*range(epochs)] * NUM_PROMPTS + [epochs] * (len(drawn) - epochs * NUM_PROMPTS))


class Interrupt(pl.Callback):
    """Ends the run in an update, once its rollout has been given out, and saves a checkpoint as an ended run does."""

    def __init__(self, at: int, path: Path) -> None:
        self.at, self.path = at, path

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        if trainer.global_step == self.at:
            trainer.save_checkpoint(self.path)
            raise InterruptedError


@pytest.mark.parametrize("mode", ["sortedrl_partial:batches_in_work=3,max_staleness=2"])
def test_an_update_that_is_cut_off_is_taken_again_with_its_rollout(
    policy_folder: Path, tmp_path: Path, mode: str
) -> None:
    trained, module, _ = train(policy_folder, mode, tmp_path / "whole")
    checkpoint = tmp_path / "cut-off.ckpt"
    with pytest.raises(InterruptedError):
        train(policy_folder, mode, tmp_path / "cut", callbacks=[Interrupt(3, checkpoint)])
    again, resumed, _ = train(policy_folder, mode, tmp_path / "again", str(checkpoint))
    assert list(again.batches) == list(range(3, UPDATES))
    for number, batch in again.batches.items():
        assert describe(batch) == describe(trained.batches[number])
    for one, other in zip(module.policy.parameters(), resumed.policy.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_checkpoint_of_another_mode_is_refused_while_prompts_are_open(policy_folder: Path, tmp_path: Path) -> None:
    train(policy_folder, "april", tmp_path)
    with pytest.raises(ValueError, match=r"has 2 prompts in work, begun on 1 ranks with rollout.plugins april"):
        train(policy_folder, "chunked:tokens_per_update=5", tmp_path / "other", str(tmp_path / f"{UPDATES}.ckpt"))


def test_groups_that_leave_in_parts_do_not_go_with_what_remembers_visits(policy_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1="}\n{"prompt": "2+2="}\n')
    data = PromptDataModule(str(policy_folder), train=str(tmp_path / "prompts.jsonl"), batch_size=2)
    module = make_module(policy_folder, advantages=Advantages("dcpo"), rewards=[by_text()], num_generations=2)
    trainer = make_trainer(RolloutScheduler(plugins=["sortedrl"]), WeightSync(), max_steps=1)
    with pytest.raises(ValueError, match=r"estimator dcpo needs complete groups .* sortedrl lets .*; add unit=group"):
        trainer.fit(module, datamodule=data)


def test_a_mode_needs_the_data_module(policy_folder: Path) -> None:
    module = make_module(policy_folder, rewards=[by_text()])
    trainer = make_trainer(RolloutScheduler(plugins=["april"]), WeightSync(), max_steps=1)
    with pytest.raises(ValueError, match=r"april needs prompts from .*PromptDataModule, but a dataloader of yo"):
        trainer.fit(module, train_dataloaders=[PromptBatch([])])


APRIL = "april:max_staleness=3"


def test_snapshots_in_a_run_of_april_are_exact_and_resume(policy_folder: Path, tmp_path: Path) -> None:
    """Old log-probs against whole policies of each version; the weights of no version are kept longer than needed."""
    objective = Objective(correction=Correction("token_truncate"))
    seen: dict[int, dict[Any, torch.Tensor]] = {}
    measure = Snapshots.on_batch

    def kept(self: Snapshots, batch: Batch) -> None:
        measure(self, batch)
        given = [rollout for rollout in batch.rollouts if "old_logprob" in rollout.columns]
        seen[batch.version] = {each.completion.request.key: each.columns["old_logprob"] for each in given}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Snapshots, "on_batch", kept)
        trained, module, _ = train(policy_folder, APRIL, tmp_path / "whole", method="snapshots", objective=objective)
    num_old = 0
    for version, batch in trained.batches.items():
        for rollout in batch:
            completion, prompt = rollout.completion, rollout.prompt.token_ids
            old_T = seen[version].get(completion.request.key)
            if old_T is None:
                continue
            row = torch.tensor([[*prompt, *completion.token_ids_T.tolist()]])
            for place, of in enumerate(completion.versions_T.tolist()):
                assert math.isnan(old_T[place]) == (of == version)
                if of < version:
                    logits_TV = trained.policies[of](input_ids=row).logits[0, len(prompt) - 1 + place]
                    expected = logits_TV.log_softmax(-1)[completion.token_ids_T[place]]
                    assert float(old_T[place]) == pytest.approx(float(expected), abs=1e-4)
                    num_old += 1
    assert num_old > 0
    assert all(log["snapshots/versions"] <= 4 for log in trained.logs)
    checkpoint = str(tmp_path / "whole" / "4.ckpt")
    _, resumed, _ = train(policy_folder, APRIL, tmp_path / "on", checkpoint, method="snapshots", objective=objective)
    for one, other in zip(module.policy.parameters(), resumed.policy.parameters(), strict=True):
        assert torch.equal(one, other)
