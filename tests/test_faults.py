"""What a run does about what goes wrong: stalls, updates that are not finite, and rows that come twice."""

from __future__ import annotations

import json
import math
import os
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hand_made import fit, make_module, random_groups, sgd, weights_of

from lit_grpo.callbacks import ThroughputMonitor
from lit_grpo.faults import Phases, StallWatch, forget_after
from lit_grpo.update.objective.policy_loss import LossOutputs, policy_loss


def test_an_update_whose_loss_alone_is_not_finite_is_left_out(
    policy_folder: Path, policy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    groups = random_groups(policy, [[0.0, 1.0, 0.0, 1.0]])
    module = make_module(policy_folder, optimizer=sgd(1.0))
    monkeypatch.setattr("lit_grpo.update.passes.policy_loss", with_infinite_value)
    recorder = fit(module, groups)
    assert all(gradient is None for gradient in recorder.gradients[0].values())
    assert recorder.logs[0]["update/skipped"] == 1.0 and math.isfinite(recorder.logs[0]["grad_norm"])
    expected = torch.cat([parameter.detach().flatten() for parameter in policy.parameters()])
    assert torch.equal(weights_of(module), expected)


def with_infinite_value(*arguments: Any) -> LossOutputs:
    outputs = policy_loss(*arguments)
    return outputs._replace(loss=outputs.loss + math.inf)


def test_the_batch_of_an_update_that_is_left_out_is_written_for_a_look(
    policy_folder: Path, policy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors import safe_open

    monkeypatch.chdir(tmp_path)
    broken = random_groups(policy, [[0.0, 1.0, 0.0, 1.0]])
    monkeypatch.setattr("lit_grpo.update.passes.policy_loss", with_infinite_value)
    fit(make_module(policy_folder, max_skipped_updates=9), *[broken] * 4)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files == [f"broken-update-{n}-rank-0.safetensors" for n in range(3)]  # and no more
    with safe_open(tmp_path / files[0], "pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    rollouts = broken[0].rollouts
    assert tensors["token_ids"].tolist() == [t for r in rollouts for t in r.completion.token_ids_T.tolist()]
    assert tensors["lengths"].tolist() == [rollout.completion.num_tokens for rollout in rollouts]
    assert tensors["sampled_logprobs"][0] == rollouts[0].completion.logprobs_T[0]
    assert tensors["prompt_lengths"].tolist() == [len(broken[0].prompt.token_ids)] * 4
    assert tensors["rewards"].tolist() == [0.0, 1.0, 0.0, 1.0] and len(tensors["advantages"]) == 4
    assert metadata["left_out"] == "0" and json.loads(metadata["rollouts"])[1] == ["train/0", 0, [1]]
    num_tokens = int(tensors["prompt_lengths"][0] + tensors["lengths"][0])
    monkeypatch.setattr("lit_grpo.faults.skipped_updates.MOST_TOKENS", num_tokens)
    fit(make_module(policy_folder), broken)
    with safe_open(tmp_path / files[0], "pt") as file:
        assert file.metadata()["left_out"] == "3" and len(file.get_tensor("lengths")) == 1


def test_a_watch_names_rank_phase_and_call_once_for_each_stall(capsys: pytest.CaptureFixture[str]) -> None:
    phases, said = Phases(), threading.Event()
    heard: list[str] = []
    watch = StallWatch(lambda: phases, minutes=0.002, rank=3)

    def listen() -> None:
        """Wait here until the watch has spoken."""
        while not said.wait(0.02):
            heard.append(capsys.readouterr().err)
            if "innermost" in heard[-1]:
                said.set()

    with phases.of("weight sync"):
        listen()
    assert phases.name == "between phases"
    (message,) = [text for text in heard if text]
    assert message.startswith("Rank 3 has not moved for ") and "in the phase weight sync; it goes on" in message
    assert "in listen" in message and "said.wait(0.02)" in message
    told_of = watch._told_of
    said.clear()
    phases.begin("update")
    listen()
    assert watch._told_of != told_of and "in the phase update" in "".join(heard)
    watch.stop()
    assert not watch._thread.is_alive()


def test_a_run_is_watched_from_its_set_up_to_its_end_or_its_failure(policy_folder: Path, policy: Any) -> None:
    def watches() -> int:
        return sum(thread.name == "stall watch" for thread in threading.enumerate() if thread not in earlier)

    class Looks(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            seen.append(watches())
            if len(seen) == 2:
                raise KeyError("an error")

    earlier = threading.enumerate()  # a test that calls hooks by hand may leave one
    seen: list[int] = []
    groups = random_groups(policy, [[0.0, 1.0, 0.0, 1.0]])
    hooks = ("on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end")
    unheard: dict[str, Any] = dict.fromkeys(
        hooks, lambda *_, **__: None
    )  # they would look for the figures of a rollout
    for failing in (False, True):
        monitor = type("Monitor", (ThroughputMonitor,), unheard)()
        with pytest.raises(KeyError) if failing else nullcontext():
            fit(make_module(policy_folder), groups, callbacks=[monitor, Looks()])
        assert watches() == 0
    assert seen == [1, 1]
    never = type("Monitor", (ThroughputMonitor,), unheard)(stall_minutes=0)
    fit(make_module(policy_folder), groups, callbacks=[never, Looks()])
    assert seen == [1, 1, 0]
    with pytest.raises(ValueError, match=r"stall_minutes must be at least 0, not -1"):
        ThroughputMonitor(stall_minutes=-1)


def test_a_resumed_run_forgets_the_rows_that_it_writes_again(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    forget_after(path, 2)
    assert not path.exists()
    rows = [json.dumps({"step": step}) + "\n" for step in (1, 2, 2, 3, 4)]
    path.write_text("".join(rows) + '{"st')
    forget_after(path, 2)
    assert path.read_text() == "".join(rows[:3])


def test_a_resumed_run_keeps_lines_that_are_no_rows_and_reads_no_pipe(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    kept = "no json\n[1]\n{}\n" + '{"step": "9"}\n' + "[" * 100_000 + "\n"
    path.write_text(kept + '{"step": 3}\n')
    forget_after(path, 2)
    assert path.read_text() == kept
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="is a pipe, and not a file"):
        forget_after(tmp_path / "pipe", 2)
