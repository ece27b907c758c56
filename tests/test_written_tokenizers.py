"""Tokenizers and chat templates in GGUF files: the readers split and render alike, or `finish` says or refuses it."""

from __future__ import annotations

import contextlib
import io
import json
import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import llama_cpp
import pytest
from conftest import random_policy, table_rows
from made_runs import make_run
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from lit_grpo.data.chat import UnusableRow, render_chat
from lit_grpo.policy.loading import load_tokenizer
from lit_grpo.process.terminal import markdown
from lit_grpo.tools.finishing.command import main
from lit_grpo.tools.finishing.vocabulary import (
    CONVERSATIONS,
    SPLITS,
    as_llama_cpp,
    comparable,
    conversations_of,
    describe,
    plain,
    splitter,
    texts_of,
)

gguf = pytest.importorskip("gguf", reason="gguf is not installed (the extra smollm2)")
from lit_grpo.tools.finishing.gguf_writer import write_gguf  # noqa: E402  # needs gguf

NUM_ROWS = 420
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|pad|>", "<|end_a|>", "<|end_b|>"]
TRAINED_ON = ["user assistant system the answer is 12 caf\u00e9s don't sell 3 + 4 = 7 na\u00efve guests: TEAS\n  "] * 20
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_BOS = "{{ bos_token }}" + CHATML


@cache
def trained(pre: str) -> str:
    """A byte-level tokenizer that splits text as llama.cpp's ``pre`` does."""
    made: Any = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = splitter(pre), decoders.ByteLevel()
    options: Any = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}
    made.train_from_iterator(TRAINED_ON, trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, **options))
    return made.to_str()


def wrapped(made: Any, template: Any = CHATML, **roles: Any) -> PreTrainedTokenizerFast:
    named = {"bos_token": "<s>", "eos_token": "<|im_end|>", "pad_token": "<|pad|>", "unk_token": "<unk>"}
    roles = {role: token for role, token in {**named, **roles}.items() if token is not None}
    made = PreTrainedTokenizerFast(tokenizer_object=made, **roles)
    made.chat_template = template
    return made


def byte_level(pre: str = "gpt-2", template: Any = CHATML, **parts: Any) -> PreTrainedTokenizerFast:
    """The same with other parts, such as ``normalizer``."""
    made: Any = Tokenizer.from_str(trained(pre))
    roles = {name: parts.pop(name) for name in list(parts) if name.endswith("_token")}
    for name, part in parts.items():
        setattr(made, name, part)
    return wrapped(made, template, **roles)


def added(*tokens: str | AddedToken, pre: str = "gpt-2", **flags: Any) -> PreTrainedTokenizerFast:
    made: Any = Tokenizer.from_str(trained(pre))
    made.add_tokens([AddedToken(token, **flags) if isinstance(token, str) else token for token in tokens])
    return wrapped(made)


def bpe(pre: str = "gpt-2", token: str | None = None, **options: Any) -> PreTrainedTokenizerFast:
    """The same with other options of BPE, and perhaps a token of text that no merge makes."""
    told = json.loads(trained(pre))
    told["model"] |= options
    if token is not None:
        told["model"]["vocab"][token] = max(told["model"]["vocab"].values()) + 1
    return wrapped(Tokenizer.from_str(json.dumps(told)))


def around(*steps: str) -> Any:
    """Special tokens around each text."""
    ids = [(step, SPECIAL.index(step)) for step in steps if step != "$A"]
    return processors.TemplateProcessing(single=[*steps], special_tokens=ids)


def characters(
    decoder: Any = None, more: tuple[str, ...] = (), split: str = r"[\s\S]", **options: Any
) -> PreTrainedTokenizerFast:
    letters = "\n .,:;=+-_'0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ?"
    made: Any = Tokenizer(models.WordLevel({t: i for i, t in enumerate([*SPECIAL, *letters, *more])}, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(split), "isolated")
    made.decoder = decoder or decoders.Fuse()
    made.add_special_tokens(SPECIAL)
    return wrapped(made, **options)


def unigram() -> PreTrainedTokenizerFast:
    return wrapped(Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0)))


def joined(*steps: Any) -> Any:
    return pre_tokenizers.Sequence([*steps])


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
ALIKE: dict[str, Callable[[], Any]] = {
    **{f"split as {pre}": lambda pre=pre: byte_level(pre) for pre in SPLITS if pre != "smaug-bpe"},
    "ignores merges as Llama 3": lambda: bpe("llama-bpe", "\u0120qxz", ignore_merges=True),
    "splits as Llama 3, needs merges": lambda: bpe("llama-bpe", "\u0120qxz"),
    "ignores merges that make all tokens": lambda: bpe("qwen2", ignore_merges=True),
    "begins with <s>": lambda: byte_level("llama-bpe", WITH_BOS, post_processor=around("<s>", "$A")),
    "begins with <s> without a template": lambda: byte_level(template=None, post_processor=around("<s>", "$A")),
    "characters": characters,
    "characters and words": lambda: characters(more=("\u00e9", "\u6f22"), split=r"[\s\S]"),
    "added tokens": lambda: added("<think>", "</think>", "two words", "\u00e9t\u00e9", normalized=False),
    "special tokens of other letters": lambda: added("<\uff5cuser\uff5c>", "<a b>", special=True, normalized=False),
    "no <s>, and a template that asks": lambda: byte_level(template=WITH_BOS, bos_token=None),
    "a template that asks for other tokens": lambda: byte_level(template="{{ pad_token }}{{ unk_token }}\n" + CHATML),
    "templates by name": lambda: byte_level(template={"default": CHATML, "tool_use": "T" + CHATML, "rag_2": CHATML}),
    "a template that refuses systems": lambda: byte_level(
        template="{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + CHATML
    ),
    "a template with generation marks": lambda: byte_level(template="{% generation %}a{% endgeneration %}" + CHATML),
    "no template": lambda: byte_level(template=None),
}
SAID: dict[str, tuple[Callable[[], Any], str]] = {
    "NFC": (lambda: byte_level("qwen2", normalizer=normalizers.NFC()), "do not apply the tokenizer's normalizer NFC"),
    "NFC in a sequence": (lambda: byte_level(normalizer=normalizers.Sequence([normalizers.NFC()])), "normalizer NFC"),
    "unknown characters": (characters, "characters that the tokenizer does not know becomes '<unk>'"),
    "lstrip": (lambda: added(AddedToken("<mask>", lstrip=True)), "The token '<mask>' has lstrip, which readers"),
    "single word": (lambda: added("zyx", single_word=True, normalized=False), "'zyx' has single_word, which"),
    "no default template": (lambda: byte_level(template={"a": CHATML, "b": CHATML}), "(a, b) is named default"),
    "ends with </s>": (
        lambda: byte_level(post_processor=around("$A", "</s>"), eos_token="</s>"),
        "does not end a prompt with '</s>'",
    ),
    "conversations without <s>": (
        lambda: byte_level(post_processor=around("<s>", "$A")),
        "does not begin a text with '<s>' as the tokenizer does, because conversations",
    ),
}
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "lower case": (lambda: byte_level(normalizer=normalizers.Lowercase()), "bytes by words, normalizer Lowercase)"),
    "NFKC": (lambda: byte_level(normalizer=normalizers.NFKC()), "normalizer NFKC"),
    "NFC and more": (
        lambda: byte_level(normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Replace("a", "b")])),
        "normalizer Replace",
    ),
    "accents taken off": (lambda: byte_level(normalizer=normalizers.StripAccents()), "normalizer StripAccents"),
    "a space before": (lambda: byte_level(pre_tokenizer=pre_tokenizers.ByteLevel()), '"add_prefix_space": true'),
    "a space before each text": (lambda: byte_level(normalizer=normalizers.Prepend("\u2581")), "normalizer Prepend"),
    "a split of its own": (
        lambda: byte_level(pre_tokenizer=joined(pre_tokenizers.Split(Regex(r"\d{2}"), "isolated"), BYTES)),
        r"(type BPE, \d{2}, bytes)",
    ),
    "an inverted split": (
        lambda: byte_level(
            pre_tokenizer=joined(pre_tokenizers.Split(Regex(SPLITS["qwen2"][0]), "isolated", True), BYTES)
        ),
        '"invert": true',
    ),
    "digits by runs": (
        lambda: byte_level(pre_tokenizer=joined(pre_tokenizers.Digits(individual_digits=False), splitter("gpt-2"))),
        '"individual_digits": false',
    ),
    "merges ignored, with tokens that no merge makes": (
        lambda: bpe("qwen2", "\u0120qxz", ignore_merges=True),
        "' qxz'; its ignore_merges has no form in GGUF for this split; leave GGUF out",
    ),
    "byte fallback": (lambda: bpe(byte_fallback=True), "bytes by words, byte_fallback)"),
    "dropout": (lambda: bpe(dropout=0.1), "bytes by words, dropout)"),
    "a prefix of subwords": (lambda: bpe(continuing_subword_prefix="", dropout=0.5), "dropout"),
    "Unigram": (unigram, "(type Unigram, without a split)"),
    "an end that takes the line's end": (
        lambda: added(AddedToken("<|im_end|>", rstrip=True, special=True)),
        "other tokens or another text of '<|im_start|>user",
    ),
    "a token twice": (lambda: added(AddedToken("[PAD419]")), "the token '[PAD419]' 2 times"),
    "other tokens around": (
        lambda: byte_level(post_processor=around("<|end_a|>", "$A", "<|end_b|>")),
        "puts '<|end_a|>', '<|end_b|>' around a text",
    ),
    "a template's odd name": (
        lambda: byte_level(template={"default": "a", "a-b": "b"}),
        "named 'a-b', and names in GGUF are",
    ),
    "no end": (lambda: byte_level(eos_token=None), "names no end token, and llama.cpp takes the token 11"),
    "words that are put together with spaces": (lambda: characters(decoders.WordPiece()), "or another text of"),
    "words inside of words": (
        lambda: characters(more=("ab", "c d"), split=r"\w+|[\s\S]"),
        "which GGUF has no form for",
    ),
    "the id of no row": (lambda: added(*(f"<{n}>" for n in range(200))), "and the policy 420 rows"),
}
"""Tokenizers by what `finish` does: written, written with a sentence, refused with a sentence."""
CUT_BY_TRANSFORMERS = {"added tokens", "special tokens of other letters"}
"""Its reader cuts added tokens with spaces, and special ones with other letters than the byte-level alphabet's."""
WRITTEN = {**ALIKE, **{name: make for name, (make, _) in SAID.items()}}


class Finished(NamedTuple):
    """The folder that `finish` made of a run whose policy has one of these tokenizers."""

    tokenizer: Any
    file: Path
    said: str
    card: str


def finish(make: Callable[[], Any], folder: Path, ends: Sequence[int] = ()) -> Finished:
    tokenizer, run = make(), make_run(folder / "made", names=["reward"])
    changes = {"vocab_size": NUM_ROWS, "bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": True}
    random_policy(**changes).save_pretrained(run / "policy")
    tokenizer.save_pretrained(run / "policy")
    (run / "policy" / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [tokenizer.eos_token_id, *ends]})
    )
    with contextlib.redirect_stdout(io.StringIO()) as said:
        main([str(run), "--gguf", "f32"])
    made = run / "finished"
    return Finished(tokenizer, made / "made-f32.gguf", said.getvalue(), (made / "README.md").read_text())


@pytest.mark.parametrize("name", ALIKE)
def test_texts_are_split_alike(name: str) -> None:
    tokenizer = ALIKE[name]()
    found = describe(tokenizer, NUM_ROWS)
    told = [sentence for sentence in found.left_out if "does not know" not in sentence]
    assert told == [] and len(found.tokens) == NUM_ROWS
    compared = comparable(plain(tokenizer), [*conversations_of(tokenizer), *texts_of(tokenizer)])
    assert len(compared) >= 8
    reader = as_llama_cpp(found)
    assert [reader.encode(text).ids for text, _ in compared] == [ids for _, ids in compared]


@pytest.mark.parametrize("name", SAID)
def test_what_few_texts_need_is_said(name: str) -> None:
    make, said = SAID[name]
    assert any(said in sentence for sentence in describe(make(), NUM_ROWS).left_out)


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_reader_would_do_in_another_way_is_refused(name: str) -> None:
    make, said = REFUSED[name]
    with pytest.raises(ValueError) as caught:
        describe(make(), NUM_ROWS)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_merges_and_tokens_decide_which_name_a_split_has() -> None:
    assert describe(bpe("llama-bpe", "\u0120qxz", ignore_merges=True), NUM_ROWS).pre == "llama-bpe"
    assert describe(bpe("llama-bpe", "\u0120qxz"), NUM_ROWS).pre == "smaug-bpe"
    assert describe(bpe("llama-bpe"), NUM_ROWS).pre == "llama-bpe"


def test_three_end_tokens_have_places_and_a_fourth_is_told() -> None:
    found = describe(byte_level(), NUM_ROWS, [6, 4, 2])
    assert [found.ids[kind] for kind in ("eos", "eot", "eom")] == [4, 6, 2] and found.left_out == ()
    found = describe(byte_level(), NUM_ROWS, [4, 6, 2, 7])
    (told,) = found.left_out
    assert told.startswith("The policy ends a completion at '<|end_b|>' too, and GGUF has places for 3 end tokens only")


@pytest.mark.parametrize("name", table_rows(WRITTEN, ["templates by name", "conversations without <s>"]))
def test_finish_tells_what_readers_do_in_another_way(name: str, tmp_path: Path) -> None:
    tokenizer, file, said, card = finish(WRITTEN[name], tmp_path, ends=[6, 2, 7])
    told = describe(tokenizer, NUM_ROWS, [6, 2, 7]).left_out
    assert told and all(f"\n  {sentence}" in said and f"\n- GGUF: {markdown(sentence)}" in card for sentence in told)
    theirs = load_tokenizer(str(file))
    assert conversations_of(theirs) == conversations_of(tokenizer)
    assert ("llama-cli" in card) == bool(conversations_of(tokenizer))
    texts = [row["prompt"] + row["completion"] for row in map(json.loads, (tmp_path / "made" / "samples.jsonl").open())]
    compared = comparable(plain(tokenizer), [*dict.fromkeys(texts), *conversations_of(tokenizer), *texts_of(tokenizer)])
    apart = [text for text, ids in compared if theirs(text, add_special_tokens=False)["input_ids"] != ids]
    assert bool(apart) == (name in CUT_BY_TRANSFORMERS)
    assert ("transformers' reader splits" in card) == ("transformers' reader splits" in said) == bool(apart)


def test_all_templates_are_in_the_file(tmp_path: Path) -> None:
    file = finish(ALIKE["templates by name"], tmp_path).file
    fields = gguf.GGUFReader(file).fields
    assert {key: fields[key].contents() for key in fields if "chat_template" in key} == {
        "tokenizer.chat_template": CHATML,
        "tokenizer.chat_template.tool_use": "T" + CHATML,
        "tokenizer.chat_template.rag_2": CHATML,
        "tokenizer.chat_templates": ["rag_2", "tool_use"],
    }


def random_texts(number: int) -> list[str]:
    """Texts of letters, digits, marks and signs of many scripts, and of the characters that splits look at."""
    drawn = random.Random(0)
    blocks = [(0x20, 0x7F), (0x20, 0x7F), (0x09, 0x0E), (0x80, 0x250), (0x300, 0x530), (0x590, 0x700), (0x900, 0x980)]
    blocks += [(0xE00, 0xE80), (0x2000, 0x2190), (0x2460, 0x2500), (0x3000, 0x3100), (0x4E00, 0x4F00), (0xAC00, 0xAD00)]
    blocks += [(0xFF00, 0xFFEF), (0x1D7C0, 0x1D800), (0x1F600, 0x1F650)]
    texts = ["".join(chr(drawn.randrange(*drawn.choice(blocks))) for _ in range(20)) for _ in range(number // 2)]
    return texts + ["".join(drawn.choices(" \n\t\r'sStT1239aA.,", k=20)) for _ in range(number // 2)]


@pytest.mark.nightly
@pytest.mark.skipif(llama_cpp.python() is None, reason=llama_cpp.MISSING)
@pytest.mark.parametrize("name", WRITTEN)
def test_llama_cpp_itself_splits_renders_and_ends_alike(name: str, tmp_path: Path) -> None:
    tokenizer, path, _, _ = finish(WRITTEN[name], tmp_path, ends=[6, 2])
    found = describe(tokenizer, NUM_ROWS, [6, 2])
    compared = comparable(plain(tokenizer), [*conversations_of(tokenizer), *texts_of(tokenizer), *random_texts(400)])
    known = dict(compared)
    conversations = [(each, text) for each in CONVERSATIONS if (text := rendered(each, tokenizer)) in known]

    def split(text: str, **options: bool) -> tuple[str, dict[str, Any]]:
        return "/tokenize", {"content": text, "parse_special": True, **options}

    answers = llama_cpp.ask(
        path,
        [
            split("a", add_special=True),
            *(split(text, add_special=False) for text in known),
            *(("/apply-template", {"messages": messages}) for messages, _ in conversations),
            *(
                ("/completion", {"prompt": "a", "n_predict": 3, "logit_bias": [[found.ids[kind], 1e9]]})
                for kind in ("eos", "eot", "eom")
                if kind in found.ids
            ),
        ],
    )
    begun, read, rest = answers[0], answers[1 : len(known) + 1], answers[len(known) + 1 :]
    begin = [found.ids["bos"]] if found.adds["bos"] else []
    assert begun["tokens"] == [*begin, *tokenizer("a", add_special_tokens=False).input_ids]
    for (text, ids), answer in zip(known.items(), read, strict=True):
        assert answer["tokens"] == ids, text
    prompts, ends = rest[: len(conversations)], rest[len(conversations) :]
    assert {end["stop_type"] for end in ends} == {"eos"}
    assert conversations or not found.has_chat or "characters" in name
    prompts = llama_cpp.ask(path, [split(prompt["prompt"], add_special=True) for prompt in prompts])
    assert [prompt["tokens"] for prompt in prompts] == [known[text] for _, text in conversations]


def rendered(messages: list[dict[str, Any]], tokenizer: Any) -> str | None:
    """Return a conversation in a tokenizer's chat template; None if it refuses."""
    try:
        return render_chat(messages, tokenizer, {})
    except (UnusableRow, ValueError):
        return None


@pytest.mark.nightly
@pytest.mark.skipif(llama_cpp.python() is None, reason=llama_cpp.MISSING)
def test_llama_cpp_does_not_load_what_is_refused_for_its_sake(tmp_path: Path) -> None:
    path = finish(byte_level, tmp_path).file
    assert llama_cpp.ask(path, [("/tokenize", {"content": "a"})])
    write_gguf(path.parent, path, "f32", "not phi-3 at all")
    with pytest.raises(ValueError, match="Failed to init server"):
        llama_cpp.ask(path, [("/tokenize", {"content": "a"})])
