"""Brings the policy's weights to the generator."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl

from lit_grpo.module import GRPOModule
from lit_grpo.rollout.generator import WeightSyncError
from lit_grpo.rollout.weights import PolicyWeights, check_arrival


class WeightSync(pl.Callback):
    """Hand the policy's weights over before the first rollout and after every update, and prove that they arrived.

    The generator must have bound every tensor of the policy, with the content that was sent (a digest of each is
    compared), and answer with the policy's version. Otherwise the run stops, and the generator refuses to sample.
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
        pl_module.log_dict(self._sync(pl_module))

    def _sync(self, module: pl.LightningModule) -> dict[str, float]:
        assert isinstance(module, GRPOModule)
        start = time.perf_counter()
        generator, version = module.generator, module.policy_version
        weights = PolicyWeights(module.policy, merged=not generator.decodes_on_policy)
        report = generator.load_weights(weights, version)
        try:
            check_arrival(weights.digests, report.digests)
            if generator.version != version:
                raise WeightSyncError(
                    f"The generator is at version {generator.version} where the policy is at {version}."
                )
        except WeightSyncError:
            generator.distrust()
            raise
        return {
            "time/weight_sync_s": time.perf_counter() - start,
            "sync/mib": report.num_bytes / 2**20,
            "sync/changed_share": report.changed_share,
        }
