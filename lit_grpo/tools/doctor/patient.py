"""The run that is examined, as the trainer has set it up for its first update."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import lightning.pytorch as pl
import torch

from lit_grpo.callbacks import RolloutScheduler, WeightSync
from lit_grpo.data.module import PromptDataModule
from lit_grpo.module import GRPOModule
from lit_grpo.tools.doctor.report import Report
from lit_grpo.types import Prompt, Rollout, RolloutGroup
from lit_grpo.update.batches.microbatch import least_tokens, make_micro_batches
from lit_grpo.update.logprobs.measurements import measure


@dataclass
class Patient:
    """The run that ``doctor`` examines, in its ``on_train_start``.

    Args:
        trainer: Lightning's Trainer of the run.
        module: GRPOModule of the run.
        data: PromptDataModule of the run.
        scheduler: RolloutScheduler of the run.
        sync: WeightSync of the run.
        report: Report that collects the findings.
        folder: A folder for checkpoints on the run's disk; None if nothing can be written there.
        folder_error: The reason for None.
        groups: The sampled completions; empty before the check ``samples``.
    """

    trainer: pl.Trainer
    module: GRPOModule
    data: PromptDataModule
    scheduler: RolloutScheduler
    sync: WeightSync
    report: Report
    folder: Path | None
    folder_error: str = ""
    groups: list[RolloutGroup] = field(default_factory=list)

    @property
    def prompts(self) -> Sequence[Prompt]:
        return self.data.prompts["train"]

    @property
    def rollouts(self) -> list[Rollout]:
        return [rollout for group in self.groups for rollout in group.rollouts]

    @property
    def device(self) -> torch.device:
        return self.module.policy.device

    def computing(self) -> AbstractContextManager[None]:
        """Return a context with the precision of a training step."""
        return self.trainer.precision_plugin.train_step_context()

    def logprobs(self, temperature: float | None = None) -> list[torch.Tensor]:
        """Return the trainer's log-probs of the tokens of each rollout that are trained on, at a temperature."""
        settings, policy = self.module.settings, self.module.policy
        applied = settings.temperature if temperature is None else temperature
        shares, most = settings.shares_prefix, settings.max_tokens_per_micro_batch
        most = least_tokens(self.rollouts, shares) if most == "auto" else most
        micro_batches = make_micro_batches(self.rollouts, most, shares)
        with self.computing():
            return measure("logprobs", micro_batches, policy, applied, self.device)

    def sampled(self) -> torch.Tensor:
        """Return the generator's log-probs of the trained tokens, one completion after another."""
        completions = [rollout.completion for rollout in self.rollouts]
        return torch.cat([one.logprobs_T[one.trained_T] for one in completions])
