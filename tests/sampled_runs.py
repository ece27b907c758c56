"""Real runs on sums, sampled on the spot: what was trained on at each version, and a checkpoint after each update."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from hand_made import Checkpoints, make_module, make_trainer, sgd

from lit_grpo.callbacks import RolloutScheduler, WeightSync
from lit_grpo.data.module import PromptDataModule
from lit_grpo.module import GRPOModule
from lit_grpo.rollout.slots.generator import SlotGenerator
from lit_grpo.types import PromptBatch, Rollout, SamplingParams


def train_on_sums(
    policy_folder: Path,
    folder: Path,
    *callbacks: pl.Callback,
    plugins: Any,
    num_prompts: int,
    batch_size: int,
    max_steps: int,
    checkpoint: str | None = None,
    **settings: Any,
) -> tuple[GRPOModule, PromptDataModule, RolloutScheduler]:
    """Train; return what was trained, what it was trained on, and the scheduler.

    Args:
        policy_folder: The policy to begin with.
        folder: For the prompts, which have a solution each, and for the checkpoints, ``VERSION.ckpt``.
        callbacks: After those of every run.
        plugins: ``rollout.plugins``.
        num_prompts: Prompts that there are.
        batch_size: Prompts of an update.
        max_steps: Optimizer steps.
        checkpoint: Where to go on from.
        settings: Of the module.
    """
    folder.mkdir(exist_ok=True)
    rows = [{"prompt": f"{n}+{n + 1}=", "solution": f"{n}bcdefgh"} for n in range(num_prompts)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = PromptDataModule(str(policy_folder), train=str(folder / "prompts.jsonl"), batch_size=batch_size)
    usual: dict[str, Any] = {"generator": SlotGenerator(6), "optimizer": sgd(0.5)}
    usual["sampling"] = SamplingParams(max_tokens=24)
    module: GRPOModule = make_module(policy_folder, **(usual | settings))
    scheduler = RolloutScheduler(plugins=plugins)
    limits: dict[str, Any] = {"max_steps": max_steps, "max_epochs": -1, "default_root_dir": folder}
    trainer = make_trainer(scheduler, WeightSync(), *callbacks, Checkpoints(folder), **limits)
    trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True)
    return module, data, scheduler


class Trained(pl.Callback):
    """Keeps the policy of each version, and what was trained on at each."""

    def __init__(self) -> None:
        self.policies: dict[int, Any] = {}
        self.batches: dict[int, list[Rollout]] = {}
        self.logs: list[dict[str, float]] = []

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: PromptBatch, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, GRPOModule)
        version = pl_module.policy_version
        self.policies[version] = copy.deepcopy(pl_module.policy).double().eval()
        self.batches[version] = list(batch.rollouts)
        assert all(rollout.kept for rollout in batch.rollouts)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: PromptBatch, batch_idx: int
    ) -> None:
        self.batches[max(self.batches)] = list(batch.rollouts)  # of one that was trained on as it came, they are here
        self.logs.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    @property
    def rollouts(self) -> list[Rollout]:
        """All of them."""
        return [rollout for batch in self.batches.values() for rollout in batch]


def check_log_probs(trained: Trained) -> None:
    """Each token's log-prob is what the policy of its version gives to it, in float64."""
    for rollout in trained.rollouts:
        completion, prompt = rollout.completion, rollout.prompt.token_ids
        ids_T = torch.cat([torch.tensor(prompt), completion.token_ids_T])
        for version in completion.versions_T.unique().tolist():
            logits_TV = trained.policies[version](input_ids=ids_T[None], use_cache=False).logits[0]
            logprobs_T = logits_TV.log_softmax(-1)[len(prompt) - 1 : -1]
            exact_T = logprobs_T.gather(-1, completion.token_ids_T[:, None]).squeeze(-1)
            own_T = completion.versions_T == version
            assert torch.allclose(exact_T[own_T].float(), completion.logprobs_T[own_T], atol=1e-4)


def describe(rollouts: Sequence[Rollout]) -> list[Any]:
    return [
        (c.request.key, c.token_ids_T.tolist(), c.versions_T.tolist(), c.trained_T.tolist(), c.logprobs_T.tolist())
        for c in (rollout.completion for rollout in rollouts)
    ]
