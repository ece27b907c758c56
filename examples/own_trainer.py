"""A Trainer and callbacks of one's own around lit_grpo's module and data. ``python examples/own_trainer.py``."""

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
    """A callback of one's own: after each training iteration everything that was logged is there."""

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        """Print the mean reward of the batch."""
        print(f"update {trainer.global_step}: reward {float(trainer.callback_metrics['reward']):.2f}")


if __name__ == "__main__":
    # The module holds the policy and what it is trained on; the optimizer is any function of its weights.
    module = GRPOModule(
        policy="tiny",
        rewards=[RewardSpec("exact_match", args={"pattern": r"(?:^|=)(\d+)$"})],
        num_generations=8,
        sampling=SamplingParams(max_tokens=64),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    )
    # Prompts come from files, data sets or Python. The policy's tokenizer renders them.
    data = PromptDataModule(policy="tiny", train=ArithmeticRows(num_rows=64), batch_size=4)
    # Callbacks do the rollouts and send the weights, so their order matters: default_callbacks has the right one. The
    # settings of each are given by its name; leave out what you do not want with None. Yours come behind the first.
    callbacks = default_callbacks({"rollout": {"plan": "lpt"}, "policy_exporter": None}, [PrintReward()])
    trainer = pl.Trainer(
        max_steps=2, logger=False, callbacks=callbacks, default_root_dir="runs/own", **TRAINER_DEFAULTS
    )
    trainer.fit(module, data)
