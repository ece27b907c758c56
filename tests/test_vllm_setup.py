"""What is said where vLLM is missing, new, or does not know an argument."""

from __future__ import annotations

import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import random_policy

from lit_grpo.policy.loading import load_policy, load_tokenizer
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.rollout.vllm import arguments as vllm_setup
from lit_grpo.rollout.vllm.arguments import (
    check_engine_args,
    kv_bytes_per_token,
    require_vllm,
    server_environment,
    warn_of_dtype,
)
from lit_grpo.rollout.vllm.engine import VLLMGenerator
from lit_grpo.rollout.vllm.process import ServerProcess
from lit_grpo.rollout.vllm.server import VLLMServerGenerator


def test_without_vllm_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, policy_folder: Path) -> None:
    monkeypatch.setattr(vllm_setup.util, "find_spec", lambda name: None)
    tokenizer = load_tokenizer(str(policy_folder))
    for generator in (VLLMGenerator(), VLLMServerGenerator()):
        with pytest.raises(ValueError, match=r"install the extra lit_grpo\[vllm\]"):
            generator.start(PolicySpec(random_policy(), tokenizer))  # pyright: ignore[reportArgumentType]


def test_a_version_that_has_not_been_tested_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_setup.util, "find_spec", lambda name: name)
    monkeypatch.setattr(vllm_setup.metadata, "version", lambda name: "0.99.1")
    with pytest.warns(UserWarning, match=r"vLLM 0.99.1 has not been tested with lit_grpo; tested is 0.32"):
        require_vllm()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        require_vllm()


@dataclasses.dataclass
class EngineArgs:
    max_model_len: int = 0
    max_num_seqs: int = 0


def test_an_unknown_engine_argument_is_named_with_those_like_it() -> None:
    check_engine_args({"max_model_len": 3}, EngineArgs)
    with pytest.raises(ValueError, match=r"engine_args holds 'max_model_length', .* did you mean max_model_len"):
        check_engine_args({"max_model_length": 3}, EngineArgs)


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: VLLMGenerator(num_slots=0), "num_slots must be at least 1, not 0"),
        (lambda: VLLMGenerator(kv_memory="much"), "kv_memory must be an amount such as"),
        (lambda: VLLMGenerator(sleep_level=3), "sleep_level must be 0, 1 or 2, not 3"),  # pyright: ignore[reportArgumentType]
        (lambda: VLLMGenerator(engine_args={"dtype": "int4"}), "must be one of float32, bfloat16, float16, not 'int4'"),
        (lambda: VLLMServerGenerator(num_servers=0), "num_servers must be at least 1, not 0"),
        (lambda: VLLMServerGenerator(timeout_s=0), "timeout_s must be above 0, not 0"),
        (lambda: VLLMServerGenerator(transfer="some"), "transfer must be full or changes"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_arguments_are_checked_when_they_are_given(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


def test_types_that_differ_are_said(recwarn: pytest.WarningsRecorder) -> None:
    policy: Any = random_policy()
    warn_of_dtype(policy, None)
    warn_of_dtype(policy, torch.float32)
    assert not recwarn
    with pytest.warns(UserWarning, match=r"vLLM computes in torch.bfloat16 and the policy's weights are torch.float32"):
        warn_of_dtype(policy, torch.bfloat16)


def test_a_server_that_does_not_answer_is_named(policy_folder: Path) -> None:
    generator = VLLMServerGenerator(urls=["http://127.0.0.1:9"], timeout_s=2.0)
    with pytest.raises(ValueError, match=r"server at http://127\.0\.0\.1:9 does not answer /tokenize"):
        generator.start(PolicySpec(random_policy(), load_tokenizer(str(policy_folder))))  # pyright: ignore[reportArgumentType]


def test_a_server_that_ends_at_once_shows_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho loading\necho 'ValueError: too little memory'\necho bye\nexit 3\n")
    fake.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(fake))
    server = ServerProcess(tmp_path, {}, {}, tmp_path / "log")
    with pytest.raises(ValueError, match="ended with code 3: ValueError: too little memory"):
        server.wait(deadline=1e12)


def test_a_skeleton_has_everything_but_weights(tmp_path: Path, policy_folder: Path) -> None:
    policy: Any = random_policy()
    PolicySpec(policy, load_tokenizer(str(policy_folder))).save_skeleton(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    assert not list(tmp_path.glob("*.safetensors"))
    assert load_tokenizer(str(tmp_path)).encode("1+") == load_tokenizer(str(policy_folder)).encode("1+")
    assert policy.config.architectures is None


def test_a_skeleton_says_nothing_of_four_bits_since_its_weights_come_whole(tmp_path: Path, policy_folder: Path) -> None:
    random_policy().save_pretrained(tmp_path / "whole")  # pyright: ignore[reportCallIssue]
    policy = load_policy(str(tmp_path / "whole"), nf4=True)
    PolicySpec(policy, load_tokenizer(str(policy_folder))).save_skeleton(tmp_path / "skeleton")
    assert "quantization_config" not in json.loads((tmp_path / "skeleton" / "config.json").read_text())
    assert policy.config.quantization_config is not None


def test_bytes_of_a_token() -> None:
    assert kv_bytes_per_token(random_policy().config, torch.float32) == 2 * 2 * 2 * 16 * 4  # pyright: ignore


def test_servers_on_a_cpu_share_its_threads_and_what_the_user_has_set_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    assert [server_environment(number)["OMP_NUM_THREADS"] for number in (1, 2, 8)] == ["5", "2", "1"]
    assert server_environment()["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert server_environment(2)["OMP_NUM_THREADS"] == "3"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in server_environment()


def test_heads_of_a_size_that_vllm_does_not_know_are_refused_before_an_engine_starts(
    monkeypatch: pytest.MonkeyPatch, policy_folder: Path
) -> None:
    monkeypatch.setattr("lit_grpo.rollout.vllm.arguments._installed_version", lambda: "0.32.0")
    policy = PolicySpec(load_policy(str(policy_folder)), load_tokenizer(str(policy_folder)))
    with pytest.raises(ValueError, match=r"heads have 16 dimensions, for which vLLM has no attention on CPUs"):
        VLLMGenerator().start(policy)
