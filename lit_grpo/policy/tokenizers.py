"""Tokenizers of folders and hub ids: ``tokenizer.json`` stands, whatever class transformers takes for the model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from lit_grpo.policy.hub import stored_file
from lit_grpo.process.inputs import read_json
from lit_grpo.process.terminal import first_line
from lit_grpo.ranks import Ranks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_FILE, _SETTINGS, _TEMPLATES = "tokenizer.json", "tokenizer_config.json", "additional_chat_templates"
_FILES = (
    *(_FILE, _SETTINGS, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "tekken.json"),
)
"""Files of tokenizers, by their names in any folder."""
TEXTS = (
    "user: The answer is 12345 + 6.78 = hello-world's, isn't it? WE'LL see: x_1 != y2;\n\tfoo  bar \n\n  (end)",
    "na\u00efve cafe\u0301 Stra\u00dfe \u0130\ufb01\u2460\uff11\u00bd \u0440\u0443\u0441\u0441\u043a\u0438\u0439 "
    "\u6f22\u5b57\u304b\u306a \u0e44\u0e17\u0e22 \u05e9\u05dc\u05d5\u05dd \U0001f642\u200d\u00a0\u200b\r\n",
    " ",
    "12",
)
"""Texts that tokenizers split in different ways: numbers, contractions, spaces, upper case, forms of Unicode."""
_MAX_TOKENS, _TOKENS_PER_TEXT = 4096, 16


def read_tokenizer(name: str, place: str, options: Mapping[str, Any] | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder or hub id as its files describe it.

    transformers takes a class by the type of the model. Many classes read only the vocabulary of ``tokenizer.json`` and
    make a tokenizer of their own around it: a Unigram tokenizer in a folder of Qwen2's kind becomes Qwen2's byte-level
    BPE. Here ``tokenizer.json`` stands, and a warning says so if the class splits a text in another way.

    Raises:
        OSError: There are no files.
        ValueError: The files cannot be used.
    """
    tokenizer, made = _load(place, options or {})
    if made is not None and (text := _split_apart(tokenizer, made)) is not None:
        Ranks().warn(
            f"The {_FILE} of {name!r} splits texts in another way than {type(made).__name__}, the class that "
            f"transformers takes for this kind of model (for example {text[:60]!r}); {_FILE} is used, and other "
            "programs have to load it with transformers.PreTrainedTokenizerFast in place of AutoTokenizer."
        )
    return tokenizer


def loading_class(place: str) -> str:
    """Return the name of the class of transformers that loads the tokenizer of a folder as its files describe it."""
    tokenizer, made = _load(place, {})
    is_replaced = made is not None and _split_apart(tokenizer, made) is not None
    return "PreTrainedTokenizerFast" if is_replaced else "AutoTokenizer"


def _load(place: str, options: Mapping[str, Any]) -> tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase | None]:
    """Load a tokenizer, and what the class of transformers makes of the same files if that may be another one."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        made: Any = AutoTokenizer.from_pretrained(place, trust_remote_code=False, **options)
    except Exception as error:  # a class may raise anything about a vocabulary that it was not made for
        if options or "trust_remote_code" in str(error) or stored_file(place, _FILE) is None:
            raise
        return _of_file(place), None
    is_of_class = isinstance(made, PreTrainedTokenizerFast) and type(made) is not PreTrainedTokenizerFast
    if options or not is_of_class or stored_file(place, _FILE) is None:
        return made, None
    own = _of_file(place)
    for role, token in made.special_tokens_map.items():  # the class knows special tokens that old files do not name
        if isinstance(token, str) and getattr(own, role, None) is None and token in own.get_vocab():
            own.add_special_tokens({role: token})
    return own, made


def _of_file(place: str) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    try:
        return PreTrainedTokenizerFast.from_pretrained(place, trust_remote_code=False)
    except Exception as error:  # the library tokenizers raises an Exception without a class of its own
        raise ValueError(f"its {_FILE} is damaged ({first_line(error)})") from error


def _split_apart(own: PreTrainedTokenizerBase, made: PreTrainedTokenizerBase) -> str | None:
    """Return a text that two tokenizers split into different tokens; None if none is found."""
    for text in _texts(own, made):
        if own(text)["input_ids"] != made(text)["input_ids"]:
            return text
    return None


def _texts(own: PreTrainedTokenizerBase, made: PreTrainedTokenizerBase) -> Iterator[str]:
    """Yield fixed texts, tokens that one of two tokenizers lacks, and texts of tokens from the whole vocabulary."""
    yield from TEXTS
    yield from sorted(made.get_vocab().keys() ^ own.get_vocab().keys())
    ids = list(range(0, len(own), max(1, len(own) // _MAX_TOKENS)))
    for begin in range(0, len(ids), _TOKENS_PER_TEXT):
        yield str(own.decode(ids[begin : begin + _TOKENS_PER_TEXT]))


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save a tokenizer in a folder: as the very files that it was loaded from, if it still is what they describe."""
    if _is_as_stored(tokenizer):
        place = tokenizer.name_or_path
        for file in filter(None, (stored_file(place, name) for name in _FILES)):
            shutil.copyfile(file, folder / file.name)
        if (Path(place) / _TEMPLATES).is_dir():
            shutil.copytree(Path(place) / _TEMPLATES, folder / _TEMPLATES)
    else:
        tokenizer.save_pretrained(folder)


def _is_as_stored(tokenizer: PreTrainedTokenizerBase) -> bool:
    place = tokenizer.name_or_path
    has_templates = isinstance(tokenizer.chat_template, dict)  # in a folder of files without fixed names
    if not place or Path(place).is_file() or (has_templates and not Path(place).is_dir()):
        return False
    try:
        if stored_file(place, _FILE) is None:
            return False
        stored, _ = _load(place, {})
    except (OSError, ValueError):  # the files have been moved or changed since
        return False
    return _written(stored) == _written(tokenizer)


def _written(tokenizer: PreTrainedTokenizerBase) -> dict[str, bytes]:
    with TemporaryDirectory(prefix="lit_grpo-") as folder:
        tokenizer.save_pretrained(folder)
        return {str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def save_for_engines(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save a tokenizer, in a folder of its own, for an engine that loads it with ``AutoTokenizer``.

    The ``config.json`` beside it, which vLLM asks for, is of a family for which ``AutoTokenizer`` takes the class that
    the tokenizer's settings name.
    """
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    if (folder / _FILE).is_file():
        settings = read_json(folder / _SETTINGS)
        (folder / _SETTINGS).write_text(json.dumps({**settings, "tokenizer_class": "PreTrainedTokenizerFast"}))
