"""A trial update: it is made with the run's own learner and optimizer, and undone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch

from lit_grpo.module import GRPOModule
from lit_grpo.optim.rates import highest_rate
from lit_grpo.tools.doctor.patient import Patient
from lit_grpo.types import Rollout, RolloutGroup
from lit_grpo.update.learner import Learner

if TYPE_CHECKING:
    from lightning.pytorch.core.optimizer import LightningOptimizer


class TrialOptimization:
    """Takes steps with a module's optimizer, without its schedule.

    Args:
        module: A module in a fit.
        lr: The learning rate of all parameter groups; by default the highest of each group's schedule.
    """

    def __init__(self, module: GRPOModule, lr: float | None) -> None:
        self.policy_version = 0
        self._module, self._lr = module, lr
        self._optimizer = cast("LightningOptimizer", module.optimizers())

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._module.optimizer

    def add_gradient(self, compute_loss: Callable[[], torch.Tensor], exchange: bool) -> None:
        self._module.add_gradient(compute_loss, exchange)

    def take_step(self, scale: float = 1.0) -> float:
        """Take a whole step; return its learning rate."""
        groups = self._optimizer.param_groups
        before = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = highest_rate(group) if self._lr is None else self._lr
        taken = float(groups[0]["lr"])
        self._optimizer.step()
        for group, lr in zip(groups, before, strict=True):
            group["lr"] = lr
        self.policy_version += 1
        return taken


@contextmanager
def undone(module: GRPOModule) -> Iterator[dict[str, torch.Tensor]]:
    """Give copies of all trained weights on the host; afterwards restore them, and clear the optimizer's state."""
    trained = {name: weight for name, weight in module.policy.named_parameters() if weight.requires_grad}
    copies = {name: weight.detach().to("cpu", copy=True) for name, weight in trained.items()}
    try:
        yield copies
    finally:
        with torch.no_grad():
            for name, weight in trained.items():
                weight.copy_(copies[name])
        cast("LightningOptimizer", module.optimizers()).optimizer.state.clear()
        module.policy.zero_grad()


_NOISE = 0.05  # share of a tensor's standard deviation; enough for log-probs to distinguish old weights from new ones


@torch.no_grad()
def disturb(policy: torch.nn.Module) -> None:
    """Change every trained weight by so much that log-probs show it."""
    for weight in policy.parameters():
        if weight.requires_grad:
            spread = float(weight.float().std()) if weight.numel() > 1 else 0.0
            noise = torch.randn(weight.shape, dtype=torch.float32) * (_NOISE * spread or _FIRST)
            weight.add_(noise.to(weight.device, weight.dtype))


_FIRST = 0.02  # noise of a tensor whose values are all equal, such as an adapter's second matrix before training


def learn(patient: Patient, groups: Sequence[RolloutGroup], lr: float | None) -> dict[str, float]:
    """Take one step on rollouts as the run would; return its metrics."""
    module = patient.module
    settings = replace(module.settings, num_iterations=1, num_minibatches=1)
    learner = Learner(module.policy, TrialOptimization(module, lr), settings, module.learner.reference)
    with patient.computing():
        return learner.learn(groups)


def rewarded(patient: Patient, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
    """Return the same completions with rewards 0 and 1 in turn, so that every group has something to learn from."""
    names = [function.name for function in patient.module.rewards]

    def with_reward(rollout: Rollout, number: int) -> Rollout:
        value = float(number % 2)
        return replace(rollout, rewards=dict.fromkeys(names, value), reward=value)

    return [
        RolloutGroup(group.prompt, [with_reward(rollout, n) for n, rollout in enumerate(group.rollouts)])
        for group in groups
    ]
