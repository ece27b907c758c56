"""PODS (arXiv 2504.13818): of each group, learn from the members whose rewards have the largest variance.

Sampling many completions is cheap beside learning from them. Of N rewards the ``keep`` with the largest variance are
the i highest and the keep - i lowest for some i (theorem 1).

Evidence: ``benchmarks/results/budgets-2026-11-23.json`` has learning curves of 4 of 16 completions beside those of
:mod:`lit_grpo.methods.members`; docs/measurements.md, "Budgets", reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from lit_grpo.methods.shared.selection import CompletionSelection, max_variance_subset
from lit_grpo.types import Rollout
from lit_grpo.update.plugin import Measure


@dataclass
class MaxVariance(CompletionSelection):
    """The members whose rewards have the largest variance (PODS, arXiv 2504.13818).

    A best and a worst one are always among them. The paper's statistics are of those ``kept``.
    """

    statistics: Literal["group", "kept"] = "kept"

    def values(self, rewards_N: torch.Tensor, rollouts: Sequence[Rollout], measure: Measure) -> torch.Tensor:
        return rewards_N.double()

    def of_group(self, values_N: torch.Tensor, size: int) -> torch.Tensor:
        return max_variance_subset(values_N, size)


PLUGINS = {"pods": MaxVariance()}
