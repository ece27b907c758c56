"""Keys and values of completions that have left their rows, and how requests go on from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from lit_grpo.rollout.slots.forward import prefill
from lit_grpo.rollout.slots.kv.cache import CopiedRow, SlotCache
from lit_grpo.rollout.slots.rows import SampledStep, TokenRows
from lit_grpo.trajectory import num_common, prefix_tree
from lit_grpo.types import GroupKey, Key, Pictures, Request

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LEAST_COPIED = 16  # tokens of another completion; fewer are computed with the others


class _Kept(NamedTuple):
    """Contents of a completion without a row, and what ``SlotCache.copy_completion`` returns of them.

    ``num_tokens`` is what it takes, in KV tokens.
    """

    group: GroupKey
    token_ids_T: np.ndarray
    copied: CopiedRow
    num_tokens: int
    ended: bool  # so that it may never come back


class KeptCompletions:
    """Keys and values of completions that have left their rows and may come back: a cache, and no more.

    Whatever is missing is computed again from the prefixes that requests own.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self._kept: dict[Key, _Kept] = {}

    def store(
        self,
        row: int,
        rows: TokenRows,
        cache: SlotCache,
        most_tokens: int,
        ended: bool = False,
        hidden_D: torch.Tensor | None = None,
    ) -> None:
        """Copy what a row holds, if all that is kept stays within ``most_tokens``.

        Those that have ended make room for it, the first of them first. With ``hidden_D``, the hidden state of its last
        token, the row holds all its tokens, because its next one is in flight; else all but the last.
        """
        request, num_held = rows.requests[row], int(rows.counts[row]) - (hidden_D is None)
        token_ids_T = rows.contents(row)[:num_held].astype(np.int32)
        self._forget(request.key)
        num_tokens = len(token_ids_T) + cache.shape.pieces.state
        if not len(token_ids_T) or num_tokens > most_tokens:
            return
        for key in [key for key, kept in self._kept.items() if kept.ended]:
            if self.num_tokens + num_tokens > most_tokens:
                self._forget(key)
        if self.num_tokens + num_tokens <= most_tokens:
            copied = cache.copy_completion(row, num_held)
            if hidden_D is not None:
                copied = copied._replace(hidden_D=hidden_D.clone())
            self._kept[request.key] = _Kept(request.group, token_ids_T, copied, num_tokens, ended)
            self.num_tokens += num_tokens

    def resume(
        self,
        policy: PreTrainedModel,
        requests: Sequence[Request],
        rows: TokenRows,
        cache: SlotCache,
        most_tokens: int,
        step: SampledStep | None = None,
    ) -> Iterator[tuple[list[Request], Sequence[torch.Tensor]]]:
        """Open rows in the cache for requests with prefixes, some at a time; yield which, and their hidden states.

        Of each, what a row or a kept completion of its prompt begins with is copied: all of it, where nothing has been
        observed since it was kept; the prefix, where it is a fork; all but the tail, where a tool has answered. What is
        left is computed, with one pass for those of one prompt that have equally much of it. Of requests that begin
        with the same tokens one is computed first. Nothing more is kept of those that have a row.

        Args:
            policy: Switched to slot attention.
            requests: What goes on; their prompts are in the cache.
            rows: The tokens of those that there are.
            cache: Cache of the slots, which takes the rows over.
            most_tokens: The most tokens that go through the model at once.
            step: The next step of the rows, where it has been launched: they hold all their tokens then, and those that
                join them come to hold all of theirs. By default all but the last, and no hidden states are yielded.
        """
        has_states, entered = cache.states is not None, list[torch.Tensor]()
        for wave in [requests] if has_states else _one_of_each_beginning(requests):
            alike: dict[tuple[GroupKey, int, int], list[tuple[Request, int | CopiedRow]]] = {}
            for request in wave:
                num_tokens = request.prefix.num_tokens - (step is None)
                known, source = self._beginning(request, rows, has_states, num_tokens)
                members = alike.setdefault((request.group, num_tokens, known), [])
                members.append((request, source))
            for (group, num_tokens, known), members in alike.items():
                beginnings, hidden = list[CopiedRow](), list[torch.Tensor]()
                for _, source in members if known else ():
                    if isinstance(source, int):
                        beginnings.append(cache.copy_completion(source, known))
                        if step is not None and known == num_tokens:
                            late = source - len(step.places)
                            hidden.append(entered[late] if late >= 0 else step.hidden_of(source))
                    else:
                        beginnings.append(source.first(known))
                        hidden += [source.hidden_D] if known == num_tokens and source.hidden_D is not None else []
                writer = cache.write_completions(group, len(members), num_tokens, beginnings, known)
                if known < num_tokens:
                    tails = [request.prefix.token_ids_T[known:num_tokens].tolist() for request, _ in members]
                    pictures = [_pictures_from(request, known) for request, _ in members]
                    hidden = [*prefill(policy, tails, most_tokens, writer, pictures)]
                for request, _ in members:
                    self._forget(request.key)
                entered += () if step is None else hidden
                yield [request for request, _ in members], () if step is None else hidden

    def _beginning(
        self, request: Request, rows: TokenRows, whole: bool, num_tokens: int
    ) -> tuple[int, int | CopiedRow]:
        """Find the longest beginning of a request's prefix that is there; its own first.

        Args:
            request: Request that goes on from what was kept.
            rows: The tokens of those that there are.
            whole: Take all of what a row or a kept completion has, or nothing, because a state is that of all of it.
            num_tokens: How many tokens of the prefix are wanted: all but the last; or all, with the hidden state of the
                last one, which only what ends there has.

        Returns:
            Its number of tokens, and the row or the copy that begins with it.
        """
        token_ids_T = request.prefix.contents[:num_tokens]
        is_all = num_tokens == request.prefix.num_tokens
        own = self._kept.get(request.key)
        there: list[tuple[np.ndarray, int | CopiedRow]] = [] if own is None else [(own.token_ids_T, own.copied)]
        there += [(kept.token_ids_T, kept.copied) for kept in self._kept.values() if kept.group == request.group]
        for row, other in enumerate(rows.requests):
            if other.group == request.group:
                there.append((rows.contents(row)[: len(rows.token_ids(row)) - (not is_all)], row))
        longest, source = 0, CopiedRow((), {})
        for number, (its_token_ids_T, its) in enumerate(there):
            common = num_common(its_token_ids_T, token_ids_T)
            ends_here = common == len(its_token_ids_T) and (isinstance(its, int) or its.hidden_D is not None)
            if is_all and common == num_tokens and not ends_here:
                common -= 1  # the last token is computed once more, for its hidden state
            if whole and common < len(its_token_ids_T):
                continue
            if own is not None and not number and common >= min(len(its_token_ids_T), num_tokens - 1):
                return common, its
            if common > max(longest, _LEAST_COPIED - 1):
                longest, source = common, its
        return longest, source

    def _forget(self, key: Key) -> None:
        if key in self._kept:
            self.num_tokens -= self._kept.pop(key).num_tokens

    def drop(self, groups: set[GroupKey]) -> None:
        for key in list(self._kept):
            if key[:2] in groups:
                self._forget(key)

    def fit(self, num_tokens: int) -> None:
        """Keep at most so many tokens; what has ended goes before what has not, and of these what came first."""
        for ended in (True, False):
            for key, kept in list(self._kept.items()):
                if kept.ended == ended and self.num_tokens > max(num_tokens, 0):
                    self._forget(key)


def _pictures_from(request: Request, first: int) -> list[tuple[int, Pictures]]:
    """Return the images of a prefix from its token ``first`` on, by their places after it, and what went before."""
    prompt, prefix = request.prompt, request.prefix.pictures
    before = [] if prompt.pictures is None else [(0, prompt.pictures.passed)]
    before += [(0, each.passed) for place, each in prefix if place < first]
    return before + [(place - first, each) for place, each in prefix if place >= first]


def _one_of_each_beginning(requests: Sequence[Request]) -> tuple[list[Request], list[Request]]:
    """Part requests of which several begin with the same tokens of a prompt: the longest of those, and the others."""
    groups: dict[GroupKey, list[Request]] = {}
    for request in requests:
        groups.setdefault(request.group, []).append(request)
    later: set[Key] = set()
    for members in groups.values():
        tree = prefix_tree([request.prefix.contents[:-1] for request in members], _LEAST_COPIED)
        for branch in tree if len(members) > 1 else []:
            if branch.parent is None:
                alike = sorted((members[number] for number in branch.members), key=lambda each: each.prefix.num_tokens)
                later |= {request.key for request in alike[:-1]}
    return [each for each in requests if each.key not in later], [each for each in requests if each.key in later]
