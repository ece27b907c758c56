"""Validation, test and predict of a module that finds rollouts in its batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import lightning.pytorch as pl
import torch
from torchmetrics import MeanMetric

from lit_grpo.faults import Phases
from lit_grpo.metrics import pass_at_k
from lit_grpo.ranks import Ranks
from lit_grpo.rewards.function import RewardFunction
from lit_grpo.types import PromptBatch

EVAL_MEANS = ("reward", "completion_length", "truncated")


class EvaluationModule(pl.LightningModule):
    """Counts which completions of held-out prompts pass, and hands rows to a writer.

    Args:
        rewards: Reward functions; the first decides who passes.
        pass_at_k: The k of the pass@k reported.
        pass_threshold: A completion passes when its first reward function gives at least this.
    """

    policy_version: int

    def __init__(self, rewards: Sequence[RewardFunction], pass_at_k: Sequence[int], pass_threshold: float) -> None:
        super().__init__()
        self.phases = Phases()
        self.rewards = rewards
        self.pass_threshold = pass_threshold
        self.pass_at_k = pass_at_k
        names = (*(f"pass@{k}" for k in pass_at_k), *EVAL_MEANS)
        self.means = torch.nn.ModuleDict({name: MeanMetric(nan_strategy="ignore") for name in names})

    @property
    def ranks(self) -> Ranks:
        """Reductions over the ranks of the run."""
        return Ranks(self.device)

    def validation_step(self, batch: PromptBatch, batch_idx: int) -> None:
        """Count which completions of held-out prompts pass."""
        for group in batch.groups:
            values = [rollout.rewards[self.rewards[0].name] for rollout in group.rollouts]
            num_passed = sum((value or 0.0) >= self.pass_threshold for value in values)
            for k in self.pass_at_k:
                if k <= len(values):
                    self._count(f"pass@{k}", pass_at_k(len(values), num_passed, k))
            for rollout in group.rollouts:
                completion = rollout.completion
                means = (rollout.reward, completion.num_tokens, completion.finish_reason == "length")
                for name, value in zip(EVAL_MEANS, means, strict=True):
                    self._count(name, value)

    def _count(self, name: str, value: float) -> None:
        cast(MeanMetric, self.means[name]).update(value)

    def on_validation_epoch_start(self) -> None:
        """Begin the counts anew."""
        for metric in self.means.values():
            cast(MeanMetric, metric).reset()

    on_test_epoch_start = on_validation_epoch_start

    def on_validation_epoch_end(self) -> None:
        """Log pass@k and the means over all held-out prompts."""
        self._log_evaluation("val")

    def test_step(self, batch: PromptBatch, batch_idx: int) -> None:
        """Do the same for the test prompts."""
        self.validation_step(batch, batch_idx)

    def on_test_epoch_end(self) -> None:
        """Log pass@k and the means over all test prompts."""
        self._log_evaluation("test")

    def _log_evaluation(self, prefix: str) -> None:
        for name, metric in self.means.items():
            value = cast(MeanMetric, metric).compute()
            self.log(f"{prefix}/{name}", value, prog_bar=name == "pass@1", sync_dist=True)
        self.log("step", float(self.policy_version), sync_dist=True)

    def predict_step(self, batch: PromptBatch, batch_idx: int) -> list[dict[str, Any]]:
        """Return one row a completion, for :class:`lit_grpo.callbacks.CompletionWriter`."""
        return [
            {
                "prompt_id": rollout.prompt.prompt_id,
                "sample_id": rollout.completion.request.path[0],
                "prompt": rollout.prompt.text,
                "completion": rollout.completion.text,
                "token_ids": rollout.completion.token_ids_T.tolist(),
                "logprob": float(rollout.completion.logprobs_T.sum()),
                "finish_reason": rollout.completion.finish_reason,
                **({"reward": rollout.reward, "rewards": rollout.rewards} if rollout.rewards else {}),
                "columns": rollout.prompt.columns,
                **({"extra": rollout.extra} if rollout.extra else {}),
            }
            for rollout in batch.rollouts
        ]
