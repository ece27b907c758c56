"""A tokenizer as GGUF describes it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""Types of tokens: of text, special, added and not special, and without a meaning."""
_LETTER = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_END = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPLITS: dict[tuple[str, ...], str] = {
    ("bytes by words",): "gpt-2",
    ("digits", "bytes by words"): "smollm",
    (rf"{_SHORT}|{_LETTER}|\p{{N}}|{_END}", "bytes"): "qwen2",
    (rf"{_SHORT}|{_LETTER}|\p{{N}}{{1,3}}|{_END}", "bytes"): "llama-bpe",
}
"""How a byte-level tokenizer splits text before it merges, and llama.cpp's name of that (``tokenizer.ggml.pre``)."""


@dataclass(frozen=True)
class Vocabulary:
    """The fields ``tokenizer.ggml.*`` of a GGUF file.

    Args:
        pre: Name of the way in which text is split before it is merged.
        tokens: The token of each row of the embedding.
        types: The type of each token.
        merges: The merges, best first: the two parts with a space between them.
        ids: Ids of special tokens by kind: ``bos``, ``eos``, ``eot``, ``unk``, ``pad``.
        adds: Whether ``bos`` and ``eos`` are added to a text.
        template: The chat template; empty if there is none.
    """

    pre: str
    tokens: list[str]
    types: list[int]
    merges: list[str]
    ids: dict[str, int] = field(default_factory=dict)
    adds: dict[str, bool] = field(default_factory=dict)
    template: str = ""


def describe(tokenizer: PreTrainedTokenizerBase, num_rows: int, end_ids: Sequence[int] = ()) -> Vocabulary:
    """Describe a tokenizer as GGUF does.

    Args:
        tokenizer: The tokenizer.
        num_rows: Number of rows of the embedding; rows without a token get the token ``[PADn]``.
        end_ids: The ids that end a sequence, those of the generation config too.

    Raises:
        ValueError: GGUF, or the reader of transformers, has no form for the tokenizer.
    """
    model, splits = _parts(tokenizer)
    added = tokenizer.added_tokens_decoder
    if model["type"] == "BPE" and splits in SPLITS and not model.get("byte_fallback"):
        pre, merges = SPLITS[splits], [one if isinstance(one, str) else " ".join(one) for one in model["merges"]]
        words = {token: (token, NORMAL) for token in model["vocab"]}
    elif model["type"] == "WordLevel":
        pre, merges, words = "gpt-2", [], _words(tokenizer, model["vocab"])
    else:
        told = f"type {model['type']}, {', '.join(splits) or 'without a split'}"
        raise ValueError(f"The policy's tokenizer ({told}) is not written as GGUF; leave GGUF out with --gguf none.")
    tokens, types = [f"[PAD{row}]" for row in range(num_rows)], [UNUSED] * num_rows
    for token, row in tokenizer.get_vocab().items():
        if row >= num_rows:
            raise ValueError(
                f"The tokenizer has the token {token!r} with the id {row}, and the policy {num_rows} rows."
            )
        tokens[row], types[row] = words.get(token, (token, NORMAL))
    for row, token in added.items():
        tokens[row], types[row] = token.content, CONTROL if token.special else USER_DEFINED
    ids = {kind: getattr(tokenizer, f"{kind}_token_id") for kind in ("bos", "eos", "unk", "pad")}
    ids["eot"] = next((one for one in end_ids if one != ids["eos"]), None)
    around = tokenizer("0")["input_ids"]
    return Vocabulary(
        pre,
        tokens,
        types,
        merges,
        ids={kind: row for kind, row in ids.items() if row is not None},
        adds={"bos": around[0] == ids["bos"], "eos": around[-1] == ids["eos"]},
        template=tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else "",
    )


def _parts(tokenizer: PreTrainedTokenizerBase) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the model of a tokenizer as its file describes it, and the steps that split text before it."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(
            f"The policy's tokenizer ({type(tokenizer).__name__}) has no tokenizer.json, so it is not written as GGUF; "
            "leave GGUF out with --gguf none."
        )
    told = json.loads(backend.to_str())
    splitter = told["pre_tokenizer"] or {}
    steps = splitter.get("pretokenizers", [splitter] if splitter else [])
    return told["model"], tuple(map(_step, steps))


def _step(step: dict[str, Any]) -> str:
    """Return a step of a pre-tokenizer as :data:`SPLITS` names it."""
    if step["type"] == "ByteLevel" and not step.get("add_prefix_space"):
        return "bytes by words" if step.get("use_regex", True) else "bytes"
    if step["type"] == "Digits" and step.get("individual_digits"):
        return "digits"
    if step["type"] == "Split" and "Regex" in step["pattern"] and step["behavior"] == "Isolated":
        return str(step["pattern"]["Regex"])
    return json.dumps(step)


def _words(tokenizer: PreTrainedTokenizerBase, vocabulary: dict[str, int]) -> dict[str, tuple[str, int]]:
    """Write the words of a tokenizer without merges: a character of one byte is a token, any other an added token.

    llama.cpp finds added tokens first. The reader of transformers finds those of ASCII without spaces only.

    Raises:
        ValueError: A word has neither of these forms.
    """
    from tokenizers.pre_tokenizers import ByteLevel

    bytes_of = ByteLevel(add_prefix_space=False, use_regex=False)
    written: dict[str, tuple[str, int]] = {}
    for word, row in vocabulary.items():
        ((spelled, _),) = bytes_of.pre_tokenize_str(word)
        alone = tokenizer(word, add_special_tokens=False)["input_ids"]
        if alone == [row] and len(spelled) == 1:
            written[word] = spelled, NORMAL
        elif alone == [row]:
            written[word] = word, USER_DEFINED
        else:
            raise ValueError(
                f"The policy's tokenizer of whole words has {word!r:.60}, which GGUF has no form for; leave GGUF out "
                "with --gguf none."
            )
    return written
