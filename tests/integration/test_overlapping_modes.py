"""Modes that decode on a server while the policy is updated: nothing is lost, nothing is older than it may be."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from conftest import table_rows
from hand_made import (
    SERVER_ARGUMENTS,
    StepRecorder,
    flat,
    plugin,
    relative_error,
    save_policy_for_vllm,
    sgd,
    weights_of,
)
from sampled_runs import Trained, check_log_probs
from test_training_modes import UPDATES, Interrupt, check_staleness, check_stream, train

from lit_grpo.rollout.generator import GenerationError
from lit_grpo.rollout.vllm.server import VLLMServerGenerator
from lit_grpo.rollout.vllm.streams import EngineRequests
from lit_grpo.types import SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy_for_vllm(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def server(forked_servers: None) -> Iterator[VLLMServerGenerator]:
    """A server, which goes on from one run to the next."""
    generator = VLLMServerGenerator(6, server_args=SERVER_ARGUMENTS | {"dtype": "float32"})
    yield generator
    generator.close()


@pytest.mark.parametrize(
    "mode",
    table_rows(
        ["asynchronous", "asynchronous:at_sync=drain", "asynchronous:max_staleness=1,unit=completion"],
        ["asynchronous:max_staleness=1,unit=completion"],
    ),
)
def test_nothing_is_lost_and_every_token_is_of_its_version(
    folder: Path, tmp_path: Path, server: Any, mode: str
) -> None:
    trained, _, scheduler = train(folder, mode, tmp_path, generator=server)
    assert list(trained.batches) == list(range(UPDATES))
    check_staleness(trained, plugin(mode).max_staleness)
    check_log_probs(trained)
    check_stream(trained, scheduler)
    assert all(log["rollout/discarded_tokens"] == 0 for log in trained.logs)  # it waits rather than throw away
    assert all(0 <= log["perf/overlap"] <= 1 for log in trained.logs)
    if "drain" in mode:
        assert all(len(rollout.completion.versions_T.unique()) == 1 for rollout in trained.rollouts)


@pytest.mark.nightly
def test_keys_and_values_of_older_weights_are_used_where_the_mode_keeps_them(
    folder: Path, tmp_path: Path, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where requests go on under other weights, they may use keys and values under the salt of the old ones."""
    opened, salts = EngineRequests.open, list[bool]()

    def open_stream(streams: Any, request: Any, expected: float, salt: str) -> Any:
        if request.prefix.num_tokens and request.prefix.newest_version != server.version:
            salts.append(salt == server._salt)
        return opened(streams, request, expected, salt)

    monkeypatch.setattr(EngineRequests, "open", open_stream)
    # Long, so that some are being decoded at a sync; and small steps, for old keys tell in the log-probs.
    settings: dict[str, Any] = {"sampling": SamplingParams(max_tokens=96), "optimizer": sgd(0.02)}
    for at_sync in ("keep", "recompute"):
        salts.clear()
        for attempt in range(5):  # where updates take long, on a busy machine, all may have been decoded before a sync
            mode, run = f"asynchronous:at_sync={at_sync}", tmp_path / f"{at_sync}-{attempt}"
            trained, _, scheduler = train(folder, mode, run, generator=server, **settings)
            check_staleness(trained, 2)
            check_stream(trained, scheduler)
            if salts:
                break
        assert salts and {*salts} == {at_sync == "recompute"}


@pytest.mark.nightly
def test_a_periodic_run_takes_the_steps_of_a_synchronous_one(folder: Path, tmp_path: Path, server: Any) -> None:
    runs = []
    for mode in (None, "periodic"):
        recorder = StepRecorder()
        trained, module, _ = train(folder, mode, tmp_path / str(mode), callbacks=[recorder], generator=server)
        check_log_probs(trained)
        runs.append((trained, module, recorder))
    (one, first, expected), (other, second, actual) = runs
    assert relative_error(flat(actual.gradients[0]), flat(expected.gradients[0])) < 1e-6
    for number, batch in one.batches.items():
        tokens = [
            [(r.completion.request.key, r.completion.token_ids_T.tolist()) for r in b]
            for b in (batch, other.batches[number])
        ]
        assert tokens[0] == tokens[1]
    assert relative_error(weights_of(second), weights_of(first)) < 1e-5
    for name in ("reward", "loss", "update/tokens", "staleness/max", "completions/mean_length"):
        assert actual.logs[0][name] == pytest.approx(expected.logs[0][name], rel=1e-5), name


def test_a_run_that_is_cut_off_beside_its_decoding_goes_on_with_all_it_had(
    folder: Path, tmp_path: Path, server: Any
) -> None:
    checkpoint = tmp_path / "cut-off.ckpt"
    cut = Trained()
    with pytest.raises(InterruptedError):
        train(folder, "asynchronous", tmp_path / "cut", callbacks=[Interrupt(3, checkpoint), cut], generator=server)
    assert not any(thread.name == "lit_grpo-rollout" for thread in threading.enumerate())
    trained, _, scheduler = train(folder, "asynchronous", tmp_path / "again", str(checkpoint), generator=server)
    assert list(trained.batches) == list(range(3, UPDATES))
    del cut.batches[3]  # its update was not taken
    trained.batches = cut.batches | trained.batches
    trained.policies = cut.policies | trained.policies
    check_staleness(trained, 2)
    check_log_probs(trained)
    check_stream(trained, scheduler)


class Breaks(pl.Callback):
    """Fails in an update."""

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        if trainer.global_step == 1:
            raise InterruptedError


@pytest.mark.parametrize("mode", table_rows(["asynchronous", "periodic"], ["periodic"]))
def test_an_update_that_fails_ends_the_decoding_beside_it(folder: Path, tmp_path: Path, server: Any, mode: str) -> None:
    with pytest.raises(InterruptedError):
        train(folder, mode, tmp_path, callbacks=[Breaks()], generator=server)
    assert not any(thread.name == "lit_grpo-rollout" for thread in threading.enumerate())
    assert server.capacity().free_slots == 6


@pytest.mark.parametrize("mode", table_rows(["asynchronous", "periodic"], ["asynchronous"]))
def test_what_fails_in_the_thread_ends_the_run(
    folder: Path, tmp_path: Path, server: Any, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, calls = server.step, []

    def fails(*_: Any) -> Any:
        calls.append(threading.current_thread().name)
        if len(calls) == 20:
            raise GenerationError("the lights went out")
        return step()

    monkeypatch.setattr(server, "step", fails)
    with pytest.raises(GenerationError, match="the lights went out"):
        train(folder, mode, tmp_path, generator=server)
    assert set(calls) == {"lit_grpo-rollout"}
    assert not any(thread.name == "lit_grpo-rollout" for thread in threading.enumerate())
