"""Drafts from text that is there: the longest suffix, found as a search of all text finds it, and what is kept."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from lit_grpo.rollout.slots.drafts import suffix
from lit_grpo.rollout.slots.drafts.suffix import LONGEST, MATCHED, PIECE, Proposal, SuffixDrafter
from lit_grpo.types import Key


class Source(SuffixDrafter):
    """A drafter whose rows are shown as tokens come, in the place of a generator's."""

    def open(self, key: Key, prompt_ids: list[int], token_ids: list[int]) -> None:
        """Let a row have these tokens."""
        self.rows = {**getattr(self, "rows", {}), key: (prompt_ids, [*token_ids])}
        self.show(key, *self.rows[key])

    def extend(self, key: Key, token_ids: list[int]) -> None:
        """Append tokens to those of a row."""
        self.rows[key][1].extend(token_ids)
        self.show(key, *self.rows[key])


def key(sample: int, visit: int = 0, prompt: str = "train/0") -> Key:
    return (prompt, visit, (sample,))


def followers(texts: list[list[int]], first: list[int], suffix: list[int]) -> list[int]:
    """All tokens from the place ``first`` of each text on that stand after ``suffix``."""
    length = len(suffix)
    return [
        text[place]
        for text, begin in zip(texts, first, strict=True)
        for place in range(max(begin, length), len(text))
        if text[place - length : place] == suffix
    ]


def longest(texts: list[list[int]], first: list[int], text: list[int], most: int) -> tuple[int, list[int]]:
    """The length of the longest suffix of ``text``, at most ``most``, that something follows, and what does."""
    for length in range(min(most, len(text)), 0, -1):
        if found := followers(texts, first, text[-length:]):
            return length, found
    return 0, []


@pytest.mark.parametrize("seed", range(12))
def test_drafts_begin_with_what_follows_the_longest_suffix_in_any_text_of_the_group(seed: int) -> None:
    rng = random.Random(seed)
    vocabulary, source = rng.choice((2, 3, 8, 40)), Source(9)
    prompt = [rng.randrange(vocabulary) for _ in range(rng.choice((1, 5, 30)))]
    earlier = [[rng.randrange(vocabulary) for _ in range(rng.randrange(20))] for _ in range(rng.randrange(3))]
    for sample, tokens in enumerate(earlier):
        source.open(key(sample), prompt, tokens)
        source.close(key(sample), ended=True)
    source.release([key(0)[:2]])
    texts, first = [prompt, *([*prompt, *tokens] for tokens in earlier)], [0, *[len(prompt)] * len(earlier)]
    rows: dict[int, list[int]] = {0: [*prompt]}
    source.open(key(0, 1), prompt, [])
    for _ in range(2 * 20 // PIECE + 2):  # until all of the earlier visit has been read
        source.extend(key(0, 1), [0])
        rows[0].append(0)
    checked = 0
    for _ in range(80):
        if len(rows) < 4 and rng.random() < 0.3:
            sample, begun = len(rows), [rng.randrange(vocabulary) for _ in range(rng.randrange(6))]
            source.open(key(sample, 1), prompt, begun)
            rows[sample] = [*prompt, *begun]
        for sample, text in rows.items():
            most = rng.randrange(1, 6)
            proposal = source.follow(key(sample, 1), most)
            searched, begins = [*texts, *rows.values()], [*first, *[len(prompt)] * len(rows)]
            length, following = longest(searched, begins, text, LONGEST)
            if not length:
                assert proposal == Proposal([])
                continue
            checked += 1
            assert length <= proposal.matched <= longest(searched, begins, text, MATCHED)[0]
            assert 1 <= len(proposal.token_ids) <= most
            times = Counter(following)
            assert times[proposal.token_ids[0]] == max(times.values())
        for sample, text in rows.items():
            sampled = [rng.randrange(vocabulary) for _ in range(rng.randrange(1, 4))]
            source.extend(key(sample, 1), sampled)
            text += sampled
    assert checked > 20


def test_each_further_token_of_a_draft_is_what_would_be_drafted_after_the_ones_before_it() -> None:
    source = Source(9)
    source.open(key(0), [1, 2, 3, 4, 5, 6, 7, 1, 2, 3], [])
    assert source.follow(key(0), 3) == Proposal([4, 5, 6], "own", 3)
    assert source.follow(key(0), 9) == Proposal([4, 5, 6, 7, 1, 2, 3, 4, 5], "own", 3)


def test_an_earlier_visit_is_read_piece_by_piece_the_beginnings_first() -> None:
    source, long = Source(9), list(range(100, 100 + 3 * PIECE))
    for sample, first in enumerate((1000, 2000)):
        source.open(key(sample), [1, 2], [first, *long])
        source.close(key(sample), ended=True)
    source.open(key(0, visit=1), [1, 2], [])
    source.extend(key(0, visit=1), [1000])
    assert source.follow(key(0, visit=1), 99).token_ids == long[: PIECE - 1]
    source.extend(key(0, visit=1), [2000])
    assert source.follow(key(0, visit=1), 99).token_ids == long[: 2 * PIECE - 1]
    source.extend(key(0, visit=1), long[:1])
    assert source.follow(key(0, visit=1), 99).token_ids == long[1 : 2 * PIECE - 1]


def test_the_source_of_a_draft_is_told() -> None:
    source = Source(9)
    source.open(key(0), [1, 2], [10, 11, 12])
    source.close(key(0), ended=True)
    source.release([key(0)[:2]])
    source.open(key(0, visit=1), [1, 2], [20, 21, 22, 23])
    source.open(key(1, visit=1), [1, 2], [])
    source.extend(key(1, visit=1), [10, 11])
    assert source.follow(key(1, visit=1), 4) == Proposal([12], "visit", 4)
    source.extend(key(1, visit=1), [20, 21])
    assert source.follow(key(1, visit=1), 1) == Proposal([22], "sibling", 2)
    source.extend(key(1, visit=1), [30, 31, 20, 21, 30, 31])
    assert source.follow(key(1, visit=1), 2) == Proposal([20, 21], "own", 4)


def test_what_followed_most_often_is_drafted_and_of_equals_the_last() -> None:
    source = Source(9)
    source.open(key(0), [1, 2, 3], [4])
    for sample, (token, drafted) in enumerate([(5, 5), (6, 6), (7, 7), (6, 6), (5, 5), (7, 7), (5, 5), (8, 5)], 1):
        source.open(key(sample), [1, 2, 3], [4, token])
        assert source.follow(key(0), 1) == Proposal([drafted], "sibling", 4)


def test_a_sample_that_comes_back_goes_on_where_it_was() -> None:
    source = Source(9)
    source.open(key(0), [1, 2], [3, 4])
    source.close(key(0), ended=False)
    assert source.kept_tokens == 0
    source.open(key(0), [1, 2], [3, 4, 5, 3, 4])
    assert source.follow(key(0), 1) == Proposal([5], "own", 2)
    source.close(key(0), ended=True)
    assert source.kept_tokens == 5


def test_a_sample_that_comes_back_with_other_tokens_goes_on_from_these() -> None:
    source = Source(9)
    source.open(key(0), [1, 2], [3, 4, 5])
    source.close(key(0), ended=False)
    source.open(key(0), [1, 2], [6, 3, 4])
    assert source.follow(key(0), 1) == Proposal([5], "sibling", 2)
    source.close(key(0), ended=True)
    assert source.kept_tokens == 3


def test_only_the_last_visit_is_kept_and_only_as_much_of_it_as_there_is_memory_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = Source(9)

    def visit(prompt: str, number: int, tokens: list[int]) -> Proposal:
        source.open(key(0, number, prompt), [1, 2], tokens[:2])
        proposal = source.follow(key(0, number, prompt), 1)
        source.extend(key(0, number, prompt), tokens[2:])
        source.close(key(0, number, prompt), ended=True)
        source.release([(prompt, number)])
        return proposal

    assert visit("a", 0, [3, 4, 5]).token_ids == []
    assert visit("a", 1, [3, 4, 6]).token_ids == [5]
    assert visit("a", 2, [3, 4, 7]).token_ids == [6]
    assert source.kept_tokens == 3
    monkeypatch.setattr(suffix, "KEPT_BYTES", 6 * suffix.TOKEN_BYTES)
    visit("b", 0, [3, 4, 8])
    assert visit("a", 3, [3, 4, 7]).token_ids == [7]
    visit("c", 0, [3, 4, 9])
    assert source.kept_tokens == 6
    assert visit("b", 1, [3, 4, 8]).token_ids == []
    assert visit("c", 1, [3, 4, 8]).token_ids == [9]


def test_a_group_is_forgotten_once_it_is_released() -> None:
    source = Source(9)
    source.open(key(0), [1, 2], [3, 4, 5])
    source.open(key(1), [1, 2], [3, 4])
    source.close(key(0), ended=False)
    assert source.follow(key(1), 1).token_ids == [5]
    source.close(key(1), ended=False)
    source.release([key(0)[:2]])
    source.open(key(1), [1, 2], [3, 4])
    assert source.follow(key(1), 1) == Proposal([])


def test_completions_of_this_visit_serve_samples_that_come_after_the_group_was_released() -> None:
    source = Source(9)
    source.open(key(0), [1, 2], [3, 4, 5])
    source.close(key(0), ended=True)
    source.release([key(0)[:2]])
    source.open(key(1), [1, 2], [3])
    assert source.follow(key(1), 2) == Proposal([4, 5], "visit", 3)
