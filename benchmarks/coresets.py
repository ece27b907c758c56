"""CoLM (arXiv 2407.19580) as a plug-in, to compare it with a random half: not part of lit_grpo, which declines it.

Half of a batch's completions are trained on: medoids of their gradients, so that each of the others has a similar one
among them. A completion's gradient is that of the head, ``A sum_t (1[v = token] - p_v) h_t``, by two random projections
of 8 columns each; CoLM estimates that of the last value projection by two forward passes, and keeps its largest
entries. Medoids are chosen greedily, by the sum of distances (L1) to the nearest one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from lit_grpo.plugins import Plugin
from lit_grpo.update.plugin import Batch

COLUMNS = 8


@dataclass
class Coreset(Plugin):
    """Train on the medoids of half of the completions with an advantage, or on a random half of them."""

    writes: ClassVar[frozenset[str]] = frozenset({"chosen"})

    at_random: bool = False

    def on_batch(self, batch: Batch) -> None:
        """Choose."""
        with_step = [rollout for rollout in batch.rollouts if rollout.advantage == rollout.advantage != 0]
        order = torch.randperm(len(with_step), generator=torch.Generator().manual_seed(len(with_step))).tolist()
        if with_step and not self.at_random:
            measured = batch.measure(with_step, _of_head)
            sketches_R = torch.stack([measured[each.completion.request.key].double().sum(0) for each in with_step])
            order = medoids(torch.cdist(sketches_R, sketches_R, p=1), -(-len(with_step) // 2))
        chosen = set(order[: -(-len(with_step) // 2)])
        for number, rollout in enumerate(with_step):
            batch.set("chosen", rollout, number in chosen)


def medoids(distances_RR: torch.Tensor, size: int) -> list[int]:
    """Choose points one by one, each the one with which the sum of distances to the nearest chosen is least."""
    nearest_R, chosen = distances_RR.max().expand(len(distances_RR)), list[int]()
    for _ in range(size):
        sums_R = torch.minimum(distances_RR, nearest_R).sum(1)
        sums_R[chosen] = torch.inf
        chosen.append(int(sums_R.argmin()))
        nearest_R = torch.minimum(nearest_R, distances_RR[chosen[-1]])
    return chosen


def _of_head(model: Any, hidden_nD: torch.Tensor, ids_n: torch.Tensor, advantages_n: torch.Tensor) -> torch.Tensor:
    """Return a sketch of each token's gradient of the head, shape (n, 64)."""
    head_VD = model.get_output_embeddings().weight
    generator = torch.Generator().manual_seed(0)
    left_VC, right_DC = (torch.randn(size, COLUMNS, generator=generator) for size in head_VD.shape)
    residual_nV = -(hidden_nD @ head_VD.T).softmax(1)
    residual_nV[torch.arange(len(ids_n)), ids_n] += 1
    outer_nCC = (residual_nV @ left_VC)[:, :, None] * (hidden_nD @ right_DC)[:, None]
    return outer_nCC.flatten(1) * advantages_n[:, None]
