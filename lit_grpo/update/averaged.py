"""An exponential average of the policy's weights, which ratios can be taken to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class AveragedPolicy:
    """Keeps the average of all policies so far, of which the one of ``n`` steps ago counts ``decay ** n``.

    ``average = (decay total average + policy) / (decay total + 1)``, ``total = decay total + 1``: what the policies
    count adds up to 1 from the first step on, so that the average is not drawn to where it began (PPO-EWMA, arXiv
    2110.00641; the code in openai/ppo-ewma at 625dac7). Only weights that are trained are kept, in float32 or wider: as
    much memory as they take.

    Args:
        policy: Followed; the same on every rank, and so is the average.
        decay: In (0, 1).
    """

    def __init__(self, policy: PreTrainedModel, decay: float) -> None:
        self.policy, self.decay = policy, decay
        self._total, self._weights = 1.0, list[torch.Tensor]()  # there are none before the first use

    @contextmanager
    def lend(self) -> Iterator[PreTrainedModel]:
        """Give the policy with the averaged weights in the place of its own."""
        trained = self._trained()
        own = [parameter.data for parameter in trained]
        try:
            for parameter, mine in zip(trained, self._of(trained), strict=True):
                parameter.data = mine.to(parameter.dtype)
            yield self.policy
        finally:
            for parameter, data in zip(trained, own, strict=True):
                parameter.data = data

    @torch.no_grad()
    def follow(self) -> None:
        """Take the policy in as it is after an optimizer step."""
        total, trained = self.decay * self._total + 1, self._trained()
        for parameter, mine in zip(trained, self._of(trained), strict=True):
            mine.mul_(1 - 1 / total).add_(parameter, alpha=1 / total)
        self._total = total

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"total": self._total, "weights": self._weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint; from one of a run without an average, begin with the policy."""
        if state:
            self._total, self._weights = state["total"], list(state["weights"])

    def _trained(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self.policy.parameters() if parameter.requires_grad]

    def _of(self, trained: list[torch.nn.Parameter]) -> list[torch.Tensor]:
        """The average, where the policy is; before the first step the policy itself."""
        if not self._weights:
            self._weights = [p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True) for p in trained]
        self._weights = [mine.to(p.device) for mine, p in zip(self._weights, trained, strict=True)]
        return self._weights
