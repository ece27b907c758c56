"""Folders whose config.json and weights contradict each other: refused before memory is taken, or right."""

import json
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import save_policy
from damaged_folder import damages
from damaged_gguf import fingerprint

DAMAGES = {  # by its name in the table of damaged_folder.py, and what the sentence says
    "num_hidden_layers is 2147483648": "num_hidden_layers in .*config.json .* input should be less than 2147483648",
    "num_hidden_layers is '2'": "Field 'num_hidden_layers' expected int, got str",
    "vocab_size is 1000000": r"hold model.embed_tokens.weight with the shape \(35, 32\), .* describes \(1000000, 32\)",
    "rms_norm_eps is nan": "rms_norm_eps in .*config.json .* input should be less than or equal to 0.1",
    "rope_theta is -1.0": "rope_theta in .*config.json .* input should be greater than 1",
    "model_type is 'llama'": "hold 4 weights of layers that the LlamaForCausalLM of its config.json lacks",
    "a layer renamed": "hold 11 weights of layers that .* lacks, such as model.layers.2",
    "config.json 'null'": "config.json is not as expected: its value: input should be a valid dictionary",
    "weights are a pipe": "model.safetensors is a pipe, and not a file",
    "dtype I32": "q_proj.weight as I32, which are no floats",
    "an index of numbers": "index.json is not as expected: weight_map",
    "layer_types is short": "must be equal to the number of `layer_types`",
}


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A folder of a policy with its tokenizer."""
    return save_policy(tmp_path / "whole")


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_config_that_contradicts_its_weights_is_refused(damage: str, whole: Path) -> None:
    data = (whole / "model.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + struct.unpack_from("<Q", data)[0]])
    dict(damages(json.loads((whole / "config.json").read_text()), header))[damage](whole)
    with pytest.raises(ValueError) as caught:
        fingerprint(str(whole))
    assert re.search(DAMAGES[damage], str(caught.value)), caught.value
    assert str(whole) in str(caught.value) and "\n" not in str(caught.value)


def test_fewer_layers_than_the_weights_are_of_are_refused(whole: Path) -> None:
    settings = json.loads((whole / "config.json").read_text())
    changes = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    (whole / "config.json").write_text(json.dumps(settings | changes))
    with pytest.raises(ValueError, match=r"hold 11 weights of layers that .* lacks, such as model\.layers\.1\."):
        fingerprint(str(whole))
    (whole / "config.json").write_text(json.dumps(settings | changes | {"num_nextn_predict_layers": 1}))
    fingerprint(str(whole))  # the layer past the last one is of another task, and the config says so


@pytest.mark.nightly
def test_each_of_some_200_damaged_folders_is_refused_or_right(whole: Path) -> None:
    program = Path(__file__).with_name("damaged_folder.py")
    command = [sys.executable, "-W", "ignore", str(program), str(whole), str(whole.parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0 and len(rows) >= 200, done.stderr[-2000:]
    for row in rows:
        assert row.get("is_right") or ("\n" not in row["refused"] and row["refused"].endswith(".")), row
    assert 0 < sum("is_right" in row for row in rows) < 10
