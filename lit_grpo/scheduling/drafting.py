"""What comes next, by what came next before: drafts from other completions of the same prompt."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

ROOT = 0
SHORTEST_MATCH = 2
"""Tokens that have to agree before a draft goes on from them."""


class SuffixAutomaton:
    """All substrings of texts that grow side by side, with how often each has come.

    A state stands for the substrings that end at the same places; its link leads to the longest of their suffixes that
    ends at more. A text that grows knows its state, so that drafting needs no search (Blumer et al., "The smallest
    automaton recognizing the subwords of a text", 1985; for several texts, as a trie grows).
    """

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link, self._length, self._count = [-1], [0], [0]

    def extend(self, state: int, token: int) -> int:
        """Let a text that has come to ``state`` (``ROOT``, where it begins) go on with a token; return its state."""
        known = self._next[state].get(token)
        if known is not None:
            reached = known if self._length[known] == self._length[state] + 1 else self._split(state, token, known)
        else:
            reached = self._add({}, self._length[state] + 1, ROOT, 0)
            while state != -1 and token not in self._next[state]:
                self._next[state][token] = reached
                state = self._link[state]
            if state != -1:
                other = self._next[state][token]
                fits = self._length[other] == self._length[state] + 1
                self._link[reached] = other if fits else self._split(state, token, other)
        above = reached
        while above != ROOT:
            self._count[above] += 1
            above = self._link[above]
        return reached

    def _add(self, following: dict[int, int], length: int, link: int, count: int) -> int:
        self._next.append(following)
        self._link.append(link)
        self._length.append(length)
        self._count.append(count)
        return len(self._link) - 1

    def _split(self, state: int, token: int, known: int) -> int:
        """Give the shorter substrings of ``known``, which end at more places from now on, a state of their own."""
        split = self._add(dict(self._next[known]), self._length[state] + 1, self._link[known], self._count[known])
        self._link[known] = split
        while state != -1 and self._next[state].get(token) == known:
            self._next[state][token] = split
            state = self._link[state]
        return split

    def draft(self, state: int, most: int) -> list[int]:
        """Return up to so many tokens that may follow a text: each time what has followed its end most often.

        Of its end as much counts as has come elsewhere, ``SHORTEST_MATCH`` tokens or more.
        """
        tokens: list[int] = []
        while len(tokens) < most:
            while state != ROOT and not self._next[state]:
                state = self._link[state]
            if self._length[state] < SHORTEST_MATCH:
                break
            following = self._next[state]
            token = max(following, key=lambda each: self._count[following[each]])
            tokens.append(token)
            state = following[token]
        return tokens


class Drafts:
    """Drafts for completions of many prompts, from those of the same prompt: siblings, and earlier visits."""

    def __init__(self) -> None:
        self._automata: dict[str, SuffixAutomaton] = {}
        self._states: dict[Hashable, tuple[SuffixAutomaton, int]] = {}

    def begin(self, key: Hashable, prompt_id: str, token_ids: Sequence[int]) -> None:
        """A completion begins behind these tokens: its prompt, and what it has already come to."""
        automaton = self._automata.setdefault(prompt_id, SuffixAutomaton())
        self._states[key] = automaton, ROOT
        self.extend(key, token_ids)

    def extend(self, key: Hashable, token_ids: Sequence[int]) -> None:
        """It goes on with these."""
        automaton, state = self._states[key]
        for token in token_ids:
            state = automaton.extend(state, token)
        self._states[key] = automaton, state

    def draft(self, key: Hashable, most: int) -> list[int]:
        """Return up to so many tokens that may follow."""
        automaton, state = self._states[key]
        return automaton.draft(state, most)

    def end(self, key: Hashable) -> None:
        """It has ended; what it was stays."""
        del self._states[key]

    def read(self, prompt_id: str, token_ids: Sequence[int]) -> None:
        """Take in a completion, behind its prompt, that has ended."""
        key = object()
        self.begin(key, prompt_id, token_ids)
        self.end(key)
