"""A folder's own tokenizer: its tokenizer.json stands in every part that loads it, whatever the model's type is."""

from __future__ import annotations

import json
import shutil
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import table_rows
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers import PreTrainedTokenizerFast as Fast

from lit_grpo.policy.loading import load_policy, load_tokenizer
from lit_grpo.policy.saving import export
from lit_grpo.policy.spec import TOKENIZER, PolicySpec
from lit_grpo.policy.tokenizers import loading_class, save_tokenizer
from lit_grpo.rewards import RewardModel
from lit_grpo.update.logprobs.teacher import check_vocabulary

TEXT = "user: The Answer is 12 hello-world 3+4=75 one two's\nfoo  bar cafe\u0301"
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
TRAINED_ON = ["the answer is 12 hello world one two's foo bar 3+4=7 user: " * 3] * 5
CHARACTERS = list("\n .,:;=+-'0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ?")
TEMPLATE = "{% for message in messages %}{{ message.content }}<|im_end|>{% endfor %}"
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level(*steps: Any, normalizer: Any = None) -> Any:
    made: Any = Tokenizer(models.BPE())
    made.normalizer, made.decoder = normalizer, decoders.ByteLevel()
    made.pre_tokenizer = pre_tokenizers.Sequence([*steps])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(TRAINED_ON, trainer)
    return made


def unigram() -> Any:
    made: Any = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Metaspace(prepend_scheme="first")
    options: Any = {"unk_token": "<unk>", "special_tokens": SPECIAL, "initial_alphabet": CHARACTERS}
    made.train_from_iterator(TRAINED_ON, trainers.UnigramTrainer(vocab_size=120, show_progress=False, **options))
    return made


def prepended() -> Any:
    """Llama 2's kind."""
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *CHARACTERS[2:], "\u2581t", "\u2581th"]
    options: Any = {"byte_fallback": True, "unk_token": "<unk>", "fuse_unk": True}
    made: Any = Tokenizer(
        models.BPE({piece: row for row, piece in enumerate(pieces)}, [("\u2581", "t"), ("\u2581t", "h")], **options)
    )
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens(SPECIAL)
    return made


def of_characters() -> Any:
    vocabulary = {token: row for row, token in enumerate([*SPECIAL, *CHARACTERS])}
    made: Any = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated"), decoders.Fuse()
    made.add_special_tokens(SPECIAL)
    return made


BY_WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
TOKENIZERS = {
    "bytes": lambda: byte_level(BY_WORDS),
    "bytes after a space": lambda: byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "bytes by digits": lambda: byte_level(pre_tokenizers.Digits(individual_digits=True), BY_WORDS),
    "bytes in lower case": lambda: byte_level(BY_WORDS, normalizer=normalizers.Lowercase()),
    "bytes as qwen2": lambda: byte_level(
        pre_tokenizers.Split(Regex(QWEN2), "isolated"), BYTES, normalizer=normalizers.NFC()
    ),
    "unigram": unigram,
    "prepended": prepended,
    "characters": of_characters,
}
MODELS = (
    *("llama", "qwen2", "qwen3", "qwen3_5_text", "qwen3_5", "gemma", "gemma3_text", "phi", "gpt2", "gpt_neox"),
    *("mistral", "olmo", "cohere", "mamba2", "opt", "starcoder2", "bart", "xglm", "mbart", "pegasus", "ctrl"),
)
CLASSES = ("PreTrainedTokenizerFast", "", "LlamaTokenizer", "GPT2Tokenizer", "Qwen2Tokenizer")
QUICK = [
    *("bytes-qwen2-PreTrainedTokenizerFast", "unigram-qwen2-PreTrainedTokenizerFast", "unigram-gemma-"),
    *("prepended-qwen3_5-PreTrainedTokenizerFast", "characters-gpt2-", "bytes as qwen2-qwen2-Qwen2Tokenizer"),
    *("bytes-llama-PreTrainedTokenizerFast", "unigram-pegasus-", "unigram-mbart-", "bytes in lower case-phi-"),
]


@cache
def description(kind: str) -> str:
    """A tokenizer as its file describes it; one of Unigram comes out of each training in another order."""
    return TOKENIZERS[kind]().to_str()


def save(kind: str, folder: Path, model: str = "", named: str = "PreTrainedTokenizerFast") -> Any:
    """Save a tokenizer, with the ``config.json`` of a type of models; return it."""
    own = Fast(
        tokenizer_object=Tokenizer.from_str(description(kind)),
        bos_token="<s>",
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        unk_token="<unk>",
    )
    own.chat_template = TEMPLATE
    own.save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": named}
    (folder / "tokenizer_config.json").write_text(json.dumps({key: one for key, one in settings.items() if one}))
    if model:
        (folder / "config.json").write_text(json.dumps({"model_type": model}))
    return own


def with_weights(kind: str, model: str, folder: Path, auto: Any = AutoModelForCausalLM, **changes: Any) -> Any:
    own = save(kind, folder)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    ends = {"eos_token_id": own.eos_token_id, "pad_token_id": own.pad_token_id, "bos_token_id": None}
    config = AutoConfig.for_model(
        model, **sizes, **ends, vocab_size=len(own), num_key_value_heads=1, head_dim=8, **changes
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        auto.from_config(config).save_pretrained(folder)
    return own


def ids(tokenizer: Any, text: str = TEXT) -> list[int]:
    return tokenizer(text)["input_ids"]


TABLE = {
    f"{kind}-{model}-{named}": (kind, model, named) for kind in TOKENIZERS for model in MODELS for named in CLASSES
}


@pytest.mark.filterwarnings("ignore:The tokenizer.json of")
@pytest.mark.parametrize("row", table_rows(TABLE, QUICK))
def test_the_tokens_are_those_of_the_file(row: str, tmp_path: Path) -> None:
    kind, model, named = TABLE[row]
    own = save(kind, tmp_path, model, named)
    loaded: Any = load_tokenizer(str(tmp_path))
    assert ids(loaded) == ids(own) and loaded.get_vocab() == own.get_vocab()
    assert loaded.decode(ids(own)) == own.decode(ids(own))
    assert loaded.special_tokens_map.items() >= own.special_tokens_map.items() and loaded.chat_template == TEMPLATE
    (tmp_path / "saved").mkdir()
    save_tokenizer(loaded, tmp_path / "saved")
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "saved" / file).read_bytes() == (tmp_path / file).read_bytes()


@pytest.mark.parametrize(
    ("kind", "model", "is_replaced"),
    [
        ("bytes", "qwen2", True),
        ("unigram", "qwen3_5", True),
        ("characters", "qwen2", True),
        ("bytes as qwen2", "qwen2", False),
        ("unigram", "qwen3", False),
        ("bytes", "llama", False),
    ],
)
def test_one_sentence_says_that_transformers_would_split_texts_in_another_way(
    kind: str, model: str, is_replaced: bool, tmp_path: Path
) -> None:
    own = save(kind, tmp_path, model)
    assert (ids(AutoTokenizer.from_pretrained(tmp_path)) != ids(own)) is is_replaced
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        load_tokenizer(str(tmp_path))
    sentences = [str(one.message) for one in said]
    assert len(sentences) == is_replaced
    if is_replaced:
        assert str(tmp_path) in sentences[0] and "tokenizer.json is used" in sentences[0]
        assert "PreTrainedTokenizerFast" in sentences[0]
    assert loading_class(str(tmp_path)) == ("PreTrainedTokenizerFast" if is_replaced else "AutoTokenizer")


def test_special_tokens_that_only_the_class_knows_are_taken_from_it(tmp_path: Path) -> None:
    """GPT-2's own folder names no end token; its class does. A token that the file lacks is not added."""
    save("bytes", tmp_path, "gpt2")
    settings = {"tokenizer_class": "GPT2Tokenizer"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="names no eos_token"), pytest.warns(UserWarning, match="tokenizer.json"):
        load_tokenizer(str(tmp_path))
    made: Any = byte_level(BY_WORDS)
    made.add_special_tokens(["<|endoftext|>"])
    made.save(str(tmp_path / "tokenizer.json"))
    loaded: Any = load_tokenizer(str(tmp_path))
    assert loaded.eos_token == "<|endoftext|>" and len(loaded) == made.get_vocab_size()


def test_a_damaged_file_is_refused_in_one_sentence(tmp_path: Path) -> None:
    save("bytes", tmp_path, "qwen2")
    whole = (tmp_path / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(whole[:-100])
    with pytest.raises(ValueError, match=r"The policy folder '.*' holds no usable tokenizer: "):
        load_tokenizer(str(tmp_path))
    broken = json.loads(whole)
    broken["model"]["type"] = "Mine"
    (tmp_path / "tokenizer.json").write_text(json.dumps(broken))
    with pytest.raises(ValueError, match=r"holds no usable tokenizer: its tokenizer.json is damaged"):
        load_tokenizer(str(tmp_path))


def test_a_reward_model_reads_what_its_file_says(tmp_path: Path) -> None:
    own = with_weights("bytes", "qwen2", tmp_path, AutoModelForSequenceClassification, num_labels=1)
    with pytest.warns(UserWarning, match=r"The tokenizer.json of .* is used"):
        scorer = RewardModel(str(tmp_path))
    model: Any = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    text = own.apply_chat_template(
        [{"role": "user", "content": TEXT}, {"role": "assistant", "content": "12"}], tokenize=False
    )
    tokens = torch.tensor([own(text, add_special_tokens=False)["input_ids"]])
    with torch.no_grad():
        expected = float(model(input_ids=tokens).logits)
    assert scorer([TEXT], ["12"]) == pytest.approx([expected], abs=1e-5)


@pytest.mark.filterwarnings("ignore:The tokenizer.json of")
def test_a_teacher_of_a_kind_that_replaces_tokenizers_has_the_policys_vocabulary(tmp_path: Path) -> None:
    save("unigram", tmp_path / "policy", "llama")
    save("unigram", tmp_path / "teacher", "gemma", "")
    check_vocabulary("teacher", load_tokenizer(str(tmp_path / "policy")), load_tokenizer(str(tmp_path / "teacher")))


@pytest.mark.filterwarnings("ignore:The tokenizer.json of")
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_an_engine_and_an_export_get_the_files_tokenizer(kind: str, tmp_path: Path) -> None:
    own = with_weights(kind, "qwen2", tmp_path / "policy")
    policy, tokenizer = load_policy(str(tmp_path / "policy")), load_tokenizer(str(tmp_path / "policy"))
    PolicySpec(policy, tokenizer).save_skeleton(tmp_path / "skeleton")
    assert ids(AutoTokenizer.from_pretrained(tmp_path / "skeleton" / TOKENIZER)) == ids(own)  # as vLLM loads it
    export(policy, tokenizer, tmp_path / "exported")
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "exported" / file).read_bytes() == (tmp_path / "policy" / file).read_bytes()
    assert ids(load_tokenizer(str(tmp_path / "exported"))) == ids(own)


@pytest.mark.filterwarnings("ignore:The tokenizer.json of")
def test_a_tokenizer_that_was_changed_or_whose_files_are_gone_is_written(tmp_path: Path) -> None:
    save("bytes", tmp_path / "policy", "qwen2")
    changed, kept = (load_tokenizer(str(tmp_path / "policy")) for _ in range(2))
    changed.add_tokens(["<new>"])
    for number, tokenizer in enumerate((changed, kept)):
        (tmp_path / str(number)).mkdir()
        shutil.rmtree(tmp_path / "policy") if number else None
        save_tokenizer(tokenizer, tmp_path / str(number))
    again: Any = Fast.from_pretrained(tmp_path / "0")
    assert again.tokenize("<new>") == ["<new>"] and ids(again) == ids(changed)
    assert ids(Fast.from_pretrained(tmp_path / "1")) == ids(kept)


@pytest.mark.filterwarnings("ignore:The tokenizer.json of")
@pytest.mark.parametrize("kind", ["bytes", "bytes by digits", "bytes as qwen2"])
def test_a_gguf_file_of_qwen2_names_the_split_of_the_file(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="gguf is not installed (the extra smollm2)")
    from lit_grpo.tools.finishing.comparison import PolicyLogprobs
    from lit_grpo.tools.finishing.gguf_writer import write_gguf

    own = with_weights(kind, "qwen2", tmp_path / "policy")
    write_gguf(tmp_path / "policy", tmp_path / "model.gguf", "f32", "a model")
    text = TEXT[:-5]  # llama.cpp composes no characters
    assert ids(load_tokenizer(str(tmp_path / "model.gguf")), text) == own(text)["input_ids"]
    assert PolicyLogprobs(tmp_path / "policy", [text]).cost(tmp_path / "model.gguf", "f32").num_apart == 0
