"""Policies in GGUF files: the weights that they hold, a model like any other, and files that cannot be a policy."""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import save_policy
from damaged_gguf import damages, fingerprint, parse

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


@pytest.mark.parametrize(("kind", "bits"), [("Q4_0", "4.7"), ("Q8_0", "8.7"), ("F16", None)])
def test_what_rounding_has_done_is_told_where_weights_were_rounded(kind: str, bits: Any, tmp_path: Path) -> None:
    write_gguf(tmp_path / "small.gguf", kind)
    path = str(tmp_path / "small.gguf")
    note = files_note(path, "bfloat16", load_policy(path))
    told = f"small.gguf holds weights of {bits} bits on average ({kind}); they are read as bfloat16, so the run begins "
    assert note == (f"{told}with the rounded model" if bits else "")
    assert files_note("tiny", "float32", load_policy("tiny")) == ""


def test_adapters_on_a_gguf_file_find_it_again(file: Path, tmp_path: Path) -> None:
    from peft import LoraConfig

    model: Any = load_policy(str(file))
    model.add_adapter(LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    model.save_pretrained(tmp_path)
    again = load_policy(str(tmp_path)).state_dict()
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, again[name]), name
    assert load_tokenizer(str(tmp_path)).eos_token == "<eos>"
    assert files_note(str(tmp_path), "float32", model).startswith("small.gguf holds weights of 8.7 bits")


def test_a_folder_with_one_gguf_file_means_the_file(file: Path, tmp_path: Path) -> None:
    shutil.copy(file, tmp_path / "a.gguf")
    assert load_policy(str(tmp_path)).name_or_path == str(tmp_path / "a.gguf")
    shutil.copy(file, tmp_path / "b.gguf")
    with pytest.raises(ValueError, match=r"has 2 GGUF files; give the path of one, such as .*a\.gguf"):
        load_policy(str(tmp_path))
    save_policy(tmp_path)
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


@pytest.mark.parametrize("changes", [{"architecture": "mamba99"}, {"kind": "I32"}])
def test_what_transformers_cannot_make_a_policy_of_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    write_gguf(tmp_path / "odd.gguf", **changes)
    with pytest.raises(ValueError, match="holds no model that transformers can use: ") as caught:
        load_policy(str(tmp_path / "odd.gguf"))
    assert "odd.gguf" in str(caught.value) and "\n" not in str(caught.value)


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
    monkeypatch.setattr("lit_grpo.policy.gguf.file.util.find_spec", lambda name: None)
    assert sentence(file).endswith("is a GGUF file, which needs gguf; install the extra lit_grpo[smollm2].")


def test_a_file_beside_another_tokenizer_keeps_its_own(file: Path, tmp_path: Path) -> None:
    shutil.copy(file, tmp_path / "a.gguf")
    save_policy(tmp_path)
    tokenizer, alone = load_tokenizer(str(tmp_path / "a.gguf")), load_tokenizer(str(file))
    assert tokenizer.get_vocab() == alone.get_vocab() and tokenizer.eos_token == "<eos>"
    assert tokenizer.chat_template == TEMPLATE and tokenizer.name_or_path == str(tmp_path / "a.gguf")
    assert type(load_policy(str(tmp_path / "a.gguf"))).__name__ == "LlamaForCausalLM"


def finished(folder: Path, **changes: Any) -> Path:
    """A Qwen3 as ``finish`` writes it: the size of its head is another one than its heads and width give."""
    from lit_grpo.tools.finishing.gguf_writer import write_gguf as write_finished

    save_policy(folder / "policy", **changes)
    write_finished(folder / "policy", folder / "finished.gguf", "f32", "finished")
    return folder / "finished.gguf"


def test_what_transformers_passes_over_is_read(tmp_path: Path) -> None:
    """The size of a head, whose default in Qwen3 is 128, and llama.cpp's base where the file names none."""
    whole = parse(finished(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 700.0}).read_bytes())
    path = tmp_path / "head.gguf"
    path.write_bytes(whole.written())
    assert load_config(str(path)).head_dim == 16 and load_config(str(path)).rope_parameters["rope_theta"] == 700.0
    whole.facts.remove(whole.fact("rope.freq_base"))
    path.write_bytes(whole.written())
    assert load_config(str(path)).rope_parameters["rope_theta"] == 10_000.0


@pytest.mark.parametrize("factors", [[1.0] * 4, [2.0, 1.0, 1.0], [math.nan, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, math.inf]])
def test_factors_of_a_rotary_embedding_are_those_of_its_model(factors: list[float], tmp_path: Path) -> None:
    write_gguf(tmp_path / "whole.gguf", "F32")
    parts = parse((tmp_path / "whole.gguf").read_bytes())
    parts.data += bytes(-len(parts.data) % 32)
    parts.tensors.append(["rope_freqs.weight", [len(factors)], 0, len(parts.data)])
    parts.data += struct.pack(f"<{len(factors)}f", *factors)
    (tmp_path / "scaled.gguf").write_bytes(parts.written())
    if factors == [1.0] * 4:
        assert load_config(str(tmp_path / "scaled.gguf")).rope_parameters["short_factor"] == factors
    else:
        with pytest.raises(ValueError, match=r"rope_freqs.weight has \d numbers, .* needs 4 finite numbers above"):
            load_config(str(tmp_path / "scaled.gguf"))


DAMAGES = {  # by its name in the table of damaged_gguf.py, and what the sentence says
    "block_count is 1": "of 1 layers (block_count), which has no place for 9 of its tensors, such as 'blk.1.attn_norm",
    "block_count is 3": "of 3 layers (block_count), and its tensors lack 9 of the model's weights, such as",
    "block_count is 2147483648": "llama.block_count .* input should be less than 2147483648",
    "offset of blk.0.attn_v.weight exchanged": "'blk.0.attn_k.weight' begins at byte 11,008 of the data, and the one",
    "attention.head_count is 8": "'blk.0.attn_q.weight' has the shape (32, 32), and the model of its header needs (64,",
    "feed_forward_length is 32": "'blk.0.ffn_gate.weight' has the shape (64, 32), and the model of its header needs (3",
    "embedding_length is 64": "embedding_length is 64, and the embedding has the shape (36, 32)",
    "attention.layer_norm_rms_epsilon is nan": "layer_norm_rms_epsilon .* input should be less than or equal to 0.1",
    "rope.freq_base is -10000": "llama.rope.freq_base .* input should be greater than 1 (it is -10000.0)",
    "rope.dimension_count is 4": "model rotates|needs (16, 32)",
    "35 types of tokens": "the vocabulary has 36 tokens, and tokenizer.ggml.token_type 35 entries",
    "eos_token_id is 36": "tokenizer.ggml.eos_token_id .* input should be less than 36 (it is 36)",
    "a token twice": "the tokens 5 and 35 are both",
    "merge '1 2 3'": "merge 0 is '1 2 3', and not two parts",
    "merge '1 €'": "holds no tokenizer that transformers can use: .*out of vocabulary",
    "19 tensors": "and its tensors end at",
    "bytes at the end": "and its tensors end at",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_header_that_contradicts_its_tensors_is_refused(damage: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "whole.gguf", "F32")
    whole = parse((tmp_path / "whole.gguf").read_bytes())
    made = dict(damages(whole))[damage](whole)
    path = tmp_path / "damaged.gguf"
    path.write_bytes(made if isinstance(made, bytes) else whole.written())
    with pytest.raises(ValueError) as caught:
        fingerprint(str(path))
    told = DAMAGES[damage].replace("(", r"\(").replace(")", r"\)")
    assert re.search(told, str(caught.value)) and str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_only_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    for load in (load_tokenizer, load_config, load_policy):  # each says what it was asked for
        with pytest.raises(ValueError, match=r"pipe.gguf is a pipe, and not a file"):
            load(str(tmp_path))
    assert "There is no GGUF file" in sentence(tmp_path / "pipe.gguf")


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["tied", "with heads of another size"])
def test_each_of_some_400_damaged_headers_is_refused_or_right(kind: str, tmp_path: Path) -> None:
    """In one process that gets a gibibyte; what is loaded has the weights, tokens and logits of the whole file."""
    if kind == "tied":
        write_gguf(tmp_path / "whole.gguf", "F32")
    whole = tmp_path / "whole.gguf" if kind == "tied" else finished(tmp_path)
    program = Path(__file__).with_name("damaged_gguf.py")
    command = [sys.executable, "-W", "ignore", str(program), str(whole), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0 and len(rows) > 300, done.stderr[-2000:]
    for row in rows:
        assert row.get("is_right") or ("\n" not in row["refused"] and row["refused"].endswith(".")), row
    assert 0 < sum("is_right" in row for row in rows) < 20
