"""The embedded generator: decodes on the policy itself, in a fixed number of slots."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import numpy as np
import torch
from transformers import PreTrainedModel  # not for type checking alone: jsonargparse would parse this file 144 times

from lit_grpo.memory import is_out_of_memory
from lit_grpo.policy.architecture.decoder import compute_dtype
from lit_grpo.policy.architecture.logits import token_head
from lit_grpo.policy.sharding import gather
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.policy.weights import PolicyWeights, digest
from lit_grpo.process.copies import in_one_copy
from lit_grpo.rollout.generator import Capacity, StepEvents
from lit_grpo.rollout.sampling import entropy, sample_tokens, to_host
from lit_grpo.rollout.slots.binding import check_slot_support, slot_context
from lit_grpo.rollout.slots.copies import check_packing
from lit_grpo.rollout.slots.forward import DecodingMode, decode_step
from lit_grpo.rollout.slots.graphs import GraphedDecoder
from lit_grpo.rollout.slots.kv.cache import SlotCache
from lit_grpo.rollout.slots.kv.kv_budget import KVBudget, check_request, kv_budget_bytes
from lit_grpo.rollout.slots.kv.shelves import KVShape
from lit_grpo.rollout.slots.prompts import AHEAD_TOKENS, KeptCompletions, PromptKey, PromptStates, batches
from lit_grpo.rollout.slots.rows import TokenRows, observe_prompts, observe_rows, with_stop_string
from lit_grpo.rollout.weights.tensors import SyncReport, Versioned, WeightSyncError, check_complete
from lit_grpo.scheduling.layouts import prompt_room
from lit_grpo.scheduling.memory_amount import MemoryAmount
from lit_grpo.types import Completion, Key, Prompt, Request, SamplingParams

KEPT_SHARE = 1 / 4


class SlotGenerator(Versioned):
    """Decode on the policy module, in at most ``num_slots`` rows that are refilled at every step.

    There is nothing to install and nothing to sync: the weights are the policy's own. A prompt is
    prefilled once for all its completions, and its keys and values are kept once. The KV memory is that of
    the prompts in work and of what the slots hold, whatever the group size.

    Args:
        num_slots: How many completions are decoded at a time.
        prefill_tokens: The most tokens, padding included, of prompts that go through the model at once.
        kv_memory: How much memory keys and values may take: an amount such as ``2.5GiB``, a share of what is free such
            as ``60%``, or ``auto``, which leaves what gradients, optimizer and update need. Where lengths make it
            scarce, fewer slots are in use, and what outgrows it is set aside and goes on later.
        packed_weights: On a CPU, decode float32 weights from copies in oneDNN's layout: products of a few rows take two
            thirds of the time. The copies take the memory of the weights once more while the policy decodes.
    """

    abilities: frozenset[str] = frozenset({"entropies", "hidden_states"})

    def __init__(
        self, num_slots: int = 64, prefill_tokens: int = 8192, kv_memory: str = "auto", packed_weights: bool = False
    ) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots must be at least 1, not {num_slots}: a completion needs a slot to decode in.")
        if prefill_tokens < 1:
            raise ValueError(f"prefill_tokens must be at least 1, not {prefill_tokens}.")
        self.num_slots = num_slots
        self.prefill_tokens = prefill_tokens
        self.kv_memory = MemoryAmount(kv_memory)
        self.packed_weights = packed_weights
        self.feature_points: tuple[int, ...] = ()
        self.keeps_ended = False
        self.budget: KVBudget | None = None
        self._policy: PreTrainedModel | None = None
        self._mode: DecodingMode | None = None
        self._clear()

    # ---- life -------------------------------------------------------------------------------------

    def start(self, policy: PolicySpec) -> None:
        """Bind the policy, after a trial on a few tokens; memory is taken with the first request.

        Raises:
            ValueError: The policy is a model that the slots cannot decode, or packed weights are not for it.
        """
        model = policy.module
        if self.packed_weights:
            check_packing(model)
        gather(model)
        self._shape, self._fused = check_slot_support(model)
        self._graphs: GraphedDecoder | None = None
        if self._fused is not None and model.device.type == "cuda":
            self._fused = self._graphs = GraphedDecoder(self._fused, model.parameters, self.num_slots)
        self._policy, self._tokenizer, self._text_of = model, policy.tokenizer, policy.text_of
        self._device, self._head = model.device, token_head(model)
        self._eos_ids = np.array(policy.eos_ids)
        self._context = slot_context(model)
        self._mode = DecodingMode(model, keeps_copies=self._graphs is not None, packs=self.packed_weights)
        granted = kv_budget_bytes(self.kv_memory, model)
        self.budget = KVBudget(granted, self._shape.bytes_per_token, self.prefill_tokens)

    def weights(self) -> PolicyWeights:
        """Every parameter as it is."""
        return PolicyWeights(self.policy, merged=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> SyncReport:
        """Check that every weight is the policy's own tensor, then take ``version``."""
        own = dict(self.policy.named_parameters())
        report = SyncReport()
        self._expect_weights(self._num_in_flight)
        for name, tensor in weights:
            if name not in own or own[name].data_ptr() != tensor.data_ptr():
                raise WeightSyncError(
                    f"SlotGenerator decodes on the policy it was started with, but {name!r} is another tensor."
                )
            report.digests[name] = digest(tensor)
        check_complete(own, report.digests)
        self._version = version
        assert self._mode is not None
        self._mode.refresh()
        if self._graphs is not None:
            self._graphs.refresh()
        self._kept = KeptCompletions()
        self._forget()
        return report

    @property
    def policy(self) -> PreTrainedModel:
        """The policy that ``start`` was given."""
        if self._policy is None:
            raise RuntimeError("SlotGenerator has not been started; call start(policy) first.")
        return self._policy

    def sleep(self) -> dict[str, float]:
        """Nothing is held between rollouts that the update could use."""
        return {}

    def close(self) -> None:
        """Free the KV memory and everything in flight."""
        self._clear()
        self._end()

    def _end(self) -> None:
        """Give the policy back as it was, once nothing is in flight."""
        if self._mode is not None and not self._num_in_flight:
            self._mode.end()

    def _without_gradients(self) -> AbstractContextManager[object]:
        return nullcontext() if self._mode is None else self._mode.without_gradients()

    def _clear(self) -> None:
        self._rows: TokenRows | None = None
        self._cache: SlotCache | None = None
        self._incoming: list[Request] = []
        self._prompts, self._kept = PromptStates(), KeptCompletions()
        self._sampling: SamplingParams | None = None

    # ---- requests ---------------------------------------------------------------------------------

    @property
    def _num_in_flight(self) -> int:
        return (0 if self._rows is None else len(self._rows)) + len(self._incoming)

    def capacity(self) -> Capacity:
        """Slots and KV memory, and how much of them is free."""
        free_slots = self.num_slots - self._num_in_flight
        if self.budget is None:
            return Capacity(self.num_slots, free_slots, kept_share=KEPT_SHARE)
        if not self._num_in_flight:
            self.budget.measure(self._shape_now().bytes_per_token)
        return Capacity(
            slots=self.num_slots,
            free_slots=free_slots,
            kv_tokens=self.budget.tokens,
            kv_tokens_in_use=self._allocated_tokens,
            layout=self._shape_now().pieces,
            kept_share=KEPT_SHARE,
        )

    @property
    def _allocated_tokens(self) -> int:
        return self._kept.num_tokens + (0 if self._cache is None else self._cache.allocated_tokens)

    def submit(self, requests: Sequence[Request], expected: Sequence[float] | None = None) -> None:
        """Admit requests, all or none; those in flight at a time share one ``SamplingParams``."""
        capacity = self.capacity()
        self._check_free(len(requests), capacity.free_slots)
        if not requests:
            return
        sampling = self._sampling if self._num_in_flight and self._sampling is not None else requests[0].sampling
        assert self.budget is not None and self._mode is not None
        limits = self._context, self.budget.granted_tokens, self.budget.bytes_per_token
        for request in requests:
            check_request(request, sampling, *limits)
        self._mode.begin()
        self._sampling = sampling
        self._incoming += requests

    def expect(self, prompts: Iterable[Prompt]) -> None:
        """Prefill these prompts some at a time: whenever one is needed, the next ones go through the model with it."""
        self._prompts.expect(prompts)

    def release(self, prompts: Iterable[Prompt]) -> None:
        """Keep these prompts no longer than the requests that are in flight need them."""
        prompts = list(prompts)
        self._prompts.release(prompts)
        self._kept.drop((prompt.prompt_id, prompt.visit) for prompt in prompts)
        self._forget()

    def _forget(self) -> None:
        """Drop the prompts that nobody needs any more: released ones, and those of older weights."""
        needed = {self._prompt_key(request) for request in self._incoming}
        with self._without_gradients():
            self._prompts.forget(self._cache, needed, self._version)

    def abort(self, keys: Iterable[Key]) -> list[Request]:
        """Stop requests and hand them back, with what they have come to as their prefixes.

        Their keys and values are kept for a return, in the memory of free slots and a quarter more, if it is there.
        """
        wanted = set(keys)
        if not wanted:
            return []
        rows = enumerate([] if self._rows is None else self._rows.requests)
        stopped = self._take_out([row for row, request in rows if request.key in wanted])
        stopped += [request for request in self._incoming if request.key in wanted]
        self._incoming = [request for request in self._incoming if request.key not in wanted]
        self._forget()
        self._end()
        return stopped

    def _take_out(self, rows: Iterable[int]) -> list[Request]:
        """Free rows, and return their requests with what they have come to."""
        requests = []
        with self._without_gradients():
            for row in sorted(rows, reverse=True):
                assert self._rows is not None and self._cache is not None
                requests.append(self._rows.request(row))
                if not self._prompts.is_released(requests[-1].group):
                    self._kept.keep(requests[-1], row, self._cache, self._room_to_keep(self._cache))
                self._cache.remove(row)
                self._rows.remove(row)
        return requests[::-1]

    def _room_to_keep(self, cache: SlotCache, entering: int = 0) -> int:
        """KV tokens of completions without a row that may be kept, where requests with so many tokens enter.

        As much as free slots leave, and ``KEPT_SHARE`` more: with the rows it is never more than slots of full length
        and their share, however many completions wait.
        """
        assert self.budget is not None
        free = self.budget.tokens - cache.allocated_tokens - entering
        free_slots = self.num_slots - self._num_in_flight
        return min(free, int((free_slots + KEPT_SHARE * self.num_slots) * cache.max_tokens))

    # ---- one step ---------------------------------------------------------------------------------

    def step(self) -> StepEvents:
        """Give every slot its next token: decode those in flight, admit the incoming, sample, finish.

        Where memory runs out within it, all requests are handed back, and less is taken from then on.
        """
        if not self._num_in_flight:
            return StepEvents()
        self._check_weights()
        assert self.budget is not None
        events = StepEvents()
        try:
            with self._without_gradients():
                self._step(events)
        except BaseException as error:
            allocated_tokens = self._allocated_tokens
            self._evacuate(events)
            if not is_out_of_memory(error) or events.num_active or len(events.set_aside) < 2:
                raise
            events.message = self.budget.shrink(allocated_tokens, len(events.set_aside))
        else:
            self.budget.note_success(self._allocated_tokens)
        self._end()
        return events

    def _step(self, events: StepEvents) -> None:
        rows, cache = self._open()
        assert self._sampling is not None
        self._spare_memory(rows, cache)
        if self._incoming:
            self._prefill_prompts(cache, events)
            self._resume(rows, cache)
        num_decoded, fresh = len(rows), [self._prompt_key(request) for request in self._incoming]
        if fresh:
            self._enter(self._incoming, rows)
        inputs = self._inputs(rows, num_decoded, cache)
        hidden = [self._decode(rows, num_decoded, inputs, cache)] if num_decoded else []
        if fresh:
            hidden.append(torch.stack([self._prompts.states[prompt] for prompt in fresh]))
            cache.admit(fresh)
        hidden_BD = torch.cat(hidden)
        sampled = sample_tokens(self._head(hidden_BD), self._sampling, inputs["uniform"])
        tokens_B, logprobs_B, entropies_B = to_host(*sampled)
        if np.isnan(logprobs_B).any():
            raise FloatingPointError(
                f"The policy's logits are NaN or infinite at version {self._version}, so no token can be sampled; "
                "look for NaN weights or a learning rate that is too high."
            )
        events.num_active = events.num_tokens = len(rows)
        events.observations += observe_rows(self.feature_points, rows, hidden_BD, entropies_B)
        rows.append(tokens_B, logprobs_B, entropies_B)
        events.finished = self._finish(rows, cache, self._stopped(rows))
        if events.finished:
            self._forget()

    def _inputs(self, rows: TokenRows, num_decoded: int, cache: SlotCache) -> dict[str, torch.Tensor]:
        """Bring what a step needs to the device in one copy: random numbers, and what is decoded of the first rows."""
        arrays = {"uniform": rows.next_uniform_B}
        if not num_decoded:
            return in_one_copy({name: torch.from_numpy(array) for name, array in arrays.items()}, self._device)
        arrays |= {"tokens": rows.last_tokens_B[:num_decoded], "positions": rows.positions_B[:num_decoded]}
        return cache.prepare(rows.counts_B[:num_decoded] - 1, arrays)

    def _decode(
        self, rows: TokenRows, num_decoded: int, inputs: dict[str, torch.Tensor], cache: SlotCache
    ) -> torch.Tensor:
        """Run the policy over the last token of the first rows; return the hidden states, (rows, hidden size)."""
        longest = int(rows.positions_B[:num_decoded].max())
        return decode_step(self.policy, self._fused, inputs["tokens"], inputs["positions"], longest, cache)

    def _open(self) -> tuple[TokenRows, SlotCache]:
        """Rows and cache for the completions in flight; new ones where their size or dtype has changed."""
        assert self._sampling is not None
        room, shape = self._sampling.room, self._shape_now()
        known = self._cache
        if known is None or (not known.num_rows and (known.max_tokens, known.shape) != (room, shape)):
            self._rows = TokenRows(self.num_slots, room)
            self._cache = SlotCache(shape, room, self.num_slots)
            self._prompts.states.clear()
        assert self._rows is not None and self._cache is not None
        return self._rows, self._cache

    def _shape_now(self) -> KVShape:
        """What the keys look like: under autocast they come in its dtype, whatever the weights are in."""
        dtype = compute_dtype(self._device, self._shape.dtype)
        return self._shape if dtype == self._shape.dtype else replace(self._shape, dtype=dtype)

    def _is_roomy(self, cache: SlotCache) -> bool:
        """Whether memory is no concern, even if all in flight grew to their limit."""
        assert self.budget is not None
        most = 2 * self._num_in_flight * cache.max_tokens + AHEAD_TOKENS
        return self._allocated_tokens + most <= self.budget.tokens

    def _spare_memory(self, rows: TokenRows, cache: SlotCache) -> None:
        """Where the step would pass the budget, give back what nobody needs: idle prompts, and room ahead of need."""
        assert self.budget is not None
        entering = sum(cache.tokens_of(request.prefix.num_tokens) for request in self._incoming)
        self._kept.fit(self._room_to_keep(cache, entering))
        if self._is_roomy(cache):
            cache.allow_slack(True)
            return
        prompts = {self._prompt_key(request): request.prompt for request in self._incoming}
        new = sum(prompt_room(len(prompt.token_ids)) for key, prompt in prompts.items() if key not in cache)
        is_tight = self._allocated_tokens + cache.growth(rows.counts_B - 1) + entering + new > self.budget.tokens
        cache.allow_slack(not is_tight)
        if is_tight:
            self._kept.fit(0)
            self._prompts.forget_idle(cache, set(prompts))
            cache.tighten()

    def _prefill_prompts(self, cache: SlotCache, events: StepEvents) -> None:
        """Compute the keys and values of the prompts that are not there yet, some of like length at a time."""
        assert self.budget is not None and self._sampling is not None
        prompts = {self._prompt_key(request): request.prompt for request in self._incoming}
        ahead = self._is_roomy(cache)
        with self.budget.prefilling():
            for batch in batches(
                self._prompts.missing(prompts, cache, ahead, self._version), self.budget.prefill_tokens
            ):
                hidden_BD = self._prompts.compute(self.policy, batch, cache, self.budget.prefill_tokens)
                events.prefilled_tokens += sum(len(prompt.token_ids) for _, prompt in batch)
                if 0 in self.feature_points:
                    entropies_B = entropy(self._head(hidden_BD), self._sampling.temperature)
                    events.observations.append(observe_prompts([key[:2] for key, _ in batch], hidden_BD, entropies_B))

    def _resume(self, rows: TokenRows, cache: SlotCache) -> None:
        """Give a row to each request that has a prefix, with the keys and values of all but its last token."""
        assert self.budget is not None
        resumed = [request for request in self._incoming if request.prefix.num_tokens]
        with self.budget.prefilling():
            most_tokens = self.budget.prefill_tokens
            for requests in self._kept.resume(self.policy, resumed, self._version, cache, rows, most_tokens):
                self._enter(requests, rows)

    def _enter(self, requests: Sequence[Request], rows: TokenRows) -> None:
        rows.admit(requests, self._version)
        entered = {request.key for request in requests}
        self._incoming = [request for request in self._incoming if request.key not in entered]

    def _finish(self, rows: TokenRows, cache: SlotCache, stopped_B: np.ndarray) -> list[Completion]:
        """Take rows out of their slots that a token has ended, or that are at their limit."""
        assert self._sampling is not None
        ended = np.flatnonzero(stopped_B | (rows.sampled_B >= self._sampling.max_tokens)).tolist()
        finished = [rows.completion(row, "stop" if stopped_B[row] else "length") for row in ended]
        for completion in finished:
            completion.text = self._text_of(completion.sampled_ids)
        for row in reversed(ended):
            if self.keeps_ended and not self._prompts.is_released(rows.requests[row].group):
                self._kept.keep(rows.request(row), row, cache, self._room_to_keep(cache), ended=True)
            cache.remove(row)
            rows.remove(row)
        return finished

    def _stopped(self, rows: TokenRows) -> np.ndarray:
        """Whether the token that each row has just got ends it, shape (rows,)."""
        assert self._sampling is not None
        at_end_B = (rows.last_tokens_B[:, None] == self._eos_ids).any(-1)
        return at_end_B | with_stop_string(rows, self._sampling.stop, self._tokenizer)

    def _evacuate(self, events: StepEvents) -> None:
        """After an error within a step: hand all requests back, and start from an empty cache."""
        rows = [] if self._rows is None else [self._rows.request(row) for row in range(len(self._rows))]
        events.set_aside = [*rows, *self._incoming]
        events.finished.clear()
        self._rows = self._cache = None
        self._incoming, self._kept = [], KeptCompletions()
        self._prompts.expect_nothing()

    def _prompt_key(self, request: Request) -> PromptKey:
        return (*request.group, self._version)
