"""Brings the policy's weights to the generator."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl

from lit_grpo.checks import check_order
from lit_grpo.module import GRPOModule
from lit_grpo.policy.sharding import rest
from lit_grpo.rollout.generator import Scorer
from lit_grpo.rollout.proof import SyncProof
from lit_grpo.rollout.weights.tensors import WeightSyncError, check_arrival

from .rollout_scheduler import RolloutScheduler


class WeightSync(pl.Callback):
    """Hand the policy's weights over before the first rollout and after every update, and prove that they arrived.

    The generator must hold every tensor of the policy, with the content that was sent (a digest of each is compared),
    and answer with the policy's version. Then every engine scores some hundred given tokens, whose log-probs must be
    the policy's (see :class:`lit_grpo.rollout.proof.SyncProof`). Otherwise the run stops, and the generator refuses to
    sample. A generator that decodes on the policy itself has nothing to score. The log-probs that a batch was sampled
    with are compared with the policy's again before the first step on it.

    Args:
        max_logprob_gap: How far, in nats and on average, the log-probs of a batch's tokens may be from the policy's. A
            sampler in bfloat16 beside a policy in float32 stays below a tenth of this.
        max_relative_gap: How far the log-probs of the given tokens may be from the policy's on average, relative to
            their spread. In bfloat16 it is about 0.01, in float32 1e-6.
        max_gap_growth: How many times as large as at all syncs before the rounding error may be that would explain it.
            Weights that lack one small update show here. Where it is larger, all weights are sent once more, and then
            it may be twice this.
    """

    def __init__(
        self, max_logprob_gap: float = 0.2, max_relative_gap: float = 0.1, max_gap_growth: float = 1.3
    ) -> None:
        for name, value in (("max_logprob_gap", max_logprob_gap), ("max_relative_gap", max_relative_gap)):
            if not value > 0:
                raise ValueError(f"{name} must be above 0, not {value}.")
        if not max_gap_growth > 1:
            raise ValueError(f"max_gap_growth must be above 1, not {max_gap_growth}.")
        self.max_logprob_gap, self.max_relative_gap = max_logprob_gap, max_relative_gap
        self.max_gap_growth = max_gap_growth
        self._proof: SyncProof | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check the place in the list."""
        check_order(trainer, RolloutScheduler, WeightSync)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Sync, on resumed runs too."""
        assert isinstance(pl_module, GRPOModule)
        pl_module.learner.max_logprob_gap = self.max_logprob_gap
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
        """Send all weights, and once more where the proof is not good; return what to log."""
        assert isinstance(module, GRPOModule)
        generator = module.generator
        rest(module.policy)
        try:
            with module.phases.of("weight sync"):
                metrics = self._send(module)
                if isinstance(generator, Scorer):
                    metrics |= self._prove(trainer, module, generator)
        except WeightSyncError:
            generator.distrust()
            raise
        return metrics

    def _send(self, module: GRPOModule) -> dict[str, float]:
        """Hand the weights over, and compare what the generator holds then."""
        start = time.perf_counter()
        generator, version = module.generator, module.policy_version
        weights = generator.weights()
        report = generator.load_weights(weights, version)
        check_arrival(weights.digests, report.digests)
        if generator.version != version:
            raise WeightSyncError(f"The generator is at version {generator.version} where the policy is at {version}.")
        return {
            "time/weight_sync_s": time.perf_counter() - start,
            "sync/mib": report.num_bytes / 2**20,
            "sync/changed_share": report.changed_share,
        }

    def _prove(self, trainer: pl.Trainer, module: GRPOModule, scorer: Scorer) -> dict[str, float]:
        """Compare log-probs; where they are too far apart on any rank, all ranks send everything once more."""
        proof = self._proof = self._proof or SyncProof(module.tokenizer, self.max_relative_gap, self.max_gap_growth)
        with trainer.precision_plugin.forward_context():
            gap = proof.measure(scorer, module.policy)
        if module.ranks.max(float(not proof.accepts(gap))):
            module.ranks.warn(
                f"After the sync of version {module.policy_version} the log-probs that {gap.engine} gives to given "
                f"tokens differ from the policy's by {gap.nats:.3g} nats; all weights are sent once more."
            )
            module.generator.distrust()
            self._send(module)
            with trainer.precision_plugin.forward_context():
                gap = proof.measure(scorer, module.policy)
            proof.check(gap, module.policy_version)
        return {"sync/logprob_gap": gap.nats, "sync/relative_gap": gap.relative, "sync/rounding": gap.rounding}
