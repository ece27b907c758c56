"""GGUF files of policies: opened again by transformers they are the policy, and their tokenizers split text alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
import torch
from conftest import save_policy, table_rows
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from lit_grpo.policy.loading import load_policy, load_tokenizer
from lit_grpo.policy.saving import export
from lit_grpo.tools.finishing.families import FAMILIES, find_family, in_pairs

gguf = pytest.importorskip("gguf", reason="gguf is not installed (the extra smollm2)")
from lit_grpo.tools.finishing.comparison import PolicyLogprobs  # noqa: E402  # needs gguf
from lit_grpo.tools.finishing.gguf_writer import KINDS, planned_bytes, write_adapter, write_gguf  # noqa: E402
from lit_grpo.tools.finishing.vocabulary import SPLITS, splitter  # noqa: E402

TEXTS = [
    "The 1234 numbers 12.5 + 0x1f, don't split THEM'LL  twice\n\n\tor so  ",
    "naïve café “quotes” … Straße, ελληνικά, русский, 漢字かな, 🙂👩‍👩‍👧, \u200b\u00a0x\r\n",
    "<|im_start|>user\nhi<|im_end|>\n<think>\nhm</think> <not_a_token> <|im_start",
    "def f(x):\n    return x**2  # ¼ ½ ²³\n" * 2,
    "   ",
    "a",
]
SIZES: dict[str, Any] = {
    "vocab_size": 416,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}
CHANGES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "mistral": {"tie_word_embeddings": False, "sliding_window": None},
    "qwen2": {"tie_word_embeddings": True, "head_dim": 16},
    "qwen3": {"tie_word_embeddings": False},
}


def byte_level(pre: str, **special: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with some merges that splits text as llama.cpp's ``pre`` does."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = splitter(pre)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **({"eos_token": "<|endoftext|>"} | special))


def made(
    kind: str, folder: Path, pre: str = "qwen2", chat_template: str = "{{ messages[0]['content'] }}", **changes: Any
) -> Path:
    """Save a random model whose vectors are not those of a new one, with a byte-level tokenizer."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, **{**SIZES, **CHANGES[kind], **changes})
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.data.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    byte_level(pre, chat_template=chat_template).save_pretrained(folder)
    return folder


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(2, 90)[None]).logits.log_softmax(-1)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_file_of_float32_is_the_policy(kind: str, tmp_path: Path) -> None:
    folder, path = made(kind, tmp_path / "policy"), tmp_path / "model.gguf"
    write_gguf(folder, path, "f32", "a model", "mit")
    policy, again = load_policy(str(folder)), load_policy(str(path))
    assert policy.state_dict().keys() == again.state_dict().keys()
    for name, weight in policy.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name
    torch.testing.assert_close(logits(policy), logits(again), rtol=0, atol=1e-5)
    cost = PolicyLogprobs(folder, TEXTS).cost(path, "f32")
    assert cost.most <= 1e-5 and cost.num_apart == 0 and cost.num_texts > len(TEXTS)


def test_transformers_own_reader_opens_the_file(tmp_path: Path) -> None:
    write_gguf(made("llama", tmp_path / "policy"), tmp_path / "model.gguf", "f32", "a model")
    again = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    torch.testing.assert_close(logits(load_policy(str(tmp_path / "policy"))), logits(again), rtol=0, atol=1e-5)
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    assert tokenizer.eos_token == "<|endoftext|>" and tokenizer.bos_token is None


def test_scaled_frequencies_of_llama_3_are_kept(tmp_path: Path) -> None:
    """transformers' reader passes over them, so ours gives them to it as factors of another kind."""
    scaled = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0}
    scaled |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    folder, path = made("llama", tmp_path / "policy", "llama-bpe", rope_parameters=scaled), tmp_path / "model.gguf"
    write_gguf(folder, path, "f32", "a model")
    policy, again = load_policy(str(folder)), load_policy(str(path))
    torch.testing.assert_close(logits(policy), logits(again), rtol=0, atol=1e-4)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    assert (logits(policy) - logits(plain)).abs().max() > 0.1
    again.save_pretrained(tmp_path / "again")
    load_tokenizer(str(folder)).save_pretrained(tmp_path / "again")
    write_gguf(tmp_path / "again", tmp_path / "again.gguf", "f32", "a model")
    torch.testing.assert_close(logits(again), logits(load_policy(str(tmp_path / "again.gguf"))), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0"])
def test_other_kinds_hold_the_rounded_weights(kind: str, tmp_path: Path) -> None:
    folder, path = made("qwen3", tmp_path / "policy"), tmp_path / "model.gguf"
    write_gguf(folder, path, kind, "a model")
    again = load_policy(str(path)).state_dict()
    for name, weight in load_policy(str(folder)).state_dict().items():
        stored = weight.numpy()
        if weight.ndim == 2:
            stored = gguf.dequantize(gguf.quantize(stored, KINDS[kind][0]), KINDS[kind][0])
        torch.testing.assert_close(again[name], torch.from_numpy(stored), rtol=0, atol=0)
    cost = PolicyLogprobs(folder, TEXTS).cost(path, kind)
    assert 0 < cost.mean < 0.1 and cost.mean < cost.most and cost.num_tokens > 100


def test_a_matrix_whose_rows_no_block_fills_is_kept_in_16_bits(tmp_path: Path) -> None:
    folder, path = made("qwen3", tmp_path / "policy", intermediate_size=80), tmp_path / "model.gguf"
    write_gguf(folder, path, "q8_0", "a model")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}
    assert kinds["blk.0.ffn_down.weight"] == "F16" and kinds["blk.0.ffn_up.weight"] == "Q8_0"
    assert kinds["blk.0.attn_norm.weight"] == "F32" and kinds["token_embd.weight"] == "Q8_0"


@pytest.mark.parametrize("kind", KINDS)
def test_the_planned_size_is_that_of_the_file(kind: str, tmp_path: Path) -> None:
    folder, path = made("llama", tmp_path / "policy"), tmp_path / "model.gguf"
    write_gguf(folder, path, kind, "a model")
    policy = load_policy(str(folder))
    shapes = {name: tuple(weight.shape) for name, weight in policy.named_parameters()}
    planned = planned_bytes(policy.config, shapes, load_tokenizer(str(folder)), kind)
    assert abs(planned - path.stat().st_size) < 20_000


def adapted(kind: str, place: Path, tied: bool = True, **settings: Any) -> Path:
    """Save a policy with a random LoRA adapter as an export does, and GGUF files of the base and of both together."""
    from peft import LoraConfig

    changes: dict[str, Any] = {} if tied else {"tie_word_embeddings": False}
    policy = load_policy(str(made(kind, place / "base", **changes)))
    tokenizer = load_tokenizer(str(place / "base"))
    wanted: dict[str, Any] = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    policy.add_adapter(LoraConfig(**wanted | settings))
    drawn = torch.Generator().manual_seed(1)
    for name, weight in policy.named_parameters():
        if ".lora_" in name:
            weight.data.normal_(0, 0.2, generator=drawn)
    export(policy, tokenizer, place / "policy")
    write_gguf(place / "base", place / "base.gguf", "f32", "base")
    write_gguf(place / "policy", place / "policy.gguf", "f32", "policy")
    return place / "policy"


PATTERNS = {
    "rank_pattern": {"k_proj": 2},
    "alpha_pattern": {r"0\.self_attn\.q_proj": 9, "up_proj": 3},
    "use_rslora": True,
}
ADAPTED = [(kind, settings) for kind in FAMILIES for settings in ({}, PATTERNS)]


@pytest.mark.parametrize(("kind", "settings"), table_rows(ADAPTED, [ADAPTED[1], ADAPTED[6]]))
def test_an_adapter_alone_is_what_training_added_to_the_base(kind: str, settings: dict, tmp_path: Path) -> None:
    """By the formula of llama.cpp: W + alpha / rank B A, where the rank is that of the layer's matrices."""
    write_adapter(adapted(kind, tmp_path, **settings), tmp_path / "adapter.gguf", "an adapter", "mit")
    files = {name: gguf.GGUFReader(tmp_path / f"{name}.gguf") for name in ("base", "policy", "adapter")}
    base, policy, adapter = ({one.name: one.data for one in file.tensors} for file in files.values())
    told = {name: field.contents() for name, field in files["adapter"].fields.items() if not name.startswith("GGUF")}
    assert told == {
        **{
            "general.architecture": FAMILIES[kind].architecture,
            "general.type": "adapter",
            "general.name": "an adapter",
        },
        **{"general.license": "mit", "adapter.type": "lora", "adapter.lora.alpha": 6.0},
    }
    assert len(adapter) == 2 * 7 * SIZES["num_hidden_layers"]
    for name, weight in base.items():
        a, b = adapter.get(f"{name}.lora_a"), adapter.get(f"{name}.lora_b")
        added = 0 if a is None else told["adapter.lora.alpha"] / len(a) * (b @ a)
        np.testing.assert_allclose(weight + added, policy[name], rtol=0, atol=1e-5, err_msg=name)
        assert a is None or np.abs(added).max() > 0.1


@pytest.mark.nightly
@pytest.mark.skipif(llama_cpp.python() is None, reason=llama_cpp.MISSING)
@pytest.mark.parametrize(("kind", "settings"), ADAPTED)
def test_llama_cpp_itself_adds_an_adapter_to_its_base(kind: str, settings: dict, tmp_path: Path) -> None:
    write_adapter(adapted(kind, tmp_path, **settings), tmp_path / "adapter.gguf", "an adapter")
    ids, num_rows = list(range(5, 21)), SIZES["vocab_size"]
    with torch.no_grad():
        policy: Any = load_policy(str(tmp_path / "policy")).eval()
        trained_TV = policy(torch.tensor(ids)[None]).logits[0].log_softmax(-1)
    merged_TV = torch.tensor(llama_cpp.logprobs(tmp_path / "policy.gguf", ids, num_rows))
    added_TV = torch.tensor(llama_cpp.logprobs(tmp_path / "base.gguf", ids, num_rows, tmp_path / "adapter.gguf"))
    base_TV = torch.tensor(llama_cpp.logprobs(tmp_path / "base.gguf", ids, num_rows))
    torch.testing.assert_close(added_TV, merged_TV, rtol=0, atol=1e-3)
    torch.testing.assert_close(added_TV, trained_TV, rtol=0, atol=1e-3)
    assert (added_TV - base_TV).abs().max() > 1


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_an_adapter_of_more_than_layers_is_left_out_with_a_sentence(target: str, tmp_path: Path) -> None:
    policy = adapted("llama", tmp_path, tied=False, target_modules=["q_proj", target])
    with pytest.raises(ValueError, match=rf"has no GGUF file, because it holds .*{target}.*; the other files have it"):
        write_adapter(policy, tmp_path / "adapter.gguf", "an adapter")
    assert not (tmp_path / "adapter.gguf").exists()


@pytest.mark.parametrize("pre", [pre for pre in SPLITS if pre != "smaug-bpe"])
def test_text_is_split_alike(pre: str, tmp_path: Path) -> None:
    kind = "qwen2" if pre == "qwen2" else "llama"  # AutoTokenizer makes a Qwen2Tokenizer of any
    folder, path = made(kind, tmp_path / "policy", pre), tmp_path / "model.gguf"
    write_gguf(folder, path, "q8_0", "a model")
    assert gguf.GGUFReader(path).get_field("tokenizer.ggml.pre").contents() == pre
    ours, theirs = load_tokenizer(str(folder)), load_tokenizer(str(path))
    for text in TEXTS:
        ids = ours(text, add_special_tokens=False)["input_ids"]
        assert theirs(text, add_special_tokens=False)["input_ids"] == ids
        assert theirs.decode(ids) == text
    assert theirs.convert_tokens_to_ids("<|im_end|>") == ours.convert_tokens_to_ids("<|im_end|>")
    assert len(theirs.get_vocab()) == SIZES["vocab_size"] > len(ours)  # rows without a token


def test_fields_of_the_tokenizer(tmp_path: Path) -> None:
    folder, path = made("qwen2", tmp_path / "policy"), tmp_path / "model.gguf"
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    write_gguf(folder, path, "f16", "a model", "apache-2.0")
    read = gguf.GGUFReader(path)

    def told(name: str) -> Any:
        field = read.get_field(name)
        return None if field is None else field.contents()

    assert (told("tokenizer.ggml.eos_token_id"), told("tokenizer.ggml.eot_token_id")) == (0, 2)
    assert told("tokenizer.ggml.bos_token_id") is None and told("tokenizer.ggml.add_bos_token") is False
    types = told("tokenizer.ggml.token_type")
    tokens = told("tokenizer.ggml.tokens")
    assert [types[tokens.index(token)] for token in ("<|im_end|>", "<think>", "a", "[PAD415]")] == [3, 4, 1, 5]
    assert told("general.license") == "apache-2.0" and told("general.file_type") == gguf.LlamaFileType.MOSTLY_F16
    assert told("qwen2.rope.freq_base") == 500.0 and told("qwen2.attention.key_length") == 16


def test_a_tokenizer_of_characters_is_written_too(tmp_path: Path) -> None:
    folder, path = tmp_path / "policy", tmp_path / "model.gguf"
    save_policy(folder)
    write_gguf(folder, path, "f32", "a model")
    ours, theirs = load_tokenizer(str(folder)), load_tokenizer(str(path))
    for text in ("12 + 3 = a<eos>", "a b  c#*<pad>?", " "):
        assert theirs(text)["input_ids"] == ours(text)["input_ids"]
    assert theirs.decode(theirs("12 + 3<eos>")["input_ids"], skip_special_tokens=True) == "12 + 3"
    assert torch.equal(logits_of(folder), logits_of(path))


def logits_of(path: Path) -> torch.Tensor:
    with torch.no_grad():
        return load_policy(str(path)).eval()(torch.arange(2, 30)[None]).logits


@pytest.mark.parametrize("name", ["tiny", "tiny_knights"])
def test_policies_of_the_package_are_written(name: str, tmp_path: Path) -> None:
    from lit_grpo.policy.named import NAMED

    path = tmp_path / "model.gguf"
    write_gguf(NAMED[name].folder, path, "f32", name)
    ours, theirs = load_tokenizer(name), load_tokenizer(str(path))
    words = [word for word, row in ours.get_vocab().items() if word != ours.unk_token]
    text = "".join(words * 2)
    assert theirs(text)["input_ids"] == ours(text)["input_ids"] == ours.convert_tokens_to_ids(words) * 2
    cost = PolicyLogprobs(NAMED[name].folder, [text]).cost(path, "f32")
    assert cost.most <= 1e-5 and cost.num_apart == 0


def test_rows_in_pairs_turn_as_halves_do() -> None:
    """llama.cpp turns numbers 2i and 2i + 1 of a head by angle i, transformers numbers i and i + head_dim / 2."""
    drawn = np.random.default_rng(0)
    weight, hidden, angles = drawn.normal(size=(2 * 6, 5)), drawn.normal(size=5), drawn.normal(size=3)

    def turned(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return x * np.cos(angles) - y * np.sin(angles), x * np.sin(angles) + y * np.cos(angles)

    halves = [np.concatenate(turned(head[:3], head[3:])) for head in (weight @ hidden).reshape(2, 6)]
    pairs = [np.stack(turned(head[::2], head[1::2])) for head in (in_pairs(weight, 2) @ hidden).reshape(2, 6)]
    np.testing.assert_allclose([pair.reshape(-1) for pair in pairs], halves, rtol=1e-12)


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("gemma2", {}, r"is of the family gemma2, which is not written as GGUF \(llama, mistral, qwen2, qwen3 are\)"),
        ("llama", {"attention_bias": True}, "has attention_bias True, which a GGUF file of the architecture llama"),
        ("mistral", {"sliding_window": 8}, "has sliding_window 8, which"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}, "rope_type linear"),
        ("llama", {"hidden_act": "gelu"}, "has hidden_act gelu, which"),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "has sliding_window 8"),
        ("qwen3", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "rope_type yarn"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type dynamic"),
    ],
)
def test_what_gguf_cannot_say_is_refused(kind: str, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        find_family(AutoConfig.for_model(kind, **{**SIZES, **CHANGES.get(kind, {}), **changes}))
    assert str(caught.value).endswith("leave GGUF out with --gguf none.")


def test_a_weight_without_a_place_is_named(tmp_path: Path) -> None:
    config = AutoConfig.for_model("qwen3", **SIZES)
    shapes = {"model.embed_tokens.weight": (416, 64), "model.layers.0.memory.weight": (4, 4)}
    with pytest.raises(ValueError, match=r"has the weight model\.layers\.0\.memory\.weight, which a GGUF file of the"):
        planned_bytes(config, shapes, byte_level("qwen2"), "f32")
