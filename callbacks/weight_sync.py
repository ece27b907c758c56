"""Brings the policy's weights to the generator."""

from __future__ import annotations

import math
import time
from typing import Annotated, Any, Literal, cast

import lightning.pytorch as pl
import torch

from lit_grpo.checks import check_order
from lit_grpo.limits import Limit, Positive, checks_arguments
from lit_grpo.module import GRPOModule
from lit_grpo.policy.sharding import gather_for_sampling
from lit_grpo.rollout.generator import Scorer
from lit_grpo.rollout.proof import SyncProof
from lit_grpo.rollout.weights.tensors import WeightSyncError, check_arrival
from lit_grpo.update.metrics import GapLimits

from .rollout_scheduler import RolloutScheduler

EXACT_GAP, ROUNDED_GAP = 0.05, 2.0
"""Max difference of a token's log-prob in nats, if both sides compute in the same way in float32, and if not."""
_FARTHEST = 100.0  # times the mean gap of given tokens, that a token which was sampled may be off
EXACT_RELATIVE_GAP, ROUNDED_RELATIVE_GAP = 0.02, 0.1
"""Max difference of log-probs of given tokens, relative to their spread, in float32 and in other types."""


class WeightSync(pl.Callback):
    """Send the policy's weights to the generator before the first rollout and after every update, and verify them.

    The generator must hold every tensor of the policy with the content that was sent (digests are compared), and report
    the policy's version. Then every engine scores some hundred given tokens, whose log-probs must match the policy's
    (see :class:`lit_grpo.rollout.proof.SyncProof`). If not, the run stops, and the generator refuses to sample. A
    generator without weights of its own scores nothing. Before the first step on a batch, the log-probs that it was
    sampled with are compared with the policy's.

    Args:
        max_logprob_gap: Max mean difference, in nats per token, between a batch's log-probs from the generator and from
            the policy, and also those of each completion, ``max_token_gap`` aside. With a generator in bfloat16 and a
            policy in float32, the difference stays below a tenth of the default.
        max_token_gap: Max difference, in nats, between one token's log-prob from the generator and from the policy. One
            token in a thousand may differ by more, and none by 20 times as much. Like ``max_logprob_gap`` it applies to
            completions that the present version sampled from their first token. With ``model.objective.correction`` a
            larger difference only warns. ``auto`` is 2 for bfloat16. In float32, in which differences are about 1e-5,
            it is 0.05, or a hundred times the mean difference of the given tokens if that is more; if it is 0.05 and
            the policy has no experts, no token may differ by more.
        max_relative_gap: Max mean difference between the engine's and the policy's log-probs of the given tokens,
            relative to their spread. It is about 0.01 in bfloat16 and 1e-6 in float32. ``auto`` is 0.02 if policy and
            engine compute in float32, which detects an engine that computes a model differently from transformers, and
            0.1 if not.
        max_gap_growth: Max growth of the rounding error that would explain the difference, as a multiple of the largest
            at earlier syncs. It detects weights that lack one small update. If the error grows more, all weights are
            sent once more, and then it may be twice as large.
    """

    @checks_arguments("weight_sync.")
    def __init__(
        self,
        max_logprob_gap: Positive = 0.2,
        max_relative_gap: Positive | Literal["auto"] = "auto",
        max_gap_growth: Annotated[float, Limit(gt=1)] = 1.3,
        max_token_gap: Positive | Literal["auto"] = "auto",
    ) -> None:
        self.max_logprob_gap, self.max_relative_gap = max_logprob_gap, max_relative_gap
        self.max_gap_growth, self.max_token_gap = max_gap_growth, max_token_gap
        self._proof: SyncProof | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        check_order(trainer, RolloutScheduler, WeightSync)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Sync, on resumed runs too."""
        assert isinstance(pl_module, GRPOModule)
        measured = self._sync(trainer, pl_module).get("sync/logprob_gap")
        if measured is None:
            measured = math.inf if "own_weights" in pl_module.generator.abilities else 0.0
        pl_module.learner.gap_limits = self._gap_limits(trainer, pl_module, measured)

    def _gap_limits(self, trainer: pl.Trainer, module: GRPOModule, measured: float) -> GapLimits:
        """Return the limits of a batch's gap; that of one token by how far given tokens' are, if it is left open."""
        limit, is_exact = self.max_token_gap, _is_exact(trainer, module)
        if isinstance(limit, str):
            farthest = _FARTHEST * float(module.ranks.max(measured))
            limit = min(max(EXACT_GAP, farthest), ROUNDED_GAP) if is_exact else ROUNDED_GAP
        routes = any("expert" in name for name, _ in module.policy.named_modules())
        return GapLimits(self.max_logprob_gap, limit, spares=routes or not is_exact or limit > EXACT_GAP)

    def _relative_limit(self, trainer: pl.Trainer, module: GRPOModule) -> float:
        """Return the limit of the relative gap, by what both sides compute in where it is left open."""
        if not isinstance(self.max_relative_gap, str):
            return self.max_relative_gap
        alike = _is_exact(trainer, module) and "policy_dtype" in module.generator.abilities
        return EXACT_RELATIVE_GAP if alike else ROUNDED_RELATIVE_GAP

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, GRPOModule)
        if pl_module.generator.version != pl_module.policy_version:
            self._sync(trainer, pl_module)

    on_test_start = on_predict_start = on_validation_start

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, GRPOModule)
        metrics = self._sync(trainer, pl_module)
        pl_module.log_dict(metrics)
        if "sync/logprob_gap" in metrics:
            pl_module.learner.gap_limits = self._gap_limits(trainer, pl_module, metrics["sync/logprob_gap"])

    def _sync(self, trainer: pl.Trainer, module: pl.LightningModule) -> dict[str, float]:
        """Send all weights, and again if the proof is not good; return what to log."""
        assert isinstance(module, GRPOModule)
        generator = module.generator
        gather_for_sampling(module.policy)
        try:
            with module.phases.of("weight sync"):
                metrics = self._send(module)
                if "scores" in generator.abilities:
                    metrics |= self._prove(trainer, module, cast("Scorer", generator))
        except WeightSyncError:
            generator.invalidate_weights()
            raise
        return metrics

    def _send(self, module: GRPOModule) -> dict[str, float]:
        """Send the weights, and check what the generator holds afterwards; return what to log."""
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
        """Compare log-probs; if they are too far apart on any rank, all ranks send all weights again."""
        max_gap = self._relative_limit(trainer, module)
        proof = self._proof = self._proof or SyncProof(module.tokenizer, max_gap, self.max_gap_growth)
        with trainer.precision_plugin.forward_context():
            gap = proof.measure(scorer, module.policy)
        if module.ranks.max(float(not proof.accepts(gap))):
            module.ranks.warn(
                f"After the sync of version {module.policy_version} the log-probs that {gap.engine} gives to given "
                f"tokens differ from the policy's by {gap.nats:.3g} nats; all weights are sent once more."
            )
            module.generator.invalidate_weights()
            self._send(module)
            with trainer.precision_plugin.forward_context():
                gap = proof.measure(scorer, module.policy)
            proof.check(gap, module.policy_version)
        return {"sync/logprob_gap": gap.nats, "sync/relative_gap": gap.relative, "sync/rounding": gap.rounding}


def _is_exact(trainer: pl.Trainer, module: GRPOModule) -> bool:
    nf4 = module.lora is not None and module.lora.base == "nf4"
    return module.policy.dtype == torch.float32 and str(trainer.precision).startswith("32") and not nf4
