"""The contract between the rollout controller and whatever decodes completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from lit_grpo.types import Completion, Prompt, Request


@dataclass(frozen=True)
class Capacity:
    """What a generator can take at this moment.

    ``slots`` completions are decoded at a time at most; ``free_slots`` more can be submitted now.
    """

    slots: int
    free_slots: int


@dataclass
class StepEvents:
    """What one decode step brought: ``num_tokens`` new tokens in ``num_active`` slots, and the finished."""

    num_active: int = 0
    num_tokens: int = 0
    finished: list[Completion] = field(default_factory=list)


@runtime_checkable
class Generator(Protocol):
    """Decodes submitted requests step by step. The rollout controller is its only caller.

    The life of a generator: ``start`` once, then ``load_weights`` before the first rollout and after
    every policy update, ``submit``/``step`` in between, and ``close`` at the end.
    """

    def start(self, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Get ready to decode for ``policy``; raises ``ValueError`` for a model it cannot decode."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> int:
        """Take over the policy's weights as ``version``; return how many tensors were bound.

        Raises:
            WeightSyncError: Tensors are missing, unknown or not the policy's.
        """
        ...

    @property
    def version(self) -> int:
        """The policy version that samples now; -1 before the first ``load_weights``."""
        ...

    def capacity(self) -> Capacity:
        """Return how much can be submitted now."""
        ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Admit requests, at most ``capacity().free_slots`` of them; decoding starts at the next step."""
        ...

    def step(self) -> StepEvents:
        """Decode one token of every admitted request; return what finished."""
        ...

    def release(self, prompts: Iterable[Prompt]) -> None:
        """Say that no more requests for these prompts will come, so nothing need be kept for them."""
        ...

    def abort(self, keys: Iterable[tuple[str, int, int]]) -> list[Completion]:
        """Stop these requests (by ``Request.key``) and return what they have so far."""
        ...

    def close(self) -> None:
        """Free what ``start`` took."""
        ...


class WeightSyncError(RuntimeError):
    """The generator's weights are not the policy's; it must not sample until a full sync succeeds."""
