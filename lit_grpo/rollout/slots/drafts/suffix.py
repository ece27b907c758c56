"""Drafts of a row's next tokens, from text that is there: its own, its siblings', and the last visit's of its prompt.

A draft is a guess that the policy verifies, so nothing here changes a sample, and nothing has to be in a checkpoint.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from lit_grpo.rollout.slots.drafts import Drafter
from lit_grpo.types import GroupKey, Key, SamplePath, SamplingParams

if TYPE_CHECKING:
    import numpy as np

    from lit_grpo.rollout.slots.kv.cache import SlotCache
    from lit_grpo.rollout.slots.rows import SampledStep, TokenRows

LONGEST = 3
"""Tokens before a drafted one that are looked up, at most; one that stood there before is enough to draft."""
PIECE = 8
"""Tokens of an earlier visit that are indexed at a time, so that no step waits for all of it."""
MATCHED = 8
"""Tokens before a drafted one that are counted where it is from, at most."""
KEPT_BYTES = 256 * 2**20
"""Memory for completions of earlier visits, :data:`TOKEN_BYTES` a token; beyond it those visited first are dropped."""
TOKEN_BYTES = array("i").itemsize
_BITS = 24  # of a token id, and one more, in the number of a context
_PLACE = 32  # bits of an index in the number of a place


class Proposal(NamedTuple):
    """Drafted tokens, no more than were asked for and empty where there are none.

    ``matched`` is the number of the row's last tokens, at most :data:`MATCHED`, that stand before the first drafted
    token in the text that it is from. That ``source`` is the row's ``own`` text (its prompt is part of it), a
    ``sibling``'s, or a completion of the prompt's last ``visit``.
    """

    token_ids: list[int]
    source: str = "own"
    matched: int = 0


NOTHING = Proposal([])


class _Texts:
    """Texts of one group, and the place of the token that followed each context most often, of equals the last.

    A context is one to :data:`LONGEST` tokens, the last one first in its number. It enters when it occurs for the first
    time after the one that is shorter by a token has occurred, so that there are one to two contexts a token.

    ``texts`` are those of the prompt, of each completion of an earlier visit, and of each sample, whose number is in
    ``rows``; all but the prompt's begin with its last tokens. ``open`` are the samples that are in rows.
    """

    def __init__(self, prompt_ids: Sequence[int], earlier: Sequence[Sequence[int]]) -> None:
        self._begin = array("i", prompt_ids[-MATCHED:])
        self.texts = [array("i"), *(self._begin[:] for _ in earlier)]
        self.rows: dict[SamplePath, int] = {}
        self.open: set[SamplePath] = set()
        self._places: dict[int, int] = {}
        self._tallies: dict[int, int] = {}  # how often a token followed a context that occurred more than once
        self._num_earlier, self._unread = len(earlier), _pieces(earlier)
        self._index(0, prompt_ids)

    def show(self, path: SamplePath, token_ids: Sequence[int] | np.ndarray) -> None:
        """Let a sample have come to these tokens; where it comes back it may have others than before."""
        if path not in self.open:
            self.open.add(path)
            if path not in self.rows or (known := self.own_tokens(path)) != array("i", token_ids[: len(known)]):
                self.rows[path] = len(self.texts)
                self.texts.append(self._begin[:])
        number = self.rows[path]
        self._index(number, [*map(int, token_ids[len(self.texts[number]) - len(self._begin) :])])
        if piece := next(self._unread, None):
            self._index(*piece)

    def own_tokens(self, path: SamplePath) -> array[int]:
        return self.texts[self.rows[path]][len(self._begin) :]

    def _index(self, number: int, token_ids: Sequence[int]) -> None:
        """Append tokens to a text, and let each be found by what stands before it."""
        texts, places, tallies = self.texts, self._places, self._tallies
        text = texts[number]
        for token in token_ids:
            place, context = number << _PLACE | len(text), 0
            for depth, before in enumerate(text[: -LONGEST - 1 : -1], 1):
                context = context << _BITS | before + 1
                known = places.get(context)
                if known is None:
                    places[context] = place
                    break
                other, there = texts[known >> _PLACE], known & 0xFFFFFFFF
                best = context << _BITS | other[there] + 1
                often = tallies.get(best)
                if often is None:  # the context occurs for the second time: the first goes one token deeper
                    if depth < LONGEST and there > depth:
                        places[context << _BITS | other[there - depth - 1] + 1] = known
                    tallies[best] = often = 1
                following = context << _BITS | token + 1
                tallies[following] = tally = tallies.get(following, 0) + 1
                if tally >= often:
                    places[context] = place
            text.append(token)

    def propose(self, path: SamplePath, most: int) -> Proposal:
        """Return at most ``most`` tokens that may follow what a sample has come to."""
        number, drafted, source, matched = self.rows[path], list[int](), NOTHING.source, 0
        last = self.texts[number][-MATCHED:]
        while len(drafted) < most:
            context = place = 0
            for token in last[: -LONGEST - 1 : -1]:
                context = context << _BITS | token + 1
                if (deeper := self._places.get(context)) is None:
                    break
                place = deeper
            if not place:
                break
            origin, there = place >> _PLACE, place & 0xFFFFFFFF
            text = self.texts[origin]
            if not drafted:
                is_own, is_earlier = origin in (0, number), origin <= self._num_earlier
                source = "own" if is_own else "visit" if is_earlier else "sibling"
                while matched < len(last) and there > matched and text[there - matched - 1] == last[-matched - 1]:
                    matched += 1
            found = text[there : there + most - len(drafted)]
            drafted += found
            last = (last + found)[-LONGEST:]
        return Proposal(drafted, source, matched) if drafted else NOTHING


def _pieces(earlier: Sequence[Sequence[int]]) -> Iterator[tuple[int, Sequence[int]]]:
    """Yield the beginnings of all texts, then what follows of each, with the numbers of the texts."""
    for first in range(0, max(map(len, earlier), default=0), PIECE):
        for number, token_ids in enumerate(earlier, 1):
            if piece := token_ids[first : first + PIECE]:
                yield number, piece


class SuffixDrafter(Drafter):
    """Drafts what has followed rows' last tokens before: equally many tokens for all rows in every step.

    Completions that have ended stay for their siblings until the group is released, and for the prompt's next visit,
    with whose first completion those of the visit before are dropped.

    ``tried`` is what rows try in a step, until it has been taken, and ``kept_tokens`` counts the tokens of completions
    that are kept for later visits.
    """

    def __init__(self, most_tokens: int) -> None:
        self.most_tokens, self.kept_tokens = most_tokens, 0
        self.tried: list[Proposal] = []
        self._groups: dict[GroupKey, _Texts] = {}
        self._visits: dict[str, tuple[int, list[array[int]]]] = {}  # by prompt, the last one and what has ended in it

    def show(self, key: Key, prompt_ids: Sequence[int], token_ids: Sequence[int] | np.ndarray) -> None:
        """Let a sample in a row have come to these tokens."""
        prompt_id, visit, path = key
        if (group := self._groups.get(key[:2])) is None:
            last, ended = self._visits.get(prompt_id, (visit, ()))
            group = self._groups[key[:2]] = _Texts(prompt_ids, ended if last <= visit else ())
        group.show(path, token_ids)

    def follow(self, key: Key, most: int) -> Proposal:
        """Return at most ``most`` tokens that may follow in a row, which has been shown."""
        return self._groups[key[:2]].propose(key[2], most)

    def close(self, key: Key, ended: bool) -> None:
        """Take a sample out of its row; if it has not ended, it may come back."""
        prompt_id, visit, path = key
        group = self._groups[key[:2]]
        group.open.discard(path)
        if ended:
            last, completions = self._visits.pop(prompt_id, (visit, []))
            if last < visit:
                self.kept_tokens -= sum(map(len, completions))
                last, completions = visit, []
            if last == visit:
                completions.append(group.own_tokens(path))
                self.kept_tokens += len(completions[-1])
            self._visits[prompt_id] = last, completions  # from now on the prompt visited last
            while self.kept_tokens * TOKEN_BYTES > KEPT_BYTES:
                _, dropped = self._visits.pop(next(iter(self._visits)))
                self.kept_tokens -= sum(map(len, dropped))

    # ---- a drafter ----------------------------------------------------------------------------------

    def draft(
        self, rows: TokenRows, most_B: np.ndarray, cache: SlotCache, sampling: SamplingParams
    ) -> Sequence[Sequence[int]]:
        """Return tokens that have followed the last ones of each row."""
        for row in range(len(rows.requests)):
            self._show(rows, row)
        pairs = zip(rows.requests, most_B.tolist(), strict=False)
        self.tried = [self.follow(request.key, most) if most else NOTHING for request, most in pairs]
        return [each.token_ids for each in self.tried]

    def _show(self, rows: TokenRows, row: int) -> None:
        request = rows.requests[row]
        self.show(request.key, request.prompt.token_ids, rows.token_ids(row))

    def took(self, rows: TokenRows, step: SampledStep, accepted_B: np.ndarray) -> Mapping[str, int]:
        """Return the accepted tokens by source."""
        accepted, tried = Counter[str](), self.tried
        self.tried = []
        for proposal, count in zip(tried, accepted_B.tolist(), strict=False):
            accepted[proposal.source] += count
        return +accepted

    def left(self, rows: TokenRows, row: int, ended: bool) -> None:
        """Let others draft from what a row has come to."""
        self._show(rows, row)
        self.close(rows.requests[row].key, ended)

    def release(self, groups: Iterable[GroupKey]) -> None:
        for group in groups:
            self._groups.pop(group, None)
