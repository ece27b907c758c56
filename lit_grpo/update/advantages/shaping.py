"""The seam for advantages: what each rollout is learnt from with, once the estimator has compared the rewards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch

from lit_grpo.plugins import GroupBatch, Plugin
from lit_grpo.types import RolloutGroup


class Shaping(Plugin):
    """What each rollout is learnt from with: here, the advantage that the run's estimator has given it.

    A rule of your own is a dataclass that derives from it. For example, less for long completions::

        @dataclass
        class ByLength(Shaping):
            cost: float = 0.001

            def shape(self, batch, advantages):
                return [
                    [value - self.cost * each.completion.num_sampled for value, each in zip(values, group.rollouts)]
                    for values, group in zip(advantages, batch.groups)
                ]

    A rule that calls ``batch.all_gather``, or compares groups, needs ``all_ranks``; one that compares members
    ``whole_groups``; one that goes by ``Rollout.reward`` ``plain_rewards``.
    """

    role: ClassVar[str] = "what each rollout is learnt from with"

    def shape(self, batch: GroupBatch, advantages: Sequence[Sequence[float]]) -> Sequence[Sequence[float]]:
        """Return an advantage for each rollout of each group.

        Args:
            batch: Groups with any number of rollouts each.
            advantages: The estimator's, in the same order; NaN for one that is not learnt from, which stays so.
        """
        return advantages


def shaped(shaping: Shaping, batch: GroupBatch, advantages_R: torch.Tensor) -> torch.Tensor:
    """Return the advantages of all rollouts of a batch, shape R, as a rule shapes them; NaN stays NaN.

    Raises:
        ValueError: The rule does not return one finite number for each rollout that is learnt from.
    """
    values = [part.tolist() for part in advantages_R.split([len(group.rollouts) for group in batch.groups])]
    returned = shaping.shape(batch, values)
    _check(shaping, batch.groups, values, returned)
    flat = [value for its in returned for value in its]
    return torch.tensor(flat, dtype=advantages_R.dtype).masked_fill(advantages_R.isnan(), math.nan)


def _check(
    shaping: Shaping,
    groups: Sequence[RolloutGroup],
    estimated: Sequence[Sequence[float]],
    returned: Sequence[Sequence[float]],
) -> None:
    name = type(shaping).__name__
    if len(returned) != len(groups):
        raise ValueError(f"{name} shapes {len(returned)} groups of {len(groups)}; give a list for each of them.")
    for group, old, new in zip(groups, estimated, returned, strict=True):
        fits = len(new) == len(old) and all(
            math.isfinite(value) or math.isnan(before) for value, before in zip(new, old, strict=True)
        )
        if not fits:
            raise ValueError(
                f"{name} gives prompt {group.prompt.prompt_id!r} the advantages {list(new)}; give one finite number "
                f"for each of its {len(old)} rollouts that is learnt from."
            )
