"""A reference policy that follows the policy (TR-DPO, arXiv 2404.09656)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch

from lit_grpo.compatibility import Clash, check_clashes
from lit_grpo.limits import Count, Limit
from lit_grpo.plugins import Plugin, RunFacts
from lit_grpo.update.plugin import TrainingRun
from lit_grpo.update.step import Step


@dataclass
class MovingReference(Plugin):
    """Update the KL term's reference to ``mixup_alpha x policy + (1 - mixup_alpha) x reference`` every so many steps.

    As TRL's ``sync_ref_model``. A batch's log-probs under the reference are computed before its first step, so that a
    reference that moves between two steps on a batch counts from the next batch. For example::

        rollout:
          plugins: [{tr_dpo: {mixup_alpha: 0.6, sync_steps: 64}}]
    """

    needs: ClassVar[frozenset[str]] = frozenset({"unsharded_weights"})
    traits: ClassVar[frozenset[str]] = frozenset({"common"})

    mixup_alpha: Annotated[float, Limit(gt=0, le=1, remedy="leave the plug-in out for a fixed reference")] = 0.6
    """Fraction of the policy in the new reference; 1 takes the policy as it is."""
    sync_steps: Count = 512
    """Optimizer steps between two updates of the reference."""

    def check(self, run: RunFacts) -> None:
        needs = "it needs a reference policy with weights of its own"
        no_term = f"model.objective.kl.beta {run.kl_beta} leaves the KL term out"
        bare = f"{run.adapters} takes the policy without its adapters, which needs no memory and cannot move"
        remedy = "set model.objective.kl.beta above 0"
        check_clashes([Clash(needs, no_term, run.kl_beta == 0, remedy), Clash(needs, bare, bool(run.adapters))])

    def setup(self) -> None:
        self._run: TrainingRun | None = None
        self._moved: dict[str, torch.Tensor] = {}

    def on_train_start(self, run: TrainingRun) -> None:
        """Take the run's policy and reference; one that has moved before a checkpoint goes on from there."""
        if run.reference is None:
            raise ValueError(
                "rollout.plugins: tr_dpo needs a reference policy with weights of its own, which a run has with "
                "model.objective.kl.beta above 0 and without adapters; leave it out."
            )
        self._run = run
        if self._moved:
            run.reference.load_state_dict(self._moved)
            self._moved = dict(run.reference.state_dict())

    @torch.no_grad()
    def on_optimizer_step(self, step: Step) -> None:
        """Move the reference, if it is time to; the same on every rank, because the policy is."""
        if step.number % self.sync_steps or self._run is None or self._run.reference is None:
            return
        reference, alpha = self._run.reference, self.mixup_alpha
        for mine, its in zip(reference.parameters(), self._run.policy.parameters(), strict=True):
            mine.mul_(1 - alpha).add_(its.to(mine.device), alpha=alpha)
        self._moved = dict(reference.state_dict())

    def state_dict(self) -> dict[str, Any]:
        return self._moved

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._moved = state


PLUGINS = {"tr_dpo": MovingReference()}
