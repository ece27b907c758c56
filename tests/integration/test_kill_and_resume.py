"""Runs that are killed again and again, each time resumed from their last checkpoint, end as one that was left alone.

A run of the command line in a process of its own (two where there are two ranks) announces its phases. It is killed in
a phase that is drawn beforehand, at a moment that is drawn from the phase's usual length, or at any moment at all, the
start of the process among them. At its end its metrics (but for times and memory), samples and trace must be those of
the run that was left alone, and its policy must be equal bit for bit.
"""

from __future__ import annotations

import csv
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.random_policies import TO_UPDATE, save_random_policy
from tests.doubles.announced_phases import MARK
from tests.doubles.conversations import chat_tokenizer, chatty_policy

ROOT = Path(__file__).parents[2]
PHASES = ("rollout", "update", "weight sync", "checkpoint", "validation")
ANY = "any moment"
MEASURED = ("time/", "perf/", "memory/", "environments/waiting_share")
CODES = {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}
OCCURRENCES = 5
"""A process is killed in one of so many occurrences of a phase."""
ENVIRONMENT = "environments:factory=tests.doubles.announced_phases.Counting,lock_step=true"
METHODS = ({"entropy_target": {"coefficient": 0.01, "target": 2.0}}, {"tr_dpo": {"mixup_alpha": 0.6, "sync_steps": 3}})
NUM_UPDATES = 24
PATIENCE_S = 300


@dataclass(frozen=True)
class Plan:
    """Plan of kills: the phases to kill in, the signal, the number of ranks, and the rollout mode.

    With ``group`` all ranks get the signal.
    """

    signal: signal.Signals
    targets: tuple[str, ...]
    ranks: int = 1
    group: bool = False
    mode: str | None = None

    @property
    def kind(self) -> str:
        """Of its runs, as part of a folder's name."""
        return f"{self.ranks}-{(self.mode or 'synchronous').partition(':')[0]}"


class Life:
    """A process from its start to its end: what it announces and when, what else it says, and its exit code.

    Args:
        command: What it runs.
        folder: Where.
    """

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        self.announced: list[tuple[float, str]] = []
        self.said: list[str] = []
        self.hit = "start"
        self._news = threading.Condition()
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # so that a signal can be sent to all of its ranks
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._news:
                if line.startswith(MARK):
                    self.announced.append((time.perf_counter(), line[len(MARK) :].strip()))
                else:
                    self.said.append(line)
                self._news.notify_all()
        with self._news:
            self._news.notify_all()

    @property
    def phase(self) -> str:
        """The current phase, or the last one if the process has ended."""
        return self.announced[-1][1] if self.announced else "start"

    def wait_for(self, phase: str, occurrence: int) -> None:
        """Wait until it has begun a phase so often, or has ended."""

        def is_there() -> bool:
            return [name for _, name in self.announced].count(phase) >= occurrence or not self._reader.is_alive()

        with self._news:
            while not self._news.wait_for(is_there, timeout=0.5) and self._process.poll() is None:
                pass

    def send(self, signum: int, group: bool) -> None:
        """Send a signal to its first rank, or to all."""
        if self._process.poll() is None:
            self.hit = self.phase
            (os.killpg if group else os.kill)(self._process.pid, signum)

    def end(self) -> int:
        """Wait for its end, of all of its ranks; return the exit code of the first."""
        try:
            self._process.wait(PATIENCE_S)
            self._reader.join(PATIENCE_S)
            if self._reader.is_alive():
                raise RuntimeError("A rank outlives the first:\n" + "".join(self.said))
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"It hangs in {self.phase}:\n" + "".join(self.said)) from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.returncode


class Workplace:
    """A folder with a policy, a config and runs.

    Args:
        folder: Empty.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._usual: dict[str, dict[str, float]] = {}  # length of each phase by the kind of run, in seconds
        save_random_policy(folder / "policy", TO_UPDATE["smallest"])
        chatty_policy(chat_tokenizer()).save_pretrained(folder / "chat")
        chat_tokenizer().save_pretrained(folder / "chat")
        prompts = [{"prompt": f"{n}={n + 1}="} for n in range(7)]
        (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
        (folder / "config.yaml").write_text(json.dumps(self._config()))

    def alone(self, plan: Plan) -> str:
        """The run of a plan's kind that nothing cuts off, by its name; made once."""
        name = f"alone-{plan.kind}"
        if plan.kind not in self._usual:
            life = self._begin(name, plan)
            assert life.end() == 0, "".join(life.said)
            self._usual[plan.kind] = _usual_lengths(life)
        return name

    def killed(self, name: str, plan: Plan, targets: list[str], rng: random.Random) -> Iterator[tuple[str, int]]:
        """Kill a run in ``targets``, from the last one on, and resume it until it ends or none is left.

        Yields the phase in which the signal came, and the exit code, of each process that was cut off.
        """
        while True:
            life = self._begin(name, plan)
            if targets and targets[-1] == ANY:
                time.sleep(rng.uniform(0, self._usual[plan.kind][ANY]))
            elif targets:
                life.wait_for(targets[-1], rng.randint(2, OCCURRENCES))
                time.sleep(rng.uniform(0, self._usual[plan.kind][targets[-1]]))
            if targets:
                life.send(plan.signal, plan.group)
            code = life.end()
            if code == 0:
                return
            assert targets, f"{name} failed:\n" + "".join(life.said)
            targets.pop()
            yield life.hit, code

    def _begin(self, name: str, plan: Plan) -> Life:
        """Start a run, or resume it from its last checkpoint."""
        command = [sys.executable, "-m", "lit_grpo", "fit", "--config", "config.yaml", "--run.name", name]
        plugins = [*([] if plan.mode is None else [plan.mode]), *METHODS]
        command += ["--rollout.plugins", json.dumps(plugins)]
        if plan.mode == ENVIRONMENT:
            command += ["--model.policy", str(self.folder / "chat"), "--model.sampling.max_observed", "80"]
        if plan.ranks > 1:
            command += ["--trainer.devices", str(plan.ranks), "--trainer.strategy", "ddp"]
        checkpoint = self.folder / "runs" / name / "checkpoints" / "last.ckpt"
        return Life([*command, "--ckpt_path", str(checkpoint)] if checkpoint.exists() else command, self.folder)

    def _config(self) -> dict[str, Any]:
        """Everything that remembers: visits, lengths, a reference and coefficients that move, a schedule, momentum."""
        scheduler = {"class_path": "torch.optim.lr_scheduler.LinearLR", "init_args": {"total_iters": NUM_UPDATES}}
        return {
            "trainer": {
                "accelerator": "cpu",
                "max_steps": NUM_UPDATES,
                "val_check_interval": 2,
                "enable_progress_bar": False,
                "callbacks": [{"class_path": "tests.doubles.announced_phases.Announcer"}],
            },
            "model": {
                "policy": str(self.folder / "policy"),
                "generator": {"class_path": "lit_grpo.rollout.slots.SlotGenerator", "init_args": {"num_slots": 6}},
                "rewards": [{"function": "tests.doubles.announced_phases.share_of_digits"}],
                "num_generations": 4,
                "num_minibatches": 2,
                "advantages": {"estimator": "dcpo"},
                "objective": {
                    "loss": "dcpo",
                    "kl": {"beta": 0.02, "target": 0.001},
                },
                "reference": {"offload": True},
                "sampling": {"max_tokens": 40},
                "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 2e-3}},
                "lr_scheduler": scheduler,
            },
            "data": {"train": "prompts.jsonl", "validation": "prompts.jsonl", "batch_size": 2},
            "checkpoint": {"every_n_updates": 5},
            "rollout_timeline": {"record_trace": True},
            "sample_logger": {"every_n_updates": 1},
        }

    def differences(self, one: str, other: str) -> list[str]:
        """Return the differences of two runs."""
        folders = [self.folder / "runs" / name for name in (one, other)]
        first, second = (_metrics(folder) for folder in folders)
        found = [f"metrics of {len(first)} and {len(second)} batches"] if len(first) != len(second) else []
        for before, after in zip(first, second, strict=False):
            found += [
                f"{name} at update {before['step']}: {before.get(name)} and {after.get(name)}"
                for name in sorted(before.keys() | after.keys())
                if before.get(name) != after.get(name)
            ]
        for name in ("samples.jsonl", "val_samples.jsonl", "trace.jsonl"):
            if len({(folder / name).read_bytes() for folder in folders}) > 1:
                found.append(name)
        weights = [load_file(folder / "policy" / "model.safetensors") for folder in folders]
        found += [name for name, weight in weights[0].items() if not torch.equal(weight, weights[1][name])]
        return found


def _metrics(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return [
            {name: value for name, value in row.items() if not name.startswith(MEASURED)}
            for row in csv.DictReader(file)
        ]


def _usual_lengths(life: Life) -> dict[str, float]:
    """The median length of each phase in a run, and half the length of the run."""
    times = [at for at, _ in life.announced]
    lengths = {phase: [] for phase in PHASES}
    for (at, phase), after in zip(life.announced, times[1:], strict=False):
        lengths.get(phase, []).append(after - at)
    return {phase: statistics.median(each) for phase, each in lengths.items()} | {ANY: 5 + (times[-1] - times[0]) / 2}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    return Workplace(tmp_path_factory.mktemp("killed"))


@pytest.mark.nightly
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "plan",
    [
        Plan(signal.SIGKILL, (*PHASES, ANY) * 5),
        Plan(signal.SIGTERM, PHASES),
        Plan(signal.SIGINT, PHASES),
        Plan(signal.SIGTERM, PHASES, ranks=2, group=True),
        Plan(signal.SIGINT, PHASES, ranks=2, group=True),
        Plan(signal.SIGTERM, ("rollout", "update"), ranks=2),
        Plan(signal.SIGKILL, ("rollout", "update"), ranks=2, group=True),
        Plan(signal.SIGKILL, PHASES, mode="april"),
        Plan(signal.SIGKILL, PHASES, mode="sortedrl:unit=group"),
        Plan(signal.SIGKILL, PHASES, mode="chunked:unit=group,tokens_per_update=12"),
        Plan(signal.SIGKILL, PHASES, mode=ENVIRONMENT),
    ],
    ids=lambda plan: f"{plan.signal.name}-{plan.kind}",
)
def test_a_run_that_is_killed_and_resumed_ends_as_one_that_was_left_alone(plan: Plan, workplace: Workplace) -> None:
    alone = workplace.alone(plan)
    rng, targets, died = random.Random(0), list(plan.targets), list[str]()
    rng.shuffle(targets)
    for number in range(len(targets)):
        name = f"{plan.signal.name}-{plan.kind}-{plan.group}-{number}"
        for phase, code in workplace.killed(name, plan, targets, rng):
            died.append(phase)
            assert code == CODES[plan.signal]
        assert workplace.differences(alone, name) == []
        if not targets:
            break
    assert len(died) == len(plan.targets)
    assert len(set(died).intersection(PHASES)) >= 2, died
