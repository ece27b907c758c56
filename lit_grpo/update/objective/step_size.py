"""How large an optimizer step is, by how much of a stale batch is left of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

StepSizeRule = Literal["fixed", "effective_samples"]


@dataclass(frozen=True)
class StepSize:
    """How much of the learning rate an optimizer step gets.

    Args:
        rule: ``fixed`` takes all of it. ``effective_samples`` takes ``sqrt(min(1, ess / full_ess))`` of it, where
            ``ess`` is the effective sample size of the step's completions, as a share, under the weights policy /
            sampler (VCPO, arXiv 2602.17616).
        full_ess: From which share on the step is whole; 1 in VCPO.
    """

    rule: StepSizeRule = "fixed"
    full_ess: float = 1.0

    def __post_init__(self) -> None:
        if self.rule not in get_args(StepSizeRule):
            raise ValueError(f"step_size.rule must be one of {', '.join(get_args(StepSizeRule))}, not {self.rule!r}.")
        if not 0 < self.full_ess <= 1:
            raise ValueError(
                f"step_size.full_ess must be in (0, 1], not {self.full_ess}; it is a share of the completions."
            )
        if self.rule == "fixed" and self.full_ess != 1:
            raise ValueError(
                f"step_size.full_ess is {self.full_ess}, but step_size.rule is fixed; set it to effective_samples."
            )

    @property
    def needs(self) -> frozenset[str]:
        """What it needs, by words of :data:`lit_grpo.compatibility.REQUIREMENTS`."""
        return frozenset({"sampled_log_probs"} if self.rule == "effective_samples" else ())

    def scale(self, log_weights_C: torch.Tensor) -> float:
        """Return what the learning rate is multiplied by.

        Args:
            log_weights_C: Log of policy / sampler of each whole completion of the step, on all ranks, not clipped.
        """
        return math.sqrt(min(1.0, effective_share(log_weights_C) / self.full_ess))


def effective_share(log_weights_C: torch.Tensor) -> float:
    """Return ``(sum w)**2 / (n sum w**2)`` in (0, 1], of weights by their logs, which may be of any size; 1 of none."""
    if not len(log_weights_C):
        return 1.0
    exact_C = log_weights_C.double()
    log_share = 2 * exact_C.logsumexp(0) - (2 * exact_C).logsumexp(0)
    return float(log_share.exp()) / len(exact_C)


@contextmanager
def scaled_learning_rate(param_groups: Sequence[dict[str, Any]], scale: float) -> Iterator[None]:
    """Multiply the learning rate of all groups for one step; a schedule finds them as it left them.

    A gradient that is scaled instead changes next to nothing under Adam, which divides by its size.
    """
    before = [group["lr"] for group in param_groups]
    try:
        for group in param_groups:
            group["lr"] = group["lr"] * scale
        yield
    finally:
        for group, lr in zip(param_groups, before, strict=True):
            group["lr"] = lr
