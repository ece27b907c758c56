"""A teacher on a real vLLM server says what its model does in this process."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from hand_made import full_logprobs, random_groups, save_policy_for_vllm

from lit_grpo.policy.loading import embeddings, load_policy, load_tokenizer
from lit_grpo.policy.spec import PolicySpec
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


def test_it_goes_on_from_prefixes_as_the_model_would(folder: Path, url: str) -> None:
    model: Any = load_policy(str(folder))
    tokenizer = load_tokenizer(str(folder))
    teacher = ServerTeacher(TeacherSettings(url), tokenizer, len(embeddings(model)[0]))
    (group,) = random_groups(model, [[0.0]])
    prompt, completion = group.prompt, group.rollouts[0].completion
    sampling = replace(completion.request.sampling, max_tokens=3, temperature=0.1)  # the teacher's own is 1
    requests = [
        replace(completion.request, path=(-1 - number,), prefix=completion.until(2), sampling=sampling)
        for number in range(200)
    ]
    spec = PolicySpec(model, tokenizer)
    found = teacher.complete(requests, spec, 4)
    assert found.keys() == {each.key for each in requests}
    again = teacher.complete(requests[:20], spec, 4)
    assert all(its.token_ids_T.tolist() == found[key].token_ids_T.tolist() for key, its in again.items())
    with torch.no_grad():
        ids = [*prompt.token_ids, *completion.token_ids_T[:2].tolist()]
        logprobs_V = model(input_ids=torch.tensor([ids])).logits[0, -1].log_softmax(-1).double()
    sampled = torch.tensor([int(its.token_ids_T[2]) for its in found.values()])
    assert all(its.token_ids_T[:2].tolist() == ids[-2:] and its.num_tokens == 3 for its in found.values())
    assert all(its.versions_T.tolist()[2:] == [4] for its in found.values())
    mean = float((logprobs_V.exp() * logprobs_V).sum())
    deviation = float((logprobs_V.exp() * (logprobs_V - mean).square()).sum().sqrt())
    assert abs(float(logprobs_V[sampled].mean()) - mean) < 4 * deviation / 200**0.5
    likeliest = float((sampled == logprobs_V.argmax()).double().mean())
    share = float(logprobs_V.max().exp())
    assert abs(likeliest - share) < 4 * (share * (1 - share) / 200) ** 0.5
