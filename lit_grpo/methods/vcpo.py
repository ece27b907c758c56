"""Smaller steps on stale batches (VCPO, arXiv 2602.17616).

The paper's other parts are settings of the objective and of advantages: ratios without a clip, weights of whole
completions that are truncated at 8, and the baseline of least variance (``model.advantages.estimator least_variance``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch

from lit_grpo.limits import Limit
from lit_grpo.plugins import Plugin
from lit_grpo.update.step import Step


@dataclass
class EffectiveSamples(Plugin):
    """Multiply the learning rate of each step by ``sqrt(min(1, ess / full_ess))``.

    ``ess`` is the effective sample size of the step's completions, as a fraction of their number, under the weights
    policy / behavior policy, which are not truncated. For example::

        rollout:
          plugins: [april, {vcpo: {full_ess: 0.5}}]
    """

    writes: ClassVar[frozenset[str]] = frozenset({"scale"})
    needs: ClassVar[frozenset[str]] = frozenset({"one_row", "whole_completions"})

    full_ess: Annotated[float, Limit(gt=0, le=1, remedy="it is a share of the completions")] = 1.0
    """Effective-sample-size fraction from which the full learning rate is used; 1 in VCPO."""

    def on_gradient(self, step: Step) -> None:
        log_weights_C = torch.cat(step.ranks.gather(step.log_weights_C))
        step["scale"] = math.sqrt(min(1.0, effective_share(log_weights_C) / self.full_ess))


def effective_share(log_weights_C: torch.Tensor) -> float:
    """Return ``(sum w)**2 / (n sum w**2)`` in (0, 1], of weights by their logs, which may be of any size; 1 of none."""
    if not len(log_weights_C):
        return 1.0
    exact_C = log_weights_C.double()
    log_share = 2 * exact_C.logsumexp(0) - (2 * exact_C).logsumexp(0)
    return float(log_share.exp()) / len(exact_C)


PLUGINS = {"vcpo": EffectiveSamples()}
