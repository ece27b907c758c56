"""Brings the policy's weights to the generator."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl

from lit_grpo.module import GRPOModule
from lit_grpo.rollout.generator import WeightSyncError


class WeightSync(pl.Callback):
    """Hand the policy's weights over before the first rollout and after every update, and check that they arrived.

    Every weight of the policy must be bound, and the generator must answer with the policy's version.
    """

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Sync, on resumed runs too."""
        self._sync(pl_module)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Sync where the generator does not have this version yet."""
        assert isinstance(pl_module, GRPOModule)
        if pl_module.generator.version != pl_module.policy_version:
            self._sync(pl_module)

    on_test_start = on_predict_start = on_validation_start

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Sync the updated weights."""
        pl_module.log("time/weight_sync_s", self._sync(pl_module))

    def _sync(self, module: pl.LightningModule) -> float:
        assert isinstance(module, GRPOModule)
        start = time.perf_counter()
        weights = dict(module.policy.named_parameters())
        bound = module.generator.load_weights(weights.items(), module.policy_version)
        if bound != len(weights) or module.generator.version != module.policy_version:
            raise WeightSyncError(
                f"{bound} of {len(weights)} weights were bound, and the generator is at version "
                f"{module.generator.version} where the policy is at {module.policy_version}."
            )
        return time.perf_counter() - start
