"""Checks that a step changes the policy, and not too much, and that the learning rate fits what is trained."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch

from lit_grpo.tools.doctor.patient import Patient
from lit_grpo.tools.doctor.report import CheckResult
from lit_grpo.tools.doctor.trial import learn, rewarded, undone

MOST_LOST = 0.5
"""Nats per token by which a step may make rewarded completions less likely.

A step along the gradient makes rewarded completions likelier. With a learning rate that is far too high it overshoots,
and all sampled completions become less likely, rewarded or not. This holds for every model, weight and optimizer.
Measured on the demo (AdamW): its own 1e-3 changes rewarded tokens by +0.01 and -0.1 nats in two seeds, ten times that
by -0.6 and -3, a hundred times by -16.
"""
MOST_CHANGE = 0.1
"""The share of the weights' norm that one step may change; with more, little of what the policy had learned is left."""


def check_rate(patient: Patient) -> Iterator[CheckResult]:
    """Compare the learning rate with those that are usual for adapters or for all weights."""
    if (unusual := patient.module.unusual_rate) is not None:
        yield CheckResult("warn", "learning rate", *unusual)


def check_step(patient: Patient) -> Iterator[CheckResult]:
    """Take one step with the highest learning rate of the schedule, on the samples with rewards 0 and 1 in turn."""
    before, groups = patient.logprobs(), rewarded(patient, patient.groups)
    policy = patient.module.policy
    with undone(patient.module) as copies:
        logs = learn(patient, groups, lr=None)
        changed = _changes(dict(policy.named_parameters()), copies)
        after = patient.logprobs()
    yield _gradient(logs["grad_norm"], changed)
    change = math.sqrt(sum(difference**2 for difference, _ in changed.values()))
    change /= math.sqrt(sum(norm**2 for _, norm in changed.values())) or 1.0
    rewards = [rollout.reward for group in groups for rollout in group.rollouts]
    gains = [now_T - then_T for now_T, then_T, reward in zip(after, before, rewards, strict=True) if reward]
    gained = float(torch.cat(gains).mean())
    figure = f"changes the weights by {change:.2g} of their norm, and what it rewards by {gained:+.2g} nats a token"
    remedy = f"lower model.optimizer.lr, which reaches {logs['lr']:.3g}, for example to a tenth"
    if not (gained >= -MOST_LOST and change <= MOST_CHANGE):
        yield CheckResult("fail", "step", figure, remedy)
    elif not change:
        yield CheckResult(
            "fail",
            "step",
            "changes no weight",
            f"raise model.optimizer.lr, which reaches {logs['lr']:.3g}, or keep the weights in float32 (model.dtype)",
        )
    else:
        yield CheckResult("pass" if gained >= 0 else "warn", "step", figure, "" if gained >= 0 else remedy)


def _gradient(norm: float, changed: Mapping[str, tuple[float, float]]) -> CheckResult:
    still = [name for name, (difference, _) in changed.items() if not difference]
    figure = f"norm {norm:.2g}, {len(changed) - len(still)} of {len(changed)} tensors change"
    if not math.isfinite(norm):
        return CheckResult("fail", "gradient", figure, "the policy's forward pass is not finite; look at its weights")
    if not norm:
        return CheckResult("fail", "gradient", figure, "the policy is frozen: nothing that it computes can be trained")
    if still:
        return CheckResult("warn", "gradient", figure, f"{still[0]} is trained, and has no part in the forward pass")
    return CheckResult("pass", "gradient", figure)


@torch.no_grad()
def _changes(weights: Mapping[str, torch.Tensor], copies: Mapping[str, torch.Tensor]) -> dict[str, tuple[float, float]]:
    """Return the norm of each weight's change, and the norm of the weight."""
    changes = {}
    for name, copy in copies.items():
        difference = weights[name].detach().cpu().float() - copy.float()
        changes[name] = (float(difference.norm()), float(copy.float().norm()))
    return changes
