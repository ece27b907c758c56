"""Common base of the generators with vLLM: engines with weights of their own decode the requests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import Annotated, Any, Literal, NamedTuple

import torch

from lit_grpo.limits import Limit, checks_arguments
from lit_grpo.policy.architecture.decoder import never_sampled
from lit_grpo.policy.sharding import is_scattered
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.policy.weights import PolicyWeights
from lit_grpo.ranks import Ranks
from lit_grpo.rollout.generator import Capacity, StepEvents
from lit_grpo.rollout.vllm.arguments import (
    adapter_arguments,
    check_family,
    check_fits,
    check_min_p,
    dtype_of,
    sampling_fields,
    warn_of_dtype,
)
from lit_grpo.rollout.vllm.images import check_sees
from lit_grpo.rollout.vllm.streams import EngineRequest, EngineRequests, SampledChunk
from lit_grpo.rollout.weights.adapters import AdapterWeights, adapter_folder, apart, share_of_elements
from lit_grpo.rollout.weights.tensors import SyncReport, Versioned, check_nothing_in_flight, complete
from lit_grpo.scheduling.layouts import Blocks
from lit_grpo.types import Key, Prompt, Request

Slots = Annotated[int, Limit(ge=1, le=2**16, remedy="a completion needs a slot to decode in")]
"""Number of completions that an engine decodes at a time."""
Travel = Literal["auto", "merged", "alone"]
"""Way of sending LoRA adapters."""


class Room(NamedTuple):
    """The most tokens of a request, and each engine's memory in KV tokens, in blocks; ``None`` if it does not tell."""

    context: int
    kv_tokens: Sequence[int | None]
    block: int

    def figure(self, over: Callable[[Iterable[int]], int]) -> int | None:
        """Return ``min`` or ``sum`` over the KV tokens of all engines; ``None`` where an engine does not tell."""
        known = [tokens for tokens in self.kv_tokens if tokens is not None]
        return over(known) if known and len(known) == len(self.kv_tokens) else None


class EngineGenerator(Versioned, ABC):
    """Hands requests to engines, and takes in what they sample.

    The tokens of a request are kept here. So it can be withdrawn at any time, and go on from its last token on another
    engine or with other weights. A token's random numbers depend on its request and its position alone, if the version
    of vLLM allows that (``WorkerExtension.draw_by_position``). Each sync has a salt of its own for vLLM's cache of
    prefixes, so that a request shares keys and values only with requests that began with the same weights.

    Args:
        num_slots: Number of completions that an engine decodes at a time.
        adapters: Way of sending LoRA adapters: ``merged``, ``alone``, or ``auto``, which is ``alone`` if that is
            possible and does not make decoding several times slower, as it does on CPUs.
        arguments: The user's arguments for vLLM.
        keeps_base: Whether weights that were sent once can stay for all adapters to come.
        remedies: Ways for the user to raise the context of the engines, and their memory.

    Attributes:
        sends_alone: Whether the adapters of the policy that it was started for travel alone.
    """

    @checks_arguments()
    def __init__(
        self,
        num_slots: Slots,
        adapters: Travel,
        arguments: Mapping[str, Any] | None,
        keeps_base: bool,
        remedies: tuple[str, str],
    ) -> None:
        self.num_slots, self.adapters, self.keeps_base, self.remedies = num_slots, adapters, keeps_base, remedies
        self.abilities: frozenset[str] = frozenset({"images", "own_weights", "scores"})
        if adapters != "alone":
            self.abilities |= {"keeps_kv"}
        self.sends_alone = False
        self.arguments = dict(arguments or {})
        self.weights_dtype = dtype_of(self.arguments)
        if self.weights_dtype is None:
            self.abilities |= {"policy_dtype"}
        self.weights_folder: str | None = None  # in which files of weights lie, or shared memory
        self.feature_points: tuple[int, ...] = ()
        self.one_by_one = False
        self.num_likeliest = 0
        self.keeps_ended = False  # vLLM caches prefixes anyway
        self._policy: PolicySpec | None = None
        self._made_for = ""
        self._arrived: dict[str, str] = {}  # the digests of what engines hold
        self._salt = ""
        self._salts: dict[Key, str] = {}  # of requests that were stopped, whose keys and values are kept
        self._streams = EngineRequests()

    # ---- what kinds of engines differ in ----------------------------------------------------------

    @abstractmethod
    def _make(self, policy: PolicySpec, lora: Mapping[str, Any]) -> None:
        """Start engines without weights."""

    @abstractmethod
    def _load(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> SyncReport:
        """Bring all weights; nothing is being decoded meanwhile."""

    @abstractmethod
    def _exchange(self, folder: Path, version: int) -> dict[str, str]:
        """Bring the adapters in a folder, in the place of others; return the digests of what engines hold of them."""

    @abstractmethod
    def _score(self, sequences: Sequence[Sequence[int]]) -> dict[str, list[list[float]]]:
        """Return the log-probs of all tokens after the first of each sequence, by the name of each engine."""

    @abstractmethod
    def _lacks_base(self) -> bool:
        """Return whether the base weights have to travel."""

    @abstractmethod
    def _room(self) -> Room:
        """Return the engines' limits."""

    @abstractmethod
    def _ask(self, stream: EngineRequest) -> None:
        """Ask an engine for the tokens to follow; ``stream`` has a new ticket."""

    @abstractmethod
    def _withdraw(self, streams: Sequence[EngineRequest]) -> None:
        """Let engines forget these streams, and give the tickets back."""

    @abstractmethod
    def _receive(self, events: StepEvents) -> None:
        """Take in what engines have sampled, after waiting for it."""

    # ---- life -------------------------------------------------------------------------------------

    def start(self, policy: PolicySpec) -> None:
        """Start engines for the policy's architecture, without its weights; those of the same architecture are kept."""
        warn_of_dtype(policy, self.weights_dtype)
        check_family(policy.config.get_text_config(), self.arguments, policy.context_length)
        check_sees(policy, self.arguments)
        lora = self._adapter_arguments(policy)
        self.sends_alone = bool(lora)
        made_for = f"{policy.signature} {lora.get('max_lora_rank')}"
        if self._made_for != made_for:
            self._made_for = ""
            self._make(policy, lora)
            self._made_for = made_for
        self.abort([stream.request.key for stream in self._streams])
        self._policy = policy
        self._streams, self._salts = EngineRequests(policy), {}
        self.invalidate_weights()

    def _adapter_arguments(self, policy: PolicySpec) -> dict[str, Any]:
        """Return vLLM's arguments for adapters that travel alone; none where they are merged."""
        if self.adapters == "alone":
            return adapter_arguments(policy.adapters, self.arguments)
        suits = torch.cuda.is_available() and self.keeps_base and not policy.keeps_kv
        if self.adapters == "auto" and policy.adapters is not None and suits:
            with suppress(ValueError):  # vLLM does not decode with them
                return adapter_arguments(policy.adapters, self.arguments)
        return {}

    def weights(self) -> PolicyWeights:
        """All weights with adapters merged; or the adapters, and the base weights where an engine has none."""
        assert self._policy is not None, "start comes first"
        if self.sends_alone:
            module, lacks_base = self._policy.module, self._lacks_base()
            if is_scattered(module):  # all ranks have to take part where one needs the base weights
                lacks_base = bool(Ranks(module.device).max(float(lacks_base)))
            return AdapterWeights(module, with_base=lacks_base, dtype=self.weights_dtype)
        return self._policy.weights(dtype=self.weights_dtype)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> SyncReport:
        check_nothing_in_flight(len(self._streams))
        return self._bring(weights, version)

    def _bring(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> SyncReport:
        """Bring weights to engines, none of which has been asked for anything."""
        assert self._policy is not None, "start comes first"
        self.version = -1
        weights = self._streams.features.watched(weights)
        if self.sends_alone:  # the base weights first, if these are among what is sent
            module = self._policy.module
            adapters, base = apart(weights, module)
            report = SyncReport(changed_share=share_of_elements(adapters, module))
            if base is not None:
                report = self._load(base, version)
            with adapter_folder(adapters, module, self.weights_folder) as folder:
                report.digests |= self._exchange(folder, version)
            report.num_bytes += sum(tensor.nbytes for tensor in adapters.values())
        else:
            report = self._load(complete(weights, self._policy.weights().names), version)
        self.version, self._salt, self._arrived = version, token_hex(8), report.digests
        return report

    @property
    def longest_sequence(self) -> int:
        """The most tokens that every engine has room for."""
        room = self._room()
        return min(room.context, room.figure(min) or room.context) - 1  # one is to follow

    def score(self, sequences: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
        """Return the log-probs of all tokens after the first of each sequence, in one tensor for each engine."""
        check_nothing_in_flight(len(self._streams))
        scores = self._score(sequences)
        return {name: torch.tensor([value for row in rows for value in row]) for name, rows in scores.items()}

    def close(self) -> None:
        """End what is in flight; engines end with this object, or serve another ``start``."""
        self.abort([stream.request.key for stream in self._streams])

    # ---- requests ---------------------------------------------------------------------------------

    def capacity(self) -> Capacity:
        room = self._room()
        slots, layout = self.num_slots * len(room.kv_tokens), Blocks(room.block)
        free_slots = max(slots - len(self._streams), 0)
        return Capacity(slots, free_slots, room.figure(sum), self._streams.kv_tokens(layout), layout, evicts=True)

    def submit(self, requests: Sequence[Request], expected: Sequence[float] | None = None) -> None:
        """Hand requests on, all or none."""
        self._check_ready(len(requests), self.capacity().free_slots)
        self._streams.features.points = self.feature_points
        room = self._room()
        for request in requests:
            check_min_p(request, self.arguments)
            check_fits(request, room.context, room.figure(min), self.remedies)
        for number, request in enumerate(requests):
            tokens = float(request.sampling.max_tokens) if expected is None else expected[number]
            self._send(self._streams.open(request, tokens, self._salts.pop(request.key, self._salt)))

    def _send(self, stream: EngineRequest) -> None:
        self._streams.give_ticket(stream)
        self._ask(stream)

    def _fields(self, stream: EngineRequest, keyed: bool) -> dict[str, Any]:
        """Return vLLM's sampling parameters for the tokens to follow; ``keyed`` where it draws by position."""
        assert self._policy is not None
        never = never_sampled(self._policy.module)
        return sampling_fields(stream.request, stream.num_begun, self._policy.eos_ids, keyed, never)

    def expect(self, prompts: Iterable[Prompt]) -> None:
        self._streams.features.unseen += prompts

    def release(self, prompts: Iterable[Prompt]) -> None:
        """Do nothing: an engine drops the prompts that were unused for longest when it needs their memory."""

    def step(self) -> StepEvents:
        """Take in what has been sampled since the last step."""
        events = StepEvents(num_active=len(self._streams))
        if events.num_active:
            self._check_ready()
            self._receive(events)
            self._streams.observe(events)
        return events

    def _take(self, stream: EngineRequest, chunk: SampledChunk, events: StepEvents) -> None:
        """Add tokens to a stream, and end it if they do; NotAsAsked if the engine was asked for others."""
        reason = self._streams.take(stream, chunk, self.version, events)
        if reason is not None:
            if chunk.finish_reason is None:  # a stop string that the engine does not know of
                self._withdraw([stream])
            self._streams.finish(stream, reason, events)

    def abort(self, keys: Iterable[Key]) -> list[Request]:
        """Stop these requests and hand them back, with their tokens so far as their prefixes."""
        stopped = self._streams.close(keys)
        self._withdraw([stream for stream in stopped if stream.ticket is not None])
        if self._policy is not None and self._policy.keeps_kv:
            self._salts |= {stream.request.key: stream.salt for stream in stopped if stream.token_ids}
        return [stream.so_far for stream in stopped]
