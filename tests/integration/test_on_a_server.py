"""Features that sample in ways of their own, each in a run on a vLLM server whose log-probs the update finds again."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import read_metrics, save_policy, save_tokenizer, table_rows

from lit_grpo.rollout.vllm.guard import TOKEN_VARIABLE
from tests.doubles.small_models import small_model
from tests.task_folders import write_task

ROOT = Path(__file__).parents[2]
TOKEN, PORT, PATIENCE_S = "t" * 32, "0", 600
TOOL = {"environments": {"tools": ["lit_grpo.tasks.calculator.calculate"], "max_turns": 3}}
AGENT = {"agent": {"run": f"{ROOT / 'tests' / 'integration' / 'test_agent_in_training.py'}:calculates"}}
FEATURES: dict[str, list[str]] = {
    "environments": ["--rollout.plugins", json.dumps([TOOL])],
    "an agent": ["--rollout.plugins", json.dumps([AGENT])],
    "arpo": ["--rollout.plugins", json.dumps([TOOL, {"arpo": {"width": 4}}])],
    "a teacher": [
        *("--rollout.plugins", json.dumps([TOOL, {"distill": {"top_k": 4}}])),
        *("--model.teacher.policy", "average", "--model.teacher.average_rate", "0.5"),
    ],
    "april": ["--rollout.plugins", json.dumps([TOOL, "april", "snapshots"])],
}
"""Of the calculator's config, with a server that runs already."""
ROUNDING = 1e-4
"""The most that a log-prob of the server and of the update may differ, in nats."""


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    return os.environ | {"PYTHONPATH": path, TOKEN_VARIABLE: TOKEN, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("vllm")
    said = tmp_path_factory.mktemp("server") / "said"
    command = [sys.executable, "-m", "lit_grpo", "serve", "--policy", "tiny_calculator", "--port", PORT]
    command += ["--num-slots", "8", "--kv-cache-memory-bytes", str(64 * 2**20)]
    with said.open("w") as file:
        server = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment())
    until = time.monotonic() + PATIENCE_S
    while "Ready: " not in said.read_text():
        assert server.poll() is None and time.monotonic() < until, said.read_text()
        time.sleep(0.2)
    yield said.read_text().split('["')[1].split('"]')[0]
    server.terminate()
    server.wait(60)


def fit(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    few = ["--trainer.max_steps", "2", "--trainer.enable_progress_bar", "false", "--run.name", "run"]
    command = [sys.executable, "-m", "lit_grpo", "fit", *words, *few]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=PATIENCE_S)


def check_gaps(folder: Path, run: subprocess.CompletedProcess[str], column: str = "sampling/logprob_gap_max") -> None:
    """Check that two updates have trained on tokens whose log-probs are the server's, up to rounding."""
    assert run.returncode == 0, run.stdout[-1000:] + run.stderr[-3000:]
    rows = read_metrics(folder / "runs" / "run" / "metrics.csv")
    gaps = [float(row[column]) for row in rows if row.get(column)]
    known = [gap for gap in gaps if not math.isnan(gap)]  # of updates with tokens that an advantage trains on
    assert len(gaps) == 2 and known and max(known) < ROUNDING, gaps


@pytest.mark.parametrize("name", table_rows(FEATURES, []))
def test_a_feature_on_a_server_trains_on_the_log_probs_that_were_sampled(name: str, url: str, tmp_path: Path) -> None:
    generator = ["--model.generator", "vllm_server", "--model.generator.num_slots", "8"]
    generator += ["--model.generator.timeout_s", "300"]  # on a busy machine an engine takes long to answer
    few = ["--data.batch_size", "2", "--model.num_generations", "4", "--trainer.limit_val_batches", "0"]
    urls = ["--model.generator.urls", json.dumps([url]), "--validate_first", "false"]
    run = fit(tmp_path, "--config", "calculator", *generator, *urls, *few, *FEATURES[name])
    if name == "april":  # whose tokens are in part of an earlier policy, from which the last one differs
        check_gaps(tmp_path, run, "snapshots/discrepancy")
    else:
        check_gaps(tmp_path, run)


REWARD = "def score(completion):\n    return sum(c.isdigit() for c in completion) / max(len(completion), 1)\n"
OWN = {
    "class_path": "vllm_server",
    # as it begins, vLLM compiles for long, and answers nothing meanwhile
    "init_args": {"num_slots": 4, "timeout_s": 300.0, "server_args": {"max_model_len": 128}},
}


@pytest.mark.nightly
def test_a_hybrid_on_a_server_trains_on_the_log_probs_that_were_sampled(tmp_path: Path) -> None:
    """Falcon-H1 has attention and a state in each layer, and vLLM computes both on CPUs."""
    pytest.importorskip("vllm")
    small_model("falcon_h1", width=4).save_pretrained(tmp_path / "policy")
    save_tokenizer(tmp_path / "policy")
    config = write_task(tmp_path, tmp_path / "policy", REWARD, model={"generator": OWN})
    check_gaps(tmp_path, fit(config, "--config", "config.yaml"))


@pytest.mark.nightly
def test_a_hybrid_that_vllm_cannot_compute_here_is_refused_in_one_sentence(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    save_policy(tmp_path / "policy", hybrid=True, head_dim=32)
    config = write_task(tmp_path, tmp_path / "policy", REWARD, model={"generator": OWN})
    run = fit(config, "--config", "config.yaml")
    refused = [line for line in run.stderr.splitlines() if line.startswith("error: ")]
    assert run.returncode == 2 and len(refused) == 1 and "gated DeltaNets" in refused[0], run.stderr[-3000:]
    assert "Traceback" not in run.stderr
