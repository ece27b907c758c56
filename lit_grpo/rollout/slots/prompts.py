"""The prompts whose keys and values are kept: which are there, which come next, and which nobody needs any more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from lit_grpo.rollout.slots.cache import SlotCache
from lit_grpo.scheduling.layouts import prompt_room
from lit_grpo.types import Prompt

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
        """Drop the prompts that no row reads, but for those ``needed``: they are computed anew in their turn."""
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


def batches(missing: Missing, most_tokens: int) -> Iterator[Missing]:
    """Put prompts that take the same room together, so many at a time as come to at most ``most_tokens``."""
    by_room: dict[int, Missing] = {}
    for key, prompt in missing:
        by_room.setdefault(prompt_room(len(prompt.token_ids)), []).append((key, prompt))
    for room, members in by_room.items():
        rows = max(1, most_tokens // room)
        yield from (members[first : first + rows] for first in range(0, len(members), rows))
