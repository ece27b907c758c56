"""A vLLM server whose weights are spread over two workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hand_made import SERVER_ARGUMENTS, save_policy_for_vllm

from lit_grpo.policy.loading import load_policy, load_tokenizer
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.rollout.proof import given_logprobs, given_tokens
from lit_grpo.rollout.vllm.server import VLLMServerGenerator
from lit_grpo.rollout.weights.tensors import SyncReport, check_arrival

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy_for_vllm(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def policy(policy_folder: Path) -> Any:
    return load_policy(str(policy_folder)).eval()


@pytest.fixture(scope="module")
def generator(policy: Any, policy_folder: Path, forked_servers: None) -> Iterator[VLLMServerGenerator]:
    arguments = SERVER_ARGUMENTS | {"tensor_parallel_size": 2}
    generator = VLLMServerGenerator(2, transfer="changes", server_args=arguments)
    generator.start(PolicySpec(policy, load_tokenizer(str(policy_folder))))
    yield generator
    generator.close()


def sync(generator: VLLMServerGenerator, version: int) -> SyncReport:
    weights = generator.weights()
    report = generator.load_weights(weights, version)
    check_arrival(weights.digests, report.digests)
    return report


def test_weights_and_changes_reach_both_workers(generator: VLLMServerGenerator, policy: Any) -> None:
    sequences = given_tokens(load_tokenizer(policy.name_or_path), generator.longest_sequence)
    first = sync(generator, 0)
    for version in (0, 1):
        if version:
            with torch.no_grad():
                for weight in list(policy.parameters())[::3]:
                    weight.mul_(1.01)
            assert 0 < sync(generator, version).num_bytes < first.num_bytes
        (scores,) = generator.score(sequences).values()
        assert torch.allclose(scores, given_logprobs(policy, sequences), atol=1e-5)
