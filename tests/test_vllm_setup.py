"""What is said where vLLM is missing, new, or does not know an argument."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from conftest import random_policy

from lit_grpo.policy.loading import load_policy, load_tokenizer
from lit_grpo.policy.spec import TOKENIZER, PolicySpec
from lit_grpo.rollout.vllm import arguments as vllm_setup
from lit_grpo.rollout.vllm import engine as vllm_engine
from lit_grpo.rollout.vllm import process as vllm_process
from lit_grpo.rollout.vllm.arguments import (
    check_drafts,
    check_engine_args,
    check_family,
    check_fits,
    check_min_p,
    check_on_cpu,
    check_version,
    draft_arguments,
    drafting,
    kv_bytes_per_token,
    require_vllm,
    server_environment,
    warn_of_dtype,
)
from lit_grpo.rollout.vllm.engine import VLLMGenerator
from lit_grpo.rollout.vllm.fleet import check_server_drafts, check_settings, wait_for
from lit_grpo.rollout.vllm.guard import KEY_VARIABLE, TOKEN_VARIABLE
from lit_grpo.rollout.vllm.process import ServerPlan, ServerProcess, root_cause
from lit_grpo.rollout.vllm.server import VLLMServerGenerator
from lit_grpo.rollout.vllm.worker.cpu_build import _expanded
from lit_grpo.types import Prompt, Request, SamplingParams
from scripts.make_tiny import make_tokenizer
from tests.doubles.small_models import small_config


def test_without_vllm_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, policy_folder: Path) -> None:
    monkeypatch.setattr(vllm_setup.util, "find_spec", lambda name: None)
    tokenizer = load_tokenizer(str(policy_folder))
    for generator in (VLLMGenerator(), VLLMServerGenerator()):
        with pytest.raises(ValueError, match=r"install the extra lit_grpo\[vllm\]"):
            generator.start(PolicySpec(random_policy(), tokenizer))


def test_a_version_that_has_not_been_tested_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_setup.util, "find_spec", lambda name: name)
    monkeypatch.setattr(vllm_setup.metadata, "version", lambda name: "0.99.1")
    with pytest.warns(UserWarning, match=r"vLLM 0.99.1 has not been tested with lit_grpo; tested is 0.32"):
        require_vllm()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        require_vllm()


def test_a_version_without_the_weight_transfer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_setup.util, "find_spec", lambda name: name)
    monkeypatch.setattr(vllm_setup.metadata, "version", lambda name: "0.31.2")
    with pytest.raises(ValueError, match=r"vLLM 0\.31\.2 is too old for lit_grpo; install vllm==0\.32"):
        require_vllm()


@dataclasses.dataclass
class EngineArgs:
    logprobs_mode: str = ""
    kv_transfer_config: Any = None
    max_model_len: int = 0
    max_num_seqs: int = 0
    quantization: str | None = None


def test_an_unknown_engine_argument_is_named_with_those_like_it() -> None:
    check_engine_args({"max_model_len": 3}, EngineArgs)
    with pytest.raises(ValueError, match=r"engine_args holds 'max_model_length', .* did you mean max_model_len"):
        check_engine_args({"max_model_length": 3}, EngineArgs)
    with pytest.raises(ValueError, match=r"engine_args.logprobs_mode is 'raw_logprobs', .* leave it out"):
        check_engine_args({"logprobs_mode": "raw_logprobs"}, EngineArgs)
    with pytest.raises(ValueError, match=r"engine_args.kv_transfer_config keeps the KV cache of old weights"):
        check_engine_args({"kv_transfer_config": {"kv_connector": "LMCacheConnectorV1"}}, EngineArgs)
    with pytest.raises(
        ValueError, match=r"quantization is 'awq_marlin', .* packed beforehand, .* take fp8_per_tensor or"
    ):
        check_engine_args({"quantization": "awq_marlin"}, EngineArgs)
    check_engine_args({"quantization": "fp8_per_tensor"}, EngineArgs)


@pytest.mark.parametrize("version", ["0.23.1", "0.9.2", "0.31.3"])
def test_a_server_with_an_old_vllm_is_refused(version: str) -> None:
    with pytest.raises(ValueError, match=f"The server at http://h:1 runs vLLM {version}, which is too old for"):
        check_version("The server at http://h:1", version)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1rc1", "0.32.0+cpu"])
def test_a_server_with_the_tested_vllm_is_taken_without_a_word(version: str, recwarn: pytest.WarningsRecorder) -> None:
    check_version("The server at http://h:1", version)
    assert not recwarn.list


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: VLLMGenerator(kv_memory="much"), "kv_memory must be an amount such as"),
        (lambda: VLLMGenerator(engine_args={"dtype": "int4"}), "must be one of float32, bfloat16, float16, not 'int4'"),
        (
            lambda: VLLMGenerator(engine_args={"tensor_parallel_size": 2}),
            r"engine_args\.tensor_parallel_size is 2, but .* device alone; leave it out, or take .*VLLMServerGenerator",
        ),
        (
            lambda: VLLMGenerator(engine_args={"distributed_executor_backend": "mp"}),
            r"engine_args\.distributed_executor_backend is 'mp', but in this process it follows from the ranks; leave",
        ),
        (lambda: VLLMServerGenerator(urls=["http://a:1", "http://a:1"]), "urls names a server twice"),
        (
            lambda: VLLMServerGenerator(transport="nccl", adapters="merged", weights_folder="/shared"),
            "weights_folder needs weights that are sent in files, but transport nccl sends .*; take transport files",
        ),
    ],
)
def test_arguments_are_checked_when_they_are_given(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


def test_keys_and_values_get_no_more_than_the_slots_can_use(
    monkeypatch: pytest.MonkeyPatch, policy_folder: Path
) -> None:
    monkeypatch.setattr(vllm_engine, "free_bytes", lambda device: 2**40)
    policy: Any = random_policy()  # its context is 256
    tokenizer = load_tokenizer(str(policy_folder))
    of_token = kv_bytes_per_token(policy.config, torch.float32)
    assert of_token is not None

    def tokens(longest_row: int | None, **arguments: Any) -> float:
        generator = VLLMGenerator(num_slots=9, **arguments)
        return generator._kv_bytes(PolicySpec(policy, tokenizer, longest_row=longest_row)) / of_token

    assert tokens(None) == 10 * 256
    assert tokens(40) == tokens(128) == 10 * 128  # whole blocks
    assert tokens(40, engine_args={"block_size": 16}) == 10 * 48
    assert tokens(16, engine_args={"block_size": 16}) == 256 + 16  # vLLM wants room for a row as long as the context
    assert tokens(16, engine_args={"block_size": 16, "max_model_len": 64}) == 10 * 16


@pytest.mark.parametrize(
    ("given", "flags", "times"),
    [
        ({}, [], 1.0),
        ({"dtype": "bfloat16"}, [], 0.5),
        ({"max_model_len": 64, "block_size": 16}, ["--block-size", "64"], 0.5),
        ({}, ["--max_model_len=64", "--block-size=64"], 0.5),  # a command line, in each spelling of vLLM's
        ({}, ["--max-model-len", "4k", "--enforce-eager", "--block-size", "64"], 0.5),
        ({"gpu_memory_utilization": 0.1}, [], None),
        ({}, ["--gpu-memory-utilization", "0.1"], None),
    ],
)
def test_servers_on_cpus_get_no_more_than_their_slots_can_use_or_their_share(
    given: dict[str, Any], flags: list[str], times: float | None, monkeypatch: pytest.MonkeyPatch, policy_folder: Path
) -> None:
    policy: Any = random_policy(head_dim=32)
    spec = PolicySpec(policy, load_tokenizer(str(policy_folder)), longest_row=40)
    needed = 10 * 128 * (kv_bytes_per_token(policy.config, torch.float32) or 0)
    monkeypatch.setattr(vllm_setup.util, "find_spec", lambda name: name)
    made: list[Any] = []
    monkeypatch.setattr(vllm_process, "ServerProcess", lambda *values, **place: made.append((values, place)))
    plan = ServerPlan(spec, 9, given, on_gpu=False, num_servers=2, flags=flags)
    for free in (5 * needed, needed):
        monkeypatch.setattr(vllm_setup, "free_bytes", lambda device, free=free: free)  # of the server's machine
        plan.start(Path("model"), "token", port=8000)
    assert [place for _, place in made] == [{"flags": flags, "port": 8000}] * 2
    told = [values[1].get("kv_cache_memory_bytes") for values, _ in made]
    assert told == [None if times is None else int(times * needed), None if times is None else int(0.2 * needed)]


def test_memory_that_leaves_nothing_for_keys_and_values_is_refused(
    monkeypatch: pytest.MonkeyPatch, policy_folder: Path
) -> None:
    pytest.importorskip("vllm")
    monkeypatch.setattr(vllm_setup.util, "find_spec", lambda name: name)
    monkeypatch.setattr(vllm_engine, "check_on_cpu", lambda *_: None)
    policy: Any = random_policy()
    weights = sum(weight.nbytes for weight in policy.parameters())
    for free in (0, int(4.9 * weights)):  # the update takes four times the weights, the engine its own
        monkeypatch.setattr(vllm_engine, "free_bytes", lambda device, free=free: free)
        with pytest.raises(ValueError, match="kv_memory is auto, which leaves nothing for the KV cache: "):
            VLLMGenerator().start(PolicySpec(policy, load_tokenizer(str(policy_folder))))
    monkeypatch.setattr(vllm_engine, "free_bytes", lambda device: 10)
    with pytest.raises(ValueError, match="kv_memory is 5%, which leaves nothing"):
        VLLMGenerator(kv_memory="5%").start(PolicySpec(policy, load_tokenizer(str(policy_folder))))


def test_an_engine_in_this_process_is_for_the_first_gpu(monkeypatch: pytest.MonkeyPatch, policy_folder: Path) -> None:
    pytest.importorskip("vllm")
    monkeypatch.setattr(vllm_setup.util, "find_spec", lambda name: name)
    monkeypatch.setattr(PolicySpec, "device", torch.device("cuda:1"))
    policy: Any = random_policy()
    said = "policy is on cuda:1, but vLLM .* decodes on cuda:0; .* set the environment variable CUDA_VISIBLE_DEVICES=1,"
    with pytest.raises(ValueError, match=said):
        VLLMGenerator().start(PolicySpec(policy, load_tokenizer(str(policy_folder))))


def test_nccl_is_for_policies_on_gpus(policy_folder: Path) -> None:
    generator = VLLMServerGenerator(transport="nccl")
    with pytest.raises(ValueError, match="transport nccl is for GPUs, and the policy is on cpu; take files"):
        generator.start(PolicySpec(random_policy(), load_tokenizer(str(policy_folder))))


def test_types_that_differ_are_said(recwarn: pytest.WarningsRecorder) -> None:
    policy: Any = random_policy()
    warn_of_dtype(policy, None)
    warn_of_dtype(policy, torch.float32)
    assert not recwarn
    with pytest.warns(UserWarning, match=r"vLLM computes in torch.bfloat16 and the policy's weights are torch.float32"):
        warn_of_dtype(policy, torch.bfloat16)


def start_named(policy_folder: Path, url: str) -> None:
    generator = VLLMServerGenerator(urls=[url], timeout_s=2.0)
    generator.start(PolicySpec(random_policy(), load_tokenizer(str(policy_folder))))


def test_a_server_that_does_not_answer_is_named(policy_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "t" * 32)
    with pytest.raises(
        ValueError, match=r"server at http://127\.0\.0\.1:9 does not answer .*: .* Start it with python -m"
    ):
        start_named(policy_folder, "http://127.0.0.1:9")


def test_named_servers_need_a_token(policy_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(ValueError, match=r"urls names servers, but LIT_GRPO_SERVER_TOKEN is not set; set it to the"):
        start_named(policy_folder, "http://127.0.0.1:9")


class Open(BaseHTTPRequestHandler):
    """A server that lets anybody in."""

    tokens: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:
        self.tokens.append(self.headers["Authorization"])
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_a_named_server_without_a_guard_is_refused_and_not_told_the_token(
    policy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "t" * 32)
    with HTTPServer(("127.0.0.1", 0), Open) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(
            ValueError, match=rf"{url} does not ask for a token, .* start it with python -m lit_grpo serve"
        ):
            start_named(policy_folder, url)
        server.shutdown()
    assert set(Open.tokens) == {"none"}


def test_a_server_that_ends_at_once_shows_its_last_words(tmp_path: Path, fake_python: Any) -> None:
    fake_python("echo loading\necho 'ValueError: too little memory'\necho bye\nexit 3")
    server = ServerProcess(tmp_path, {}, {}, "t" * 32)
    with pytest.raises(
        ValueError, match=r"ended with code 3\. It said: ValueError: too little memory All of that is in"
    ):
        wait_for(server, deadline=1e12)
    server.stop()
    assert server.log.read_text().split() == ["loading", "ValueError:", "too", "little", "memory", "bye"]  # it stays
    assert server.log.stat().st_mode & 0o777 == 0o600
    server.log.unlink()


def test_a_server_that_is_slow_to_start_is_told_of_once_and_its_remedy_is_that_of_who_waits(
    tmp_path: Path, fake_python: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_python("echo loading\nexec sleep 600")
    monkeypatch.setattr("lit_grpo.rollout.vllm.fleet._TELL_S", 0.1)
    server = ServerProcess(tmp_path, {}, {}, "t" * 32)
    while "loading" not in server.log.read_text():
        time.sleep(0.01)
    with pytest.raises(ValueError, match=r"did not answer in time\. It said: loading .*\.log\. Raise it\.$"):
        wait_for(server, time.monotonic() + 1.0, " Raise it.")
    assert capsys.readouterr().out.count(f"for the vLLM server at {server.url} to start; its log is {server.log}") == 1
    server.stop()
    server.log.unlink()


def test_the_token_is_in_the_environment_and_not_on_the_command_line(tmp_path: Path, fake_python: Any) -> None:
    fake_python('echo $VLLM_API_KEY\necho "$@"\nsleep 600')
    arguments = {"middleware": "of.the.User", "enforce_eager": True}
    server = ServerProcess(tmp_path, arguments, {KEY_VARIABLE: "another"}, "t" * 32, flags=["--middleware", "a.B"])
    while len(said := server.log.read_text().splitlines()) < 2:
        time.sleep(0.01)
    assert said[0] == "t" * 32
    assert said[1].endswith("--middleware a.B --middleware lit_grpo.rollout.vllm.guard.Guard")  # whatever the user's
    assert "t" * 32 not in said[1] and "--middleware of.the.User --enforce-eager" in said[1]
    server.stop()
    assert not server.log.exists() and not server.runs


def test_a_server_outlives_the_thread_that_asked_for_it(tmp_path: Path, fake_python: Any) -> None:
    fake_python("exec sleep 600")
    servers: list[ServerProcess] = []
    thread = threading.Thread(target=lambda: servers.append(ServerProcess(tmp_path, {}, {}, "t" * 32)))
    thread.start()
    thread.join()
    (server,) = servers
    with pytest.raises(subprocess.TimeoutExpired):
        server.process.wait(0.5)
    server.stop()
    assert server.process.returncode == -signal.SIGTERM


def test_workers_of_a_server_that_was_killed_end_after_it(tmp_path: Path, fake_python: Any) -> None:
    """An engine may go on where its server is gone, with all its memory."""
    fake_python("sleep 600 &\necho $!\nwait")
    server = ServerProcess(tmp_path, {}, {}, "t" * 32)
    while not (said := server.log.read_text().split()):
        time.sleep(0.01)
    worker = Path("/proc", said[0], "stat")
    assert worker.exists()
    server.process.kill()
    deadline = time.monotonic() + 120
    while worker.exists() and worker.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not worker.exists() or worker.read_text().split()[2] == "Z"  # where nobody collects the children of others
    server.stop()
    server.log.unlink()


def test_a_port_that_is_taken_is_said(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(
            ValueError, match=rf"cannot listen on port {port} of 127\.0\.0\.1 \(Address already in use\)"
        ):
            ServerProcess(tmp_path, {}, {}, "t" * 32, port=port)


PREFIX = "(EngineCore pid=123) ERROR 11-22 15:09:45 [core.py:1510] "
IN_ANOTHER_PROCESS = f"""loading
{PREFIX}EngineCore failed to start.
{PREFIX}Traceback (most recent call last):
{PREFIX}  File "core.py", line 1482, in run_engine_core
{PREFIX}    raise ValueError(
{PREFIX}ValueError: No available memory for the cache blocks.
Traceback (most recent call last):
    raise RuntimeError(
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{}}
"""
CAUSED = """Traceback (most recent call last):
ValueError: long ago
Traceback (most recent call last):
FileNotFoundError: no such file: 'config.json'

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
OSError: it cannot be loaded
bye
"""
DEAD = (
    "(APIServer pid=9) ERROR 11-28 22:28:46 [vllm_error.py:54] vllm.v1.engine.exceptions.EngineDeadError: EngineCore "
    "encountered an issue. See stack trace (above) for the root cause.\n"
)
SEVERAL_LINES = """Traceback (most recent call last):
pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, User-specified max_model_len (99999) is greater than 256.
    For further information visit https://errors.pydantic.dev
"""


@pytest.mark.parametrize(
    "log, cause",
    [
        (IN_ANOTHER_PROCESS, "ValueError: No available memory for the cache blocks."),
        (CAUSED, "FileNotFoundError: no such file: 'config.json'"),
        (
            SEVERAL_LINES,
            "1 validation error for ModelConfig Value error, User-specified max_model_len (99999) is greater",
        ),
        ("usage: ...\napi_server.py: error: unrecognized arguments: --x\n", "error: unrecognized arguments: --x"),
        ("RuntimeError: Engine core initialization failed. See root cause above.\n", "See root cause above."),
        (f"{DEAD}RuntimeError: its engine was ended by SIGKILL.\n", "ended by SIGKILL"),
        (f"{PREFIX}KeyError: 'x'\n{DEAD}Its engine has ended with code 1.\n", "KeyError: 'x'"),
        (f"{DEAD}Its engine has ended with code 1.\n", "Its engine has ended with code 1."),
        ("loading\nKilled\n\n", "Killed"),
        ("", "(nothing)"),
    ],
)
def test_the_cause_of_a_failure_is_found_in_the_log(log: str, cause: str) -> None:
    assert cause in root_cause(log)
    assert "further" not in root_cause(log)


SERVED = {"model_config": {"logprobs_mode": "processed_logprobs", "generation_config": "vllm"}}


@pytest.mark.parametrize(
    "config, said",
    [
        ({"model_config": {"logprobs_mode": "raw_logprobs"}}, "logprobs_mode 'raw_logprobs', .* --logprobs-mode proc"),
        ({"model_config": {"generation_config": "auto"}}, "generation_config 'auto', .* --generation-config vllm"),
        ({"model_config": {"override_generation_config": {"max_new_tokens": 8}}}, "without --override-generation-conf"),
        ({"watermark_config": {"scheme": "gumbel"}}, "without --watermark-config"),
        ({"kv_transfer_config": {"kv_connector": "LMCacheConnectorV1"}}, "which keeps what old weights made"),
    ],
)
def test_a_server_that_samples_otherwise_is_refused(config: dict[str, Any], said: str) -> None:
    check_settings("http://127.0.0.1:9", SERVED | {"watermark_config": None})
    with pytest.raises(ValueError, match=said):
        check_settings("http://127.0.0.1:9", SERVED | config)


def test_a_skeleton_has_everything_but_weights(tmp_path: Path, policy_folder: Path) -> None:
    policy: Any = random_policy()
    PolicySpec(policy, load_tokenizer(str(policy_folder))).save_skeleton(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    assert not list(tmp_path.glob("*.safetensors"))
    assert load_tokenizer(str(tmp_path / TOKENIZER)).encode("1+") == load_tokenizer(str(policy_folder)).encode("1+")
    assert policy.config.architectures is None


NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
OF_A_MODEL = {"method": "draft_model", "num_speculative_tokens": 3, "draft_load_config": {"load_format": "auto"}}
DRAFTS: dict[str, tuple[Any, str]] = {
    "no mapping": ("ngram", r"speculative_config is 'ngram', which is no mapping; write, .*\{method: ngram, num"),
    "misspelled": (NGRAM | {"prompt_lookup_maximum": 4}, "'prompt_lookup_maximum', .* did you mean prompt_lookup_max"),
    "of vLLM's own": (NGRAM | {"target_model_config": {}}, "holds 'target_model_config', which is no field of it; lea"),
    "no method": ({"num_speculative_tokens": 3}, "method is None; take ngram, .* eagle3 or draft_model"),
    "not tried": (NGRAM | {"method": "medusa"}, "method is 'medusa'; take ngram, ngram_gpu, suffix, mtp, eagle3 or"),
    "lossy": (NGRAM | {"rejection_sample_method": "synthetic"}, "method is 'synthetic', by which tokens are kept that"),
    "lossy rate": (NGRAM | {"synthetic_acceptance_length": 2.0}, "acceptance_length is 2.0, by .* standard or block"),
    "none": (NGRAM | {"num_speculative_tokens": 0}, "num_speculative_tokens is 0; give the tokens .* 1 to 128"),
    "too many": (NGRAM | {"num_speculative_tokens": 129}, "num_speculative_tokens is 129; give"),
    "no number": (NGRAM | {"num_speculative_tokens": 2.5}, "num_speculative_tokens is 2.5; give"),
    "missing number": ({"method": "ngram"}, "num_speculative_tokens is None; give"),
    "no package": ({"method": "suffix"}, "needs arctic-inference, .* run pip install arctic-inference==0.1.1, or take"),
    "no weights": ({"method": "mtp"}, r"'mtp' .* lacks model and draft_load_config; add .* or leave speculative_co"),
    "random weights": (OF_A_MODEL | {"draft_load_config": None, "model": "a"}, "lacks draft_load_config; add"),
    "no such model": (
        OF_A_MODEL | {"model": "/no/model"},
        r"'/no/model', whose config.json cannot be read \(.*\);",
    ),
}
"""Ways to draft that are refused, and the sentence."""


@pytest.mark.parametrize("name", DRAFTS)
def test_drafts_that_cannot_be_or_change_what_is_sampled_are_refused(
    name: str, policy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an engine in this process and by servers that are started here, before any of them starts."""
    monkeypatch.setattr(
        vllm_setup.util, "find_spec", lambda package: None if package == "arctic_inference" else package
    )
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    policy: Any = random_policy(head_dim=32)
    config, said = DRAFTS[name]
    given, spec = {"speculative_config": config}, PolicySpec(policy, load_tokenizer(str(policy_folder)))
    for make in (lambda: VLLMGenerator(engine_args=given), lambda: VLLMServerGenerator(server_args=given)):
        with pytest.raises(ValueError, match=said):
            make().start(spec)
    with pytest.raises(ValueError, match=said):  # as serve is told of them
        ServerPlan(spec, 4, {}, on_gpu=True, flags=["--speculative-config", json.dumps(config)])


def test_drafts_that_keep_the_distribution_are_counted(policy_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_setup.util, "find_spec", lambda package: package)
    policy: Any = random_policy(head_dim=32)
    spec = PolicySpec(policy, load_tokenizer(str(policy_folder)))
    assert drafting({}) is None and draft_arguments({}) == {}
    heads = {"method": "mtp", "model": str(policy_folder), "draft_load_config": {"load_format": "auto"}}
    of_model = OF_A_MODEL | {"model": str(policy_folder), "rejection_sample_method": "block"}
    for config in (NGRAM, {"method": "suffix"}, heads, of_model):
        check_drafts({"speculative_config": config}, spec)
        assert draft_arguments({"speculative_config": config}) == {"per_request_spec_decode_metrics": "summary"}
    short = {"spec_method": "ngram", "spec_tokens": "3"}
    assert drafting(short) == {"method": "ngram", "num_speculative_tokens": "3"}
    check_drafts(short, spec)


def test_a_model_drafts_from_the_tokens_of_the_policy(tmp_path: Path, policy_folder: Path) -> None:
    policy: Any = random_policy(head_dim=32)
    spec = PolicySpec(policy, load_tokenizer(str(policy_folder)))
    config, known = json.loads((policy_folder / "config.json").read_text()), policy.config.vocab_size

    def check(number: int, **changes: Any) -> None:
        (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": number}))
        check_drafts({"speculative_config": OF_A_MODEL | {"model": str(tmp_path)} | changes}, spec)

    check(known)
    for number, changes in ((known - 1, {}), (known + 1, {}), (known + 1, {"method": "eagle3"})):
        with pytest.raises(
            ValueError, match=rf"drafts from {number} tokens, and the policy knows {known}; take a model"
        ):
            check(number, **changes)
    check(known - 1, method="eagle3")  # whose heads leave rare tokens out
    check(known - 1, use_heterogeneous_vocab=True)


def test_drafts_that_may_be_missing_are_refused_for_recurrent_layers(policy_folder: Path) -> None:
    policy: Any = random_policy(hybrid=True)
    spec = PolicySpec(policy, load_tokenizer(str(policy_folder)))
    with pytest.raises(
        ValueError, match=r"is 'ngram', and the policy .* recurrent layers, .*39273\); take method: mtp"
    ):
        check_drafts({"speculative_config": NGRAM}, spec)
    with pytest.raises(ValueError, match=r"^At the server http://h:1 speculative_config.method is 'ngram', and "):
        check_server_drafts("http://h:1", NGRAM, None, spec)
    heads = {"method": "mtp", "model": str(policy_folder), "draft_load_config": {"load_format": "auto"}}
    check_drafts({"speculative_config": heads}, spec)


def test_a_server_drafts_as_the_run_says(policy_folder: Path) -> None:
    policy: Any = random_policy()
    spec = PolicySpec(policy, load_tokenizer(str(policy_folder)))
    served = {
        **NGRAM,
        "prompt_lookup_max": 5,
        "rejection_sample_method": "standard",
        "model": "ngram",
        "revision": None,
    }
    for given in (None, NGRAM, NGRAM | {"prompt_lookup_max": 5}):
        check_server_drafts("http://h:1", served, given, spec)
    check_server_drafts("http://h:1", None, None, spec)
    for there, given in ((served, NGRAM | {"num_speculative_tokens": 4}), (None, NGRAM)):
        with pytest.raises(ValueError, match=r"^The server at http://h:1 has .* with --speculative-config '{"):
            check_server_drafts("http://h:1", there, given, spec)
    with pytest.raises(ValueError, match=r"^At the server http://h:1 speculative_config.synthetic_acceptance_rates is"):
        check_server_drafts("http://h:1", served | {"synthetic_acceptance_rates": [0.5]}, None, spec)


def test_weights_that_draft_are_kept_and_min_p_is_not_for_drafts(policy_folder: Path) -> None:
    with pytest.raises(ValueError, match=r"a model that drafts needs .* sleep_level 2 drops them; take sleep_le"):
        VLLMGenerator(sleep_level=2, engine_args={"speculative_config": OF_A_MODEL | {"model": str(policy_folder)}})
    VLLMGenerator(sleep_level=2, engine_args={"speculative_config": NGRAM})
    request = Request(Prompt("train/0", (1, 2, 3), ""), (0,), SamplingParams(min_p=0.1))
    check_min_p(request, {})
    with pytest.raises(ValueError, match=r"sampling.min_p is 0.1, by which vLLM does not verify drafts; set min_p"):
        check_min_p(request, {"speculative_config": NGRAM})


def test_on_a_cpu_drafts_are_verified_with_what_this_package_mends() -> None:
    config: Any = small_config("qwen3", width=8)
    check_on_cpu(config, {"worker_extension_cls": "a.B"})
    with pytest.raises(ValueError, match="only lit_grpo's worker_extension_cls mends; leave worker_extension_cls or"):
        check_on_cpu(config, {"worker_extension_cls": "a.B", "speculative_config": NGRAM})


def test_values_of_rows_are_repeated_for_their_drafted_tokens() -> None:
    values, ends = torch.tensor([0.0, 0.7, 0.5, 0.0]), torch.tensor([2, 2, 5, 6], dtype=torch.int32)
    assert _expanded(values, ends, 6, 0, 1).tolist() == [1.0, 1.0, 0.5, 0.5, 0.5, 1.0]
    assert _expanded(torch.tensor([4, 0], dtype=torch.int32), torch.tensor([1, 2]), 2).dtype == torch.int32


def test_a_family_that_vllm_computes_in_another_way_is_refused_with_a_remedy() -> None:
    pytest.importorskip("vllm")
    check_family(small_config("qwen3"), {}, 128)
    with pytest.raises(ValueError, match=r"keeps old weights of gpt_oss .* \(its experts and attention sinks\), "):
        check_family(small_config("gpt_oss"), {}, 128)
    cohere2 = small_config("cohere2", {"sliding_window": 96})
    with pytest.raises(ValueError, match=r"lets it see 95, .* set max_model_len among vLLM's arguments to at most 96"):
        check_family(cohere2, {}, 128)
    check_family(cohere2, {"max_model_len": 96}, 128)
    with pytest.raises(ValueError, match=r"On a CPU .* without the bias of their router, .* ernie4_5_moe .* or a GPU"):
        check_on_cpu(small_config("ernie4_5_moe", width=4), {})
    check_on_cpu(small_config("falcon_mamba"), {})
    with pytest.raises(ValueError, match="heads have 16 dimensions, for which vLLM has no attention on CPUs"):
        check_on_cpu(small_config("gemma4_text", {"head_dim": 32}), {})  # those of its full layers


ROOM = {
    "an engine": (lambda: VLLMGenerator(), "raise engine_args.max_model_len as far", "raise kv_memory, or lower"),
    "own servers": (
        lambda: VLLMServerGenerator(),
        "raise server_args.max_model_len as far",
        "raise server_args.kv_cache_memory_bytes, or lower",
    ),
    "named servers": (
        lambda: VLLMServerGenerator(urls=["http://a:1"]),
        "start the servers with a larger --max-model-len as far",
        "start the servers with a larger --kv-cache-memory-bytes, or lower",
    ),
}
"""The remedies of a request that is too long: fields and options that the generator has."""


@pytest.mark.parametrize("name", ROOM)
def test_a_request_that_is_too_long_names_a_setting_of_its_generator(name: str) -> None:
    make, *remedies = ROOM[name]
    request = Request(Prompt("train/0", (1, 2, 3), ""), (0,), SamplingParams(max_tokens=8))
    for limits, remedy in zip(((10, 99), (99, 10)), remedies, strict=True):
        with pytest.raises(ValueError, match=re.escape(remedy)):
            check_fits(request, *limits, make().remedies)


HYBRIDS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "small keys": (
        {"linear_key_head_dim": 16},
        {},
        r"have 16 and 128 dimensions, .* CPUs .*; take lit_grpo\.rollout\.slots",
    ),
    "small values": ({"linear_value_head_dim": 16}, {"dtype": "bfloat16"}, "have 128 and 16 dimensions, which vLLM"),
    "float32": ({}, {}, "in bfloat16 alone, and is to compute in .*; set dtype: bfloat16 among vLLM's arguments, or"),
    "bfloat16": ({}, {"dtype": "bfloat16"}, r"^vLLM's model of qwen3_5_text imports torchvision, which is not .*, or"),
}
"""What an engine on a CPU is told to compute of a hybrid, and why it is refused."""


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_hybrid_that_vllm_cannot_compute_here_is_refused_before_anything_starts(
    name: str, policy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each obstacle is told, for the remedy of one alone would not help."""
    pytest.importorskip("vllm")
    monkeypatch.setattr(vllm_setup.util, "find_spec", lambda package: None if package == "torchvision" else package)
    changes, arguments, said = HYBRIDS[name]
    sizes = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "head_dim": 32} | changes
    policy: Any = random_policy(hybrid=True, **sizes)
    spec = PolicySpec(policy, load_tokenizer(str(policy_folder)))
    version, _, build = str(torch.__version__).partition("+")
    index = f" --index-url https://download.pytorch.org/whl/{build}" if build else ""
    for generator in (VLLMGenerator(engine_args=arguments), VLLMServerGenerator(server_args=arguments)):
        with pytest.raises(ValueError, match=said) as refused:
            generator.start(spec)
        assert f"; run pip install torchvision torch=={version}{index}" in str(refused.value)


IMPORTING = """
import importlib, json, sys
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from vllm.model_executor.models.registry import ModelRegistry
sys.modules["torchvision"] = None
lacking = []
for family, architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
    if architecture in ModelRegistry.models:
        try:
            importlib.import_module(ModelRegistry.models[architecture].module_name)
        except ImportError:
            lacking.append(family)
print(json.dumps(lacking))
"""


@pytest.mark.nightly
def test_the_families_that_need_torchvision_are_those_that_vllm_cannot_import_without_it() -> None:
    pytest.importorskip("vllm")
    run = subprocess.run([sys.executable, "-c", IMPORTING], capture_output=True, text=True, check=True)
    assert set(json.loads(run.stdout.splitlines()[-1])) == set(vllm_setup._WITH_TORCHVISION)


def test_a_server_whose_model_cannot_be_imported_names_the_package() -> None:
    """vLLM logs the error, and raises another that points to the log."""
    log = """\
(APIServer pid=7) ERROR 11-28 22:08:34 [registry.py:1108] ModuleNotFoundError: No module named 'timm'
(APIServer pid=7) Traceback (most recent call last):
(APIServer pid=7) ValueError: Model architectures ['A'] failed to be inspected. Please check the logs for more details.
"""
    assert root_cause(log) == "ModuleNotFoundError: No module named 'timm'"


def test_servers_on_a_cpu_share_its_threads_and_what_the_user_has_set_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    assert [server_environment(number)["OMP_NUM_THREADS"] for number in (1, 2, 8)] == ["5", "2", "1"]
    assert server_environment()["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert server_environment(2)["OMP_NUM_THREADS"] == "3"
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    assert server_environment()["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"  # so that bound.py reaches workers
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in server_environment()


def test_heads_of_a_size_that_vllm_does_not_know_are_refused_before_an_engine_starts(
    monkeypatch: pytest.MonkeyPatch, policy_folder: Path
) -> None:
    pytest.importorskip("vllm")
    monkeypatch.setattr("lit_grpo.rollout.vllm.arguments.installed_version", lambda: "0.32.0")
    policy = PolicySpec(load_policy(str(policy_folder)), load_tokenizer(str(policy_folder)))
    with pytest.raises(ValueError, match=r"heads have 16 dimensions, for which vLLM has no attention on CPUs"):
        VLLMGenerator().start(policy)


def test_a_rank_has_one_engine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    monkeypatch.setattr("lit_grpo.rollout.vllm.engine._of_ranks", [object()])
    policy: Any = random_policy(head_dim=32)
    with pytest.raises(ValueError, match="engine of another policy, or one that broke off in a step, and as one"):
        VLLMGenerator().start(PolicySpec(policy, make_tokenizer()))
