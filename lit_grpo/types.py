"""What flows through one training iteration, from prompt to micro-batch.

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
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from lit_grpo.completion import Completion, FinishReason

if TYPE_CHECKING:
    import torch

    from lit_grpo.scheduling.spans import Span
    from lit_grpo.update.split_prompt import SplitPrompt

__all__ = [
    "Completion",
    "FinishReason",
    "MicroBatch",
    "Prompt",
    "PromptBatch",
    "Request",
    "Rollout",
    "RolloutGroup",
    "SamplingParams",
]


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

    ``groups`` is empty until :class:`callbacks.RolloutScheduler` has filled it; then it has one group
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


@dataclass(frozen=True)
class PackedGroup:
    """Where a prompt and some of its responses stand in a packed row: the prompt once, the responses behind it.

    ``response_tokens`` counts what of each response goes through the model: all but its last token, which predicts
    nothing. The prompt of a group that is split may be carried instead of standing in the row: its keys and values were
    computed for all of its micro-batches, and follow those of the row from ``carried_at`` on.
    """

    start: int
    prompt_tokens: int
    response_tokens: tuple[int, ...]
    carried_at: int | None = None

    @property
    def prompt_start(self) -> int:
        """Where its prompt's keys begin."""
        return self.start if self.carried_at is None else self.carried_at

    @property
    def response_start(self) -> int:
        """Where its first response begins in the row."""
        return self.start + (self.prompt_tokens if self.carried_at is None else 0)


@dataclass
class MicroBatch:
    """What goes through the policy at once, laid out in one of two ways.

    *Packed*, for models that can share a prefix: one row without padding, in which each of ``groups`` stands as [prompt
    | response 1 | response 2 | ...], every response counting its positions from the prompt's end. *In rows*, where
    ``groups`` is empty: a completion a row behind a prompt of its own, padded on the right (under causal attention
    padding on the right is never seen, so there is no attention mask, and no pad id can be mistaken for a token).

    The completion tokens, one completion after another, are the N axis: ``source_N`` says where in the flattened
    (B, T) the *predecessor* of each token stands, whose hidden state predicts it; that of a response's first token is
    the prompt's last. The last tokens of carried prompts count as standing behind the row, one after another.
    ``prompts`` are those of groups that are split, by group, and None for all others. ``advantages_C`` and
    ``lengths_C``, the number of its tokens, are per completion, in the order of the N axis; ``rows_C`` is each one's
    place among the rollouts of the step.

    Example:
        The prompt [5, 6] with the completions [7, 8] and [9, 4, 3], packed::

            input_ids_BT    = [[5, 6, 7, 9, 4]]    groups = (PackedGroup(0, 2, (1, 2)),)
            position_ids_BT = [[0, 1, 2, 2, 3]]
            source_N = [1, 2, 1, 3, 4]    target_ids_N = [7, 8, 9, 4, 3]    lengths_C = [2, 3]
    """

    input_ids_BT: torch.Tensor
    position_ids_BT: torch.Tensor
    source_N: torch.Tensor
    target_ids_N: torch.Tensor
    sampled_logprobs_N: torch.Tensor
    advantages_C: torch.Tensor
    lengths_C: torch.Tensor
    rows_C: torch.Tensor
    groups: tuple[PackedGroup, ...] = ()
    prompts: tuple[SplitPrompt | None, ...] = ()

    def to(self, device: torch.device | str) -> MicroBatch:
        """Return a copy on ``device``."""
        tensors = {name: value.to(device) for name, value in vars(self).items() if name not in ("groups", "prompts")}
        return replace(self, **tensors)
