"""The contract between the rollout loop and the generators that decode completions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from lit_grpo.scheduling.layouts import Blocks, KVLayout
from lit_grpo.types import Likeliest, Observation, StepEvents

if TYPE_CHECKING:
    import torch

    from lit_grpo.policy.spec import PolicySpec
    from lit_grpo.policy.weights import PolicyWeights
    from lit_grpo.rollout.weights.tensors import SyncReport
    from lit_grpo.types import Key, Prompt, Request

__all__ = [
    "Capacity",
    "Decoder",
    "GenerationError",
    "Generator",
    "Likeliest",
    "Observation",
    "Scorer",
    "StepEvents",
]


@dataclass(frozen=True)
class Capacity:
    """The free capacity of a generator.

    At most ``slots`` completions are decoded at a time; ``free_slots`` more can be submitted now. ``kv_tokens`` is the
    memory for keys and values in tokens, ``None`` where it is not a limit, ``kv_tokens_in_use`` how much of it is
    taken, and ``layout`` how it is divided among completions. A generator that ``evicts`` makes room by itself when
    memory becomes scarce; from any other the loop takes requests away before a step that would not fit. Of completions
    that have left their slots it keeps keys and values of so many tokens at least: ``kept_share`` of what slots of full
    length hold. It computes those of others again.
    """

    slots: int
    free_slots: int
    kv_tokens: int | None = None
    kv_tokens_in_use: int = 0
    layout: KVLayout = Blocks()  # noqa: RUF009 (frozen)
    evicts: bool = False
    kept_share: float = math.inf


class Decoder(Protocol):
    """Decodes submitted requests step by step: what the rollout loop, its only caller, needs of a generator.

    ``feature_points`` are the numbers of tokens at which its steps report observations; they may be set while nothing
    is in flight. ``keeps_ended`` says, likewise, that completions which end may go on, or others begin within them, so
    that keys and values are worth keeping until their prompt is released. ``one_by_one`` says that somebody looks at
    each number of tokens, so that no step is to bring a request several. ``num_likeliest`` is how many of the likeliest
    tokens of each distribution a step reports, 0 for no report.
    """

    feature_points: tuple[int, ...]
    keeps_ended: bool
    one_by_one: bool
    num_likeliest: int

    @property
    def version(self) -> int:
        """The policy version that samples now; -1 where no complete set of weights has arrived."""
        ...

    def capacity(self) -> Capacity:
        """Return how much can be submitted now."""
        ...

    def submit(self, requests: Sequence[Request], expected: Sequence[float] | None = None) -> None:
        """Admit requests, at most ``capacity().free_slots`` of them; each continues from its prefix at the next step.

        Args:
            requests: The requests to decode.
            expected: Expected number of tokens of each request, for a generator that balances requests over servers.
        """
        ...

    def expect(self, prompts: Iterable[Prompt]) -> None:
        """Say which prompts requests will come for, so that some can be made ready together."""
        ...

    def step(self) -> StepEvents:
        """Decode one token of every admitted request; return what finished."""
        ...

    def release(self, prompts: Iterable[Prompt]) -> None:
        """Say that no more requests for these prompts will come, so that nothing is kept for them."""
        ...

    def abort(self, keys: Iterable[Key]) -> list[Request]:
        """Stop these requests and hand them back, with their tokens so far as their prefixes."""
        ...


@runtime_checkable
class Generator(Decoder, Protocol):
    """Decodes with the weights of a policy.

    The life of a generator: ``start`` once, then ``load_weights`` before the first rollout and after
    every policy update, ``submit``/``step`` in between, and ``close`` at the end.

    ``abilities`` are what it can do beyond decoding, known before ``start``:

    - ``own_devices``: it decodes on devices that the policy does not use, so also while the policy is updated.
    - ``own_weights``: it computes with a copy of the weights, which have to travel to it. A generator without this
      decodes with the policy module itself.
    - ``scores``: it is a :class:`Scorer`, whose scores of given tokens prove which weights it computes with.
    - ``entropies``: completions come with the mean entropy of the distributions that their tokens were sampled from.
    - ``keeps_kv``: a request that is stopped before a sync can go on after it with the keys and values of the old
      weights, where :class:`lit_grpo.policy.spec.PolicySpec` asks for that.
    - ``policy_dtype``: it computes in the type of the policy's weights, so in float32 its scores are the policy's.
    - ``hidden_states``: the features of its observations are the policy's last hidden states.
    - ``images``, ``observed_images``: prompts may have images, and so may what requests have observed.
    - ``likeliest``: its steps report the likeliest tokens of the distributions that tokens were drawn from.
    """

    abilities: frozenset[str]

    def start(self, policy: PolicySpec) -> None:
        """Get ready to decode for ``policy``; raise a ``ValueError`` for a model that it cannot decode."""
        ...

    def weights(self) -> PolicyWeights:
        """Return the weights of the policy that the next ``load_weights`` has to bring."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> SyncReport:
        """Take over the policy's weights as ``version``; return what was bound.

        Args:
            weights: Tensors of the policy to sample with, by name.
            version: Version of the policy.

        Raises:
            WeightSyncError: Tensors are missing, unknown or not the policy's, or requests are in flight.
        """
        ...

    def invalidate_weights(self) -> None:
        """Refuse to sample until ``load_weights`` succeeds again: the weights were found to be wrong."""
        ...

    def sleep(self) -> dict[str, float]:
        """Give back memory until the next ``load_weights``, if that is possible; return metrics by name."""
        ...

    def close(self) -> None:
        """Free what ``start`` took."""
        ...


class Scorer(Generator, Protocol):
    """A generator with the ability ``scores``: the log-probs that it gives to tokens show which weights it has."""

    @property
    def longest_sequence(self) -> int:
        """The most tokens that it can score together, the first among them."""
        ...

    def score(self, sequences: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
        """Return the log-probs, at temperature 1, of all tokens after the first of each sequence.

        The result has one tensor (N) for each engine by its name: the log-probs of one sequence after another.

        Raises:
            WeightSyncError: Requests are in flight, or no engine answers.
        """
        ...


class GenerationError(RuntimeError):
    """No engine is left that could decode."""
