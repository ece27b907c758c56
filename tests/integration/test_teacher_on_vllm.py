"""A teacher on a real vLLM server says what its model does in this process."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from hand_made import full_logprobs, random_groups, save_policy_for_vllm

from lit_grpo.policy.loading import embeddings, load_policy, load_tokenizer
from lit_grpo.update.logprobs.teacher import ServerTeacher, TeacherSettings

pytestmark = pytest.mark.nightly
PATIENCE_S = 500


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy_for_vllm(tmp_path_factory.mktemp("teacher"))


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    pytest.importorskip("vllm")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "128", "--block-size", "32"]
    arguments += ["--kv-cache-memory-bytes", str(8 * 2**20), "--dtype", "float32", "--max-num-seqs", "8"]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), *arguments]
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until and process.poll() is None:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code == 200:
                break
        except httpx.HTTPError:
            time.sleep(1)
    else:
        process.kill()
        pytest.fail((folder / "server.log").read_text()[-3000:])
    yield f"http://127.0.0.1:{port}/v1"
    process.terminate()
    process.wait(60)


@pytest.mark.parametrize("top_k", [0, 3])
def test_its_log_probs_are_those_of_the_model(folder: Path, url: str, top_k: int) -> None:
    model: Any = load_policy(str(folder))
    tokenizer = load_tokenizer(str(folder))
    teacher = ServerTeacher(TeacherSettings(url), tokenizer, len(embeddings(model)[0]))
    assert teacher.context == 128
    groups = random_groups(model, [[0.0] * 4] * 2)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    scores = teacher.score(lambda *_: {}, rollouts, lambda value: [value], top_k)
    assert len(scores) == len(rollouts)
    for rollout in rollouts:
        its = scores[rollout.completion.request.key]
        assert torch.allclose(its.logprobs_T, full_logprobs(model, rollout), atol=2e-3)
        if top_k:
            ids = torch.tensor([[*rollout.prompt.token_ids, *rollout.completion.token_ids_T.tolist()]])
            begin = len(rollout.prompt.token_ids) - 1
            expected = model(input_ids=ids).logits[0, begin:-1].log_softmax(-1).topk(top_k)
            assert torch.allclose(its.top_logprobs_TL[:, :top_k], expected.values.detach(), atol=2e-3)
