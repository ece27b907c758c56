"""Control tokens, such as ``<|im_end|>``, in texts that only spell them.

A tokenizer turns the text of a control token into that token wherever it stands, also within what a tool, a user or a
row says. So a text that is to stay a text is *covered* before the chat template sees it: each control token that it
spells becomes a placeholder. The rendered conversation is then encoded by a copy of the tokenizer that knows control
tokens by other names, with the template's own control tokens renamed and the placeholders as they were spelled.
Conversations without a placeholder are encoded by the tokenizer itself, and have the ids that they always had.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Tokens that structure a turn although tokenizers do not call them special."""
_KNOWN = "_lit_grpo_control_tokens"  # the attribute of a tokenizer by which it keeps its own


def written_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the chat template of a tokenizer, or all of them where it has several; an empty text without one."""
    templates: Any = tokenizer.chat_template or ""
    return templates if isinstance(templates, str) else "".join(templates.values())


class PlacedTokens(NamedTuple):
    """The tokens of a text, and where each stands.

    Args:
        ids: Token ids of the text, in order.
        places: For each token, the numbers of characters before its begin and before its end; None if the tokenizer
            does not tell them, as slow ones do not.
    """

    ids: list[int]
    places: list[tuple[int, int]] | None


class ControlTokens:
    """The control tokens of a tokenizer, and texts that spell them.

    They are the special tokens, the end-of-sequence token, and of the other added ones those that the chat template
    names, and ``TAGS``. Added tokens that are ordinary text, such as runs of line breaks, are none.

    Args:
        tokenizer: Tokenizer of the policy, whose added tokens and chat template are searched.

    Attributes:
        ids: The id of each control token, by its text.
        pattern: Finds the longest control token at each place of a text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer, self._written = tokenizer, written_template(tokenizer)
        self.ids: dict[str, int] = {
            token.content: number
            for number, token in tokenizer.added_tokens_decoder.items()
            if token.content.strip()
            and (token.special or token.content in self._written or token.content in (*TAGS, tokenizer.eos_token))
        }
        named = sorted(self.ids, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, named)) or r"(?!)")
        self._key = secrets.token_hex(8)  # so that no text can spell a placeholder
        self._texts = list(self.ids)
        self._placeholder = re.compile(f"\ue000{self._key}:(\\d+)\ue001")

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> ControlTokens:
        """Return those of a tokenizer, the same ones until it gets another chat template."""
        known: ControlTokens | None = vars(tokenizer).get(_KNOWN)
        is_own = known is not None and known._tokenizer is tokenizer  # a copy has another tokenizer's
        if known is None or not is_own or known._written != written_template(tokenizer):
            known = vars(tokenizer)[_KNOWN] = cls(tokenizer)
        return known

    def cover(self, text: str) -> str:
        """Put a placeholder for each control token that a text spells."""
        numbers = {name: number for number, name in enumerate(self._texts)}
        return self.pattern.sub(lambda found: f"\ue000{self._key}:{numbers[found[0]]}\ue001", text)

    def cover_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a chat message with its texts covered; what the policy itself has said stays as it is."""
        own = message["role"] == "assistant"
        texts = {name: message[name] for name in ("content", "name") if isinstance(message.get(name), str) and not own}
        return {**message, **{name: self.cover(text) for name, text in texts.items()}}

    def uncover(self, text: str) -> str:
        return self._placeholder.sub(lambda found: self._texts[int(found[1])], text)

    def is_covered(self, text: str) -> bool:
        return self._placeholder.search(text) is not None

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of a text, which may be covered, or of a rendered conversation.

        With ``add_special_tokens`` those come too that the tokenizer puts before each text, such as one that begins it,
        and never those that it puts after each text, because prompts are continued.
        """
        return self._encoded(text, add_special_tokens, has_places=False).ids

    def encode_in_place(self, text: str, add_special_tokens: bool = False) -> PlacedTokens:
        """Return the ids of a text as :meth:`encode` does, with their places in ``spelled(text, is_covered(text))``."""
        return self._encoded(text, add_special_tokens, has_places=bool(getattr(self._tokenizer, "is_fast", False)))

    def spelled(self, text: str, is_covered: bool) -> str:
        """Return the characters that are encoded for a part of a text; other ones only if the text is covered."""
        if not is_covered:
            return text
        return self.uncover(self.pattern.sub(lambda found: self._renamed[found[0]], text))

    def read_back(self, spelled: str) -> str:
        """Return the text of which :meth:`spelled` has made these characters, as it was before it was covered."""
        names = {renamed: name for name, renamed in self._renamed.items()}
        return re.sub(f"\ue002{self._key}:\\d+\ue003", lambda found: names[found[0]], spelled)

    def _encoded(self, text: str, add_special_tokens: bool, has_places: bool) -> PlacedTokens:
        found: Any
        if self.is_covered(text):
            spelled = self.spelled(text, is_covered=True)
            (found,) = self._copy.encode_batch([spelled], add_special_tokens=add_special_tokens)  # without the GIL
            ids, mask, places = found.ids, found.special_tokens_mask, found.offsets
        else:
            wanted: dict[str, Any] = {
                "return_offsets_mapping": has_places,
                "return_special_tokens_mask": add_special_tokens,
            }
            wanted = {name: value for name, value in wanted.items() if value}
            found = self._tokenizer(text, add_special_tokens=add_special_tokens, **wanted)
            ids, mask, places = (found.get(name, ()) for name in ("input_ids", "special_tokens_mask", "offset_mapping"))
        num = len(ids)
        while add_special_tokens and num and mask[num - 1]:
            num -= 1
        return PlacedTokens(list(ids[:num]), list(places[:num]) if has_places else None)

    @property
    def _renamed(self) -> Mapping[str, str]:
        return {name: f"\ue002{self._key}:{number}\ue003" for name, number in self.ids.items()}

    @cached_property
    def _copy(self) -> Any:
        """The tokenizer with its control tokens under other names, each with its id."""
        from tokenizers import Tokenizer

        backend: Any = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(
                "A text spells a control token, and the policy's tokenizer has no backend of the library tokenizers, "
                "with which it could be encoded as plain characters; choose a policy with a fast tokenizer."
            )
        state, renamed = json.loads(backend.to_str()), self._renamed
        for token in state["added_tokens"]:
            token["content"] = renamed.get(token["content"], token["content"])
        model = state["model"]
        vocabulary = model.get("vocab")
        if isinstance(vocabulary, dict):
            model["vocab"] = {renamed.get(piece, piece): number for piece, number in vocabulary.items()}
        elif isinstance(vocabulary, list):
            model["vocab"] = [[renamed.get(piece, piece), score] for piece, score in vocabulary]
        if "merges" in model:
            model["merges"] = [pair for pair in model["merges"] if not {*pair, "".join(pair)} & renamed.keys()]
        if model.get("unk_token") in renamed:
            model["unk_token"] = renamed[model["unk_token"]]
        state["truncation"] = state["padding"] = None
        copy = Tokenizer.from_str(json.dumps(state))
        copy.encode_special_tokens = False
        return copy
