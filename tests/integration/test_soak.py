"""A run on two vLLM servers in which something goes wrong all the time, and what is left over from it.

A fault comes every few updates, drawn at random: a server is killed, and another started at its port; a server stands
still for some seconds; its weights are exchanged without the run's knowledge; a reward function fails, or a call of it
takes long; a gradient is not finite. The run has to reach its end. ``LIT_GRPO_SOAK=500`` runs 500 updates, counts
memory, file descriptors, threads, child processes and files in shared memory every ten updates, and allows no growth.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import pytest
import torch

from benchmarks.processes import quiet_trainer
from benchmarks.random_policies import Sizes, random_qwen3
from benchmarks.workloads import arithmetic_rows, load
from lit_grpo.callbacks import RolloutScheduler, WeightSync
from lit_grpo.data.module import PromptDataModule
from lit_grpo.module import GRPOModule
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.rollout.vllm.arguments import server_arguments, server_environment
from lit_grpo.rollout.vllm.fleet import wait_for
from lit_grpo.rollout.vllm.guard import TOKEN_VARIABLE
from lit_grpo.rollout.vllm.process import ServerProcess
from lit_grpo.rollout.vllm.server import VLLMServerGenerator
from lit_grpo.rollout.weights.files import weights_folder, write
from lit_grpo.rollout.weights.tensors import SyncReport
from lit_grpo.types import SamplingParams

EVERY = 10
"""Updates from one count to the next."""
PATIENCE_S = 8.0
"""Seconds without progress after which the run takes a server for hung; a busy machine needs some."""
POLICY = Sizes(2, 64, 128, 4, 2, 32)
TOKEN = "soak-" + "0123456789abcdef" * 2
ENGINE = {"max_model_len": 96, "block_size": 32, "kv_cache_memory_bytes": 16 * 2**20}


class Servers:
    """Two servers at fixed ports, which may die and be started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes = [self._start(None), self._start(None)]
        for process in self.processes:
            wait_for(process, time.monotonic() + 300)
        self._due: list[tuple[float, Callable[[], None]]] = []

    def _start(self, port: int | None) -> ServerProcess:
        arguments = server_arguments("float32", 8) | ENGINE
        return ServerProcess(self.folder, arguments, server_environment(2), TOKEN, port=port)

    def kill(self, number: int) -> None:
        """End a server at once, and start another at its port a second later."""
        process = self.processes[number]
        os.killpg(process.process.pid, signal.SIGKILL)
        process.process.wait()
        process.log.unlink(missing_ok=True)
        self._due.append((time.monotonic() + 1.0, lambda: self._restart(number)))

    def _restart(self, number: int) -> None:
        self.processes[number] = self._start(int(self.processes[number].url.rpartition(":")[2]))

    def stand_still(self, number: int) -> None:
        """Stop a server for longer than the run waits for it."""
        pid = self.processes[number].process.pid
        os.killpg(pid, signal.SIGSTOP)
        timer = threading.Timer(1.5 * PATIENCE_S, lambda: _signal(pid, signal.SIGCONT))
        timer.start()  # of its own, for the run may wait for the server

    def look(self) -> None:
        """Do what is due."""
        due = [call for when, call in self._due if when <= time.monotonic()]
        self._due = [each for each in self._due if each[1] not in due]
        for call in due:
            call()

    def close(self) -> None:
        """End both."""
        for process in self.processes:
            _signal(process.process.pid, signal.SIGCONT)
            process.stop()


def _signal(pid: int, number: int) -> None:
    if psutil.pid_exists(pid):
        os.killpg(pid, number)


class Faults(pl.Callback):
    """Brings a fault every few updates, and counts what there is.

    Args:
        servers: The servers of the run.
        kinds: What happens, in orders that are drawn; those of servers while both are up.
        seed: Of what happens when.
    """

    def __init__(self, servers: Servers, kinds: tuple[str, ...], seed: int) -> None:
        self.servers, self.kinds, self.random = servers, kinds, random.Random(seed)
        self.next, self.coming, self.counts = 3, list[str](), Counter[str]()
        self.reward = ""  # what the next call of the reward function does
        self.rows: list[dict[str, float]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Bring a fault, where it is time."""
        self.servers.look()
        version = pl_module.policy_version
        if version < self.next:
            return
        if not self.coming:
            self.coming = self.random.sample(self.kinds, len(self.kinds))
        is_whole = len(pl_module.generator._fleet.alive) == 2  # one has to be left
        possible = [kind for kind in self.coming if is_whole or kind not in OF_SERVERS]
        if possible:
            self.coming.remove(kind := possible[0])
        else:  # however long a server takes to come back, faults go on
            kind = self.random.choice([kind for kind in self.kinds if kind not in OF_SERVERS])
        self.next = version + self.random.randint(2, 7)
        self.counts[kind] += 1
        number = self.random.randrange(2)
        if kind == "a server is killed":
            self.servers.kill(number)
        elif kind == "a server stands still":
            self.servers.stand_still(number)
        elif kind == "weights are exchanged":
            pl_module.generator.exchanges = True
        elif kind == "a gradient is not finite":
            parameter = next(pl_module.policy.parameters())
            handle = parameter.register_hook(lambda gradient: (handle.remove(), gradient * torch.nan)[1])
        else:
            self.reward = kind

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count what this process has."""
        version = pl_module.policy_version
        if version % EVERY == 0 and (not self.rows or self.rows[-1]["update"] != version):
            self.rows.append({"update": version, **_possessions()})

    def score(self, completion: str) -> float:
        """The reward: the share of digits, or what has been decided."""
        kind, self.reward = self.reward, ""
        if kind == "a reward fails":
            raise RuntimeError("the judge has no answer")
        if kind == "a reward is slow":
            time.sleep(2.0)
        return sum(character.isdigit() for character in completion) / max(len(completion), 1)


class FaultyGenerator(VLLMServerGenerator):
    """Where it is told so, one of its servers has other weights after a load; the proof has to find it."""

    exchanges = False

    def load_weights(self, weights: Any, version: int) -> SyncReport:
        """Bring all weights, and then others to one server."""
        report = super().load_weights(weights, version)
        if self.exchanges:
            self.exchanges = False
            with weights_folder() as folder:
                tensors = {name: tensor * 1.05 for name, tensor in self.weights()}
                write(tensors.items(), folder / "weights.safetensors")
                self._fleet.alive[-1].reload(version, source=str(folder / "weights.safetensors"))
        return report


OF_SERVERS = ("a server is killed", "a server stands still", "weights are exchanged")
KINDS = (
    *OF_SERVERS,
    "a gradient is not finite",
    "a reward fails",
    "a reward is slow",
)


def _possessions() -> dict[str, float]:
    process = psutil.Process()
    shared = list(Path("/dev/shm").glob("lit_grpo_*")) if Path("/dev/shm").is_dir() else []
    return {
        "rss_mib": process.memory_info().rss / 2**20,
        "descriptors": process.num_fds(),
        "threads": process.num_threads(),
        "children": len(process.children()),
        "shared_files": len(shared),
    }


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
def test_a_run_survives_faults_and_keeps_nothing_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_updates = int(os.environ.get("LIT_GRPO_SOAK", "20"))
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    _, tokenizer = load("tiny", "cpu")
    policy = random_qwen3(POLICY)
    PolicySpec(policy, tokenizer).save_skeleton(tmp_path)
    policy.save_pretrained(tmp_path)
    servers = Servers(tmp_path)
    faults = Faults(servers, KINDS if num_updates >= 100 else KINDS[1:], seed=0)
    try:
        module = _train(tmp_path, servers, faults, num_updates)
    finally:
        servers.close()
    assert module.policy_version >= num_updates
    assert faults.counts.total() >= num_updates / 10
    rows = faults.rows
    early, late = _largest(rows[2:12] if len(rows) > 12 else rows[:1]), _largest(rows[-10:])
    growth = late["rss_mib"] / early["rss_mib"]
    assert growth <= (1.05 if num_updates >= 100 else 1.2)
    for kind in ("descriptors", "threads", "children", "shared_files"):
        assert late[kind] <= early[kind] + (2 if num_updates >= 100 else 4), kind  # connections come and go


def _train(folder: Path, servers: Servers, faults: Faults, num_updates: int) -> GRPOModule:
    rewards: Any = [faults.score]
    rows: Any = list(arithmetic_rows(8).rows())
    urls = [process.url for process in servers.processes]
    module = GRPOModule(
        policy=str(folder),
        rewards=rewards,
        num_generations=4,
        generator=FaultyGenerator(8, urls=urls, timeout_s=PATIENCE_S),
        sampling=SamplingParams(max_tokens=16),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-5),
        on_reward_error="none",
        max_tokens_per_micro_batch=4096,
    )
    data = PromptDataModule(str(folder), train=rows, batch_size=4)
    callbacks: list[pl.Callback] = [faults, RolloutScheduler(), WeightSync()]
    trainer = quiet_trainer("cpu", callbacks, max_steps=num_updates, max_epochs=-1, default_root_dir=folder)
    trainer.fit(module, datamodule=data)
    return module


def _largest(rows: list[dict[str, float]]) -> dict[str, float]:
    """The median memory, and the largest of all other figures."""
    medians = {"rss_mib": statistics.median(row["rss_mib"] for row in rows)}
    return {name: max(row[name] for row in rows) for name in rows[0]} | medians
