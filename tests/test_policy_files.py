"""Whatever a policy's folder holds: it is loaded, or refused with one sentence that names it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import table_rows
from odd_files import NO_FILES, make_no_file

from lit_grpo.policy.loading import load_config, load_policy, load_tokenizer

FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "model.safetensors")
CONTENTS = {
    "nothing": b"",
    "zeros": b"\0" * 100,
    "no UTF-8": b"\xff\xfe{",
    "brackets": b"[" * 100_000,
    "a list": b"[1]",
    "a text": b'"x"',
    "null": b"null",
    "digits": b"9" * 10_000,
    "half": b'{"a": ',
}
FIELDS = {
    "config.json": ("model_type", "architectures", "hidden_size", "num_hidden_layers", "vocab_size", "rope_parameters"),
    "tokenizer_config.json": ("eos_token", "tokenizer_class", "chat_template", "added_tokens_decoder"),
}
ODD: dict[str, Any] = {
    "none": None,
    "minus": -1,
    "huge": 10**12,
    "text": "x",
    "list": [1],
    "object": {"a": 1},
    "1e308": 1e308,
}
TABLE = [
    *((file, kind) for file in FILES for kind in (*CONTENTS, *NO_FILES)),
    *((file, f"{field}: {odd}") for file, fields in FIELDS.items() for field in fields for odd in ODD),
    ("adapter_config.json", "a list"), ("adapter_config.json", "brackets"), ("adapter_config.json", "no UTF-8"),
    ("model.safetensors.index.json", "a list"), ("model.safetensors.index.json", "brackets"),
]  # fmt: skip
QUICK = [
    ("config.json", "a pipe"), ("config.json", "brackets"), ("config.json", "hidden_size: text"),
    ("tokenizer.json", "/dev/zero"), ("tokenizer_config.json", "a list"), ("adapter_config.json", "a list"),
    ("model.safetensors.index.json", "a list"), ("model.safetensors", "a pipe"),
]  # fmt: skip


@pytest.mark.parametrize(("file", "kind"), table_rows(TABLE, QUICK))
def test_a_damaged_policy_is_refused_in_a_sentence(
    file: str, kind: str, policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    folder = tmp_path / "damaged"
    shutil.copytree(policy_folder, folder)
    path, (field, _, odd) = folder / file, kind.partition(": ")
    before = json.loads(path.read_text()) if odd else {}
    path.unlink(missing_ok=True)
    match kind:
        case _ if kind in NO_FILES:
            make_no_file(kind, path)
        case _ if odd:
            path.write_text(json.dumps(before | {field: ODD[odd]}))
        case _:
            path.write_bytes(CONTENTS[kind])
    try:
        load_config(str(folder))
        load_tokenizer(str(folder))
        load_policy(str(folder))
    except ValueError as error:
        assert str(folder) in str(error)
        assert len(str(error)) < 2000
    else:
        assert file in ("tokenizer_config.json", "generation_config.json") or odd
