"""The seam for what is added to the objective's loss, of what the policy computes on the way to its log-probs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, ClassVar

from lit_grpo.plugins import Plugin

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from lit_grpo.ranks import Ranks

    Visit = Callable[[Callable[[Callable[[], object], float], None]], None]


class Term:
    """What is added to the loss of one optimizer step: here, nothing.

    Attributes:
        metrics: What to log of the step, the same on every rank.
    """

    metrics: Mapping[str, float] = {}

    def watching(self) -> AbstractContextManager[object]:
        """Return a context for the forward pass of a micro-batch, in which the term may look at what is computed."""
        return nullcontext()

    def added_to(self, loss: torch.Tensor, weight: float) -> torch.Tensor:
        """Return a micro-batch's share of the step's loss, with the term's share of what was last watched.

        Args:
            loss: The objective's.
            weight: What the tokens of the micro-batch count; 0 where it has none to learn from.
        """
        return loss


class Auxiliary(Plugin):
    """What is added to the objective's loss: here, nothing.

    A rule of your own is a dataclass that derives from it. The log of ``loss`` stays the objective's.
    """

    role: ClassVar[str] = "what is added to the objective's loss"

    def term(self, policy: PreTrainedModel, visit: Visit, ranks: Ranks) -> Term:
        """Return the term of an optimizer step, before its first backward pass.

        Args:
            policy: Learns.
            visit: Calls a function for each micro-batch of the step, with what sends it through the policy's layers
                without gradient, and with what its tokens count. All ranks call it together or not at all.
            ranks: Of the run.
        """
        return Term()
