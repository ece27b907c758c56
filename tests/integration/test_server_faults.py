"""vLLM servers that die or hang in the middle of a rollout, and weights that travel as changes."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from conftest import random_policy
from hand_made import SERVER_ARGUMENTS, by_text, full_logprobs, make_module, make_trainer, save_policy_for_vllm, sgd
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from benchmarks.rollouts import Stepped
from lit_grpo.callbacks import RolloutScheduler, WeightSync
from lit_grpo.data.module import PromptDataModule
from lit_grpo.policy.loading import load_policy, load_tokenizer
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.policy.weights import PolicyWeights
from lit_grpo.rollout.generator import GenerationError
from lit_grpo.rollout.loop import RolloutLoop
from lit_grpo.rollout.vllm.arguments import server_arguments, server_environment
from lit_grpo.rollout.vllm.fleet import _REQUIRED, wait_for
from lit_grpo.rollout.vllm.guard import OWNER_PATH, RUN_HEADER, TOKEN_VARIABLE
from lit_grpo.rollout.vllm.http import ServerError
from lit_grpo.rollout.vllm.process import ServerProcess
from lit_grpo.rollout.vllm.server import VLLMServerGenerator
from lit_grpo.rollout.weights.tensors import SyncReport, check_arrival
from lit_grpo.types import Prompt, SamplingParams
from scripts.make_tiny import make_tokenizer

PROMPTS = [Prompt("a", (2, 3, 4), ""), Prompt("b", (9,), "")]
SAMPLING = SamplingParams(max_tokens=48)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy_for_vllm(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def policy(folder: Path) -> Any:
    return load_policy(str(folder)).eval()


@pytest.fixture(scope="module")
def generator(policy: Any, folder: Path, forked_servers: None) -> Iterator[VLLMServerGenerator]:
    """Two servers; the tests use them up one after another."""
    generator = VLLMServerGenerator(2, num_servers=2, transfer="changes", server_args=SERVER_ARGUMENTS, restarts=4)
    generator.start(PolicySpec(policy, load_tokenizer(str(folder))))
    generator.load_weights(PolicyWeights(policy), 0)
    yield generator
    generator.close()


def ask(generator: Any, method: str, path: str, **options: Any) -> httpx.Response:
    """Ask the first server as another run does that has come by its token."""
    headers = {"Authorization": f"Bearer {generator._fleet.token}", RUN_HEADER: "another"} | options.pop("headers", {})
    return httpx.request(
        method, generator._fleet._servers[0].client.url + path, headers=headers, timeout=30.0, **options
    )


def sync(generator: Any, policy: Any, version: int) -> SyncReport:
    weights = PolicyWeights(policy)
    report = generator.load_weights(weights, version)
    check_arrival(weights.digests, report.digests)
    return report


def pids(generator: VLLMServerGenerator) -> list[int]:
    processes = [server.process for server in generator._fleet.alive]
    return [process.process.pid for process in processes if isinstance(process, ServerProcess)]


def collect(
    generator: VLLMServerGenerator,
    fault: Callable[[], None] = lambda: None,
    drops: bool = False,
    said: list[str] | None = None,
) -> tuple[dict[Any, list[int]], list[str]]:
    """Sample 16 completions, with a ``fault`` once some tokens are there; return their tokens and what moved.

    ``drops`` says that some tokens are not taken, and sampled again; ``said`` takes everything that the user is told.
    """
    said = [] if said is None else said
    num_tokens = 0

    def on_step(new_tokens: int) -> None:
        nonlocal num_tokens
        before, num_tokens = num_tokens, num_tokens + new_tokens
        if before < 60 <= num_tokens:
            fault()

    controller = RolloutLoop(generator, listeners=[Stepped(on_step)])
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        groups, _ = controller.collect(PROMPTS, 8, SAMPLING, seed=0)
    said += [str(each.message) for each in warned]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    whole = sum(rollout.completion.num_tokens for rollout in rollouts)
    assert num_tokens > whole if drops else num_tokens == whole > 60  # none is sampled twice
    return {r.completion.request.key: r.completion.token_ids_T.tolist() for r in rollouts}, [
        text for text in said if "will go on from there" in text
    ]


@pytest.fixture(scope="module")
def expected(generator: VLLMServerGenerator) -> dict[Any, list[int]]:
    return collect(generator)[0]


def test_only_the_run_with_the_token_that_has_taken_a_server_can_change_it(generator: Any) -> None:
    (url, *_) = [server.client.url for server in generator._fleet._servers]
    bare = {"Content-Type": "text/plain"}
    for path in ("/update_weights", "/collective_rpc", "/v1/completions", "/v1/load_lora_adapter", "/pause"):
        assert httpx.post(url + path, content="{}", headers=bare).status_code == 401
        page = {"Authorization": f"Bearer {generator._fleet.token}", "Origin": "https://evil.example"}
        assert httpx.post(url + path, content="{}", headers=bare | page).status_code == 403
        if path != "/v1/completions":
            assert ask(generator, "POST", path).status_code == 409
    for path in ("/health", "/metrics", "/server_info", "/openapi.json"):
        assert httpx.get(url + path).status_code == 401
        assert ask(generator, "GET", path, headers={"Host": "evil.example"}).status_code == 403
    client = generator._fleet._servers[0].client
    told = client.ask("GET", "/server_info?config_format=json")["vllm_config"]
    for name, (part, allowed, _) in _REQUIRED.items():  # what is checked is there to be checked
        assert (told[part] if part else told)[name] in allowed
    with pytest.raises(
        ServerError, match="Workers are asked for methods of lit_grpo's extension alone, not for 'save_"
    ):
        client.ask_workers("save_sharded_state", path="/tmp/x")
    with pytest.raises(ServerError, match="is not in a private folder"):
        client.ask_workers("reload", source="/etc/passwd")
    assert client.is_ours()


def test_servers_named_by_url_are_checked_and_used(
    generator: Any, policy: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls = [server.client.url for server in generator._fleet._servers[:1]]
    monkeypatch.setenv(TOKEN_VARIABLE, "another-token-of-some-length")
    with pytest.raises(ValueError, match="does not take this run's token"):
        VLLMServerGenerator(2, urls=urls).start(PolicySpec(policy, load_tokenizer(str(folder))))
    monkeypatch.setenv(TOKEN_VARIABLE, generator._fleet.token)
    with pytest.raises(ValueError, match="belongs to another run"):
        VLLMServerGenerator(2, urls=urls).start(PolicySpec(policy, load_tokenizer(str(folder))))
    generator.close()  # gives them back
    wider = random_policy(head_dim=32, intermediate_size=96)
    with pytest.raises(ValueError, match="another model is served: its intermediate_size is 64, the policy's is 96"):
        VLLMServerGenerator(2, urls=urls).start(PolicySpec(wider, load_tokenizer(str(folder))))
    with pytest.raises(ValueError, match="has another tokenizer than the policy"):
        VLLMServerGenerator(2, urls=urls).start(PolicySpec(policy, make_tokenizer()))
    named = VLLMServerGenerator(2, urls=urls)
    named.start(PolicySpec(policy, load_tokenizer(str(folder))))
    assert named.capacity().slots == 2
    sync(named, policy, 0)
    assert len(collect(named)[0]) == 16
    named.close()
    assert sync(generator, policy, 0).changed_share == 1.0  # taken again, with nothing known of what they hold


def test_changes_of_a_small_update_are_few_and_rebuild_every_bit(generator: VLLMServerGenerator, policy: Any) -> None:
    sync(generator, policy, 0)
    saved = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    with torch.no_grad():
        policy.model.layers[0].mlp.up_proj.weight[:3, :5] += 0.125
        policy.model.norm.weight[7] *= 1.5
    for version, state in ((1, policy.state_dict()), (2, saved)):
        policy.load_state_dict(state)
        report = sync(generator, policy, version)  # of the tensors that the servers put together
        num_elements = sum(parameter.numel() for parameter in policy.parameters())
        assert report.changed_share == pytest.approx(16 / num_elements)
        assert report.num_bytes == 16 * (4 + 4)
        groups, _ = RolloutLoop(generator).collect(PROMPTS, 2, SAMPLING, seed=0)
        for rollout in groups[0].rollouts:
            assert torch.allclose(rollout.completion.logprobs_T, full_logprobs(policy, rollout), atol=1e-4)
    generator.invalidate_weights()
    assert sync(generator, policy, 2).changed_share == 1.0  # whole, for what the servers hold is not known


def test_weights_that_another_run_has_changed_are_not_sampled_with(
    generator: Any, policy: Any, expected: dict[Any, list[int]]
) -> None:
    client = generator._fleet._servers[0].client
    another = httpx.Client(headers={"Authorization": f"Bearer {generator._fleet.token}", RUN_HEADER: "another"})

    def usurp() -> None:
        """Change a server as another run does, once ours has lost it."""
        client.release()
        held.append(another.send(another.build_request("POST", client.url + OWNER_PATH), stream=True))
        assert held[0].is_success and ask(generator, "GET", OWNER_PATH).json()["owned"]
        assert ask(generator, "POST", "/update_weight_version", json={"new_version": "3"}).is_success

    held: list[httpx.Response] = []
    tokens, messages = collect(generator, usurp, drops=True)
    assert tokens == expected
    assert len(messages) == 1 and "somebody else has changed its weights" in messages[0]
    assert generator.capacity().slots == 2
    with pytest.warns(UserWarning, match="A server is left out: .* belongs to another run"):
        sync(generator, policy, 3)
    another.close()  # as the end of its process does
    deadline = time.monotonic() + 120
    while ask(generator, "GET", OWNER_PATH).json()["owned"]:
        assert time.monotonic() < deadline
    sync(generator, policy, 3)
    assert generator.capacity().slots == 4  # it is back
    assert collect(generator) == (expected, [])


def test_a_slow_server_is_waited_for(generator: Any, expected: dict[Any, list[int]]) -> None:
    (server, *_) = generator._fleet.alive
    engines = psutil.Process(server.process.process.pid).children(recursive=True)
    assert engines

    def stop_for_a_while() -> None:
        """Stop what computes, while the process that answers goes on."""
        for engine in engines:
            engine.suspend()
        threading.Timer(6.0, lambda: [engine.resume() for engine in engines]).start()

    said: list[str] = []
    assert collect(generator, stop_for_a_while, said=said) == (expected, [])
    waits = [text for text in said if text.startswith(f"Waiting for the vLLM server at {server.client.url}: none of")]
    assert len(waits) == 1 and "and it answers, but its engine does not. It is left out at " in waits[0]
    assert len(generator._fleet.alive) == 2


def test_a_server_that_hangs_is_left_out_and_comes_back(
    generator: Any, policy: Any, expected: dict[Any, list[int]]
) -> None:
    before = pids(generator)
    tokens, messages = collect(generator, lambda: os.killpg(before[0], signal.SIGSTOP))
    assert tokens == expected
    assert len(messages) == 1 and "has hung: none of its " in messages[0] and "and it does not answer." in messages[0]
    assert pids(generator) == before[1:]
    os.killpg(before[0], signal.SIGCONT)  # or the next sync would start it again
    sync(generator, policy, 3)
    assert pids(generator) == before
    assert collect(generator) == (expected, [])


@pytest.mark.nightly
def test_a_server_whose_engine_hangs_is_left_out_and_started_again_while_it_says_that_it_is_well(
    generator: Any, policy: Any, expected: dict[Any, list[int]]
) -> None:
    fleet, before = generator._fleet, pids(generator)
    hung, restarts = fleet._servers[0], fleet.restarts

    def hang() -> None:
        """Stop the engine, which is a process of its own, and let the one that answers ``/health`` go on."""
        children = psutil.Process(hung.process.process.pid).children(recursive=True)
        max(children, key=psutil.Process.num_threads).suspend()
        assert hung.client._loop.run(hung.client._request("GET", "/health", timeout=60.0)).is_success

    def said_by_sync(version: int) -> list[str]:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            sync(generator, policy, version)
        return [str(each.message) for each in said]

    # Within a rollout: the other goes on with all that it had, and the next sync starts it again without waiting.
    hung.process.log.unlink()
    tokens, messages = collect(generator, hang)
    assert tokens == expected
    assert len(messages) == 1 and "and it answers, but its engine does not. " in messages[0]
    assert "will go on from there on the server that is left." in messages[0]
    said = said_by_sync(3)
    assert [text for text in said if "It is started again, and decodes after a sync that finds it up" in text], said
    assert pids(generator) == before[1:] and hung.process.process.pid != before[0]  # nobody has waited for it
    assert not psutil.pid_exists(before[0]) and fleet.restarts == restarts - 1
    assert collect(generator) == (expected, [])
    wait_for(hung.process, time.monotonic() + 300.0)
    sync(generator, policy, 3)
    assert pids(generator) == [hung.process.process.pid, *before[1:]]  # it has taken the weights
    assert collect(generator) == (expected, [])

    # Before a sync: which says what it waits for, and goes on with the other.
    hang()
    said, url = said_by_sync(4), hung.client.url
    waiting = f"Waiting for the vLLM server at {url}: whether it is well has not"
    assert any(text.startswith(waiting) for text in said), said
    assert any(text.startswith(f"The vLLM server at {url} is left out: it, or its engine, has not") for text in said)
    assert pids(generator) == before[1:]
    for child in psutil.Process(hung.process.process.pid).children(recursive=True):
        child.resume()  # it is slow, and not dead: what it holds is not what it is asked for, and it takes the weights
    while not hung.client.answers():
        time.sleep(0.1)
    sync(generator, policy, 3)
    assert len(pids(generator)) == 2 and fleet.restarts == restarts - 1
    assert collect(generator) == (expected, [])


@pytest.mark.nightly
def test_a_rollout_whose_servers_are_all_stopped_ends_well(
    generator: Any, policy: Any, expected: dict[Any, list[int]]
) -> None:
    before, restarts = pids(generator), generator._fleet.restarts

    def stop() -> None:
        for pid in before:
            os.killpg(pid, signal.SIGSTOP)

    tokens, messages = collect(generator, stop)
    assert tokens == expected
    assert len([message for message in messages if "has hung" in message]) == 2, messages
    assert any("go on from there on a server that was started again." in message for message in messages), messages
    assert generator._fleet.restarts == restarts - 2 and not set(pids(generator)) & set(before)
    for server in generator._fleet._servers:
        wait_for(server.process, time.monotonic() + 300.0)
    sync(generator, policy, 3)
    assert len(pids(generator)) == 2
    assert collect(generator) == (expected, [])
    generator._fleet.restarts = restarts


@pytest.mark.nightly
def test_a_server_that_is_killed_loses_and_doubles_nothing_and_is_started_again(
    generator: Any, policy: Any, expected: dict[Any, list[int]]
) -> None:
    before, server = pids(generator), generator._fleet._servers[0]
    log = server.process.log

    def kill() -> None:
        os.killpg(before[0], signal.SIGKILL)
        server.process.process.wait()

    said: list[str] = []
    tokens, messages = collect(generator, kill, said=said)
    assert tokens == expected
    assert len(messages) == 1 and "go on from there on the server that is left." in messages[0]
    while server.process.log == log:  # it is started again without a sync
        time.sleep(0.05)
    assert any(f"What it said is in {log}." in text for text in said) and log.exists()
    log.unlink()
    sync(generator, policy, 3)
    assert pids(generator)[-1:] == before[1:] and server.process.runs  # nobody waits for it
    wait_for(server.process, time.monotonic() + 300.0)
    sync(generator, policy, 3)
    assert pids(generator) == [server.process.process.pid, *before[1:]]
    assert collect(generator) == (expected, [])


@pytest.mark.nightly
def test_a_rollout_whose_last_server_dies_goes_on_once_one_is_started_again(
    generator: Any, policy: Any, expected: dict[Any, list[int]]
) -> None:
    generator._fleet.restarts = 1  # what earlier faults have left

    def kill() -> None:
        for server in generator._fleet._servers:
            os.killpg(server.process.process.pid, signal.SIGKILL)

    said: list[str] = []
    tokens, messages = collect(generator, kill, said=said)
    assert tokens == expected and any("(0 restarts left)" in text for text in said)
    assert any("go on from there on a server that was started again." in message for message in messages), messages
    assert len(pids(generator)) == 1 and generator.capacity().slots == 2  # the other had no restart left
    sync(generator, policy, 3)
    assert collect(generator) == (expected, [])


@pytest.mark.nightly
def test_a_server_that_begins_anew_at_its_address_comes_back(
    generator: Any, policy: Any, expected: dict[Any, list[int]]
) -> None:
    fleet = generator._fleet
    (dead,) = [server for server in fleet._servers if not server.up]
    port = int(dead.client.url.rpartition(":")[2])
    arguments = server_arguments("float32", 2) | SERVER_ARGUMENTS | {"served_model_name": "another"}
    dead.process = ServerProcess(fleet._folder.path, arguments, server_environment(2), fleet.token, port=port)
    wait_for(dead.process, time.monotonic() + 300.0)
    sync(generator, policy, 3)
    assert dead.client.model == "another" and len(fleet.alive) == 2
    for server in fleet._servers:
        server.client.watch.timeout_s = 60.0  # for a new engine beside a busy one
    assert collect(generator) == (expected, [])


class KillAll(Callback):
    """Ends the generator's servers after an update."""

    def __init__(self, generator: VLLMServerGenerator, after: int) -> None:
        self.generator, self.after = generator, after

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if pl_module.policy_version == self.after:
            for pid in pids(self.generator):
                os.killpg(pid, signal.SIGKILL)


def train(folder: Path, generator: VLLMServerGenerator, *callbacks: Callback, ckpt_path: Path | None = None) -> Any:
    """Take three updates, with a checkpoint after each."""
    module = make_module(
        folder,
        generator=generator,
        optimizer=sgd(0.1),
        sampling=SamplingParams(max_tokens=9),
        rewards=[by_text()],
    )
    data = PromptDataModule(str(folder), train=str(folder / "train.jsonl"), batch_size=2)
    checkpoint = ModelCheckpoint(folder / "checkpoints", save_last=True, every_n_train_steps=1)
    everything = (*callbacks, RolloutScheduler(), WeightSync(), checkpoint)
    trainer = make_trainer(*everything, enable_checkpointing=True, max_steps=3, max_epochs=-1)
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path, weights_only=False)
    return module


@pytest.mark.nightly
def test_a_run_whose_last_server_dies_says_so_and_resumes_from_its_checkpoint(
    folder: Path, generator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that has begun anew is there for the run that resumes."""
    fleet = generator._fleet
    fleet._servers, (_, other) = fleet._servers[1:], fleet._servers[::-1]
    assert len(pids(generator)) == 1
    with pytest.raises(GenerationError, match="No vLLM server is left; start them again and resume"):
        train(folder, generator, KillAll(generator, after=2))
    other.client.release()
    monkeypatch.setenv(TOKEN_VARIABLE, fleet.token)
    again = VLLMServerGenerator(2, urls=[other.client.url])
    resumed = train(folder, again, ckpt_path=folder / "checkpoints" / "last.ckpt")
    assert resumed.policy_version == 3
    other.process.stop()
