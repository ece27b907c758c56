"""What is kept of prompts, and of completions that have left their rows: what is there, what comes, what may go."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import torch

from lit_grpo.rollout.slots.forward import prefill
from lit_grpo.rollout.slots.kv.cache import SlotCache
from lit_grpo.rollout.slots.rows import TokenRows
from lit_grpo.scheduling.layouts import prompt_room
from lit_grpo.trajectory import num_common, prefix_tree
from lit_grpo.types import GroupKey, Key, Prompt, Request

if TYPE_CHECKING:
    from transformers import PreTrainedModel

AHEAD_TOKENS = 512
_LEAST_COPIED = 16  # tokens of another completion; fewer are computed with the others
PromptKey = tuple[str, int, int]
"""``(prompt_id, visit, policy version)``: keys and values of an older version are another prompt's."""
Missing = list[tuple[PromptKey, Prompt]]


class PromptStates:
    """The last hidden state of each prompt in the cache, and what is to come of prompts.

    ``states`` is by prompt; a prompt is in it exactly as long as it is in the cache.
    """

    def __init__(self) -> None:
        self.states: dict[PromptKey, torch.Tensor] = {}
        self._expected: dict[tuple[str, int], Prompt] = {}
        self._released: set[tuple[str, int]] = set()

    def expect(self, prompts: Iterable[Prompt]) -> None:
        """These prompts will be needed."""
        self._expected |= {(prompt.prompt_id, prompt.visit): prompt for prompt in prompts}

    def expect_nothing(self) -> None:
        """Forget what is to come, and the states: the cache is gone."""
        self._expected.clear()
        self.states.clear()

    def release(self, prompts: Iterable[Prompt]) -> None:
        """These prompts are needed no longer than by what is in flight."""
        released = {(prompt.prompt_id, prompt.visit) for prompt in prompts}
        for key in released:
            self._expected.pop(key, None)
        self._released |= released

    def is_released(self, group: GroupKey) -> bool:
        """Whether no more requests will come for a prompt."""
        return group in self._released

    def compute(self, policy: PreTrainedModel, batch: Missing, cache: SlotCache, most_tokens: int) -> torch.Tensor:
        """Prefill prompts of the same room, ``most_tokens`` at once; return their last states, (prompts, D)."""
        sequences = [prompt.token_ids for _, prompt in batch]
        writer = cache.write_prompts([key for key, _ in batch], [len(tokens) for tokens in sequences])
        hidden_BD = prefill(policy, sequences, most_tokens, writer)
        for row, (key, _) in enumerate(batch):
            self.states[key] = hidden_BD[row].clone()
        return hidden_BD

    def forget(self, cache: SlotCache | None, needed: set[PromptKey], version: int) -> None:
        """Drop the prompts that nobody needs any more: released ones, and those of older weights.

        Args:
            cache: Where they are kept; those that its rows read stay.
            needed: Prompts of requests that have no row yet.
            version: Of the weights.
        """
        used = needed if cache is None else needed | cache.prompts_in_use
        for key in [key for key in self.states if key not in used]:
            if key[:2] in self._released or key[2] != version:
                assert cache is not None
                cache.drop_prompt(key)
                del self.states[key]
        self._released &= {key[:2] for key in needed | set(self.states)}

    def forget_idle(self, cache: SlotCache, needed: set[PromptKey]) -> None:
        """Drop the prompts that no row reads, but for those ``needed``: they are computed again in their turn."""
        for key in self.states.keys() - cache.prompts_in_use - needed:
            cache.drop_prompt(key)
            del self.states[key]

    def missing(self, prompts: Mapping[PromptKey, Prompt], cache: SlotCache, ahead: bool, version: int) -> Missing:
        """Return those of ``prompts`` that are not in the cache; if any, and ``ahead``, also some that come next."""
        missing = [(key, prompt) for key, prompt in prompts.items() if key not in cache]
        if missing and ahead:
            missing += self._ahead({key[:2] for key in prompts}, cache, version)
        return missing

    def _ahead(self, needed: set[tuple[str, int]], cache: SlotCache, version: int) -> Missing:
        """Choose the prompts that are prefilled before they are needed: a few, and short ones."""
        chosen, num_tokens = [], 0
        for key, prompt in list(self._expected.items()):
            num_tokens += prompt_room(len(prompt.token_ids))
            if num_tokens > AHEAD_TOKENS:
                break
            del self._expected[key]
            if key not in needed and (*key, version) not in cache:
                chosen.append(((*key, version), prompt))
        return chosen


class _Kept(NamedTuple):
    """Tokens of a completion without a row, and their keys and values as ``SlotCache.copy_completion`` returns them."""

    prompt: PromptKey
    token_ids_T: np.ndarray
    tensors: list[torch.Tensor]
    ended: bool  # so that it may never come back


class _Beginning(NamedTuple):
    """The first tokens of a request's prefix whose keys and values are there, and where to get them."""

    num_tokens: int
    copy: Callable[[int], list[torch.Tensor]]


class KeptCompletions:
    """Keys and values of completions that have left their rows and may come back: a cache, and no more.

    Whatever is missing is computed again from the prefixes that requests own.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self._kept: dict[Key, _Kept] = {}

    def keep(self, request: Request, row: int, cache: SlotCache, most_tokens: int, ended: bool = False) -> None:
        """Copy what a row holds of a prefix, if all that is kept stays within ``most_tokens``.

        Those that have ended make room for it, the first of them first.
        """
        self._forget(request.key)
        num_tokens = request.prefix.num_tokens - 1
        if not 0 < num_tokens <= most_tokens:
            return
        for key in [key for key, kept in self._kept.items() if kept.ended]:
            if self.num_tokens + num_tokens > most_tokens:
                self._forget(key)
        if self.num_tokens + num_tokens <= most_tokens:
            prompt, token_ids_T = cast("PromptKey", cache.prompt_of(row)), request.prefix.token_ids_T[:-1].numpy()
            self._kept[request.key] = _Kept(prompt, token_ids_T, cache.copy_completion(row, num_tokens), ended)
            self.num_tokens += num_tokens

    def resume(
        self,
        policy: PreTrainedModel,
        requests: Sequence[Request],
        version: int,
        cache: SlotCache,
        rows: TokenRows,
        most_tokens: int,
    ) -> Iterator[list[Request]]:
        """Open rows for requests with prefixes, some at a time, and yield which.

        Of each, what a row or a kept completion of its prompt begins with is copied: all of it, where nothing has been
        observed since it was kept; the prefix, where it is a fork; all but the tail, where a tool has answered. What is
        left is computed, with one pass for those of one prompt that have equally much of it. Of requests that begin
        with the same tokens one is computed first. Nothing more is kept of those that have a row.

        Args:
            policy: Switched to slot attention.
            requests: What goes on; their prompts are in the cache.
            version: Of the policy.
            cache: Takes the rows.
            rows: The tokens of those that there are.
            most_tokens: The most tokens that go through the model at once.
        """
        first, others = _one_of_each_beginning(requests)
        for wave in (first, others):
            alike: dict[tuple[PromptKey, int, int], list[tuple[Request, _Beginning]]] = {}
            for request in wave:
                prompt, beginning = (*request.group, version), self._beginning(request, version, cache, rows)
                alike.setdefault((prompt, request.prefix.num_tokens - 1, beginning.num_tokens), []).append(
                    (request, beginning)
                )
            for (prompt, num_tokens, known), members in alike.items():
                beginnings = [beginning.copy(known) for _, beginning in members] if known else []
                writer = cache.write_completions(prompt, len(members), num_tokens, beginnings)
                if known < num_tokens:
                    tails = [request.prefix.token_ids_T[known:-1].tolist() for request, _ in members]
                    first_position = len(members[0][0].prompt.token_ids) + known
                    prefill(policy, tails, most_tokens, writer, first_position)
                for request, _ in members:
                    self._forget(request.key)
                yield [request for request, _ in members]

    def _beginning(self, request: Request, version: int, cache: SlotCache, rows: TokenRows) -> _Beginning:
        """Return the longest beginning of a request's prefix, without its last token, that is there; its own first."""
        prompt, token_ids_T = (*request.group, version), request.prefix.token_ids_T[:-1].numpy()
        own = self._kept.get(request.key)
        if own is not None and (known := num_common(own.token_ids_T, token_ids_T)) == len(own.token_ids_T):
            return _Beginning(known, partial(_first, own.tensors))
        found = [
            _Beginning(num_common(kept.token_ids_T, token_ids_T), partial(_first, kept.tensors))
            for kept in self._kept.values()
            if kept.prompt == prompt
        ]
        found += [
            _Beginning(rows.num_common(row, token_ids_T), partial(cache.copy_completion, row))
            for row in range(len(rows))
            if cache.prompt_of(row) == prompt
        ]
        nothing = _Beginning(0, partial(_first, []))
        longest = max(found, key=lambda beginning: beginning.num_tokens, default=nothing)
        return longest if longest.num_tokens >= _LEAST_COPIED else nothing

    def _forget(self, key: Key) -> None:
        if key in self._kept:
            self.num_tokens -= len(self._kept.pop(key).token_ids_T)

    def drop(self, groups: Iterable[GroupKey]) -> None:
        """Keep no more of these groups."""
        groups = set(groups)
        for key in [key for key in self._kept if key[:2] in groups]:
            self._forget(key)

    def fit(self, num_tokens: int) -> None:
        """Keep at most so many tokens; what has ended goes before what has not, and of these what came first."""
        for key in sorted(self._kept, key=lambda key: not self._kept[key].ended):
            if self.num_tokens > max(num_tokens, 0):
                self._forget(key)


def _first(tensors: Sequence[torch.Tensor], num_tokens: int) -> list[torch.Tensor]:
    """Return keys and values of the first tokens, no copy."""
    return [tensor[:, :num_tokens] for tensor in tensors]


def _one_of_each_beginning(requests: Sequence[Request]) -> tuple[list[Request], list[Request]]:
    """Part requests of which several begin with the same tokens of a prompt: the longest of those, and the others."""
    groups: dict[GroupKey, list[Request]] = {}
    for request in requests:
        groups.setdefault(request.group, []).append(request)
    later: set[Key] = set()
    for members in groups.values():
        tree = prefix_tree([request.prefix.token_ids_T[:-1].numpy() for request in members], _LEAST_COPIED)
        for branch in tree if len(members) > 1 else []:
            if branch.parent is None:
                alike = sorted((members[number] for number in branch.members), key=lambda each: each.prefix.num_tokens)
                later |= {request.key for request in alike[:-1]}
    return [each for each in requests if each.key not in later], [each for each in requests if each.key in later]


def batches(missing: Missing, most_tokens: int) -> Iterator[Missing]:
    """Put prompts that take the same room together, so many at a time as come to at most ``most_tokens``."""
    by_room: dict[int, Missing] = {}
    for key, prompt in missing:
        by_room.setdefault(prompt_room(len(prompt.token_ids)), []).append((key, prompt))
    for room, members in by_room.items():
        rows = max(1, most_tokens // room)
        yield from (members[first : first + rows] for first in range(0, len(members), rows))
