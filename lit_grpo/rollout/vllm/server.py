"""vLLM servers over HTTP: tokens in, tokens out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from lit_grpo.policy.loading import eos_token_ids
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.policy.weights import PolicyWeights
from lit_grpo.rollout.generator import Capacity, GenerationError, StepEvents
from lit_grpo.rollout.vllm.adapters import adapter_arguments, check_adapters
from lit_grpo.rollout.vllm.arguments import (
    check_fits,
    dtype_of,
    finish_reason,
    sampling_fields,
    signature,
    warn_of_dtype,
)
from lit_grpo.rollout.vllm.fleet import Fleet, Server
from lit_grpo.rollout.vllm.http import ServerError
from lit_grpo.rollout.vllm.streams import Arrival, StreamPump, Streams, TextFeatures
from lit_grpo.rollout.weights.adapters import AdapterWeights
from lit_grpo.rollout.weights.tensors import SyncReport, WeightSyncError, complete
from lit_grpo.types import Completion, Key, Prompt, Request

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


_RETRIES = 3  # of one completion, as long as its server is well


class VLLMServerGenerator:
    """Decode on one or more vLLM servers, started here on loopback or named by URL.

    A completion goes to the server with the least work ahead, by predicted tokens. A server that dies or hangs is left
    out, and what it was decoding begins anew on the others, with the same seeds; it comes back with a sync that
    reaches it. Weights go through files that the servers can read, in shared memory where they are on this machine.

    Args:
        num_slots: How many completions each server decodes at a time (vLLM's ``max_num_seqs``).
        num_servers: How many servers each rank starts; with ``urls`` none are.
        devices: The GPUs of each server that is started, as ``CUDA_VISIBLE_DEVICES`` names them: ``["1", "2,3"]``.
        urls: Servers that run already, with ``VLLM_SERVER_DEV_MODE=1``, ``--weight-transfer-config
            '{"backend": "lit_grpo"}'`` and lit_grpo installed beside vLLM; ``python -m lit_grpo serve`` starts such a
            one (with ``--max-lora-rank`` for adapters alone). Of several ranks each takes its share of them.
        transfer: What a sync sends: ``full``, all weights, or ``changes``, the elements that differ from those last
            sent; for these each side keeps a copy of the weights on its host.
        adapters: How LoRA adapters travel: ``merged`` into the weights, all of which travel with every sync; or
            ``alone``, after weights that travel once, and vLLM decodes with its own support of LoRA.
        weights_folder: Where the files are put, readable by all servers; shared memory by default.
        timeout_s: Seconds without an answer, or without a token of any completion, after which a server counts as hung.
        start_timeout_s: Seconds that a server may take to start.
        server_args: Any other argument of vLLM's servers, such as ``dtype`` or ``tensor_parallel_size``.
    """

    decodes_on_policy = False

    def __init__(
        self,
        num_slots: int = 64,
        num_servers: int = 1,
        devices: list[str] | None = None,
        urls: list[str] | None = None,
        transfer: Literal["full", "changes"] = "full",
        adapters: Literal["merged", "alone"] = "merged",
        weights_folder: str | None = None,
        timeout_s: float = 60.0,
        start_timeout_s: float = 300.0,
        server_args: dict[str, Any] | None = None,
    ) -> None:
        for name, value in (("num_slots", num_slots), ("num_servers", num_servers)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}.")
        for name, value in (("timeout_s", timeout_s), ("start_timeout_s", start_timeout_s)):
            if not value > 0:
                raise ValueError(f"{name} must be above 0, not {value}.")
        if transfer not in ("full", "changes"):
            raise ValueError(f"transfer must be full or changes, not {transfer!r}.")
        check_adapters(adapters)
        if adapters == "alone" and transfer == "changes":
            raise ValueError(
                "transfer: changes is for weights that travel with every sync, and with adapters: alone they travel "
                "once; take transfer: full."
            )
        if devices is not None and len(devices) != num_servers:
            raise ValueError(f"devices names the GPUs of {len(devices)} servers, but num_servers is {num_servers}.")
        self.num_slots = num_slots
        self.adapters = adapters
        self.feature_points: tuple[int, ...] = ()
        self._fleet = Fleet(num_slots, num_servers, devices, urls, transfer, weights_folder, timeout_s, start_timeout_s)
        self._server_args = dict(server_args or {})
        self.weights_dtype = dtype_of(self._server_args)
        self._policy: PreTrainedModel | None = None
        self._made_for = ""
        self._pump: StreamPump | None = None
        self._version = -1

    # ---- life -------------------------------------------------------------------------------------

    def start(self, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Start servers for the policy's architecture, or check those named; those that run for the same are kept.

        Raises:
            ValueError: vLLM is not installed, a server does not start or answer, or serves another model, or vLLM does
                not take the policy's adapters.
        """
        warn_of_dtype(policy, self.weights_dtype)
        arguments = adapter_arguments(policy, self._server_args) if self.adapters == "alone" else {}
        made_for = f"{signature(policy)} {arguments.get('max_lora_rank')}"
        if self._made_for != made_for:
            self._fleet.start(PolicySpec(policy, tokenizer, arguments | self._server_args))
            self._made_for = made_for
        self._fleet.forget_weights()
        self._policy = policy
        self._eos_ids = eos_token_ids(policy, tokenizer)
        self._features = TextFeatures(policy, self.feature_points)
        self._streams = Streams(tokenizer, self._features)
        self._at: dict[Key, tuple[Server, int, float]] = {}  # the server, the attempt, the tokens expected
        self._unseen: list[Prompt] = []
        self._pump = self._pump or StreamPump()

    def weights_of(self, policy: PreTrainedModel) -> PolicyWeights:
        """All weights with adapters merged; or the adapters, and the base weights where a server has none."""
        if self.adapters == "alone":
            return AdapterWeights(policy, with_base=self._fleet.lacks_base(), dtype=self.weights_dtype)
        return PolicyWeights(policy, dtype=self.weights_dtype)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> SyncReport:
        """Bring all weights, or adapters, to every server that answers, and forget the prompts of the old ones."""
        assert self._policy is not None, "start comes first"
        self._version = -1  # until all of them are there
        if self.adapters == "alone":
            report = self._fleet.load_apart(weights, self._policy, version)
        else:
            report = self._fleet.load_weights(complete(weights, PolicyWeights(self._policy).names), version)
        self._version = version
        return report

    @property
    def version(self) -> int:
        """The policy version that samples now; -1 where no complete set of weights has arrived."""
        return self._version

    def distrust(self) -> None:
        """Refuse to sample until ``load_weights`` succeeds again, with all weights."""
        self._version = -1
        self._fleet.forget_weights()

    def sleep(self) -> dict[str, float]:
        """Servers have devices of their own; they stay as they are."""
        return {}

    def close(self) -> None:
        """End what is in flight; the servers end with this object, or serve another ``start``."""
        if self._pump is not None:
            self.abort([request.key for request in self._streams.requests])
            self._pump.close(self._fleet.clients)
            self._pump = None

    # ---- requests ---------------------------------------------------------------------------------

    def capacity(self) -> Capacity:
        """Slots and KV memory of the servers that are up, and how much of them is free."""
        slots = self.num_slots * len(self._fleet.alive)
        free_slots = max(slots - len(self._streams), 0)
        return Capacity(slots, free_slots, None, self._streams.num_kv_tokens)

    def submit(self, requests: Sequence[Request], expected: Sequence[float] | None = None) -> None:
        """Send requests, all or none, each to the server that has the least to do."""
        if self._version < 0:
            raise WeightSyncError("The generator has no complete set of weights; call load_weights first.")
        if len(requests) > (free_slots := self.capacity().free_slots):
            raise ValueError(f"{len(requests)} requests for {free_slots} free slots; submit at most that many.")
        for request in requests:
            check_fits(request, self._fleet.context, self._fleet.context)
        for number, request in enumerate(requests):
            self._streams.open(request)
            self._send(request, 0, float(request.sampling.max_tokens) if expected is None else expected[number])

    def _send(self, request: Request, attempt: int, expected: float) -> None:
        assert self._pump is not None
        if not self._fleet.alive:
            raise GenerationError("No vLLM server is left; start them again and resume from the last checkpoint.")
        ahead = {id(server): 0.0 for server in self._fleet.alive}
        count = dict.fromkeys(ahead, 0)
        for key, (server, _, tokens) in self._at.items():
            if id(server) in ahead:
                ahead[id(server)] += max(tokens - self._streams.num_tokens(key), 1.0)
                count[id(server)] += 1
        free = [server for server in self._fleet.alive if count[id(server)] < self.num_slots] or self._fleet.alive
        server = min(free, key=lambda server: ahead[id(server)])
        self._at[request.key] = server, attempt, expected
        fields = sampling_fields(request, self._eos_ids)
        self._pump.begin(request.key, attempt, server.client, request.prompt.token_ids, fields)

    def expect(self, prompts: Iterable[Prompt]) -> None:
        """Show the prompts for the prediction of lengths with the next step."""
        self._unseen += prompts

    def release(self, prompts: Iterable[Prompt]) -> None:
        """A server drops the prompts that have not been used for longest, where it needs their memory."""

    def step(self) -> StepEvents:
        """Wait for tokens, and return all that have come.

        Raises:
            GenerationError: No server is left.
        """
        events = StepEvents(num_active=len(self._streams))
        if not events.num_active:
            return events
        assert self._pump is not None
        events.observations += self._features.of_prompts(self._unseen)
        self._unseen.clear()
        arrivals: list[Arrival] = []
        while not arrivals:
            arrivals = self._pump.arrivals(1.0)
        for arrival in arrivals:
            self._take(arrival, events)
        self._streams.observe(events)
        return events

    def _take(self, arrival: Arrival, events: StepEvents) -> None:
        server, attempt, _ = self._at.get(arrival.key, (None, -1, 0.0))
        if server is None or attempt != arrival.attempt:
            return  # of an aborted request, or of an attempt that was given up
        if isinstance(arrival.content, ServerError):
            if attempt < _RETRIES and not arrival.content.hung and server.is_well():
                self._begin_anew(arrival.key)  # a connection broke, not the server
            else:
                self._lose(server, str(arrival.content), events)
            return
        chunk = arrival.content
        self._streams.extend(arrival.key, chunk.token_ids, chunk.logprobs, self._version, events)
        if chunk.finish_reason is not None:
            self._streams.finish(arrival.key, finish_reason(chunk.finish_reason), events)
            self._drop(arrival.key)

    def _lose(self, server: Server, reason: str, events: StepEvents) -> None:
        """Leave a server out, and begin what it was decoding anew elsewhere."""
        self._fleet.lose(server)
        lost = [key for key, (at, _, _) in self._at.items() if at is server]
        events.message = (
            f"{reason} Its {len(lost)} completions begin anew on the {len(self._fleet.alive)} servers that are left."
        )
        for key in lost:
            try:
                self._begin_anew(key)
            except GenerationError as error:
                raise GenerationError(f"{reason} {error}") from None

    def _begin_anew(self, key: Key) -> None:
        """Ask for a completion again from its beginning, of any server that is up."""
        assert self._pump is not None
        _, attempt, expected = self._at.pop(key)
        self._pump.cancel(key)
        self._send(self._streams.restart(key), attempt + 1, expected)

    def _drop(self, key: Key) -> None:
        assert self._pump is not None
        del self._at[key]
        self._pump.cancel(key)

    def abort(self, keys: Iterable[Key]) -> list[Completion]:
        """Stop requests and return their partial completions."""
        if self._pump is None:
            return []
        partial = self._streams.abort(keys)
        for completion in partial:
            if completion.request.key in self._at:
                self._drop(completion.request.key)
        return partial
