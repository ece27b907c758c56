"""A tokenizer as GGUF describes it, proved by what llama.cpp makes of the description."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from lit_grpo.data.chat import EndlessTemplate, Message, UnusableRow, render_chat
from lit_grpo.policy.tokenizers import TEXTS

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import AddedToken, PreTrainedTokenizerBase

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""Types of tokens: of text, special, added and not special, and without a meaning."""
_LETTER = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_END = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPLITS: dict[str, tuple[str, ...]] = {
    "gpt-2": ("bytes by words",),
    "smollm": ("digits", "bytes by words"),
    "qwen2": (rf"{_SHORT}|{_LETTER}|\p{{N}}|{_END}", "bytes"),
    "llama-bpe": (rf"{_SHORT}|{_LETTER}|\p{{N}}{{1,3}}|{_END}", "bytes"),
    "smaug-bpe": (rf"{_SHORT}|{_LETTER}|\p{{N}}{{1,3}}|{_END}", "bytes"),
}
"""llama.cpp's names (``tokenizer.ggml.pre``) of how a byte-level tokenizer splits text before it merges."""
_IGNORE_MERGES = {"llama-bpe"}
"""Those by which llama.cpp takes a word that is a token as it is, whatever the merges make of it."""
_NAMED_STYLES = ("phi-3", "phi3")
"""Parts of a model's name by which llama.cpp changes special tokens, and does not load a file without some of them."""
_NO_FORM = ("dropout", "byte_fallback", "continuing_subword_prefix", "end_of_word_suffix")
"""Options of BPE that GGUF has no field for."""
_FLAGS = ("lstrip", "rstrip", "single_word")
"""Options of an added token that GGUF has no field for."""
_ENDS = ("eos", "eot", "eom")
"""The places that GGUF has for tokens that end a sequence."""
DEFAULT_TEMPLATE = "default"
_QUESTION = {"role": "user", "content": "Why did the Caf\u00e9 sell 1234 na\u00efve Guests 5.6 TEAS,\n  didn't it?"}
CONVERSATIONS: tuple[list[Message], ...] = (
    [_QUESTION],
    [{"role": "system", "content": "You are brief."}, _QUESTION],
    [_QUESTION, {"role": "assistant", "content": "It didn't: 3 + 4 = 7."}, {"role": "user", "content": " And now? "}],
)
_MAX_TOKENS, _TOKENS_PER_TEXT = 4096, 16
_REMEDY = "leave GGUF out with --gguf none"


@dataclass(frozen=True)
class Vocabulary:
    """The fields ``tokenizer.ggml.*`` of a GGUF file.

    Args:
        pre: Name of the way in which text is split before it is merged.
        tokens: The token of each row of the embedding.
        types: The type of each token.
        merges: The merges, best first: the two parts with a space between them.
        ids: Ids of special tokens by kind: ``bos``, ``eos``, ``eot``, ``eom``, ``unk``, ``pad``.
        adds: Whether ``bos`` and ``eos`` are added to a prompt.
        templates: The chat templates by name; that without a name is ``default``.
        left_out: What readers of the file do in another way than the tokenizer, a sentence each.
    """

    pre: str
    tokens: list[str]
    types: list[int]
    merges: list[str]
    ids: dict[str, int] = field(default_factory=dict)
    adds: dict[str, bool] = field(default_factory=dict)
    templates: dict[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    @property
    def has_chat(self) -> bool:
        """True if a reader renders conversations without being told the name of a template."""
        return DEFAULT_TEMPLATE in self.templates


def describe(tokenizer: PreTrainedTokenizerBase, num_rows: int, end_ids: Sequence[int] = ()) -> Vocabulary:
    """Describe a tokenizer as GGUF does, and prove that llama.cpp splits texts by the description as it does.

    Args:
        tokenizer: Tokenizer of the policy, to be written as GGUF.
        num_rows: Number of rows of the embedding; rows without a token get the token ``[PADn]``.
        end_ids: The ids that end a sequence, those of the generation config too.

    Raises:
        ValueError: GGUF has no form for the tokenizer, or llama.cpp would split a text in another way.
    """
    told, splits = _parts(tokenizer)
    model = told["model"]
    pres = [pre for pre, steps in SPLITS.items() if steps == splits] if model["type"] == "BPE" else ["gpt-2"]
    kind, normalizers = model["type"], _steps(told["normalizer"], "normalizers")
    odd = [f"normalizer {step['type']}" for step in normalizers if step["type"] != "NFC"]
    odd += [name for name in _NO_FORM if model.get(name)]
    merges = [one if isinstance(one, str) else " ".join(one) for one in model.get("merges", ())]
    odd += [f"merge {merge!r}" for merge in merges if merge.count(" ") != 1][:1]
    if odd or kind not in ("BPE", "WordLevel") or not pres:
        parts = ", ".join([f"type {kind}", *(splits or ["without a split"]), *odd])
        raise ValueError(f"The policy's tokenizer ({parts}) is not written as GGUF; {_REMEDY}.")
    words = _words(tokenizer, model["vocab"]) if kind == "WordLevel" else {}
    tokens, types = _rows(tokenizer, num_rows, words)
    left_out = [*_left_out(tokenizer, model, normalizers)]
    ids, more_ends = _special_ids(tokenizer, end_ids)
    if more_ends:
        left_out.append(
            f"The policy ends a completion at {_named(tokenizer, more_ends)} too, and GGUF has places for "
            f"{len(_ENDS)} end tokens only, so llama.cpp goes on after it."
        )
    conversations = conversations_of(tokenizer)
    adds, told_apart = _adds(tokenizer, conversations)
    templates = _templates(tokenizer)
    if templates and DEFAULT_TEMPLATE not in templates:
        left_out.append(
            f"None of the chat templates ({', '.join(templates)}) is named {DEFAULT_TEMPLATE}, so readers of the file "
            "render no conversation until they are told a name."
        )
    policy, apart = plain(tokenizer), ""
    texts = comparable(policy, [*conversations, *texts_of(tokenizer), *_texts_of_tokens(tokenizer, policy)])
    for pre in pres:
        found = Vocabulary(pre, tokens, types, merges, ids, adds, templates, (*left_out, *told_apart))
        if not (apart := _split_apart(policy, as_llama_cpp(found), texts)):
            return found
    hint = "; its ignore_merges has no form in GGUF for this split" if model.get("ignore_merges") else ""
    raise ValueError(
        f"The policy's tokenizer is not written as GGUF: by the file llama.cpp would make other tokens or another text "
        f"of {apart[:60]!r}{hint}; {_REMEDY}."
    )


def check_name(name: str) -> None:
    """Refuse a model's name by which llama.cpp would treat special tokens in another way.

    Raises:
        ValueError: It is one.
    """
    found = [part for part in _NAMED_STYLES if part in name.lower()]
    if found:
        raise ValueError(
            f"The model's name in a GGUF file would be {name!r}, and {found[0]} in a name makes llama.cpp expect the "
            "special tokens of another model; give another as --name."
        )


def as_llama_cpp(vocabulary: Vocabulary) -> Tokenizer:
    """Return the tokenizer that llama.cpp makes of a description (``llama_vocab::impl::load`` and ``tokenize``)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models

    merges: Any = [tuple(merge.split(" ")) for merge in vocabulary.merges]
    rows = {token: row for row, token in enumerate(vocabulary.tokens)}
    made: Any = Tokenizer(models.BPE(rows, merges, ignore_merges=vocabulary.pre in _IGNORE_MERGES))
    made.pre_tokenizer, made.decoder = splitter(vocabulary.pre), decoders.ByteLevel()
    found = zip(vocabulary.tokens, vocabulary.types, strict=True)
    made.add_tokens([AddedToken(token, normalized=False) for token, kind in found if kind in (CONTROL, USER_DEFINED)])
    return made


def splitter(pre: str) -> Any:
    """Return the pre-tokenizer that llama.cpp's name ``pre`` means."""
    from tokenizers import Regex, pre_tokenizers

    made: dict[str, Any] = {
        "digits": pre_tokenizers.Digits(individual_digits=True),
        "bytes by words": pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        "bytes": pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    }
    steps = [made.get(step) or pre_tokenizers.Split(Regex(step), "isolated") for step in SPLITS[pre]]
    return pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]


def conversations_of(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return what the default chat template makes of a few conversations; those that it refuses are left out."""
    if not _has_default(tokenizer):
        return []
    found = []
    for messages in CONVERSATIONS:
        try:
            found.append(render_chat(messages, tokenizer, {}))
        except (UnusableRow, EndlessTemplate):
            continue
    return found


def texts_of(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return texts that tokenizers split in different ways, and texts with each added token of this one.

    Flags of an added token that GGUF has no field for act beside it; such a token stands alone.
    """
    found = [*TEXTS, TEXTS[0].upper()]
    for token in tokenizer.added_tokens_decoder.values():
        found += (
            [token.content] if _flags(token) else [f"a{token.content}1", f"It is {token.content} \n{token.content}"]
        )
    return found


def comparable(policy: Tokenizer, texts: Sequence[str]) -> list[tuple[str, list[int]]]:
    """Return texts with their tokens, without the few things that a GGUF file is known not to hold.

    Texts are in the form that the normalizer of the policy's tokenizer (:func:`plain`) makes, and those with characters
    that it does not know are left out.
    """
    normalizer, model = policy.normalizer, cast(Any, policy.model)
    formed = [text if normalizer is None else str(normalizer.normalize_str(text)) for text in texts]
    unknown = None if getattr(model, "unk_token", None) is None else policy.token_to_id(model.unk_token)
    rows = [each.ids for each in policy.encode_batch_fast(formed, add_special_tokens=False)]
    return [(text, ids) for text, ids in zip(formed, rows, strict=True) if unknown not in ids]


def plain(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """Return the tokenizer of a ``tokenizer.json`` without limits of its length."""
    from tokenizers import Tokenizer

    backend: Any = tokenizer
    made: Any = Tokenizer.from_str(backend.backend_tokenizer.to_str())
    made.no_padding()
    made.no_truncation()
    return made


def _split_apart(policy: Tokenizer, reader: Tokenizer, compared: Sequence[tuple[str, list[int]]]) -> str:
    """Return a text that a reader makes other tokens of, or puts together in another way; empty if none is found."""
    found = reader.encode_batch_fast([text for text, _ in compared], add_special_tokens=False)
    for (text, ids), read in zip(compared, found, strict=True):
        if read.ids != ids:
            return text
        if len(ids) > 1 and (told := policy.decode(ids, False)) != text and told != reader.decode(ids, False):
            return text
    return ""


def _texts_of_tokens(tokenizer: PreTrainedTokenizerBase, policy: Tokenizer) -> list[str]:
    """Return the text of each token, and some texts of several tokens from the whole vocabulary."""
    decode, added = policy.decode, tokenizer.added_tokens_decoder
    ids = [row for row in sorted(tokenizer.get_vocab().values()) if row not in added or not _flags(added[row])]
    some = ids[:: max(1, len(ids) // _MAX_TOKENS)]
    several = [some[begin : begin + _TOKENS_PER_TEXT] for begin in range(0, len(some), _TOKENS_PER_TEXT)]
    return [decode(rows, False) for rows in (*([row] for row in ids), *several)]


def _flags(token: AddedToken) -> list[str]:
    """Return the options of an added token that GGUF has no field for."""
    return [flag for flag in _FLAGS if getattr(token, flag)]


def _rows(
    tokenizer: PreTrainedTokenizerBase, num_rows: int, words: Mapping[str, tuple[str, int]]
) -> tuple[list[str], list[int]]:
    """Return the token and the type of each row of the embedding.

    ``words`` says how tokens that GGUF spells in another way are written, with their types.

    Raises:
        ValueError: A token has no row, or two rows have one token.
    """
    tokens, types = [f"[PAD{row}]" for row in range(num_rows)], [UNUSED] * num_rows
    for token, row in tokenizer.get_vocab().items():
        if row >= num_rows:
            raise ValueError(
                f"The tokenizer has the token {token!r} with the id {row}, and the policy {num_rows} rows."
            )
        tokens[row], types[row] = words.get(token, (token, NORMAL))
    for row, token in tokenizer.added_tokens_decoder.items():
        tokens[row], types[row] = token.content, CONTROL if token.special else USER_DEFINED
    twice, number = Counter(tokens).most_common(1)[0]
    if number > 1:
        raise ValueError(
            f"A GGUF file would have the token {twice[:60]!r} {number} times, which llama.cpp cannot read; {_REMEDY}."
        )
    return tokens, types


def _special_ids(tokenizer: PreTrainedTokenizerBase, end_ids: Sequence[int]) -> tuple[dict[str, int], list[int]]:
    """Return the ids of special tokens by kind, and end tokens that GGUF has no place for.

    Raises:
        ValueError: No token ends a sequence; llama.cpp would take one of its own choice.
    """
    ends = [*dict.fromkeys(row for row in (tokenizer.eos_token_id, *end_ids) if isinstance(row, int))]
    if not ends:
        raise ValueError(
            f"The policy's tokenizer names no end token, and llama.cpp takes the token 11 for it then; {_REMEDY}."
        )
    ids = {kind: getattr(tokenizer, f"{kind}_token_id") for kind in ("bos", "unk", "pad")}
    ids = {kind: row for kind, row in ids.items() if row is not None} | dict(zip(_ENDS, ends, strict=False))
    return ids, ends[len(_ENDS) :]


def _left_out(
    tokenizer: PreTrainedTokenizerBase, model: Mapping[str, Any], normalizers: Sequence[Any]
) -> Iterator[str]:
    """Yield a sentence on each part of a tokenizer that GGUF has no field for, and that few texts need."""
    if normalizers:
        yield (
            "Readers of the file do not apply the tokenizer's normalizer NFC: a letter and an accent that are two "
            "characters become other tokens than for the policy."
        )
    from tokenizers.pre_tokenizers import ByteLevel

    unknown = model.get("unk_token")
    if unknown is not None and not set(ByteLevel.alphabet()) <= model["vocab"].keys():
        yield (
            f"Text with characters that the tokenizer does not know becomes {unknown!r} for the policy, and other "
            "tokens or none for readers of the file."
        )
    for token in tokenizer.added_tokens_decoder.values():
        if flags := _flags(token):
            yield (
                f"The token {token.content!r} has {' and '.join(flags)}, which readers of the file do not know: "
                "spaces or letters beside the token become other tokens than for the policy."
            )


def _adds(tokenizer: PreTrainedTokenizerBase, conversations: Sequence[str]) -> tuple[dict[str, bool], list[str]]:
    """Return whether a reader begins and ends prompts with special tokens, and sentences on what it leaves out.

    llama.cpp adds its tokens to a conversation too, but does not double the first one.

    Raises:
        ValueError: The tokenizer adds other tokens than GGUF can say.
    """
    backend: Any = tokenizer
    encode = backend.backend_tokenizer.encode
    texts = ("0", *tokenizer.get_vocab())
    sample = next((text for text in texts if len(encode(text, add_special_tokens=False))), "0")
    whole = tokenizer(sample)["input_ids"]
    alone = tokenizer(sample, add_special_tokens=False)["input_ids"]
    place = next((at for at in range(len(whole)) if whole[at : at + len(alone)] == alone), 0)
    before, after = whole[:place], whole[place + len(alone) :]
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    if before not in ([], [bos]) or after not in ([], [eos]):
        raise ValueError(
            f"The policy's tokenizer puts {_named(tokenizer, [*before, *after])} around a text, and GGUF can say so of "
            f"its BOS and EOS tokens only; {_REMEDY}."
        )
    sentences = []
    first = str(tokenizer.bos_token)
    begins = bool(before) and (not conversations or any(text.startswith(first) for text in conversations))
    if before and not begins:
        sentences.append(
            f"llama.cpp does not begin a text with {first!r} as the tokenizer does, because conversations of the chat "
            "template begin without it."
        )
    if after:
        sentences.append(
            f"llama.cpp does not end a prompt with {tokenizer.eos_token!r}, which the tokenizer adds to each text and "
            "training takes off again."
        )
    return {"bos": begins, "eos": False}, sentences


def _templates(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return the chat templates by name; they begin by setting the special tokens that llama.cpp does not tell them.

    Raises:
        ValueError: GGUF has no form for a template's name.
    """
    told: Any = tokenizer.chat_template or {}
    templates: dict[str, str] = {DEFAULT_TEMPLATE: told} if isinstance(told, str) else dict(sorted(told.items()))
    tokens = {"bos_token": tokenizer.bos_token or "", **tokenizer.special_tokens_map}
    known = {"eos_token", *(["bos_token"] if tokenizer.bos_token else [])}
    for name, template in templates.items():
        if not (name.isascii() and name.isidentifier()):
            raise ValueError(
                f"The tokenizer has a chat template named {name!r}, and names in GGUF are of letters, digits and _; "
                f"{_REMEDY}."
            )
        used = {each: text for each, text in tokens.items() if each in template and each not in known}
        sets = "".join(f"{{% set {each} = {_literal(text)} %}}" for each, text in used.items())
        templates[name] = f'{sets}{{{{ "" }}}}{template}' if sets else template
    return templates


def _literal(value: Any) -> str:
    """Write a token or several as a value of a chat template."""
    return json.dumps([*map(str, value)] if isinstance(value, list) else str(value), ensure_ascii=False)


def _has_default(tokenizer: PreTrainedTokenizerBase) -> bool:
    told: Any = tokenizer.chat_template
    return isinstance(told, str) or (isinstance(told, dict) and DEFAULT_TEMPLATE in told)


def _named(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return ", ".join(repr(tokenizer.convert_ids_to_tokens(row)) for row in ids)


def _parts(tokenizer: PreTrainedTokenizerBase) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return a tokenizer as its file describes it, and the steps that split text before its model."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(
            f"The policy's tokenizer ({type(tokenizer).__name__}) has no tokenizer.json, so it is not written as GGUF; "
            f"{_REMEDY}."
        )
    told = json.loads(backend.to_str())
    return told, tuple(map(_step, _steps(told["pre_tokenizer"], "pretokenizers")))


def _steps(part: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """Return the steps of a part of a tokenizer, which may be a sequence of others."""
    if part is None:
        return []
    return [each for step in part[name] for each in _steps(step, name)] if name in part else [part]


def _step(step: dict[str, Any]) -> str:
    """Return a step of a pre-tokenizer as :data:`SPLITS` names it."""
    if step["type"] == "ByteLevel" and not step.get("add_prefix_space"):
        return "bytes by words" if step.get("use_regex", True) else "bytes"
    if step["type"] == "Digits" and step.get("individual_digits"):
        return "digits"
    is_split = step["type"] == "Split" and "Regex" in step["pattern"]
    if is_split and step["behavior"] == "Isolated" and not step.get("invert"):
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
