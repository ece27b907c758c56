"""Tiny tokenizers of many kinds, whose tokens of a text alone differ from those that it has in a whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% elif continue_final_message %}{% endif %}"
)
SPECIAL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|pad|>")
LETTERS = "\n .,:;=+-0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ?üé\u0301"
TEXTS = ["user assistant system hello The answer is 12 thank you what is one plus two caf\u00e9 number "] * 20


def _wrapped(tokenizer: Tokenizer, eos: str = "<|im_end|>", template: str = CHATML, **more: Any) -> Any:
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token=eos, pad_token="<|pad|>", unk_token="<unk>", **more
    )
    made.chat_template = template
    return made


def _bytes(prefix_space: bool = False, normalizer: Any = None, special: Sequence[Any] = SPECIAL) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def _unigram(scheme: str, normalizer: Any = None) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    trainer = trainers.UnigramTrainer(
        vocab_size=300,
        special_tokens=list(SPECIAL),
        unk_token="<unk>",
        show_progress=False,
        initial_alphabet=list(LETTERS),
    )
    tokenizer.train_from_iterator([*TEXTS, *[LETTERS] * 5], trainer)
    return tokenizer


def _prepend() -> Tokenizer:
    """Return one of Llama 2's kind: BPE with byte fallback, and a space put before each text by its normalizer."""
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *LETTERS.strip()]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    merges = [("▁", "T"), ("▁T", "h"), ("▁Th", "e"), ("T", "h"), ("Th", "e"), ("▁", "1"), ("1", "2"), ("▁1", "2")]
    for merge in merges:
        vocabulary.setdefault("".join(merge), len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in SPECIAL])
    return tokenizer


def _word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=list(SPECIAL), show_progress=False, initial_alphabet=list(LETTERS)
    )
    tokenizer.train_from_iterator([*TEXTS, LETTERS], trainer)
    return tokenizer


def _words() -> Tokenizer:
    words = dict.fromkeys([*SPECIAL, *" ".join(TEXTS).split(), *LETTERS.split(), *"=+-.,:?", "more"])
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([*SPECIAL])
    return tokenizer


def _characters() -> Tokenizer:
    letters = dict.fromkeys([*SPECIAL, *LETTERS])
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, [], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([*SPECIAL])
    return tokenizer


def _begins_and_ends() -> Any:
    """Return one that puts tokens before and after each text."""
    tokenizer = _bytes()
    ids = [(each, tokenizer.token_to_id(each)) for each in ("<s>", "</s>")]
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=ids)
    return _wrapped(tokenizer)


def _strips() -> Any:
    """Return one whose control tokens take the spaces beside them, as Phi-3's do."""
    tokens = [AddedToken(each, special=True, lstrip=True, rstrip=True) for each in ("<|im_start|>", "<|im_end|>")]
    return _wrapped(_bytes(special=["<unk>", "<s>", "</s>", "<|pad|>", *tokens]))


def _plain_end() -> Any:
    """Return one whose turns end with an added token that is not special, by the name of a variable alone."""
    tokenizer = _bytes(special=["<unk>", "<s>", "</s>", "<|im_start|>", "<|pad|>"])
    tokenizer.add_tokens([AddedToken("<end>", special=False, normalized=False)])
    return _wrapped(tokenizer, "<end>", CHATML.replace("<|im_end|>", "{{ eos_token }}"))


def _slow() -> Any:
    """Return one that tells no places of its tokens: a token for each byte."""
    made = ByT5Tokenizer(extra_ids=0, additional_special_tokens=["<|im_start|>", "<|im_end|>"], eos_token="<|im_end|>")
    made.chat_template = CHATML
    return made


KINDS: dict[str, Callable[[], Any]] = {
    "byte BPE": lambda: _wrapped(_bytes()),
    "byte BPE, prefix space": lambda: _wrapped(_bytes(prefix_space=True)),
    "Unigram, first": lambda: _wrapped(_unigram("first")),
    "Unigram, always": lambda: _wrapped(_unigram("always")),
    "Prepend": lambda: _wrapped(_prepend()),
    "lower-casing": lambda: _wrapped(_bytes(normalizer=normalizers.Lowercase())),
    "NFC": lambda: _wrapped(_bytes(normalizer=normalizers.NFC())),
    "NFKC Unigram": lambda: _wrapped(_unigram("first", normalizers.NFKC())),
    "without accents": lambda: _wrapped(
        _unigram("always", normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]))
    ),
    "WordPiece": lambda: _wrapped(_word_piece()),
    "WordLevel": lambda: _wrapped(_words()),
    "characters": lambda: _wrapped(_characters()),
    "begins and ends": _begins_and_ends,
    "stripping": _strips,
    "plain end": _plain_end,
    "slow": _slow,
}
