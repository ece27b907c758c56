"""What flows through one training iteration, from prompt to rollout group.

Dimension legend, used as a suffix on tensors everywhere (``rewards_PG``, ``logprobs_BT``):

====  ==========================================================
P     prompts in a batch
G     completions per prompt (the group size)
R     rollouts of a batch, group by group, however many each has
B     rows of a batch that goes through the model
C     completions of a micro-batch
T     tokens
N     completion tokens that are learnt from, of a micro-batch, one completion after another
V     vocabulary
K     reward functions
====  ==========================================================
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import torch

    Values = torch.Tensor | np.ndarray | Sequence[int] | Sequence[float] | Sequence[bool]

SamplePath = tuple[int, ...]
"""Which sample of a prompt: ``(sample,)``; where a sample forks and takes turns, ``(sample, branch, turn)``."""
GroupKey = tuple[str, int]
"""``(prompt_id, visit)``: one visit of a prompt, whose completions are a group."""
Key = tuple[str, int, SamplePath]
"""``(prompt_id, visit, path)``: one completion of a run."""


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


class Segment(NamedTuple):
    """A stretch of tokens of one origin.

    ``version`` is that of the policy that sampled them; None where they were *observed* (a tool's answer, a hint):
    those stand in the row and are never learnt from. Sampled ones are, unless ``trained`` is False.
    """

    num_tokens: int
    version: int | None
    trained: bool = True


OBSERVED = -1
"""Stands for the version of tokens that no policy has sampled."""


def _segments(versions_T: Values, trained_T: Values | None = None) -> tuple[Segment, ...]:
    """Cut where version or training changes."""
    versions = _array(versions_T, "int64")
    trained = versions != OBSERVED if trained_T is None else _array(trained_T, "bool") & (versions != OBSERVED)
    if not len(versions):
        return ()
    if (versions == versions[0]).all() and (trained == trained[0]).all():
        return _uniform(len(versions), int(versions[0]), bool(trained[0]))
    changes = np.flatnonzero((np.diff(versions) != 0) | (np.diff(trained) != 0)) + 1
    begins = [0, *changes.tolist()]
    ends = [*begins[1:], len(versions)]
    return tuple(
        Segment(end - begin, None if versions[begin] == OBSERVED else int(versions[begin]), bool(trained[begin]))
        for begin, end in zip(begins, ends, strict=True)
    )


@lru_cache(4096)
def _uniform(num_tokens: int, version: int, trained: bool) -> tuple[Segment]:
    """Return one segment; equal ones share memory."""
    return (Segment(num_tokens, None if version == OBSERVED else version, trained),)


def _array(values_T: Values, dtype: str) -> np.ndarray:
    detach = getattr(values_T, "detach", None)  # of a tensor
    return np.ascontiguousarray(values_T if detach is None else detach().cpu().numpy(), dtype=dtype)


def _tensor(memory: bytearray, dtype: torch.dtype, begin: int, count: int) -> torch.Tensor:
    """A tensor on that memory, from byte ``begin`` on; it may take part in autograd, wherever it is asked for."""
    import torch

    with torch.inference_mode(False):
        if not count:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(memory, dtype=dtype, count=count, offset=begin)


class Trajectory:
    """What follows a prompt: tokens with their log-probs, in segments that say where they come from.

    ``token_ids_T`` (int64), ``logprobs_T`` (float32, of the distribution that was sampled from; 0 where observed),
    ``versions_T`` (int64, the policy version that sampled each token, or ``OBSERVED``) and ``trained_T`` (bool, whether
    it is learnt from) lie on the CPU and have equal length. ``entropy`` is the mean entropy, in nats, of the
    distributions that its tokens were sampled from; NaN where the generator does not tell.

    A token takes eight bytes, and there are no tensors until they are asked for: ``logprobs_T`` is then the memory that
    is kept, the others are copies. Ids, log-probs and versions can be assigned as a whole.

    Args:
        token_ids_T: Tensor, array or sequence.
        logprobs_T: Likewise.
        versions_T: Likewise.
        trained_T: Likewise; all that were sampled by default.
        entropy: See above.
    """

    __slots__ = ("_memory", "_num_tokens", "entropy", "segments")

    def __init__(
        self,
        token_ids_T: Values = (),
        logprobs_T: Values = (),
        versions_T: Values = (),
        trained_T: Values | None = None,
        entropy: float = math.nan,
    ) -> None:
        self._memory, self._num_tokens = bytearray(), 0  # ids (int32), then log-probs (float32)
        self.token_ids_T, self.logprobs_T = token_ids_T, logprobs_T
        self.segments = _segments(versions_T, trained_T)
        self.entropy = entropy

    @property
    def num_tokens(self) -> int:
        """Number of tokens, observed ones among them."""
        return self._num_tokens

    @property
    def num_trained(self) -> int:
        """Number of tokens that are learnt from."""
        return sum(segment.num_tokens for segment in self.segments if segment.trained)

    @property
    def oldest_version(self) -> int | None:
        """The version of its oldest sampled token; None where there is none."""
        return min((segment.version for segment in self.segments if segment.version is not None), default=None)

    @property
    def token_ids_T(self) -> torch.Tensor:
        """The tokens, int64; a copy."""
        import torch

        return _tensor(self._memory, torch.int32, 0, self._num_tokens).long()

    @token_ids_T.setter
    def token_ids_T(self, token_ids_T: Values) -> None:
        logprobs = self._memory[4 * self._num_tokens :]
        self._memory, self._num_tokens = bytearray(_array(token_ids_T, "int32")) + logprobs, len(token_ids_T)

    @property
    def logprobs_T(self) -> torch.Tensor:
        """Their log-probs, float32; what is written to it is kept."""
        import torch

        begin = 4 * self._num_tokens
        return _tensor(self._memory, torch.float32, begin, (len(self._memory) - begin) // 4)

    @logprobs_T.setter
    def logprobs_T(self, logprobs_T: Values) -> None:
        self._memory = self._memory[: 4 * self._num_tokens] + bytearray(_array(logprobs_T, "float32"))

    @property
    def versions_T(self) -> torch.Tensor:
        """The policy versions that sampled them, int64; a copy."""
        return self._spread([OBSERVED if segment.version is None else segment.version for segment in self.segments])

    @versions_T.setter
    def versions_T(self, versions_T: Values) -> None:
        self.segments = _segments(versions_T)

    @property
    def trained_T(self) -> torch.Tensor:
        """Whether they are learnt from, bool; a copy."""
        return self._spread([segment.trained for segment in self.segments]).bool()

    def _spread(self, values: Sequence[int]) -> torch.Tensor:
        """Give each token the value of its segment, int64."""
        import torch

        counts = torch.tensor([segment.num_tokens for segment in self.segments], dtype=torch.int64)
        return torch.tensor(values, dtype=torch.int64).repeat_interleave(counts)

    def until(self, num_tokens: int) -> Trajectory:
        """Return its first tokens; ``entropy`` stays, as the best that is known of them."""
        part = Trajectory(self.token_ids_T[:num_tokens], self.logprobs_T[:num_tokens], entropy=self.entropy)
        part.segments = _segments(self.versions_T[:num_tokens], self.trained_T[:num_tokens])
        return part

    def followed_by(
        self, token_ids: Sequence[int], logprobs: Sequence[float] | None = None, version: int | None = None
    ) -> Trajectory:
        """Return this and more tokens behind it: sampled with ``logprobs`` by ``version``, or observed without."""
        whole = Trajectory(
            [*self.token_ids_T.tolist(), *token_ids],
            [*self.logprobs_T.tolist(), *(logprobs or [0.0] * len(token_ids))],
            entropy=self.entropy,
        )
        new = [OBSERVED if version is None else version] * len(token_ids)
        whole.segments = _segments(
            [*self.versions_T.tolist(), *new], [*self.trained_T.tolist(), *([True] * len(token_ids))]
        )
        return whole


EMPTY = Trajectory()
"""Nothing yet; it is never written to."""


@dataclass(frozen=True, slots=True)
class Request:
    """One completion to sample, or to go on with: a request owns what it has come to so far, its ``prefix``.

    Its random numbers depend on its ``key``, ``seed`` and the position of a token, counted over the prefix, alone.
    ``sampling.max_tokens`` limits the prefix and what follows together.
    """

    prompt: Prompt
    path: SamplePath
    sampling: SamplingParams
    seed: int = 0
    prefix: Trajectory = field(default=EMPTY, compare=False)

    @property
    def key(self) -> Key:
        """``(prompt_id, visit, path)``, unique among the requests of a run."""
        return (self.prompt.prompt_id, self.prompt.visit, self.path)

    @property
    def group(self) -> GroupKey:
        """``(prompt_id, visit)``."""
        return (self.prompt.prompt_id, self.prompt.visit)

    def after(self, prefix: Trajectory) -> Request:
        """Return the request that goes on behind ``prefix``."""
        return replace(self, prefix=prefix)


FinishReason = Literal["stop", "length", "abort"]


class Completion(Trajectory):
    """A trajectory that has come to its end.

    ``finish_reason`` is ``stop`` (an end-of-sequence token or a stop string; the token is kept), ``length`` (the limit)
    or ``abort``.

    Args:
        request: What was asked for.
        token_ids_T: See :class:`Trajectory`.
        logprobs_T: Likewise.
        versions_T: Likewise.
        finish_reason: Why it ended.
        text: The tokens as text.
        entropy: See :class:`Trajectory`.
        trained_T: Likewise.
    """

    __slots__ = ("finish_reason", "request", "text")

    def __init__(
        self,
        request: Request,
        token_ids_T: Values,
        logprobs_T: Values,
        versions_T: Values,
        finish_reason: FinishReason,
        text: str = "",
        entropy: float = math.nan,
        trained_T: Values | None = None,
    ) -> None:
        super().__init__(token_ids_T, logprobs_T, versions_T, trained_T, entropy)
        self.request = request
        self.finish_reason: FinishReason = finish_reason
        self.text = text

    def __repr__(self) -> str:
        return f"Completion({self.request.key}, {self.num_tokens} tokens, {self.finish_reason!r}, {self.text!r})"


@dataclass(slots=True)
class Rollout:
    """A completion and what it earned.

    ``rewards`` holds each reward function's value by name, ``None`` where it does not apply; ``reward``
    is their weighted sum, NaN where none applies (such a rollout takes no part in the update). One that is not ``kept``
    counts in the statistics of its group, and is not learnt from.
    """

    prompt: Prompt
    completion: Completion
    rewards: dict[str, float | None] = field(default_factory=dict)
    reward: float = math.nan
    kept: bool = True


@dataclass
class RolloutGroup:
    """The rollouts of one visit of a prompt, in the order of their paths: any number of them, missing ones allowed.

    Statistics are over all members, whatever part of them is kept.
    """

    prompt: Prompt
    rollouts: list[Rollout]

    @property
    def key(self) -> GroupKey:
        """``(prompt_id, visit)``."""
        return (self.prompt.prompt_id, self.prompt.visit)


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
        self.spans: Sequence[tuple[Key, Span]] = []
        self.predicted: Mapping[Key, float] = {}
        self.trained = False

    def to(self, device: torch.device | str) -> PromptBatch:
        """Return itself: rollouts stay on the host, micro-batches move to the device."""
        return self

    @property
    def rollouts(self) -> list[Rollout]:
        """All rollouts, group by group."""
        return [rollout for group in self.groups for rollout in group.rollouts]
