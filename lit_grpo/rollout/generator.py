"""The contract between the rollout controller and whatever decodes completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from lit_grpo.policy.weights import PolicyWeights
    from lit_grpo.rollout.weights.tensors import SyncReport
    from lit_grpo.types import Completion, Key, Prompt, Request


@dataclass(frozen=True)
class Capacity:
    """What a generator can take at this moment.

    ``slots`` completions are decoded at a time at most; ``free_slots`` more can be submitted now. ``kv_tokens`` is the
    memory for keys and values in tokens, ``None`` where it is no limit, and ``kv_tokens_in_use`` what is taken of it.
    """

    slots: int
    free_slots: int
    kv_tokens: int | None = None
    kv_tokens_in_use: int = 0


@dataclass
class Observation:
    """What the policy shows of some completions when they have come to ``num_tokens`` tokens.

    With 0 tokens it is what it shows of prompts, which all their completions share: ``keys`` are then the first two
    parts of a request's key. ``features`` (float32, a row for each of ``keys``) are the last hidden state, the mean
    log-prob so far and the entropy of the next token.
    """

    keys: Sequence[Key] | Sequence[tuple[str, int]]
    num_tokens: int
    features: np.ndarray


@dataclass
class StepEvents:
    """What one decode step brought: ``num_tokens`` new tokens in ``num_active`` slots, and the finished.

    ``set_aside`` are requests that had to leave for want of memory; submitted again, they go on where they were.
    ``message`` is for the user, where something went otherwise than planned.
    """

    num_active: int = 0
    num_tokens: int = 0
    finished: list[Completion] = field(default_factory=list)
    set_aside: list[Request] = field(default_factory=list)
    observations: list[Observation] = field(default_factory=list)
    message: str = ""


@runtime_checkable
class Generator(Protocol):
    """Decodes submitted requests step by step. The rollout controller is its only caller.

    ``feature_points``, set before ``start``, are the numbers of tokens at which its steps report observations.

    The life of a generator: ``start`` once, then ``load_weights`` before the first rollout and after
    every policy update, ``submit``/``step`` in between, and ``close`` at the end.
    """

    feature_points: tuple[int, ...]
    decodes_on_policy: bool
    """Whether it computes with the policy's own tensors, adapters and all, so that weights need not travel."""

    def start(self, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Get ready to decode for ``policy``; raises ``ValueError`` for a model it cannot decode."""
        ...

    def weights_of(self, policy: PreTrainedModel) -> PolicyWeights:
        """Return the weights of ``policy`` that the next ``load_weights`` has to bring."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> SyncReport:
        """Take over the policy's weights as ``version``; return what was bound.

        Raises:
            WeightSyncError: Tensors are missing, unknown or not the policy's.
        """
        ...

    @property
    def version(self) -> int:
        """The policy version that samples now; -1 where no complete set of weights has arrived."""
        ...

    def distrust(self) -> None:
        """Refuse to sample until ``load_weights`` succeeds again: the weights have proved to be wrong."""
        ...

    def capacity(self) -> Capacity:
        """Return how much can be submitted now."""
        ...

    def submit(self, requests: Sequence[Request], expected: Sequence[float] | None = None) -> None:
        """Admit requests, at most ``capacity().free_slots`` of them; decoding starts at the next step.

        Args:
            requests: What to decode.
            expected: How many tokens are expected of each, for a generator that spreads them.
        """
        ...

    def expect(self, prompts: Iterable[Prompt]) -> None:
        """Say which prompts requests will come for, so that some can be made ready together."""
        ...

    def step(self) -> StepEvents:
        """Decode one token of every admitted request; return what finished."""
        ...

    def release(self, prompts: Iterable[Prompt]) -> None:
        """Say that no more requests for these prompts will come, so nothing need be kept for them."""
        ...

    def abort(self, keys: Iterable[Key]) -> list[Completion]:
        """Stop these requests (by ``Request.key``) and return what they have so far."""
        ...

    def sleep(self) -> dict[str, float]:
        """Give back what memory can be given back until the next ``load_weights``; return metrics of it by name."""
        ...

    def close(self) -> None:
        """Free what ``start`` took."""
        ...


class GenerationError(RuntimeError):
    """Nothing is left that could decode."""
