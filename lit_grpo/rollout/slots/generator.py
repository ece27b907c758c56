"""The embedded generator: decodes on the policy itself, in a fixed number of slots."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
import torch
from transformers import PreTrainedModel  # not for type checking alone: jsonargparse would parse this file 144 times

from lit_grpo.limits import Completions, Limit, Number, check_value
from lit_grpo.memory import begin_read, free_bytes, in_one_copy, is_out_of_memory
from lit_grpo.policy.architecture.decoder import compute_dtype, token_head
from lit_grpo.policy.architecture.states import state_layers
from lit_grpo.policy.sharding import gather
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.policy.weights import PolicyWeights, digest
from lit_grpo.rollout.generator import Capacity, Observation, StepEvents
from lit_grpo.rollout.sampling import distribution, sample_tokens
from lit_grpo.rollout.slots.attention import KVShape
from lit_grpo.rollout.slots.binding import check_slot_support, row_attention, slot_context
from lit_grpo.rollout.slots.copies import check_packing
from lit_grpo.rollout.slots.forward import DecodingMode, decode_by_model, prefill
from lit_grpo.rollout.slots.graphs import GraphedDecoder
from lit_grpo.rollout.slots.kept import KeptCompletions
from lit_grpo.rollout.slots.kv.cache import KVBudget, SlotCache, check_request
from lit_grpo.rollout.slots.kv.tables import RowTables
from lit_grpo.rollout.slots.rows import SampledStep, TokenRows
from lit_grpo.rollout.weights.tensors import (
    SyncReport,
    Versioned,
    WeightSyncError,
    check_complete,
    check_nothing_in_flight,
)
from lit_grpo.scheduling.layouts import prompt_room
from lit_grpo.scheduling.memory_amount import MemoryAmount
from lit_grpo.types import EMPTY, Completion, GroupKey, Key, Prompt, Request, SamplingParams

if TYPE_CHECKING:
    from lit_grpo.rollout.slots.drafts import Draft, Drafter
    from lit_grpo.rollout.slots.drafts.states import StatesAhead

KEPT_SHARE = 1 / 4
AHEAD_TOKENS = 512  # of prompts that are prefilled before they are needed
MOST_QUERIES = 256
"""Last tokens and drafted ones that go through the policy in a step, where slots are fewer: logits take memory."""
Drafts = Annotated[int, Limit(ge=1, le=32)] | Literal["auto", "off", False]  # YAML reads off as False
DrafterName = Literal["text", "heads"]
_DRAFTERS = {  # the class of each, and whether it is made for a policy
    "text": ("lit_grpo.rollout.slots.drafts.suffix:SuffixDrafter", False),
    "heads": ("lit_grpo.rollout.slots.drafts.heads:Heads", True),
}


class SlotGenerator(Versioned):
    """Decode on the policy module, in at most ``num_slots`` rows that are refilled at every step.

    There is nothing to install and nothing to sync: the weights are the policy's own. A prompt is
    prefilled once for all its completions, and its keys and values are kept once. The KV memory is that of
    the prompts in work and of what the slots hold, whatever the group size.

    On a GPU it runs ahead (:attr:`runs_ahead`): :meth:`step` launches the next step before it waits for the tokens of
    the current one, so that the GPU decodes while the host finds out what has ended, and what comes in its place. Each
    row goes on from the token that the GPU has just sampled; columns, positions and random numbers do not depend on
    tokens. New rows get their first tokens of a step that has been launched from hidden states: of their prompts, of
    what was kept, or of the pass over what is missing. So results and numbers of steps are those of one step after
    another. A completion that ends, or is stopped, leaves a token in flight, which nobody reads; if it goes on, that
    token is sampled again, from the same hidden state and random number.

    Attributes:
        runs_ahead: Launch a step before the tokens of the last one have been read; :meth:`start` sets it on a GPU.

    Args:
        num_slots: Number of completions decoded at a time.
        prefill_tokens: Max number of tokens, including padding, of prompts that are prefilled in one forward pass.
        kv_memory: Max memory of the KV cache: an amount such as ``2.5GiB``, a fraction of the free memory such as
            ``60%``, or ``auto``, which in ``fit`` leaves the memory that gradients, optimizer and update need. If
            completions are too long for it, fewer slots are used, and completions are preempted and resumed later.
        packed_weights: On a CPU, decode float32 weights from copies in oneDNN's layout: products of a few rows take two
            thirds of the time. The copies take the memory of the weights once more while the policy decodes.
        drafts: How many tokens a completion tries ahead in a step, at most. The samples stay the same, in fewer steps,
            each of which computes more positions; only while memory is no concern. ``auto``: on a GPU as many as are
            worth the time of a step, which is measured before the first rollout; on a CPU none.
        drafter: Where these tokens come from: ``text``, those that have followed a completion's last ones before, in
            its own text and in other completions of its prompt; or ``heads``, the policy's own layer of multi-token
            prediction, as Qwen3.5 has one, which needs a number of ``drafts``.
    """

    abilities: frozenset[str] = frozenset({"entropies", "hidden_states", "images", "likeliest", "observed_images"})

    def __init__(
        self,
        num_slots: int = 64,
        prefill_tokens: int = 8192,
        kv_memory: str = "auto",
        packed_weights: bool = False,
        drafts: Drafts = "auto",
        drafter: DrafterName = "text",
    ) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots must be at least 1, not {num_slots}: a completion needs a slot to decode in.")
        check_value("num_slots", num_slots, Completions)
        check_value("prefill_tokens", prefill_tokens, Number)
        if prefill_tokens < 1:
            raise ValueError(f"prefill_tokens must be at least 1, not {prefill_tokens}.")
        check_value("drafts", drafts, Drafts)
        check_value("drafter", drafter, DrafterName)
        self.num_slots = num_slots
        self.drafts: Drafts = drafts or "off"
        if drafter == "heads" and drafts == "auto":
            raise ValueError(
                "The drafter heads has no price for auto; set model.generator.drafts to a number, such as 3."
            )
        self.drafter = drafter
        self.prefill_tokens = prefill_tokens
        self.kv_memory = MemoryAmount(kv_memory)
        self.packed_weights = packed_weights
        self.feature_points: tuple[int, ...] = ()
        self.keeps_ended = self.one_by_one = self.runs_ahead = False
        self.num_likeliest = 0
        self.budget: KVBudget | None = None
        self._policy: PreTrainedModel | None = None
        self._mode: DecodingMode | None = None
        self._shape = KVShape((), torch.float32, torch.device("cpu"))
        self._sampling = SamplingParams()
        self._graphs: GraphedDecoder | None = None
        self._tables: RowTables | None = None
        self._drafter: Drafter | None = None
        self._is_unpriced = False  # until steps have been timed, which say what drafts are worth
        self._expected: dict[GroupKey, Prompt] = {}  # prompts that requests will come for
        self._released: set[GroupKey] = set()  # prompts in flight that no more requests will come for
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
        self._graphs, self._tables = None, None
        attention = row_attention(self._shape)
        self._is_unpriced, most_drafted = self.drafts == "auto" and model.device.type == "cuda", 0
        if self._is_unpriced:
            from lit_grpo.rollout.slots.drafts.price import MOST_DRAFTED as most_drafted
        elif isinstance(self.drafts, int):
            (name, is_of_policy), most_drafted = _DRAFTERS[self.drafter], self.drafts
            self._drafter = drafter = resolve_name(name)(*[model] * is_of_policy, most_drafted)
            self._shape = drafter.beside(self._shape)
        if most_drafted and self._shape.states is not None:
            state_layers(model)  # with the model's own attention
        most_queries = max(self.num_slots, min(self.num_slots * (1 + most_drafted), MOST_QUERIES))
        self._most_queries = most_queries
        if self._fused is not None and attention is not None:
            self._tables = RowTables(self._shape, most_queries, attention)
            self._graphs = GraphedDecoder(self._fused, self._tables, model.parameters)
        self._policy, self._tokenizer, self._text_of = model, policy.tokenizer, policy.text_of
        self._device, self._dtype, self._head = model.device, self._shape.dtype, token_head(model)
        self._eos_ids = np.array(policy.eos_ids)
        self.runs_ahead = self._device.type == "cuda"
        self._to_host = begin_read if self.runs_ahead else torch.Tensor.cpu
        self._context = slot_context(model)
        self._mode = DecodingMode(model, keeps_copies=self._graphs is not None, packs=self.packed_weights)
        granted = self.kv_memory.bytes(free_bytes(policy.device), policy.update_bytes)
        self.budget = KVBudget(granted, self._shape.bytes_per_token, self.prefill_tokens)

    def weights(self) -> PolicyWeights:
        return PolicyWeights(self.policy, merged=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> SyncReport:
        """Check that every weight is the policy's own tensor, then take ``version``."""
        own = dict(self.policy.named_parameters())
        report = SyncReport()
        check_nothing_in_flight(self._num_in_flight)
        self.version = -1
        for name, tensor in weights:
            if name not in own or own[name].data_ptr() != tensor.data_ptr():
                raise WeightSyncError(
                    f"SlotGenerator decodes on the policy it was started with, but {name!r} is another tensor."
                )
            report.digests[name] = digest(tensor)
        check_complete(own, report.digests)
        self.version = version
        assert self._mode is not None
        self._mode.refresh()
        if self._graphs is not None:
            self._graphs.refresh()
        if self._cache.prompts or self._kept.num_tokens:
            self._clear()  # these are keys and values of other weights
        return report

    @property
    def policy(self) -> PreTrainedModel:
        if self._policy is None:
            raise RuntimeError("SlotGenerator has not been started; call start(policy) first.")
        return self._policy

    def sleep(self) -> dict[str, float]:
        """Nothing is held between rollouts that the update could use."""
        return {}

    def close(self) -> None:
        """Free the KV memory and everything in flight."""
        self._clear()
        self._expected.clear()
        self._released.clear()
        if self._mode is not None:
            self._mode.end()

    def _clear(self) -> None:
        self._incoming: list[Request] = []
        self._launched: SampledStep | None = None  # a step of all rows, whose tokens have not been read
        self._rows, self._cache = TokenRows(self.num_slots, 0), SlotCache(self._shape, 0, self.num_slots)
        self._kept = KeptCompletions()

    # ---- requests ---------------------------------------------------------------------------------

    @property
    def _num_in_flight(self) -> int:
        return len(self._rows.requests) + len(self._incoming)

    def capacity(self) -> Capacity:
        """Slots and KV memory, and how much of them is free."""
        num_in_flight = self._num_in_flight
        free_slots = self.num_slots - num_in_flight
        if self.budget is None:
            return Capacity(self.num_slots, free_slots, kept_share=KEPT_SHARE)
        dtype = compute_dtype(self._device, self._dtype)  # keys come in it: in autocast's, whatever the weights are in
        if dtype != self._shape.dtype:
            self._shape = replace(self._shape, dtype=dtype)
        if not num_in_flight and self._shape.bytes_per_token != self.budget.bytes_per_token:
            self.budget.measure(self._shape.bytes_per_token)
        return Capacity(
            slots=self.num_slots,
            free_slots=free_slots,
            kv_tokens=self.budget.tokens,
            kv_tokens_in_use=self._kept.num_tokens + self._cache.allocated_tokens,
            layout=self._shape.pieces,
            kept_share=KEPT_SHARE,
        )

    def submit(self, requests: Sequence[Request], expected: Sequence[float] | None = None) -> None:
        """Admit requests, all or none; those in flight at a time share one ``SamplingParams``."""
        if self._is_unpriced:
            self._is_unpriced = False
            self._price_drafts()
        self._check_ready(len(requests), self.capacity().free_slots)
        if not requests:
            return
        sampling = self._sampling if self._num_in_flight else requests[0].sampling
        assert self.budget is not None and self._mode is not None
        for request in requests:
            check_request(request, sampling, self._context, self.budget, self._shape.pieces)
        self._mode.begin()
        self._sampling = sampling
        self._incoming += requests
        if self._drafter is not None:
            self._drafter.expect(requests, expected)

    def _price_drafts(self) -> None:
        """Time some steps, and draft what is worth its price from now on; nothing if that cannot be measured.

        Prompts that requests will come for stay out of them: what is observed of a prompt would be told to nobody.
        """
        from lit_grpo.rollout.slots.drafts.price import PricedDrafter, TrialDrafter, measure_cost

        self._drafter = trial = TrialDrafter()
        expected, self._expected = self._expected, {}
        try:
            cost = measure_cost(self, trial, self._context)
        finally:
            self._expected = expected
        self._drafter = None if cost is None else PricedDrafter(self.num_slots, cost)

    def expect(self, prompts: Iterable[Prompt]) -> None:
        """Prefill these prompts some at a time: whenever one is needed, the next ones go through the model with it."""
        for prompt in prompts:
            self._expected[prompt.prompt_id, prompt.visit] = prompt

    def release(self, prompts: Iterable[Prompt]) -> None:
        """Keep these prompts no longer than the requests that are in flight need them."""
        groups: set[GroupKey] = set()
        for prompt in prompts:
            groups.add((prompt.prompt_id, prompt.visit))
            self._expected.pop((prompt.prompt_id, prompt.visit), None)
        self._released |= groups
        if self._kept.num_tokens:
            self._kept.drop(groups)
        self._forget_prompts()

    def abort(self, keys: Iterable[Key]) -> list[Request]:
        """Stop requests and hand them back, with what they have come to as their prefixes.

        Their keys and values are kept for a return, in the memory of free slots and a quarter more, if it is there.
        """
        wanted = set(keys)
        if not wanted or not self._num_in_flight:
            return []
        assert self._mode is not None
        stopped: list[Request] = []
        with self._mode.without_gradients():
            for row in reversed(range(len(self._rows.requests))):
                if (request := self._rows.requests[row]).key in wanted:
                    stopped.insert(0, request.after(self._rows.trajectory(row)))
                    self._leave(row)
        stopped += [request for request in self._incoming if request.key in wanted]
        self._incoming = [request for request in self._incoming if request.key not in wanted]
        self._forget_prompts()
        if not self._num_in_flight:
            self._mode.end()
        return stopped

    def _leave(self, row: int, ended: bool = False) -> None:
        """Free a row; its keys and values are kept where requests may go on from them, as far as there is room."""
        launched = self._launched
        if self._rows.requests[row].group not in self._released and (self.keeps_ended or not ended):
            hidden_D = None if launched is None else launched.hidden_of(row)
            self._kept.store(row, self._rows, self._cache, self._room_to_keep(), ended, hidden_D)
        if self._drafter is not None:
            self._drafter.left(self._rows, row, ended)
        self._cache.remove(row)
        self._rows.remove(row)
        if launched is not None:
            launched.places[row] = launched.places[-1]
            del launched.places[-1]
            self._launched = launched if launched.places else None

    def _room_to_keep(self, entering: int = 0) -> int:
        """KV tokens of completions without a row that may be kept, where requests with so many tokens enter.

        As much as free slots leave, and ``KEPT_SHARE`` more: with the rows it is never more than slots of full length
        and their share, however many completions wait.
        """
        assert self.budget is not None
        free = self.budget.tokens - self._cache.allocated_tokens - entering
        free_slots = self.num_slots - self._num_in_flight
        tokens_per_slot = self._cache.max_tokens + self._shape.pieces.state
        return min(free, int((free_slots + KEPT_SHARE * self.num_slots) * tokens_per_slot))

    def _forget_prompts(self) -> None:
        """Drop the prompts that were released, once nothing in flight needs them."""
        in_flight = {request.group for request in (*self._rows.requests, *self._incoming)}
        unneeded = [group for group in self._cache.prompts if group in self._released and group not in in_flight]
        if self._drafter is not None:
            self._drafter.release(self._released - in_flight)
        self._released &= in_flight
        if unneeded and self._mode is not None:
            with self._mode.without_gradients():
                for group in unneeded:
                    self._cache.drop_prompt(group)

    # ---- one step ---------------------------------------------------------------------------------

    def step(self) -> StepEvents:
        """Give every slot its next token: decode those in flight, admit the incoming, sample, finish.

        Where it runs ahead, the step of those in flight has been launched by the call before, and the next one is
        launched here before any token is read. With drafts a step that is to try some is launched once all is read.

        Where memory runs out within it, all requests are handed back, and less is taken from then on.
        """
        if not self._num_in_flight:
            return StepEvents()
        self._check_ready()
        assert self.budget is not None and self._mode is not None
        events, is_prefilling = StepEvents(), False
        try:
            with self._mode.without_gradients():
                is_roomy = self._make_room()
                step, self._launched = self._launched, None
                shown: list[tuple[Sequence[GroupKey], torch.Tensor]] = []  # features of prompts, on their way here
                entering: list[torch.Tensor] = []  # hidden states that the next tokens of new rows come from
                if self._incoming:
                    is_prefilling = True
                    shown += self._prefill_prompts(events, ahead=is_roomy)
                    if resumed := [request for request in self._incoming if request.prefix.num_tokens]:
                        entering += self._resume(resumed, step)
                    entering += [self._cache.prompts[request.group].hidden_D for request in self._incoming]
                    self._rows.admit(self._incoming, self.version)
                    self._incoming, is_prefilling = [], False
                if step is None:
                    draft = None
                    if self._drafter is not None and is_roomy:
                        draft = self._draft(len(self._rows.requests) - len(entering))
                    step = self._decode(entering, None, draft)
                elif entering:
                    first = len(step.places)
                    uniform_B = in_one_copy(self._rows.inputs(0, first), self._device)["uniform"]
                    step.join(self._sample(torch.stack(entering), uniform_B, first))
                if entering:
                    self._cache.admit([request.group for request in self._rows.requests[self._cache.num_rows :]])
                if self.runs_ahead and self._may_run_ahead(is_roomy, step):
                    self._launched = self._decode([], step)
                if step.ready is not None:
                    step.ready.synchronize()
                for keys, features_BF in shown:
                    events.observations.append(Observation(keys, 0, features_BF.numpy()))
                tokens_B, observations, events.likeliest = self._rows.take(step, self.feature_points)
                events.num_active = events.num_tokens = len(tokens_B)
                events.observations += observations
                self._finish(step, tokens_B, events)
        except BaseException as error:
            kv_tokens, rows = self._kept.num_tokens + self._cache.allocated_tokens, self._rows
            stopped = [request.after(rows.trajectory(row)) for row, request in enumerate(rows.requests)]
            events.preempted = [*stopped, *self._incoming]
            if self._drafter is not None:
                for row in range(len(rows.requests)):
                    self._drafter.left(rows, row, ended=False)
            self._clear()
            self._expected.clear()
            if not is_out_of_memory(error) or events.num_active or len(events.preempted) < 2:
                raise
            events.message = self.budget.shrink(kv_tokens, len(events.preempted), is_prefilling)
            return events
        finally:
            if not self._num_in_flight:
                self._mode.end()
        self.budget.note_success(self._kept.num_tokens + self._cache.allocated_tokens)
        return events

    def _make_room(self) -> bool:
        """Have rows and a cache for what is in flight; where the step would pass the budget, give back what it can.

        That is what nobody needs: idle prompts, and room ahead of need. Returns whether memory is no concern, even if
        all in flight grew to their limit.
        """
        room, shape = self._sampling.room, self._shape
        if not self._cache.num_rows and (self._cache.max_tokens, self._cache.shape) != (room, shape):
            self._rows = TokenRows(self.num_slots, room)
            self._cache = SlotCache(shape, room, self.num_slots, self._tables)
        cache, budget = self._cache, self.budget
        assert budget is not None
        prefixes = [request.prefix.num_tokens for request in self._incoming]
        if self._kept.num_tokens:
            self._kept.fit(self._room_to_keep(cache.tokens_of(prefixes)))
        in_use = self._kept.num_tokens + cache.allocated_tokens
        most_tokens = cache.max_tokens + 2 * shape.pieces.state  # of a row, if its prompt is its own
        if in_use + 2 * self._num_in_flight * most_tokens + AHEAD_TOKENS <= budget.tokens:
            cache.most_entries = self.num_slots
            return True
        entering, prompts = cache.tokens_of(prefixes), {request.group: request.prompt for request in self._incoming}
        for group, prompt in prompts.items():
            entering += 0 if group in cache.prompts else shape.pieces.prompt(len(prompt.token_ids))
        columns_B = self._rows.counts[: len(self._rows.requests)] - (self._launched is None)
        is_tight = in_use + cache.growth(columns_B) + entering > budget.tokens
        cache.most_entries = 0 if is_tight else self.num_slots
        if is_tight:
            self._kept.fit(0)
            needed = prompts.keys() | {request.group for request in self._rows.requests}
            for group in [group for group in cache.prompts if group not in needed]:
                cache.drop_prompt(group)  # it is computed again in its turn
            cache.settle(0.0)
        return False

    def _may_run_ahead(self, is_roomy: bool, step: SampledStep) -> bool:
        """Return whether a step may be launched before the tokens of the last one, ``step``, are read.

        It may if some row is not at its limit with the token in flight, and if its keys and values fit. The loop
        makes room for as many tokens of each row as there are with that token, so memory seldom says no. With drafts,
        neither step may have any.
        """
        rows, budget = self._rows, self.budget
        num_rows = len(rows.requests)
        assert budget is not None
        if self._drafter is not None and (
            step.draft is not None or (is_roomy and self._most_drafted(num_rows, num_ahead=1).any())
        ):
            return False
        if (rows.sampled[:num_rows] + 1 >= self._sampling.max_tokens).all():
            return False
        if is_roomy:
            return True
        in_use = self._kept.num_tokens + self._cache.allocated_tokens
        return in_use + self._cache.growth(rows.counts[:num_rows]) <= budget.tokens

    def _prefill_prompts(self, events: StepEvents, ahead: bool) -> list[tuple[Sequence[GroupKey], torch.Tensor]]:
        """Compute what is missing of the prompts of incoming requests: keys and values, and their last hidden states.

        Prompts that take the same room go through the policy together. If any is missing, and ``ahead``, some short
        ones that requests will come for go with it.

        Returns:
            The features of prompts that are observed, on their way to the host.
        """
        shown: list[tuple[Sequence[GroupKey], torch.Tensor]] = []
        cache, budget, states = self._cache, self.budget, self._shape.states
        assert budget is not None
        needed = {request.group: request.prompt for request in self._incoming}
        missing: dict[GroupKey, Prompt] = {}
        for group, prompt in needed.items():
            if group not in cache.prompts:
                missing[group] = prompt
        if missing and ahead:
            num_tokens = 0
            for group, prompt in list(self._expected.items()):
                num_tokens += self._shape.pieces.prompt(len(prompt.token_ids))
                if num_tokens > AHEAD_TOKENS:
                    break
                del self._expected[group]
                if group not in needed and group not in cache.prompts:
                    missing[group] = prompt
        by_room: dict[int, list[tuple[GroupKey, Prompt]]] = {}
        for group, prompt in missing.items():
            length = len(prompt.token_ids)
            room = prompt_room(length) if states is None or states.goes_on else length
            by_room.setdefault(room, []).append((group, prompt))
        for room, alike in by_room.items():
            most = max(1, budget.prefill_tokens // room)
            if states is not None:
                alike.sort(key=lambda each: -len(each[1].token_ids))
                most = 1 if any(prompt.pictures is not None for _, prompt in alike) else most
            for first in range(0, len(alike), most):
                groups, prompts = zip(*alike[first : first + most], strict=True)
                sequences = [prompt.token_ids for prompt in prompts]
                lengths = [*map(len, sequences)]
                writer = cache.write_prompts(groups, lengths)
                pictures = [[] if prompt.pictures is None else [(0, prompt.pictures)] for prompt in prompts]
                hidden_BD = prefill(self.policy, sequences, budget.prefill_tokens, writer, pictures)
                for row, (group, hidden_D) in enumerate(zip(groups, hidden_BD, strict=True)):
                    cache.prompts[group].hidden_D = hidden_D.clone()
                    if writer.states is not None:
                        cache.prompts[group].states = writer.states.copy(row)
                events.prefilled_tokens += sum(lengths)
                if 0 in self.feature_points:
                    logits_BV = self._head(hidden_BD).float() / (self._sampling.temperature or 1.0)
                    entropies_B1 = torch.special.entr(logits_BV.softmax(-1)).sum(-1)[:, None]  # before truncation
                    features_BF = torch.cat([hidden_BD.float(), torch.zeros_like(entropies_B1), entropies_B1], -1)
                    shown.append((groups, self._to_host(features_BF)))
        return shown

    def _resume(self, resumed: Sequence[Request], step: SampledStep | None) -> list[torch.Tensor]:
        """Give rows to those of the incoming requests that have prefixes: the cache gets all but their last tokens.

        Where a ``step`` of the other rows has been launched, it gets all, and the hidden states of their last tokens
        are returned.
        """
        assert self.budget is not None
        rows, most_tokens, entering = self._rows, self.budget.prefill_tokens, list[torch.Tensor]()
        for requests, hidden in self._kept.resume(self.policy, resumed, rows, self._cache, most_tokens, step):
            rows.admit(requests, self.version)
            entering += hidden
            entered = {request.key for request in requests}
            self._incoming = [request for request in self._incoming if request.key not in entered]
        return entering

    def _most_drafted(self, num_decoded: int, num_ahead: int = 0) -> np.ndarray:
        """Return how many tokens each decoded row may try in the next step, with ``num_ahead`` tokens in flight.

        As many as the drafter takes for worth it, within the row's limit, and up to the next point at which the row is
        observed: the token after it is sampled by itself.
        """
        rows, drafter = self._rows, self._drafter
        assert drafter is not None
        if self.one_by_one or self.num_likeliest:
            return np.zeros(num_decoded, dtype=np.int64)
        sampled_B = rows.sampled[:num_decoded] + num_ahead
        stops = np.array([*sorted(self.feature_points), self._sampling.max_tokens])
        most_B = np.minimum(stops[np.searchsorted(stops[:-1], sampled_B)], stops[-1]) - sampled_B - 1
        room = self._most_queries - num_decoded
        most_B = np.clip(drafter.most(rows, num_decoded, room), 0, np.maximum(most_B, 0))
        return np.minimum(most_B, np.maximum(room - np.cumsum(most_B) + most_B, 0))

    def _draft(self, num_decoded: int) -> Draft | None:
        """Return what the first ``num_decoded`` rows try in the next step, if anything."""
        from lit_grpo.rollout.slots.drafts import Draft

        assert self._drafter is not None
        most_B = self._most_drafted(num_decoded)
        if not most_B.any():
            return None
        proposals = self._drafter.draft(self._rows, most_B, self._cache, self._sampling)
        return Draft.of(proposals, most_B, int(self.policy.config.get_text_config(decoder=True).vocab_size))

    def _decode(
        self, entering: Sequence[torch.Tensor], before: SampledStep | None = None, draft: Draft | None = None
    ) -> SampledStep:
        """Launch a step of all rows; the device may not have begun with it on return.

        Args:
            entering: Hidden states that the tokens of the last rows come from. All others are decoded from their last
                tokens.
            before: The step that samples the last tokens, where the host has not read them.
            draft: What rows try after their last tokens.
        """
        rows, cache, num_ahead = self._rows, self._cache, int(before is not None)
        num_decoded = len(rows.requests) - len(entering)
        arrays, hidden = rows.inputs(num_decoded, num_ahead=num_ahead, draft=draft), []
        ahead: StatesAhead | None = None
        if before is not None and before.places != [*range(before.bits_FB.shape[1])]:
            arrays["places"] = np.array(before.places)
        if num_decoded:
            if draft is None:
                inputs = cache.prepare(rows.counts[:num_decoded] - 1 + num_ahead, arrays)
            else:
                inputs = cache.prepare(rows.counts[draft.rows_N] - 1 + draft.ahead_N, arrays, draft.rows_N)
            longest = int(arrays["positions"].max())
            tokens_B = inputs["tokens"] if before is None else before.bits_FB[0].view(torch.int32).long()
            if "places" in inputs:
                tokens_B = tokens_B.index_select(0, inputs["places"])
            positions_B = inputs["positions"]
            if self._graphs is not None:
                hidden.append(self._graphs(tokens_B, positions_B, longest))
            elif self._fused is not None:
                hidden.append(self._fused(tokens_B, positions_B, longest, cache))
            else:
                if draft is not None and cache.states is not None:
                    from lit_grpo.rollout.slots.drafts.states import StatesAhead

                    ahead = StatesAhead(state_layers(self.policy), cache.states, draft)
                hidden.append(decode_by_model(self.policy, tokens_B, positions_B, cache, ahead))
        else:
            inputs = in_one_copy(arrays, self._device)
        if entering:
            hidden.append(torch.stack([*entering]))
        step = self._sample(torch.cat(hidden), inputs["uniform"], num_ahead=num_ahead, draft=draft)
        step.ahead = ahead
        return step

    def _sample(
        self,
        hidden_BD: torch.Tensor,
        uniform_B: torch.Tensor,
        first: int = 0,
        num_ahead: int = 0,
        draft: Draft | None = None,
    ) -> SampledStep:
        """Sample a token of each row from the ``first`` on; all that the host is to know of them is sent to it.

        That is in one piece where no row is at a point at which it is observed, because every copy is a launch.
        """
        logits_BV = self._head(hidden_BD)
        tokens_B, *others = sample_tokens(logits_BV, self._sampling, uniform_B)
        if self.num_likeliest:
            number = min(self.num_likeliest, logits_BV.shape[-1])
            logprobs_BK, ids_BK = distribution(logits_BV, self._sampling).topk(number)
            others += [*ids_BK.int().view(torch.float32).T, *logprobs_BK.T]
        bits_FB = torch.stack([tokens_B.int().view(torch.float32), *others])
        step = SampledStep(bits_FB, hidden_BD, [self._to_host(bits_FB)], [*range(len(hidden_BD))], draft=draft)
        if draft is not None:
            del step.places[len(draft.tokens_BK) : len(draft.rows_N)]
        sampled_B = self._rows.sampled[first : first + len(step.places)] + num_ahead
        is_shown_B = np.zeros(len(sampled_B), dtype=bool)
        for point in self.feature_points:
            is_shown_B |= sampled_B == point
        if shown := np.flatnonzero((sampled_B > 0) & is_shown_B).tolist():
            states_BD = self._to_host(hidden_BD.float())
            step.shown = {step.places[row]: states_BD[step.places[row]] for row in shown}
        if self._device.type == "cuda":
            step.ready = torch.cuda.current_stream(self._device).record_event()
        return step

    def _finish(self, step: SampledStep, tokens_B: np.ndarray, events: StepEvents) -> None:
        """Give rows what they tried and got right; free those that a token has ended, or that are at their limit."""
        rows, sampling = self._rows, self._sampling
        stopped_B, accepted_B = np.zeros(len(tokens_B), dtype=bool), np.zeros(len(tokens_B), dtype=np.int64)
        with_new_token: Iterable[np.ndarray | slice] = [slice(None)]  # all rows
        if step.draft is not None:
            with_new_token = rows.take_drafted(step, tokens_B, stopped_B, accepted_B)
        for rows_N in with_new_token:
            stopped_B[rows_N] = (tokens_B[rows_N, None] == self._eos_ids).any(-1)
            if sampling.stop:
                numbers_N = np.arange(len(tokens_B))[rows_N]
                stopped_B[rows_N] |= rows.with_stop_string(numbers_N, sampling.stop, self._tokenizer)
        if self._drafter is not None:
            self._cache.roll_back(rows.counts[: len(tokens_B)] - 1)
            events.accepted.update(self._drafter.took(rows, step, accepted_B))
            if step.ahead is not None:
                step.ahead.take(accepted_B)
            events.num_drafted = 0 if step.draft is None else step.draft.num_tokens
            events.num_tokens += int(accepted_B.sum())
            events.beyond = {rows.requests[row].key: int(accepted_B[row]) for row in np.flatnonzero(accepted_B)}
        ended = np.flatnonzero(stopped_B | (rows.sampled[: len(tokens_B)] >= sampling.max_tokens)).tolist()
        for row in ended:
            reason = "stop" if stopped_B[row] else "length"
            completion = Completion.of(rows.requests[row].after(EMPTY), rows.trajectory(row), reason)
            completion.text = self._text_of(completion.sampled_ids, completion.request.prompt)
            events.finished.append(completion)
        for row in reversed(ended):
            self._leave(row, ended=True)
        if ended:
            self._forget_prompts()
