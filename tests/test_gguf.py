"""Policies in GGUF files: the weights that they hold, a model like any other, and files that cannot be a policy."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import random_policy, save_tokenizer

from lit_grpo.policy.gguf import gguf_file
from lit_grpo.policy.loading import files_note, load_config, load_policy, load_tokenizer
from lit_grpo.policy.saving import export
from lit_grpo.policy.spec import TOKENIZER, PolicySpec

gguf = pytest.importorskip("gguf", reason="gguf is not installed (the extra smollm2)")
from tiny_gguf import TEMPLATE, write_gguf  # noqa: E402  # needs gguf


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy of Q8_0."""
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    write_gguf(path)
    return path


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_0", "Q5_1"])
def test_the_weights_are_those_that_the_file_holds(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    written, told = write_gguf(path, kind), gguf.GGMLQuantizationType[kind]
    loaded = load_policy(str(path)).state_dict()
    assert loaded.keys() == written.state_dict().keys()
    for name, weight in written.state_dict().items():
        matrix = weight.numpy()
        if weight.ndim == 2:  # a row of a matrix is rounded by itself, in whatever order rows are
            matrix = gguf.dequantize(gguf.quantize(matrix, told), told)
        torch.testing.assert_close(loaded[name], torch.from_numpy(matrix), rtol=0, atol=0)


def test_a_model_of_a_gguf_file_is_one_like_any_other(file: Path, tmp_path: Path) -> None:
    model: Any = load_policy(str(file))
    told = model.config.to_dict()
    assert "quantization_config" not in told and "_model_name_or_path" not in told
    assert not {"hf_quantizer", "quantization_method", "is_quantized"} & vars(model).keys()
    model.save_pretrained(tmp_path / "saved")
    again = load_policy(str(tmp_path / "saved")).state_dict()
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, again[name]), name
    compared = export(model, load_tokenizer(model.name_or_path), tmp_path / "exported")
    assert compared is not None and compared.gap == 0.0


def test_an_engine_gets_a_skeleton_of_a_model_that_is_not_quantized(file: Path, tmp_path: Path) -> None:
    PolicySpec(load_policy(str(file)), load_tokenizer(str(file))).save_skeleton(tmp_path)
    config = (tmp_path / "config.json").read_text()
    assert "quantization" not in config and "gguf" not in config and "Random" not in config
    assert json.loads(config)["dtype"] == "float32"
    assert load_tokenizer(str(tmp_path / TOKENIZER)).chat_template == TEMPLATE


def test_the_tokenizer_and_its_chat_template_come_with_the_file(file: Path) -> None:
    tokenizer = load_tokenizer(str(file))
    assert tokenizer.eos_token == "<eos>" and tokenizer.pad_token == "<pad>"
    ids = tokenizer("12+3 = a<eos>")["input_ids"]
    assert len(ids) == 8 and tokenizer.decode(ids, skip_special_tokens=True) == "12+3 = a"
    said = tokenizer.apply_chat_template([{"role": "user", "content": "12"}], tokenize=False)
    assert said == "=12"
    assert load_tokenizer((load_policy(str(file)), None)).get_vocab() == tokenizer.get_vocab()


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (
            "Q4_0",
            "small.gguf holds weights of 4.7 bits on average (Q4_0); they are read as bfloat16, so the run begins ",
        ),
        (
            "Q8_0",
            "small.gguf holds weights of 8.7 bits on average (Q8_0); they are read as bfloat16, so the run begins ",
        ),
        ("F16", ""),
    ],
)
def test_what_rounding_has_done_is_told_where_weights_were_rounded(kind: str, told: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "small.gguf", kind)
    note = files_note(str(tmp_path / "small.gguf"), "bfloat16")
    assert note == (f"{told}with the rounded model" if told else "")
    assert files_note("tiny", "float32") == ""


def test_adapters_on_a_gguf_file_find_it_again(file: Path, tmp_path: Path) -> None:
    from peft import LoraConfig

    model: Any = load_policy(str(file))
    model.add_adapter(LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    model.save_pretrained(tmp_path)
    again = load_policy(str(tmp_path)).state_dict()
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, again[name]), name
    assert load_tokenizer(str(tmp_path)).eos_token == "<eos>"
    assert files_note(str(tmp_path), "float32").startswith("small.gguf holds weights of 8.7 bits")


def test_a_folder_with_one_gguf_file_means_the_file(file: Path, tmp_path: Path) -> None:
    shutil.copy(file, tmp_path / "a.gguf")
    assert load_policy(str(tmp_path)).name_or_path == str(tmp_path / "a.gguf")
    shutil.copy(file, tmp_path / "b.gguf")
    with pytest.raises(ValueError, match=r"has 2 GGUF files; give the path of one, such as .*a\.gguf"):
        load_policy(str(tmp_path))
    random_policy().save_pretrained(tmp_path)  # pyright: ignore[reportCallIssue]
    save_tokenizer(tmp_path)
    assert gguf_file(str(tmp_path)) is None and type(load_policy(str(tmp_path))).__name__ == "Qwen3ForCausalLM"


def sentence(path: Path) -> str:
    """What is said of a file, whichever part of the policy is asked for first."""
    said = set[str]()
    for load in (load_tokenizer, load_config, load_policy):
        with pytest.raises(ValueError) as caught:
            load(str(path))
        said.add(str(caught.value))
    (same,) = said
    assert "\n" not in same and same.endswith(".")
    return same


@pytest.mark.parametrize("length", [0, 3, 20, 100, 900, -1])
def test_a_file_that_was_cut_off_is_called_damaged(length: int, file: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(file.read_bytes()[:length])
    assert f"The GGUF file {str(path)!r} is damaged (" in sentence(path) and "download it again" in sentence(path)


def test_a_file_of_something_else_is_called_so(tmp_path: Path) -> None:
    path = tmp_path / "else.gguf"
    assert "There is no GGUF file" in sentence(path)
    path.write_bytes(b"PK\x03\x04" * 100)
    assert "is damaged (it does not begin with GGUF)" in sentence(path)
    path.write_bytes(b"GGUF\x01\x00\x00\x00" + bytes(100))
    assert "is damaged (it is of version 1 of the format, and 2 and 3 are known)" in sentence(path)


def test_parts_of_a_split_file_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "part.gguf", parts=3)
    assert "is one of 3 parts; join them" in sentence(tmp_path / "part.gguf")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"architecture": "mamba99"}, "holds no model that transformers can use: "),
        ({"layers": 10**9}, "names 1000000000 layers (block_count), but has 20 tensors in all"),
        ({"layers": 3}, "lack 9 of the model's weights, such as model.layers.2."),
        ({"kind": "I32"}, "holds no model that transformers can use: "),
    ],
)
def test_what_transformers_cannot_make_a_policy_of_is_refused(
    changes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    import re

    write_gguf(tmp_path / "odd.gguf", **changes)
    with pytest.raises(ValueError, match=told.replace("(", r"\(").replace(")", r"\)")) as caught:
        load_policy(str(tmp_path / "odd.gguf"))
    assert re.search(r"odd\.gguf", str(caught.value)) and "\n" not in str(caught.value)


def test_bytes_that_were_changed_end_in_a_sentence_or_in_a_model(file: Path, tmp_path: Path) -> None:
    whole, drawn = file.read_bytes(), random.Random(0)
    for number in range(40):
        damaged = bytearray(whole)
        for _ in range(3):
            damaged[drawn.randrange(2400)] ^= 1 << drawn.randrange(8)
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(damaged)
        for load in (load_tokenizer, load_policy):
            try:
                load(str(path))
            except ValueError as error:
                assert str(path) in str(error)


def test_four_bits_of_bitsandbytes_are_refused_on_a_gguf_file(file: Path) -> None:
    with pytest.raises(
        ValueError, match=r"lora.base is nf4, which the weights of the GGUF file .* leave lora.base out"
    ):
        load_policy(str(file), nf4=True)


def test_without_the_package_the_extra_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_grpo.policy.gguf.util.find_spec", lambda name: None)
    assert sentence(file).endswith("is a GGUF file, which needs gguf; install the extra lit_grpo[smollm2].")


def test_a_file_beside_another_tokenizer_keeps_its_own(file: Path, tmp_path: Path) -> None:
    shutil.copy(file, tmp_path / "a.gguf")
    random_policy().save_pretrained(tmp_path)  # pyright: ignore[reportCallIssue]
    save_tokenizer(tmp_path)
    tokenizer, alone = load_tokenizer(str(tmp_path / "a.gguf")), load_tokenizer(str(file))
    assert tokenizer.get_vocab() == alone.get_vocab() and tokenizer.eos_token == "<eos>"
    assert tokenizer.chat_template == TEMPLATE and tokenizer.name_or_path == str(tmp_path / "a.gguf")
    assert type(load_policy(str(tmp_path / "a.gguf"))).__name__ == "LlamaForCausalLM"


def test_the_size_of_a_head_is_read_where_transformers_passes_it_over(tmp_path: Path) -> None:
    """Of Qwen3, whose default is 128."""
    writer = gguf.GGUFWriter(str(tmp_path / "head.gguf"), "qwen3")
    writer.add_name("head")
    writer.add_block_count(1)
    writer.add_key_length(16)
    writer.add_token_list(["a"])
    writer.add_tensor("token_embd.weight", torch.zeros(1, 32).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert load_config(str(tmp_path / "head.gguf")).head_dim == 16
