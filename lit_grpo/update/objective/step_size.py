"""How large an optimizer step is, by how much of a stale batch is left of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch

from lit_grpo.compatibility import Clash, check_clashes
from lit_grpo.limits import Limit, check_fields

StepSizeRule = Literal["fixed", "effective_samples"]


@dataclass(frozen=True)
class StepSize:
    """Fraction of the learning rate that an optimizer step uses.

    Args:
        rule: ``fixed``: use the full learning rate. ``effective_samples``: multiply it by ``sqrt(min(1, ess /
            full_ess))``, where ``ess`` is the effective sample size of the step's completions, as a fraction of their
            number, under the weights policy / behavior policy (VCPO, arXiv 2602.17616).
        full_ess: Effective-sample-size fraction from which the full learning rate is used; 1 in VCPO.
    """

    rule: StepSizeRule = "fixed"
    full_ess: Annotated[float, Limit(above=0, most=1, remedy="it is a share of the completions")] = 1.0

    def __post_init__(self) -> None:
        place = "model.objective.step_size."
        check_fields(self, place)
        clash = Clash(
            f"{place}full_ess {self.full_ess} needs steps by the effective sample size",
            f"{place}rule fixed takes all of the learning rate",
            found=self.full_ess != 1 and self.rule == "fixed",
            remedy=f"set {place}rule to effective_samples",
        )
        check_clashes([clash])

    @property
    def needs(self) -> frozenset[str]:
        """What it needs, by words of :data:`lit_grpo.compatibility.REQUIREMENTS`."""
        return frozenset({"one_row", "whole_completions"} if self.rule == "effective_samples" else ())

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
