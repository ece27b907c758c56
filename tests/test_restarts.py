"""Servers of ours that have ended are started again, but not for ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lit_grpo.policy.loading import load_policy, load_tokenizer
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.rollout.generator import GenerationError
from lit_grpo.rollout.vllm.fleet import Fleet
from lit_grpo.rollout.vllm.http import ServerClient
from lit_grpo.rollout.vllm.members import Server
from lit_grpo.rollout.vllm.process import ServerProcess
from lit_grpo.rollout.vllm.server import VLLMServerGenerator
from lit_grpo.rollout.vllm.transports import transport_of
from lit_grpo.rollout.weights.tensors import WeightSyncError


def test_a_server_that_ends_at_once_each_time_is_not_started_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho 'ValueError: too little memory'\nexit 3\n")
    fake.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(fake))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # where logs stay
    fleet = Fleet(1, 1, None, None, False, transport_of("files", None), 0.5, 20.0, None, restarts=2)
    client = ServerClient("http://127.0.0.1:9", "t", "run", 0.5, fleet.loop)
    server = Server(client, ServerProcess(tmp_path, {}, {}, "t" * 32))
    fleet._servers, fleet._introduction = [server], None  # pyright: ignore[reportAttributeAccessIssue]
    assert isinstance(server.process, ServerProcess)
    server.process.process.wait()
    with (
        pytest.warns(UserWarning, match="ended with code 3. It said: ValueError: too little memory") as said,
        pytest.raises(WeightSyncError, match="No vLLM server took the policy's weights: none is up"),
    ):
        fleet.load_weights([], 0)
    texts = [str(each.message) for each in said]
    assert len(texts) == 3 and "(1 restarts are left)" in texts[0] and "(0 restarts are left)" in texts[1]
    assert fleet.restart(server) == "" and len(list(tmp_path.glob("*.log"))) == 3
    fleet._stop()


def test_a_rollout_does_not_go_on_with_a_policy_that_has_changed_since_it_was_sent(
    policy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = VLLMServerGenerator(2)
    generator._policy = PolicySpec(load_policy(str(policy_folder)), load_tokenizer(str(policy_folder)))
    generator._version, generator._arrived = 3, {"weight": "a"}

    def load(weights: Any, version: int, in_flight: Any) -> None:
        assert (version, in_flight) == (3, "recompute")
        generator._arrived = {"weight": arrives, "base": "c"}

    monkeypatch.setattr(generator, "load_weights", load)
    arrives = "a"
    generator._begin_anew([], "It has died.")
    arrives = "b"
    with pytest.raises(GenerationError, match=r"It has died\. No vLLM server is left; start them again"):
        generator._begin_anew([], "It has died.")
