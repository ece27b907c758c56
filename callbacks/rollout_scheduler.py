"""Fills prompt batches with rollouts."""

from __future__ import annotations

import lightning.pytorch as pl

from lit_grpo.module import GRPOModule
from lit_grpo.rewards import RewardRunner
from lit_grpo.rollout.controller import RolloutController
from lit_grpo.types import Prompt, PromptBatch, SamplingParams


class RolloutScheduler(pl.Callback):
    """Sample and reward the completions of each batch before its step, in every stage.

    ``predict`` rewards them too, where its data has the columns that the reward functions need.

    A free slot takes the next request in the order of arrival, whatever its group, so no slot waits for
    the longest completion of a round.
    """

    def __init__(self) -> None:
        self._controller: RolloutController | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check that the reward functions can be called with the data's columns."""
        if not isinstance(pl_module, GRPOModule):
            raise ValueError(f"RolloutScheduler needs a GRPOModule, not a {type(pl_module).__name__}.")
        for split, rows in _prompts(trainer).items():
            if split == "predict":
                continue
            for function in pl_module.rewards:
                function.check_columns(rows[0].columns)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check the prompts' lengths and start the generator."""
        assert isinstance(pl_module, GRPOModule)
        pl_module.check_lengths(_prompts(trainer))
        self._start(trainer, pl_module)

    on_validation_start = on_test_start = on_predict_start = on_train_start

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: PromptBatch, batch_idx: int
    ) -> None:
        """Sample ``num_generations`` completions a prompt."""
        assert isinstance(pl_module, GRPOModule)
        self._collect(trainer, pl_module, batch, pl_module.num_generations, pl_module.sampling)
        pl_module.log_dict(batch.metrics)

    def on_validation_batch_start(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        batch: PromptBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Sample ``eval_num_generations`` completions a prompt."""
        assert isinstance(pl_module, GRPOModule)
        self._collect(trainer, pl_module, batch, pl_module.eval_num_generations, pl_module.eval_sampling)

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Free the generator's memory and stop the reward functions' threads."""
        if self._controller is not None:
            self._controller.generator.close()
            if self._controller.rewards is not None:
                self._controller.rewards.close()
            self._controller = None

    def _start(self, trainer: pl.Trainer, module: GRPOModule) -> None:
        if self._controller is not None:
            return
        module.generator.start(module.policy, module.tokenizer)
        rewards = None
        if module.rewards and not (trainer.predicting and not _can_score(module, _prompts(trainer)["predict"])):
            rewards = RewardRunner(module.rewards, module.on_reward_error, module.reward_timeout_s)
        self._controller = RolloutController(module.generator, rewards)

    def _collect(
        self,
        trainer: pl.Trainer,
        module: GRPOModule,
        batch: PromptBatch,
        num_generations: int,
        sampling: SamplingParams,
    ) -> None:
        assert self._controller is not None
        with trainer.precision_plugin.forward_context():
            batch.groups, stats = self._controller.collect(
                batch.prompts, num_generations, sampling, module.sampling_seed
            )
        batch.metrics = stats.metrics()
        if self._controller.rewards is not None:
            batch.metrics["rewards/errors"] = float(self._controller.rewards.num_errors)


def _can_score(module: GRPOModule, prompts: list[Prompt]) -> bool:
    try:
        for function in module.rewards:
            function.check_columns(prompts[0].columns)
    except ValueError:
        return False
    return True


def _prompts(trainer: pl.Trainer) -> dict[str, list[Prompt]]:
    """The prompts that the data module has loaded, by split."""
    return getattr(trainer.datamodule, "prompts", {})  # pyright: ignore[reportAttributeAccessIssue]
