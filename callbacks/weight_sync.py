"""Brings the policy's weights to the generator."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl

from lit_grpo.checks import check_order
from lit_grpo.module import GRPOModule
from lit_grpo.rollout.proof import logprob_gap
from lit_grpo.rollout.weights.tensors import WeightSyncError, check_arrival
from lit_grpo.types import Prompt

from .rollout_scheduler import RolloutScheduler


class WeightSync(pl.Callback):
    """Hand the policy's weights over before the first rollout and after every update, and prove that they arrived.

    The generator must have bound every tensor of the policy, with the content that was sent (a digest of each is
    compared), and answer with the policy's version. Then it samples a few tokens, whose log-probs must be the policy's.
    Otherwise the run stops, and the generator refuses to sample. A generator that decodes on the policy itself needs no
    such sample.

    Args:
        max_logprob_gap: How far, in nats and on average, the generator's log-probs of these tokens may be from the
            policy's. A sampler in bfloat16 beside a policy in float32 stays below a tenth of this.
    """

    def __init__(self, max_logprob_gap: float = 0.2) -> None:
        if not max_logprob_gap > 0:
            raise ValueError(f"max_logprob_gap must be above 0, not {max_logprob_gap}.")
        self.max_logprob_gap = max_logprob_gap

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check the place in the list."""
        check_order(trainer, RolloutScheduler, WeightSync)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Sync, on resumed runs too."""
        self._sync(trainer, pl_module)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Sync where the generator does not have this version yet."""
        assert isinstance(pl_module, GRPOModule)
        if pl_module.generator.version != pl_module.policy_version:
            self._sync(trainer, pl_module)

    on_test_start = on_predict_start = on_validation_start

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Sync the updated weights."""
        pl_module.log_dict(self._sync(trainer, pl_module))

    def _sync(self, trainer: pl.Trainer, module: pl.LightningModule) -> dict[str, float]:
        assert isinstance(module, GRPOModule)
        with module.phases.of("weight sync"):
            return self._hand_over(trainer, module)

    def _hand_over(self, trainer: pl.Trainer, module: GRPOModule) -> dict[str, float]:
        start = time.perf_counter()
        generator, version = module.generator, module.policy_version
        weights = generator.weights()
        report = generator.load_weights(weights, version)
        metrics = {
            "time/weight_sync_s": time.perf_counter() - start,
            "sync/mib": report.num_bytes / 2**20,
            "sync/changed_share": report.changed_share,
        }
        try:
            check_arrival(weights.digests, report.digests)
            if generator.version != version:
                raise WeightSyncError(
                    f"The generator is at version {generator.version} where the policy is at {version}."
                )
            if not generator.decodes_on_policy:
                metrics["sync/logprob_gap"] = self._probe(trainer, module)
        except WeightSyncError:
            generator.distrust()
            raise
        return metrics

    def _probe(self, trainer: pl.Trainer, module: GRPOModule) -> float:
        """Compare log-probs."""
        with trainer.precision_plugin.forward_context():
            gap = logprob_gap(module.generator, module.policy, _any_prompt(trainer), module.policy_version)
        if not gap <= self.max_logprob_gap:
            raise WeightSyncError(
                f"After the sync of version {module.policy_version} the generator's log-probs differ from the policy's "
                f"by {gap:.3g} nats on average, where weight_sync.max_logprob_gap allows {self.max_logprob_gap}: its "
                "weights are not the policy's, or it computes in another precision."
            )
        return gap


def _any_prompt(trainer: pl.Trainer) -> Prompt:
    """The first prompt of the data."""
    prompts: dict[str, list[Prompt]] = getattr(trainer.datamodule, "prompts", {})  # pyright: ignore[reportAttributeAccessIssue]
    return next((rows[0] for rows in prompts.values() if rows), Prompt("probe", (0,), ""))
