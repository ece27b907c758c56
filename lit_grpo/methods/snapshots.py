"""The trainer's own log-probs at the version that sampled a token, from weights that are kept in host memory.

"Missing Old Logits in Asynchronous Agentic RL" (arXiv 2605.12070), the exact variant, by snapshots.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import psutil
import torch

from lit_grpo.limits import Limit
from lit_grpo.plugins import AllGather, GroupBatch, Plugin
from lit_grpo.types import OBSERVED, Key
from lit_grpo.update.objective.tokens import Tokens
from lit_grpo.update.plugin import Batch, TrainingRun

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_GIB = 2**30


@dataclass
class Snapshots(Plugin):
    """Keep the weights of the versions that sampled tokens in work, and recompute log-probs under them.

    The ratio of the policy now to the sampler is the product of two factors, which are corrected apart::

        pi_now / sampler_v = (pi_v / sampler_v) x (pi_now / pi_v)

    ``v`` is the version that sampled a token, the sampler computes with the generator's arithmetic and ``pi`` with the
    trainer's. The first factor is the *discrepancy* between the two at one version, which
    ``model.objective.correction`` weighs by; the second is the *staleness*, which the clip bounds. Both need
    ``log pi_v``, which is gone once the policy has moved, unless the weights of ``v`` are kept. For example::

        model:
          objective: {correction: {mode: token_truncate}}
        rollout:
          plugins: [april, snapshots]

    A snapshot has the weights that are trained alone (with LoRA the adapters), in their own dtype, in host memory. It
    is taken before the policy moves on from a version that samples, and let go once nothing that may be trained on has
    a token of it. All ranks keep the same ones. One at a time takes the place of the policy's own weights on the
    device, before the first update on a batch, when there are no gradients yet.
    """

    writes: ClassVar[frozenset[str]] = frozenset({"old_logprob"})
    needs: ClassVar[frozenset[str]] = frozenset({"one_row", "unsharded_weights"})
    changes: ClassVar[Mapping[str, str]] = {"ratios_to_sampler": "takes them to policies whose weights it has to keep"}
    traits: ClassVar[frozenset[str]] = frozenset({"common"})

    snapshot_gib: Annotated[float | None, Limit(gt=0, finite=True, remedy="leave it out for no limit")] = None
    """Max host memory, in GiB, for the snapshots of one rank; by default the rank's part of the memory that is free
    when training starts.
    """

    def setup(self) -> None:
        self._weights: dict[int, list[torch.Tensor]] = {}
        self._version = 0

    def on_train_start(self, run: TrainingRun) -> None:
        """Check that there is room for the weights that old tokens need, and on resuming that they are there."""
        self._run, self._version = run, run.version
        if run.max_staleness is not None and run.open_versions is not None:
            self.check_memory(run.max_staleness)
            needed = run.open_versions(run.version) - {run.version}
            run.ranks.together(lambda: self.check_kept(needed))

    # ---- what is kept -------------------------------------------------------------------------------

    @property
    def versions(self) -> list[int]:
        return sorted(self._weights)

    def on_batch_start(self) -> None:
        """Keep the policy's weights, if tokens that it samples now may be trained on after the update."""
        if self._run.max_staleness is not None:
            self.hold(self._version)

    def hold(self, version: int) -> None:
        """Keep the policy's weights as those of ``version``, unless they are kept already."""
        if version not in self._weights:
            self._weights[version] = [weight.detach().to("cpu", copy=True) for weight in self._trained()]

    @contextmanager
    def lend(self, version: int) -> Iterator[PreTrainedModel]:
        """Give the policy with the weights of ``version`` in the place of its own."""
        trained = self._trained()
        own = [weight.data for weight in trained]
        try:
            for weight, kept in zip(trained, self._weights[version], strict=True):
                weight.data = kept.to(weight.device)
            yield self._run.policy
        finally:
            for weight, data in zip(trained, own, strict=True):
                weight.data = data

    def on_update_end(self, batch: GroupBatch) -> dict[str, float]:
        self._version = batch.version
        if self._run.open_versions is None:
            return {}
        held = len(self._weights)
        self.let_go(self._run.open_versions(batch.version), batch.all_gather)
        return {"snapshots/versions": float(held), "snapshots/gib": held * self.one_gib}

    def let_go(self, needed: Iterable[int], all_gather: AllGather) -> None:
        everywhere = set[int]().union(*all_gather({*needed}))
        self._weights = {version: weights for version, weights in self._weights.items() if version in everywhere}

    def _trained(self) -> list[torch.nn.Parameter]:
        return [weight for weight in self._run.policy.parameters() if weight.requires_grad]

    # ---- what is measured ---------------------------------------------------------------------------

    def on_batch(self, batch: Batch) -> None:
        """Give each token that is trained on its log-prob under the version that sampled it.

        A completion goes through the policy once for each version that it has tokens of; rollouts of earlier
        batches are left out. With one step on the batch, tokens of the policy now are NaN, for the pass that learns
        from them computes them, and nothing is given if there are no others.
        """
        fresh = [rollout for rollout in batch.rollouts if not rollout.trained_before and rollout.completion.num_trained]
        sampled: dict[Key, torch.Tensor] = {}
        for completion in (rollout.completion for rollout in fresh):
            versions_T = completion.versions_T[completion.trained_T]
            assert not (versions_T == OBSERVED).any()
            sampled[completion.request.key] = versions_T
        found = {key: torch.full((len(versions_T),), math.nan) for key, versions_T in sampled.items()}
        versions = {each for versions_T in sampled.values() for each in versions_T.unique().tolist()}
        if self._weights:
            versions = versions.union(*batch.all_gather(versions))
        self.check_kept(versions - {batch.version})
        if not batch.several_steps:
            versions -= {batch.version}
        for each in sorted(versions):
            some = [rollout for rollout in fresh if (sampled[rollout.completion.request.key] == each).any()]
            lend = None if each == batch.version else partial(self.lend, each)
            for key, logprobs_T in batch.measure(some, "logprobs", lend).items():
                found[key] = torch.where(sampled[key] == each, logprobs_T, found[key].to(logprobs_T.dtype))
        for rollout in fresh if versions else ():
            batch.set("old_logprob", rollout, found[rollout.completion.request.key])

    def loss(self, tokens: Tokens) -> None:
        """Log how far each token's two factors are from 1, in nats: absolute logs, shape N."""
        tokens.log("snapshots/discrepancy", (tokens.old_logprobs_N - tokens.sampled_logprobs_N).abs())
        tokens.log("snapshots/staleness", (tokens.logprobs_N.detach() - tokens.old_logprobs_N).abs())

    # ---- memory and checkpoints ---------------------------------------------------------------------

    @property
    def one_gib(self) -> float:
        return sum(weight.numel() * weight.element_size() for weight in self._trained()) / _GIB

    def check_memory(self, max_staleness: int) -> None:
        """Check that the host has room for as many snapshots as a run may need; all ranks call it."""
        ranks, updates_per_batch = self._run.ranks, self._run.updates_per_batch
        most = max_staleness // updates_per_batch + 1
        hosts = ranks.gather(socket.gethostname())
        free_gib = psutil.virtual_memory().available / _GIB / hosts.count(hosts[ranks.rank])
        allowed = self.snapshot_gib
        limit, name = (free_gib, "the host has") if allowed is None else (allowed, "its snapshot_gib allows")
        needed_gib = most * self.one_gib
        if ranks.max(float(needed_gib > limit)):
            raise ValueError(
                f"rollout.plugins has snapshots, which may keep the trained weights of {most} versions at a time "
                f"(max_staleness {max_staleness}, {updates_per_batch} updates a batch), {needed_gib:.3g} GiB of host "
                f"memory on each rank, and {name} {limit:.3g} GiB; lower max_staleness of the other plug-in, "
                "train adapters (model.lora), set snapshot_gib higher, or leave snapshots out."
            )

    def check_kept(self, versions: Iterable[int]) -> None:
        """Raise a ``ValueError`` where one of these versions is not kept."""
        if missing := sorted({*versions} - self._weights.keys()):
            raise ValueError(
                f"Tokens of policy version {missing[0]} wait to be trained on, and rollout.plugins has snapshots, "
                "but the weights of that version have not been kept; go on from a checkpoint of a run with snapshots, "
                "or leave the plug-in out."
            )

    def state_dict(self) -> dict[str, Any]:
        return {"weights": dict(self._weights)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        kept = state["weights"].items()
        self._weights = {version: [weight.clone() for weight in weights] for version, weights in kept}


PLUGINS = {"snapshots": Snapshots()}
