"""The trainer's own log-probs at the version that sampled a token, from weights that are kept on the host."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol

import psutil
import torch

from lit_grpo.ranks import Ranks
from lit_grpo.types import OBSERVED, Rollout, Trajectory
from lit_grpo.update.objective.tokens import Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_GIB = 2**30


class MeasureLogprobs(Protocol):
    """Measures every token that is learnt from under the policy, or under a model that is lent for it."""

    def __call__(
        self,
        rollouts: Sequence[Rollout],
        what: Literal["logprobs"],
        lend: Callable[[], AbstractContextManager[PreTrainedModel]] | None = None,
    ) -> list[torch.Tensor]:
        """Return the log-probs of each rollout's tokens, on the host."""
        ...


class Snapshots:
    """Keeps the weights of the versions that tokens in work were sampled with, and recomputes log-probs under them.

    "Missing Old Logits in Asynchronous Agentic RL" (arXiv 2605.12070), the exact route by snapshots. The ratio of the
    policy now to the sampler is the product of two factors, which are corrected apart::

        pi_now / sampler_v = (pi_v / sampler_v) x (pi_now / pi_v)

    ``v`` is the version that sampled a token, the sampler computes with the generator's arithmetic and ``pi`` with the
    trainer's. The first factor is the *discrepancy* between the two at one version, which ``objective.correction``
    weighs by; the second is the *staleness*, which the clip bounds. Both need ``log pi_v``, which is gone once the
    policy has moved, unless the weights of ``v`` are kept.

    A snapshot has the weights that are trained alone (with LoRA the adapters), in their own dtype, in host memory. It
    is taken before the policy moves on from a version that samples, and let go once nothing that may be learnt from has
    a token of it. All ranks keep the same ones. One at a time takes the place of the policy's own weights on the
    device, before the first update on a batch, when there are no gradients yet.

    Args:
        policy: Trained; the same on every rank.
    """

    def __init__(self, policy: PreTrainedModel) -> None:
        self.policy = policy
        self._weights: dict[int, list[torch.Tensor]] = {}

    @property
    def versions(self) -> list[int]:
        """The versions that are kept."""
        return sorted(self._weights)

    @property
    def snapshot_gib(self) -> float:
        """What one of them takes."""
        return sum(weight.numel() * weight.element_size() for weight in self._trained()) / _GIB

    def metrics(self) -> dict[str, float]:
        """Say how many are kept, and in how much host memory."""
        held = len(self._weights)
        return {"snapshots/versions": float(held), "snapshots/gib": held * self.snapshot_gib}

    # ---- what is kept -------------------------------------------------------------------------------

    def hold(self, version: int) -> None:
        """Keep the policy's weights as those of ``version``, unless they are kept already."""
        if version not in self._weights:
            self._weights[version] = [weight.detach().to("cpu", copy=True) for weight in self._trained()]

    def let_go(self, needed: Iterable[int], ranks: Ranks) -> None:
        """Let go of all versions but those that a rank needs; all ranks call it."""
        everywhere = set[int]().union(*ranks.gather({*needed}))
        self._weights = {version: weights for version, weights in self._weights.items() if version in everywhere}

    @contextmanager
    def lend(self, version: int) -> Iterator[PreTrainedModel]:
        """Give the policy with the weights of ``version`` in the place of its own."""
        trained = self._trained()
        own = [weight.data for weight in trained]
        try:
            for weight, kept in zip(trained, self._weights[version], strict=True):
                weight.data = kept.to(weight.device)
            yield self.policy
        finally:
            for weight, data in zip(trained, own, strict=True):
                weight.data = data

    def _trained(self) -> list[torch.nn.Parameter]:
        return [weight for weight in self.policy.parameters() if weight.requires_grad]

    # ---- what is measured ---------------------------------------------------------------------------

    def logprobs(
        self, rollouts: Sequence[Rollout], version: int, measure: MeasureLogprobs, ranks: Ranks, measures_now: bool
    ) -> list[torch.Tensor] | None:
        """Return for each rollout the log-prob of each token that is learnt from under the version that sampled it.

        A completion goes through the policy once for each version that it has tokens of. All ranks call it together
        where one of them holds a version.

        Args:
            rollouts: What is to be learnt from; those that have been learnt from before are not measured (NaN).
            version: Of the policy now.
            measure: See there.
            ranks: Those of the run.
            measures_now: Measure tokens of the policy now, too. They are NaN otherwise, for the pass that learns from
                them computes them; and None is returned where there are no others.

        Raises:
            ValueError: A version is not kept.
        """
        sampled = [_trained_versions(rollout.completion) for rollout in rollouts]
        found = [torch.full((len(versions_T),), math.nan) for versions_T in sampled]
        fresh = [place for place, rollout in enumerate(rollouts) if not rollout.learnt]
        versions = {each for place in fresh for each in sampled[place].unique().tolist()}
        if self._weights:
            versions = versions.union(*ranks.gather(versions))
        self.check_kept(versions - {version})
        if not measures_now:
            versions -= {version}
        for each in sorted(versions):
            some = [place for place in fresh if (sampled[place] == each).any()]
            lend = None if each == version else partial(self.lend, each)
            measured = measure([rollouts[place] for place in some], "logprobs", lend)
            for place, logprobs_T in zip(some, measured, strict=True):
                found[place] = torch.where(sampled[place] == each, logprobs_T, found[place].to(logprobs_T.dtype))
        return found if versions else None

    def check_kept(self, versions: Iterable[int]) -> None:
        """Check that versions are kept.

        Raises:
            ValueError: One is not.
        """
        if missing := sorted({*versions} - self._weights.keys()):
            raise ValueError(
                f"Tokens of policy version {missing[0]} wait to be learnt from, and objective.proximal is snapshots, "
                "but the weights of that version have not been kept; go on from a checkpoint of a run with snapshots, "
                "or take the proximal that this one's run had."
            )

    # ---- memory and checkpoints ---------------------------------------------------------------------

    def check_memory(self, max_staleness: int, updates_per_batch: int, limit_gib: float | None, ranks: Ranks) -> None:
        """Check that the host has room for as many as a run may need; all ranks call it.

        Args:
            max_staleness: Updates that may lie between a token and the update that learns from it.
            updates_per_batch: Updates from one version that samples to the next.
            limit_gib: What the snapshots of one rank may take; by default its share of what is free.
            ranks: Those of the run.

        Raises:
            ValueError: They may not fit.
        """
        most = max_staleness // updates_per_batch + 1
        hosts = ranks.gather(socket.gethostname())
        free_gib = psutil.virtual_memory().available / _GIB / hosts.count(hosts[ranks.rank])
        limit, name = (free_gib, "the host has") if limit_gib is None else (limit_gib, "objective.snapshot_gib allows")
        needed_gib = most * self.snapshot_gib
        if ranks.max(float(needed_gib > limit)):
            raise ValueError(
                f"objective.proximal is snapshots, which may keep the trained weights of {most} versions at a time "
                f"(max_staleness {max_staleness}, {updates_per_batch} updates a batch), {needed_gib:.3g} GiB of host "
                f"memory on each rank, and {name} {limit:.3g} GiB; lower max_staleness in rollout.plugins, "
                "train adapters (model.lora), set objective.snapshot_gib higher, or take another proximal."
            )

    def state_dict(self) -> dict[int, list[torch.Tensor]]:
        """What a checkpoint keeps."""
        return dict(self._weights)

    def load_state_dict(self, state: Mapping[int, Any]) -> None:
        """Go on from a checkpoint; from one of a run without snapshots, there are none."""
        self._weights = {version: [weight.clone() for weight in weights] for version, weights in state.items()}


def factor_metrics(tokens: Tokens) -> dict[str, torch.Tensor]:
    """Say how far each token's two factors are from 1, in nats: absolute logs, shape N."""
    return {
        "snapshots/discrepancy": (tokens.old_logprobs_N - tokens.sampled_logprobs_N).abs(),
        "snapshots/staleness": (tokens.logprobs_N.detach() - tokens.old_logprobs_N).abs(),
    }


def _trained_versions(trajectory: Trajectory) -> torch.Tensor:
    """The versions that sampled the tokens which are learnt from, one after another."""
    versions_T = trajectory.versions_T[trajectory.trained_T]
    assert not (versions_T == OBSERVED).any()
    return versions_T
