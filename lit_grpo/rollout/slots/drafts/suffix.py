"""Drafts of a row's next tokens, from text that is there: its own, its siblings', and the last visit's of its prompt.

A draft is a guess that the policy verifies, so nothing here changes a sample, and nothing has to be in a checkpoint.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from lit_grpo.rollout.slots.drafts import Drafter
from lit_grpo.types import GroupKey, Key, SamplePath, SamplingParams

if TYPE_CHECKING:
    import numpy as np

    from lit_grpo.rollout.slots.kv.cache import SlotCache
    from lit_grpo.rollout.slots.rows import SampledStep, TokenRows

LONGEST = 3
"""Tokens before a drafted one that are looked up, at most; one that stood there before is enough to draft."""
PIECE = 8
"""Tokens of an earlier visit that are indexed at a time."""
MATCHED = 8
"""Tokens before a drafted one that are counted where it is from, at most."""
MOST_DRAFTED = 8
"""The most tokens that a row tries in a step, where their price decides."""
KEPT_BYTES = 256 * 2**20
"""Memory for completions of earlier visits, :data:`TOKEN_BYTES` a token; beyond it those visited first are dropped."""
TOKEN_BYTES = array("i").itemsize
_BITS = 24  # of a token id in the number of an edge
_PLACE = 32  # bits of an index in the number of a place

Source = Literal["own", "sibling", "visit"]


class Proposal(NamedTuple):
    """Drafted tokens, no more than were asked for and empty where there are none.

    ``matched`` is the number of the row's last tokens, at most :data:`MATCHED`, that stand before the first drafted
    token in the text that it is from. That is the row's ``own`` text (its prompt is part of it), a ``sibling``'s, or a
    completion of the prompt's last ``visit``.
    """

    token_ids: list[int]
    source: Source = "own"
    matched: int = 0


NOTHING = Proposal([])


class _Texts:
    """Texts of one group, indexed by what stands before each token.

    The index is a trie of contexts read backwards: the node of ``c b a`` is reached from the root by ``a``, ``b``,
    ``c``. A node is made when a context occurs for the first time, and a deeper one when the shallower context occurs
    for the second time, so that there are one to two nodes a token. Each node holds the last place of the token that
    followed its context most often.

    Attributes:
        texts: Token ids of the prompt, and of each completion after the last tokens of the prompt.
        paths: The sample that each text is of; None of the prompt and of completions of an earlier visit.
        rows: The text of each sample.
        open: Samples that are in rows.
        is_released: No further sample will come.
    """

    def __init__(self, prompt_ids: Sequence[int], earlier: Sequence[Sequence[int]]) -> None:
        self.texts: list[array[int]] = []
        self.paths: list[SamplePath | None] = []
        self.rows: dict[SamplePath, int] = {}
        self.open: set[SamplePath] = set()
        self.is_released = False
        self._edges: dict[int, int] = {}
        self._places = array("q", [0])
        self._times = array("i", [0])  # how often the token at the place followed; 0 where the context occurred once
        self._tallies: dict[int, int] = {}  # how often a token followed, of contexts that occurred more than once
        self._begin = array("i", prompt_ids[-MATCHED:])
        self._add(array("i"), prompt_ids, None)
        for _ in earlier:
            self._add(self._begin, (), None)
        self._unread = _pieces(earlier)

    def add(self, path: SamplePath, token_ids: Sequence[int]) -> None:
        """Let a sample's text be that of these tokens, of which it may have some already."""
        self.open.add(path)
        self._read()
        number = self.rows.get(path)
        if number is not None:
            known = self.texts[number][len(self._begin) :]
            if array("i", token_ids[: len(known)]) == known:
                self.extend(path, token_ids[len(known) :])
                return
        self.rows[path] = len(self.texts)
        self._add(self._begin, token_ids, path)

    def _add(self, begin: array[int], token_ids: Sequence[int], path: SamplePath | None) -> None:
        self.texts.append(begin[:])
        self.paths.append(path)
        self._index(len(self.texts) - 1, token_ids)

    def extend(self, path: SamplePath, token_ids: Sequence[int]) -> None:
        self._index(self.rows[path], token_ids)
        self._read()

    def _read(self) -> None:
        """Index a piece of the earlier visit, so that no step waits for all of it."""
        if piece := next(self._unread, None):
            self._index(*piece)

    def own_tokens(self, path: SamplePath) -> array[int]:
        return self.texts[self.rows[path]][len(self._begin) :]

    def _index(self, number: int, token_ids: Sequence[int]) -> None:
        """Append tokens to a text, and let each be found by what stands before it."""
        texts, edges, places, times, tallies = self.texts, self._edges, self._places, self._times, self._tallies
        text = texts[number]
        for token in token_ids:
            place, node = number << _PLACE | len(text), 0
            for depth, before in enumerate(text[: -LONGEST - 1 : -1], 1):
                edge = node << _BITS | before
                node = edges.get(edge, 0)
                if not node:
                    edges[edge] = len(places)
                    places.append(place)
                    times.append(0)
                    break
                often = times[node]
                if not often:  # the context occurs for the second time: the first goes one token deeper
                    known = places[node]
                    other, there = texts[known >> _PLACE], known & 0xFFFFFFFF
                    if depth < LONGEST and there > depth:
                        edges[node << _BITS | other[there - depth - 1]] = len(places)
                        places.append(known)
                        times.append(0)
                    tallies[node << _BITS | other[there]] = often = times[node] = 1
                tally = tallies.get(node << _BITS | token, 0) + 1
                tallies[node << _BITS | token] = tally
                if tally >= often:
                    times[node], places[node] = tally, place
            text.append(token)

    def propose(self, path: SamplePath, most: int) -> Proposal:
        """Return at most ``most`` tokens that may follow what a sample has come to."""
        edges, number, drafted = self._edges, self.rows[path], list[int]()
        context, source, matched = self.texts[number][-MATCHED:], NOTHING.source, 0
        while len(drafted) < most:
            node = 0
            for token in context[: -LONGEST - 1 : -1]:
                deeper = edges.get(node << _BITS | token, 0)
                if not deeper:
                    break
                node = deeper
            if not node:
                break
            origin, there = self._places[node] >> _PLACE, self._places[node] & 0xFFFFFFFF
            text = self.texts[origin]
            if not drafted:
                own = origin == 0 or origin == number
                source = "own" if own else "visit" if self.paths[origin] is None else "sibling"
                while matched < len(context) and there > matched and text[there - matched - 1] == context[-matched - 1]:
                    matched += 1
            found = text[there : there + most - len(drafted)]
            drafted += found
            context = (context + found)[-LONGEST:]
        return Proposal(drafted, source, matched) if drafted else NOTHING


def _pieces(earlier: Sequence[Sequence[int]]) -> Iterator[tuple[int, Sequence[int]]]:
    """Yield the beginnings of all texts, then what follows of each, with the numbers of the texts."""
    for first in range(0, max(map(len, earlier), default=0), PIECE):
        for number, token_ids in enumerate(earlier, 1):
            if piece := token_ids[first : first + PIECE]:
                yield number, piece


class DraftSource:
    """Drafts for the rows of a generator, from text of their groups.

    Completions that have ended stay for their siblings until the group is released and none of it is in a row, and for
    the prompt's next visit, with whose first completions those of the visit before are dropped.

    Attributes:
        kept_tokens: Tokens of completions that are kept for later visits.
    """

    def __init__(self) -> None:
        self._groups: dict[GroupKey, _Texts] = {}
        self._visits: dict[str, dict[int, list[array[int]]]] = {}  # by prompt and visit, completions that have ended
        self.kept_tokens = 0

    def open(self, key: Key, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> None:
        """Let a sample into a row, with the tokens that it has already."""
        prompt_id, visit, path = key
        group = self._groups.get((prompt_id, visit))
        if group is None:
            visits = self._visits.get(prompt_id, {})
            last = max((number for number in visits if number <= visit), default=visit)
            group = self._groups[prompt_id, visit] = _Texts(prompt_ids, visits.get(last, ()))
        group.add(path, token_ids)

    def extend(self, key: Key, token_ids: Sequence[int]) -> None:
        """Append the tokens that a row got."""
        self._groups[key[:2]].extend(key[2], token_ids)

    def close(self, key: Key, ended: bool) -> None:
        """Take a sample out of its row; if it has not ended, it may be opened again."""
        prompt_id, visit, path = key
        group = self._groups[prompt_id, visit]
        group.open.discard(path)
        if ended:
            self._keep(prompt_id, visit, group.own_tokens(path))
        self._forget(key[:2])

    def _keep(self, prompt_id: str, visit: int, tokens: array[int]) -> None:
        visits = self._visits[prompt_id] = self._visits.pop(prompt_id, {})  # from now on the prompt visited last
        visits.setdefault(visit, []).append(tokens)
        dropped = [visits.pop(earlier) for earlier in list(visits) if earlier < visit]
        self.kept_tokens += len(tokens)
        while (self.kept_tokens - _num_tokens(dropped)) * TOKEN_BYTES > KEPT_BYTES:
            dropped += self._visits.pop(next(iter(self._visits))).values()
        self.kept_tokens -= _num_tokens(dropped)

    def release(self, group: GroupKey) -> None:
        """Note that no further sample of a group will come."""
        if group in self._groups:
            self._groups[group].is_released = True
            self._forget(group)

    def _forget(self, key: GroupKey) -> None:
        group = self._groups[key]
        if group.is_released and not group.open:
            del self._groups[key]

    def propose(self, key: Key, most: int) -> Proposal:
        """Return at most ``most`` tokens that may follow in a row."""
        return self._groups[key[:2]].propose(key[2], most)


class SuffixDrafter(Drafter):
    """Drafts what has followed rows' last tokens before: equally many tokens for all rows in every step.

    Attributes:
        tried: What rows try in a step, until it has been taken.

    Args:
        most_tokens: Of a row in a step.
    """

    def __init__(self, most_tokens: int) -> None:
        self.most_tokens = most_tokens
        self.source = DraftSource()
        self.tried: list[Proposal] = []
        self._known: dict[Key, int] = {}  # tokens of each row that the source has

    def draft(
        self, rows: TokenRows, most_B: np.ndarray, cache: SlotCache, sampling: SamplingParams
    ) -> Sequence[Sequence[int]]:
        """Return tokens that have followed the last ones of each row."""
        self.tried = self.propose(rows, most_B)
        return [each.token_ids for each in self.tried]

    def propose(self, rows: TokenRows, most_B: np.ndarray) -> list[Proposal]:
        """Return at most ``most_B`` tokens that have followed the last ones of each of the first rows."""
        for row in range(len(rows.requests)):
            self._show(rows, row)
        pairs = zip(rows.requests, most_B.tolist(), strict=False)
        return [self.source.propose(request.key, most) if most else NOTHING for request, most in pairs]

    def _show(self, rows: TokenRows, row: int) -> None:
        """Let the source have what a row has got since it was there the last time."""
        request, token_ids = rows.requests[row], rows.token_ids(row)
        known = self._known.get(request.key)
        if known is None:
            self.source.open(request.key, request.prompt.token_ids, token_ids.tolist())
        elif known < len(token_ids):
            self.source.extend(request.key, token_ids[known:].tolist())
        self._known[request.key] = len(token_ids)

    def took(self, rows: TokenRows, step: SampledStep, accepted_B: np.ndarray) -> dict[str, int]:
        """Return the accepted tokens by source; the source itself reads rows before it drafts."""
        accepted: dict[str, int] = {}
        for proposal, count in zip(self.tried, accepted_B.tolist(), strict=False):
            if count:
                accepted[proposal.source] = accepted.get(proposal.source, 0) + count
        self.tried = []
        return accepted

    def left(self, rows: TokenRows, row: int, ended: bool) -> None:
        """Let others draft from what a row has come to."""
        self._show(rows, row)
        key = rows.requests[row].key
        del self._known[key]
        self.source.close(key, ended)

    def release(self, groups: Iterable[GroupKey]) -> None:
        for group in groups:
            self.source.release(group)


def _num_tokens(visits: Sequence[Sequence[array[int]]]) -> int:
    return sum(len(tokens) for visit in visits for tokens in visit)
