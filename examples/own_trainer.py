# /// script
# requires-python = ">=3.11"
# dependencies = ["lit_grpo", "lightning>=2.6.1", "torch>=2.11"]
# [tool.uv.sources]
# lit_grpo = { path = "..", editable = true }
# ///
"""Your own Trainer and callbacks with lit_grpo's module and data. ``python examples/own_trainer.py``."""

from typing import Any

import lightning.pytorch as pl
import torch

from lit_grpo.data import PromptDataModule
from lit_grpo.module import GRPOModule
from lit_grpo.rewards import RewardSpec
from lit_grpo.tasks import ArithmeticRows
from lit_grpo.training import TRAINER_DEFAULTS, default_callbacks
from lit_grpo.types import SamplingParams


class PrintReward(pl.Callback):
    """A callback of your own. After a training iteration it can read all logged metrics."""

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        """Print the mean reward of the batch."""
        print(f"update {trainer.global_step}: reward {float(trainer.callback_metrics['reward']):.2f}")


if __name__ == "__main__":
    # The module has the policy, the rewards and the objective; the optimizer is any function of the weights.
    module = GRPOModule(
        policy="tiny",
        rewards=[RewardSpec("exact_match", args={"pattern": r"(?:^|=)(\d+)$"})],
        num_generations=8,
        sampling=SamplingParams(max_tokens=64),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    )
    # Prompts come from files, data sets or Python. The policy's tokenizer renders them.
    data = PromptDataModule(policy="tiny", train=ArithmeticRows(num_rows=64), batch_size=4)
    # Callbacks make the rollouts and send the weights, so their order matters; default_callbacks knows it. Settings are
    # given by a callback's name, and None leaves a callback out. Yours are called after the first, the checkpoint.
    callbacks = default_callbacks({"rollout": {"plan": "lpt"}, "policy_exporter": None}, [PrintReward()])
    trainer = pl.Trainer(
        max_steps=2, logger=False, callbacks=callbacks, default_root_dir="runs/own", **TRAINER_DEFAULTS
    )
    trainer.fit(module, data)
