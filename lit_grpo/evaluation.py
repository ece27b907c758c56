"""Validation, test and predict of a module that finds rollouts in its batches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, cast

import lightning.pytorch as pl
import torch
from torchmetrics import MeanMetric

from lit_grpo.faults import Phases
from lit_grpo.faults.observers import Observers
from lit_grpo.findings.rewards import HELD_OUT, RewardCurves
from lit_grpo.limits import Limit, check_value
from lit_grpo.metrics import pass_at_k
from lit_grpo.ranks import Ranks
from lit_grpo.rewards.function import RewardFunction
from lit_grpo.types import PassRule, PromptBatch

EVAL_MEANS = ("reward", "completion_length", "truncated")


class EvaluationModule(pl.LightningModule):
    """Computes pass@k of held-out prompts, logs the reward functions, and passes rows to a writer.

    Args:
        rewards: Reward functions that completions are scored with.
        pass_at_k: Values of k for which pass@k is logged.
        pass_threshold: Min reward of a correct completion, by the reward function that ``pass_reward`` names.
        pass_reward: Name of the reward function that decides whether a completion is correct; by default the first. A
            plug-in may provide it.

    Attributes:
        reward_curves: The reward functions in training.
        held_out_curves: The reward functions in validations.
        observers: Keeps callbacks and loggers that only show or write the run from ending it.
    """

    policy_version: int

    def __init__(
        self,
        rewards: Sequence[RewardFunction],
        pass_at_k: Sequence[int],
        pass_threshold: float,
        pass_reward: str | None = None,
    ) -> None:
        super().__init__()
        self.phases, self.observers = Phases(), Observers()
        self.pass_at_k = pass_at_k
        names = (*(f"pass@{k}" for k in pass_at_k), *EVAL_MEANS)
        self.means = torch.nn.ModuleDict({name: MeanMetric(nan_strategy="ignore") for name in names})
        check_value("pass_threshold", pass_threshold, Annotated[float, Limit()])
        self._pass_reward, self._pass_threshold = pass_reward, pass_threshold
        self._held_out: dict[str, list[tuple[float, float]]] = {}  # pass@1 and reward of the prompts of each data set
        self.score_with(rewards)

    def score_with(self, rewards: Sequence[RewardFunction]) -> None:
        """Score with these reward functions from now on, before anything has been scored."""
        self.rewards = rewards
        names = [function.name for function in rewards]
        by_dataset = any(function.datasets for function in rewards)
        self.pass_rule = PassRule.among(names, self._pass_reward, self._pass_threshold, by_dataset)
        weights = {function.name: function.weight for function in rewards}
        self.reward_curves = RewardCurves(weights, self.pass_rule)
        self.held_out_curves = RewardCurves(weights, self.pass_rule, HELD_OUT)
        self.reward_means = torch.nn.ModuleList([MeanMetric(nan_strategy="ignore") for _ in rewards])

    @property
    def held_out_metrics(self) -> list[str]:
        """The names of what a validation logs, without metrics of the user's own."""
        return [f"val/{name}" for name in (*self.means, *self._reward_names)]

    @property
    def _reward_names(self) -> list[str]:
        return [f"rewards/{function.name}/mean" for function in self.rewards]

    @property
    def ranks(self) -> Ranks:
        return Ranks(self.device)

    def validation_step(self, batch: PromptBatch, batch_idx: int) -> None:
        """Count which completions of held-out prompts pass.

        A prompt of whose completions none can be called correct or wrong, such as one without an answer, is left out.
        """
        for group in batch.groups:
            num_samples = len(group.rollouts)
            num_passed = sum(self.pass_rule.passes(rollout.rewards) for rollout in group.rollouts)
            is_judged = any(self.pass_rule.judges(rollout.rewards) for rollout in group.rollouts)
            for k in self.pass_at_k:
                if k <= num_samples:
                    passed = pass_at_k(num_samples, num_passed, k) if is_judged else math.nan
                    self._count(self.means[f"pass@{k}"], passed)
            rewarded = [rollout.reward for rollout in group.rollouts if not math.isnan(rollout.reward)]
            if group.prompt.dataset and rewarded:
                passed = num_passed / num_samples if is_judged else math.nan
                values = passed, math.fsum(rewarded) / len(rewarded)
                self._held_out.setdefault(group.prompt.dataset, []).append(values)
            for rollout in group.rollouts:
                completion = rollout.completion
                means = (rollout.reward, completion.num_sampled, completion.finish_reason == "length")
                for name, value in zip(EVAL_MEANS, means, strict=True):
                    self._count(self.means[name], value)
                for function, mean in zip(self.rewards, self.reward_means, strict=True):
                    value = rollout.rewards[function.name]
                    self._count(mean, math.nan if value is None else value)

    def _count(self, mean: torch.nn.Module, value: float) -> None:
        cast(MeanMetric, mean).update(value)

    def on_validation_epoch_start(self) -> None:
        for metric in (*self.means.values(), *self.reward_means):
            cast(MeanMetric, metric).reset()
        self._held_out = {}

    on_test_epoch_start = on_validation_epoch_start

    def on_validation_epoch_end(self) -> None:
        self.follow(self.held_out_curves, self._log_evaluation("val"))

    def follow(self, curves: RewardCurves, logs: Mapping[str, float]) -> None:
        """Add a row to the curves of reward functions, and warn of what they show since."""
        with self.observers.may_fail("The finding of flat rewards"):
            for finding in curves.add(logs):
                self.ranks.warn(finding.sentence)

    def test_step(self, batch: PromptBatch, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def on_test_epoch_end(self) -> None:
        self._log_evaluation("test")

    def _log_evaluation(self, prefix: str) -> dict[str, float]:
        """Log all means, over all ranks; return them by name, without the prefix."""
        means = [*self.means.items(), *zip(self._reward_names, self.reward_means, strict=True)]
        values = {name: cast(MeanMetric, mean).compute() for name, mean in means}
        for name, value in values.items():
            self.log(f"{prefix}/{name}", value, prog_bar=name == "pass@1", sync_dist=True)
        self.log("step", float(self.policy_version), sync_dist=True)
        parts = self.ranks.gather(self._held_out)
        for dataset in sorted(set().union(*parts)):
            its = [each for part in parts for each in part.get(dataset, ())]
            for name, of_prompts in zip(("pass@1", "reward"), zip(*its, strict=True), strict=True):
                if known := [value for value in of_prompts if not math.isnan(value)]:
                    self.log(f"{prefix}/datasets/{dataset}/{name}", math.fsum(known) / len(known))
        return {name: float(value) for name, value in values.items()}

    def predict_step(self, batch: PromptBatch, batch_idx: int) -> list[dict[str, Any]]:
        """Return one row a completion, for :class:`lit_grpo.callbacks.CompletionWriter`."""
        return [
            {
                "prompt_id": rollout.prompt.prompt_id,
                "sample_id": rollout.completion.request.path[0],
                "prompt": rollout.asked,
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
