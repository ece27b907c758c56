"""What flows through one training iteration, from prompt to rollout group.

Dimension legend, used as a suffix on tensors everywhere (``rewards_PG``, ``logprobs_BT``):

====  ==========================================================
P     prompts in a batch
G     completions per prompt (the group size)
B     rows of a batch that goes through the model
C     completions of a micro-batch
T     tokens
N     completion tokens of a micro-batch, flattened over its rows
V     vocabulary
K     reward functions
====  ==========================================================
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import numpy as np
    import torch


Key = tuple[str, int, int]
"""``(prompt_id, visit, sample_id)``: one completion of a run."""


class Span(NamedTuple):
    """A slot decodes one completion from ``start`` to ``end``, in steps or seconds.

    ``group`` is a number that completions of one prompt share. A completion that was set aside has several spans.
    """

    slot: int
    start: float
    end: float
    group: int


@dataclass(frozen=True)
class SamplingParams:
    """How completions are sampled.

    Args:
        temperature: Divides the logits; 0 is greedy decoding (validation and predict only).
        top_p: Keep the smallest set of tokens whose probability reaches this; 1 keeps all.
        top_k: Keep this many most likely tokens; 0 keeps all.
        min_p: Drop tokens less likely than this share of the likeliest one; 0 keeps all.
        max_tokens: The most tokens of one completion, the end-of-sequence token included.
        stop: A completion ends once its text contains one of these strings (which it keeps).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.temperature < 0 or not math.isfinite(self.temperature):
            raise ValueError(f"sampling temperature must be a finite number >= 0, not {self.temperature}.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"sampling top_p must be in (0, 1], not {self.top_p}; 1 keeps every token.")
        if self.top_k < 0:
            raise ValueError(f"sampling top_k must be >= 0, not {self.top_k}; 0 keeps every token.")
        if not 0 <= self.min_p < 1:
            raise ValueError(f"sampling min_p must be in [0, 1), not {self.min_p}; 0 keeps every token.")
        if self.max_tokens < 1:
            raise ValueError(f"sampling max_tokens must be at least 1, not {self.max_tokens}.")
        if any(not text for text in self.stop):
            raise ValueError("sampling stop holds an empty string, which would end every completion; remove it.")

    @property
    def truncates(self) -> bool:
        """Whether tokens of the model's distribution can be left out of sampling."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


@dataclass(frozen=True)
class Prompt:
    """One prompt, tokenised.

    ``prompt_id`` is stable across runs and epochs (``"train/17"``: split and row number); ``visit``
    counts how often it has been drawn before, so that a second epoch samples anew. ``columns`` are
    all fields of its row, for the reward functions.
    """

    prompt_id: str
    token_ids: tuple[int, ...]
    text: str
    columns: dict[str, Any] = field(default_factory=dict)
    visit: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """One completion to sample. Its random numbers depend on its ``key``, ``seed`` and position alone."""

    prompt: Prompt
    sample_id: int
    sampling: SamplingParams
    seed: int = 0

    @property
    def key(self) -> tuple[str, int, int]:
        """``(prompt_id, visit, sample_id)``, unique among the requests of a run."""
        return (self.prompt.prompt_id, self.prompt.visit, self.sample_id)


@dataclass(slots=True)
class Rollout:
    """A completion and what it earned.

    ``rewards`` holds each reward function's value by name, ``None`` where it does not apply; ``reward``
    is their weighted sum, NaN where none applies (such a rollout takes no part in the update).
    """

    prompt: Prompt
    completion: Completion
    rewards: dict[str, float | None] = field(default_factory=dict)
    reward: float = math.nan


@dataclass
class RolloutGroup:
    """All rollouts of one prompt, ordered by ``sample_id``. A group is never split or partial."""

    prompt: Prompt
    rollouts: list[Rollout]


class PromptBatch:
    """The seam between callbacks and module: prompts in, whole rollout groups added by the scheduler.

    ``groups`` is empty until :class:`lit_grpo.callbacks.RolloutScheduler` has filled it; then it has one group
    a prompt, in the order of ``prompts``. ``metrics`` is what the rollout has to say of itself, ``spans`` which slot
    decoded which completion when, and ``predicted`` how many tokens were expected of each (by ``Request.key``).
    ``trained`` is set by the training step, and makes the batch count as consumed in a checkpoint.

    It is no dataclass, because Lightning copies those field by field to convert their tensors.
    """

    def __init__(self, prompts: list[Prompt]) -> None:
        self.prompts = prompts
        self.groups: list[RolloutGroup] = []
        self.metrics: dict[str, float] = {}
        self.spans: Sequence[tuple[tuple[str, int, int], Span]] = []
        self.predicted: Mapping[tuple[str, int, int], float] = {}
        self.trained = False

    def to(self, device: torch.device | str) -> PromptBatch:
        """Return itself: rollouts stay on the host, micro-batches move to the device."""
        return self

    @property
    def rollouts(self) -> list[Rollout]:
        """All rollouts, group by group."""
        return [rollout for group in self.groups for rollout in group.rollouts]


FinishReason = Literal["stop", "length", "abort"]


class Completion:
    """The tokens of one sample.

    ``token_ids_T`` (int64), ``logprobs_T`` (float32, of the distribution that was sampled from) and
    ``versions_T`` (int64, the policy version that sampled each token) lie on the CPU and have equal
    length. ``finish_reason`` is ``stop`` (an end-of-sequence token or a stop string; the token is
    kept), ``length`` (the limit) or ``abort``. ``entropy`` is the mean entropy, in nats, of the distributions that its
    tokens were sampled from; NaN where the generator does not tell.

    A token takes eight bytes, and there are no tensors until they are asked for: ``logprobs_T`` is then the memory that
    is kept, the others are copies, which can be assigned as a whole.
    """

    __slots__ = ("_memory", "_num_tokens", "_versions", "entropy", "finish_reason", "request", "text")

    def __init__(
        self,
        request: Request,
        token_ids_T: torch.Tensor,
        logprobs_T: torch.Tensor,
        versions_T: torch.Tensor,
        finish_reason: FinishReason,
        text: str = "",
        entropy: float = math.nan,
    ) -> None:
        self.request = request
        self._memory, self._num_tokens = bytearray(), 0  # ids (int32), then log-probs (float32)
        self.token_ids_T, self.logprobs_T, self.versions_T = token_ids_T, logprobs_T, versions_T
        self.finish_reason: FinishReason = finish_reason
        self.text = text
        self.entropy = entropy

    @property
    def num_tokens(self) -> int:
        """Number of sampled tokens."""
        return self._num_tokens

    @property
    def token_ids_T(self) -> torch.Tensor:
        """The tokens, int64; a copy."""
        import torch

        return _tensor(self._memory, torch.int32, 0, self._num_tokens).long()

    @token_ids_T.setter
    def token_ids_T(self, token_ids_T: torch.Tensor) -> None:
        logprobs = self._memory[4 * self._num_tokens :]
        self._memory, self._num_tokens = bytearray(_array(token_ids_T).astype("int32")) + logprobs, len(token_ids_T)

    @property
    def logprobs_T(self) -> torch.Tensor:
        """Their log-probs, float32; what is written to it is kept."""
        import torch

        begin = 4 * self._num_tokens
        return _tensor(self._memory, torch.float32, begin, (len(self._memory) - begin) // 4)

    @logprobs_T.setter
    def logprobs_T(self, logprobs_T: torch.Tensor) -> None:
        self._memory = self._memory[: 4 * self._num_tokens] + bytearray(_array(logprobs_T).astype("float32"))

    @property
    def versions_T(self) -> torch.Tensor:
        """The policy versions that sampled them, int64; a copy."""
        import torch

        if isinstance(self._versions, int):
            return torch.full((self.num_tokens,), self._versions)
        return _tensor(self._versions, torch.int64, 0, len(self._versions) // 8).clone()

    @versions_T.setter
    def versions_T(self, versions_T: torch.Tensor) -> None:
        values = _array(versions_T)
        uniform = len(values) > 0 and bool((values == values[0]).all())
        self._versions: int | bytearray = int(values[0]) if uniform else bytearray(values.astype("int64"))

    def __repr__(self) -> str:
        return f"Completion({self.request.key}, {self.num_tokens} tokens, {self.finish_reason!r}, {self.text!r})"


def _array(values_T: torch.Tensor) -> np.ndarray:
    return values_T.detach().cpu().contiguous().numpy()


def _tensor(memory: bytearray, dtype: torch.dtype, begin: int, count: int) -> torch.Tensor:
    """A tensor on that memory, from byte ``begin`` on; it may take part in autograd, wherever it is asked for."""
    import torch

    with torch.inference_mode(False):
        if not count:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(memory, dtype=dtype, count=count, offset=begin)
