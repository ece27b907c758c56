"""The embedded generator: decodes on the policy itself, in a fixed number of slots."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from lit_grpo.policy import eos_token_ids, hidden_states, token_logits
from lit_grpo.rollout.generator import Capacity, StepEvents, WeightSyncError
from lit_grpo.rollout.kv_cache import PrefillCache, PromptKV, SlotCache, use_slot_attention
from lit_grpo.rollout.sampling import request_key, sample_tokens
from lit_grpo.rollout.support import check_slot_support, slot_context
from lit_grpo.types import Completion, FinishReason, Prompt, Request, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_CAPACITY_STEP = 64


class SlotGenerator:
    """Decode on the policy module, in ``num_slots`` rows of KV cache that are refilled at every step.

    There is nothing to install and nothing to sync: the weights are the policy's own. A prompt is
    prefilled once for all its completions. The KV memory is slots x (prompt + completion) tokens,
    whatever the group size.

    Args:
        num_slots: How many completions are decoded at a time.
        prefill_tokens: The most prompt tokens, padding included, that go through the model at once.
    """

    def __init__(self, num_slots: int = 64, prefill_tokens: int = 8192) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots must be at least 1, not {num_slots}: a completion needs a slot to decode in.")
        if prefill_tokens < 1:
            raise ValueError(f"prefill_tokens must be at least 1, not {prefill_tokens}.")
        self.num_slots = num_slots
        self.prefill_tokens = prefill_tokens
        self._version = -1
        self._policy: PreTrainedModel | None = None
        self._attention: str | None = None
        self._clear()

    # ---- life -------------------------------------------------------------------------------------

    def start(self, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Bind the policy, after a trial on a few tokens; slots are allocated with the first request.

        Raises:
            ValueError: The policy is a model that the slots cannot decode.
        """
        check_slot_support(policy)
        self._policy, self._tokenizer = policy, tokenizer
        self._eos_ids = torch.tensor(eos_token_ids(policy, tokenizer))
        self._context = slot_context(policy)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> int:
        """Check that every weight is the policy's own tensor, then take ``version``."""
        own = dict(self.policy.named_parameters())
        names = set()
        self._version = -1  # until all of them are here
        for name, tensor in weights:
            if name not in own or own[name].data_ptr() != tensor.data_ptr():
                raise WeightSyncError(
                    f"SlotGenerator decodes on the policy it was started with, but {name!r} is another tensor."
                )
            names.add(name)
        if missing := own.keys() - names:
            raise WeightSyncError(f"{len(missing)} of {len(own)} weights did not arrive, {min(missing)!r} among them.")
        self._prompts.clear()
        self._version = version
        return len(names)

    @property
    def version(self) -> int:
        """The policy version that samples now; -1 where no complete set of weights has arrived."""
        return self._version

    @property
    def policy(self) -> PreTrainedModel:
        """The policy that ``start`` was given."""
        if self._policy is None:
            raise RuntimeError("SlotGenerator has not been started; call start(policy, tokenizer) first.")
        return self._policy

    def close(self) -> None:
        """Free the KV memory and everything in flight."""
        self._clear()
        self._end()

    def _begin(self) -> None:
        """Switch the policy to slot attention, without gradients, from the first request in flight on."""
        if self._attention is None:
            self._training = self.policy.training
            self.policy.eval()
            self._attention = use_slot_attention(self.policy)

    def _end(self) -> None:
        """Give the policy back as it was, once nothing is in flight."""
        if self._attention is not None and not self._requests and not self._incoming:
            self.policy.set_attn_implementation(self._attention)
            self.policy.train(self._training)
            self._attention = None

    def _clear(self) -> None:
        self._requests: list[Request] = []  # one a row in use, in the order of the rows
        self._incoming: list[Request] = []
        self._prompts: dict[tuple[str, int], PromptKV] = {}
        self._released: set[tuple[str, int]] = set()
        self._cache: SlotCache | None = None
        self._sampling: SamplingParams | None = None

    # ---- requests ---------------------------------------------------------------------------------

    def capacity(self) -> Capacity:
        """Slots, and how many of them are free."""
        return Capacity(self.num_slots, self.num_slots - len(self._requests) - len(self._incoming))

    def submit(self, requests: Sequence[Request]) -> None:
        """Admit requests, all or none; those in flight at a time share one ``SamplingParams``."""
        self._check_weights()
        if not requests:
            return
        free_slots = self.capacity().free_slots
        if len(requests) > free_slots:
            raise ValueError(f"{len(requests)} requests for {free_slots} free slots; submit at most that many.")
        in_flight = self._requests or self._incoming
        sampling = self._sampling if in_flight and self._sampling is not None else requests[0].sampling
        for request in requests:
            self._check(request, sampling)
        self._begin()
        self._sampling = sampling
        self._incoming += requests

    def _check_weights(self) -> None:
        if self._version < 0:
            raise WeightSyncError("The generator has no complete set of weights; call load_weights first.")

    def _check(self, request: Request, sampling: SamplingParams) -> None:
        if request.sampling != sampling:
            raise ValueError("Requests in flight at the same time must share their sampling parameters.")
        if not request.prompt.token_ids:
            raise ValueError(f"Prompt {request.prompt.prompt_id!r} has no tokens; a completion needs at least one.")
        total = len(request.prompt.token_ids) + request.sampling.max_tokens
        if total > self._context:
            raise ValueError(
                f"Prompt {request.prompt.prompt_id!r} has {len(request.prompt.token_ids)} tokens and up to "
                f"{request.sampling.max_tokens} are to follow, but the model's context is {self._context}; "
                "lower sampling.max_tokens or data.max_prompt_tokens."
            )

    def release(self, prompts: Iterable[Prompt]) -> None:
        """Drop the keys and values of prompts that no further request will need."""
        self._released |= {(prompt.prompt_id, prompt.visit) for prompt in prompts}
        self._forget()

    def _forget(self) -> None:
        """Drop released prompts, once the requests that were submitted for them have been admitted."""
        needed = {request.key[:2] for request in self._incoming}
        for key in self._released - needed:
            self._prompts.pop(key, None)
        self._released &= needed

    def abort(self, keys: Iterable[tuple[str, int, int]]) -> list[Completion]:
        """Stop requests and return their partial completions; those not yet begun come back empty."""
        wanted = set(keys)
        rows = [row for row, request in enumerate(self._requests) if request.key in wanted]
        with torch.inference_mode():
            partial = [self._completion(row, "abort") for row in rows]
            self._remove(rows)
        for request in [request for request in self._incoming if request.key in wanted]:
            self._incoming.remove(request)
            empty = torch.empty(0, dtype=torch.int64)
            partial.append(Completion(request, empty, torch.empty(0), empty.clone(), "abort"))
        self._end()
        return partial

    # ---- one step ---------------------------------------------------------------------------------

    def step(self) -> StepEvents:
        """Give every slot its next token: decode those in flight, admit the incoming, sample, finish."""
        if not self._requests and not self._incoming:
            return StepEvents()
        self._check_weights()
        with torch.inference_mode():
            logits = [self._decode()] if self._requests else []
            logits += self._admit()
            rows = self._sample(torch.cat(logits))
            finished = self._finish()
        self._end()
        return StepEvents(num_active=rows, num_tokens=rows, finished=finished)

    def _decode(self) -> torch.Tensor:
        """Run the policy over the last token of each row; return logits, shape (rows, V)."""
        assert self._cache is not None
        rows = len(self._requests)
        positions_B = self._lengths[:rows] - 1
        self._cache.prepare(positions_B, self._span)
        last_B1 = self._tokens[self._row_index[:rows], self._counts[:rows] - 1].unsqueeze(-1)
        hidden = hidden_states(self.policy, last_B1, position_ids=positions_B.unsqueeze(-1), slot_cache=self._cache)
        return token_logits(self.policy, hidden[:, 0])

    def _admit(self) -> list[torch.Tensor]:
        """Prefill new prompts and open a row for each incoming request; return first-token logits."""
        if not self._incoming:
            return []
        incoming, self._incoming = self._incoming, []
        self._prefill({(r.prompt.prompt_id, r.prompt.visit): r.prompt for r in incoming})
        prompts = [self._prompts[r.prompt.prompt_id, r.prompt.visit] for r in incoming]
        self._reserve(max(p.num_tokens for p in prompts), prompts[0])
        assert self._cache is not None
        first, last = len(self._requests), len(self._requests) + len(incoming)
        self._cache.admit(first, prompts)
        device = self._lengths.device
        self._lengths[first:last] = torch.tensor([p.num_tokens for p in prompts], device=device)
        self._keys[first:last] = torch.tensor([request_key(r) for r in incoming], device=device)
        self._counts[first:last] = 0
        self._requests += incoming
        self._span = max(self._span, *(p.num_tokens for p in prompts))
        self._forget()
        return [torch.stack([p.logits_V for p in prompts])]

    def _sample(self, logits_BV: torch.Tensor) -> int:
        """Append one token to each row, with its log-prob and the policy version."""
        assert self._sampling is not None
        rows = logits_BV.shape[0]
        counts_B = self._counts[:rows]
        tokens_B, logprobs_B = sample_tokens(logits_BV, self._sampling, self._keys[:rows], counts_B)
        index = (self._row_index[:rows], counts_B)
        self._tokens[index] = tokens_B
        self._logprobs[index] = logprobs_B
        self._versions[index] = self._version
        self._counts[:rows] += 1
        self._lengths[:rows] += 1
        self._span += 1
        self._last_B, self._last_logprobs_B = tokens_B, logprobs_B
        return rows

    def _finish(self) -> list[Completion]:
        """Take the rows that have ended out of their slots."""
        assert self._sampling is not None
        rows = len(self._requests)
        stopped_B = (self._last_B[:, None] == self._eos_ids).any(-1)
        stopped_B[self._stop_strings()] = True
        broken_B = self._last_logprobs_B.isnan()
        ended = (stopped_B | broken_B | (self._counts[:rows] >= self._sampling.max_tokens)).nonzero().flatten()
        if not len(ended):
            return []
        if broken_B.any():
            raise FloatingPointError(
                f"The policy's logits are NaN or infinite at version {self._version}, so no token can be sampled; "
                "look for NaN weights or a learning rate that is too high."
            )
        by_row = list(zip(ended.tolist(), stopped_B[ended].tolist(), strict=True))
        finished = [self._completion(row, "stop" if stopped else "length") for row, stopped in by_row]
        self._remove([row for row, _ in by_row])
        return finished

    def _stop_strings(self) -> list[int]:
        """Rows whose text has come to hold a stop string; only its last tokens are decoded each step."""
        assert self._sampling is not None
        if not self._sampling.stop:
            return []
        # A token may hold as little as one byte of a character.
        longest = max(len(text.encode()) for text in self._sampling.stop)
        columns_L = torch.arange(-longest - 1, 0, device=self._counts.device)
        columns_BL = self._counts[: len(self._requests), None] + columns_L
        tails = self._tokens[: len(self._requests)].gather(1, columns_BL.clamp(min=0))
        lengths = self._counts[: len(self._requests)].tolist()
        texts = self._tokenizer.batch_decode(
            [tail[-min(length, len(tail)) :] for tail, length in zip(tails.tolist(), lengths, strict=True)]
        )
        return [row for row, text in enumerate(texts) if any(stop in text for stop in self._sampling.stop)]

    # ---- memory -----------------------------------------------------------------------------------

    def _prefill(self, prompts: dict[tuple[str, int], Prompt]) -> None:
        """Compute the keys and values of the prompts that are not there yet, a few rows at a time."""
        missing = sorted(
            ((key, prompt) for key, prompt in prompts.items() if key not in self._prompts),
            key=lambda item: len(item[1].token_ids),
        )
        while missing:
            longest = len(missing[-1][1].token_ids)
            rows = max(1, self.prefill_tokens // longest)
            chunk, missing = missing[-rows:], missing[:-rows]
            input_ids_BT = torch.zeros((len(chunk), longest), dtype=torch.int64)
            for row, (_, prompt) in enumerate(chunk):
                input_ids_BT[row, : len(prompt.token_ids)] = torch.tensor(prompt.token_ids)
            cache = PrefillCache()
            hidden = hidden_states(self.policy, input_ids_BT.to(self.policy.device), slot_cache=cache)
            last = torch.tensor([len(prompt.token_ids) - 1 for _, prompt in chunk], device=hidden.device)
            logits_BV = token_logits(self.policy, hidden[torch.arange(len(chunk), device=hidden.device), last])
            for row, (key, prompt) in enumerate(chunk):
                self._prompts[key] = cache.prompt(row, len(prompt.token_ids), logits_BV[row])

    def _reserve(self, prompt_tokens: int, like: PromptKV) -> None:
        """Make room for prompts of this length; longer ones than ever before reallocate the slots."""
        assert self._sampling is not None
        max_tokens = self._sampling.max_tokens
        tokens = -(-(prompt_tokens + max_tokens) // _CAPACITY_STEP) * _CAPACITY_STEP
        old = self._cache
        if old is not None and old.num_tokens >= tokens and self._tokens.shape[1] >= max_tokens:
            return
        device = like.keys_values.device
        if old is not None and self._requests:
            self._cache = SlotCache(self.num_slots, tokens, like)
            self._cache.take_over(old, len(self._requests))
            return
        self._cache = old = None  # freed before the larger one is there
        self._row_index = torch.arange(self.num_slots, device=device)
        self._tokens = torch.zeros((self.num_slots, max_tokens), dtype=torch.int64, device=device)
        self._logprobs = torch.zeros((self.num_slots, max_tokens), device=device)
        self._versions = torch.zeros((self.num_slots, max_tokens), dtype=torch.int64, device=device)
        self._counts, self._lengths, self._keys = torch.zeros((3, self.num_slots), dtype=torch.int64, device=device)
        self._eos_ids = self._eos_ids.to(device)
        self._span = 0
        self._cache = SlotCache(self.num_slots, tokens, like)

    def _completion(self, row: int, reason: FinishReason) -> Completion:
        count = int(self._counts[row])
        buffers = (self._tokens, self._logprobs, self._versions)
        with torch.inference_mode(False):  # what leaves the generator may take part in autograd
            token_ids_T, logprobs_T, versions_T = (buffer[row, :count].clone().cpu() for buffer in buffers)
        text = str(self._tokenizer.decode(token_ids_T.tolist(), skip_special_tokens=True))
        return Completion(self._requests[row], token_ids_T, logprobs_T, versions_T, reason, text)

    def _remove(self, rows: list[int]) -> None:
        """Free rows: the last rows in use move into the holes, so that no step computes a hole."""
        kept = len(self._requests) - len(rows)
        gone = set(rows)
        holes = [row for row in rows if row < kept]
        movers = [row for row in range(kept, len(self._requests)) if row not in gone]
        if holes:
            assert self._cache is not None
            for source, target in zip(movers, holes, strict=True):
                self._cache.move(source, target, self._span)
                self._requests[target] = self._requests[source]
            sources, targets = torch.tensor(movers), torch.tensor(holes)
            for state in (self._tokens, self._logprobs, self._versions, self._counts, self._lengths, self._keys):
                state[targets] = state[sources]
        del self._requests[kept:]
        self._span = int(self._lengths[:kept].max()) if kept else 0
