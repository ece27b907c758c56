"""What is kept of prompts, and of completions that have left their rows: what is there, what comes, what may go."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from lit_grpo.rollout.slots.forward import prefill
from lit_grpo.rollout.slots.kv.cache import SlotCache
from lit_grpo.scheduling.layouts import prompt_room
from lit_grpo.types import GroupKey, Key, Prompt, Request

if TYPE_CHECKING:
    from transformers import PreTrainedModel

AHEAD_TOKENS = 512
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


class KeptCompletions:
    """Keys and values of completions that have left their rows and may come back: a cache, and no more.

    Whatever is missing is computed again from the prefixes that requests own.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self._kept: dict[Key, list[torch.Tensor]] = {}

    def keep(self, request: Request, row: int, cache: SlotCache, most_tokens: int) -> None:
        """Copy what a row holds of a prefix, if all that is kept stays within ``most_tokens``."""
        num_tokens = request.prefix.num_tokens - 1
        if 0 < num_tokens <= most_tokens - self.num_tokens:
            self._kept[request.key] = cache.copy_completion(row, num_tokens)
            self.num_tokens += num_tokens

    def resume(
        self, policy: PreTrainedModel, requests: Sequence[Request], version: int, cache: SlotCache, most_tokens: int
    ) -> Iterator[list[Request]]:
        """Open rows for requests with prefixes, some at a time, and yield which; nothing more of them is kept.

        What is not kept is computed again, with one pass for those of one prompt whose prefixes are equally long.

        Args:
            policy: Switched to slot attention.
            requests: What goes on; their prompts are in the cache.
            version: Of the policy.
            cache: Takes the rows.
            most_tokens: The most tokens that go through the model at once.
        """
        alike: dict[tuple[PromptKey, int], list[Request]] = {}
        for request in requests:
            prompt, num_tokens = (*request.group, version), request.prefix.num_tokens - 1
            copy = self._kept.pop(request.key, None)
            self.num_tokens -= 0 if copy is None else copy[0].shape[1]
            if copy is not None and copy[0].shape[1] == num_tokens:
                cache.put_back(prompt, copy)
                yield [request]
            else:
                alike.setdefault((prompt, num_tokens), []).append(request)
        for (prompt, num_tokens), members in alike.items():
            writer = cache.write_completions(prompt, len(members), num_tokens)
            if num_tokens:
                sequences = [request.prefix.token_ids_T[:-1].tolist() for request in members]
                prefill(policy, sequences, most_tokens, writer, len(members[0].prompt.token_ids))
            yield members

    def drop(self, groups: Iterable[GroupKey]) -> None:
        """Keep no more of these groups."""
        groups = set(groups)
        for key in [key for key in self._kept if key[:2] in groups]:
            self.num_tokens -= self._kept.pop(key)[0].shape[1]

    def fit(self, num_tokens: int) -> None:
        """Keep at most so many tokens; what came first goes first."""
        while self.num_tokens > max(num_tokens, 0):
            self.num_tokens -= self._kept.pop(next(iter(self._kept)))[0].shape[1]


def batches(missing: Missing, most_tokens: int) -> Iterator[Missing]:
    """Put prompts that take the same room together, so many at a time as come to at most ``most_tokens``."""
    by_room: dict[int, Missing] = {}
    for key, prompt in missing:
        by_room.setdefault(prompt_room(len(prompt.token_ids)), []).append((key, prompt))
    for room, members in by_room.items():
        rows = max(1, most_tokens // room)
        yield from (members[first : first + rows] for first in range(0, len(members), rows))
