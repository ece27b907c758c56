"""The tokens of a part of a text: those that stand there in the whole, not those of the part alone.

A tokenizer of SentencePiece's kind puts a space before the first word of each text. Alone, the answer ``12`` becomes
``▁12``, which never stands there in the whole text. So the whole is encoded once, and its tokens are divided where its
parts meet. A text is refused if a token belongs to two of its parts, or if its first part, after which the policy is
sampled, has other tokens alone.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lit_grpo.data.chat import UnusableRow
from lit_grpo.data.control import ControlTokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SHOWN = 16  # characters of a text on each side of a border, in messages


class PartTokens:
    """The tokens of a text that is made of parts.

    Args:
        tokenizer: Tokenizer of the policy, which encodes the whole text at once.
        parts: The parts in their order, which may be covered (:class:`lit_grpo.data.control.ControlTokens`).
        add_special_tokens: Whether tokens that the tokenizer puts before each text are added.

    Attributes:
        ids: The token ids of the whole.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *parts: str, add_special_tokens: bool = False) -> None:
        self._tokenizer, self._control = tokenizer, ControlTokens.of(tokenizer)
        self._parts, self._adds = parts, add_special_tokens
        whole = "".join(parts)
        is_covered = self._control.is_covered(whole)
        spelled = [self._control.spelled(part, is_covered) for part in parts]
        self._text = self._control.spelled(whole, is_covered)
        self._ends = list(itertools.accumulate(map(len, spelled))) if "".join(spelled) == self._text else None
        self.ids, places = self._control.encode_in_place(whole, add_special_tokens)
        self._token_ends = [end for _, end in places or ()]
        self._places = places if self._token_ends == sorted(self._token_ends) else None  # others cannot be relied on

    def divided(self, first_ids: Sequence[int] | None = None) -> list[list[int]]:
        """Return the tokens of each part, which together are those of the whole.

        Args:
            first_ids: The tokens after which the policy is sampled; by default those that the first part has alone.

        Raises:
            UnusableRow: A token belongs to two parts, or the whole does not begin with ``first_ids``.
        """
        numbers = [0]
        for number in range(1, len(self._parts)):
            if number > 1 or first_ids is None:
                num = self._num_before(number)
            else:
                is_first = self.ids[: len(first_ids)] == [*first_ids] and self.num_within(1) <= len(first_ids)
                num = len(first_ids) if is_first else None
            if num is None:
                raise self._joined(number)
            numbers.append(num)
        return [self.ids[begin:end] for begin, end in itertools.pairwise([*numbers, len(self.ids)])]

    def head(self, num: int, first_ids: Sequence[int] | None = None) -> tuple[list[int], str]:
        """Return the first tokens of the last part, at most ``num``, and their text; no character is cut.

        Raises:
            UnusableRow: As for :meth:`divided`.
        """
        ids = self.divided(first_ids)[-1]
        begin = len(self.ids) - len(ids)
        end = begin + min(num, len(ids))
        while end > begin and not self._is_between_characters(end):
            end -= 1
        return self.ids[begin:end], self._written(begin, end)

    def tail(self, num: int) -> str:
        """Return the text of the last tokens, at most ``num``; no character is cut."""
        begin = max(len(self.ids) - num, 0)
        while begin < len(self.ids) and not self._is_between_characters(begin):
            begin += 1
        return self._written(begin, len(self.ids))

    def num_within(self, num_parts: int) -> int:
        """Return the number of tokens that end in the first parts; 0 if the tokenizer does not tell."""
        if self._places is None or self._ends is None:
            return 0
        return bisect_right(self._token_ends, self._ends[num_parts - 1])

    def _joined(self, number: int) -> UnusableRow:
        """Say that the tokens are other ones where the first parts and the others meet."""
        before, after = ("".join(parts) for parts in (self._parts[:number], self._parts[number:]))
        before, after = self._control.uncover(before)[-_SHOWN:], self._control.uncover(after)[:_SHOWN]
        return UnusableRow(
            f"has {before!r} and {after!r} at the border of a prompt and its answer, or of two turns, which the "
            f"tokenizer joins into other tokens than those of {before!r} alone, after which the policy is sampled; "
            "move a space or line break to the other side of the border, or change the words there"
        )

    def _num_before(self, number: int) -> int | None:
        """Return the number of tokens of the first parts; None if a token belongs to both sides.

        The first part alone has to have the same tokens, since the policy has not seen what follows.
        """
        if self._ends is None:  # a control token is spelled by two parts
            return None
        if number == 1 or self._places is None:
            ids = self._control.encode("".join(self._parts[:number]), self._adds)
            return len(ids) if self.ids[: len(ids)] == ids else None
        num, border = self.num_within(number), self._ends[number - 1]
        if num == len(self.ids) or self._places[num][0] >= border:
            return num
        beyond = self._text[border : self._places[num][1]]  # a control token may take the spaces that follow it
        return num + 1 if beyond.isspace() and self.ids[num] in self._control.ids.values() else None

    def _is_between_characters(self, num: int) -> bool:
        """Return whether no character has tokens both before and after the first ``num``."""
        if self._places is None or not 0 < num < len(self.ids):
            return True
        return self._places[num][0] >= self._places[num - 1][1]

    def _written(self, begin: int, end: int) -> str:
        """Return the text of tokens of the last part, with what stands before them and has no token, such as spaces."""
        if self._places is None or self._ends is None:
            return str(self._tokenizer.decode(self.ids[begin:end], clean_up_tokenization_spaces=False))
        border = self._ends[-2] if len(self._ends) > 1 else 0
        start = max(self._places[begin - 1][1] if begin else 0, border)
        stop = self._places[end - 1][1] if 0 < end < len(self.ids) else len(self._text) if end else start
        return self._control.read_back(self._text[start:stop])


def num_common(first: Sequence[Any], second: Sequence[Any]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
