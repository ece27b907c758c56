"""Runs that are killed again and again, each time resumed from their last checkpoint, beside one that was left alone.

A run of the command line in a process of its own (two where there are two ranks) announces its phases. It is killed in
a phase that is drawn beforehand, at a moment that is drawn from the phase's usual length, or at any moment at all, the
start of the process among them. When such a run has come to its end, its metrics (but for times and memory), samples
and trace must be those of the run that was left alone, and its policy must be equal bit for bit. A kill
counts in the phase that the process announced last before it died, another signal in that which it came in.
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
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.kill_and_resume_case import MARK
from benchmarks.random_policies import TO_UPDATE, save_random_policy
from benchmarks.report import ROOT, Claim, Options, Row, finish, note, parse_options
from tests.doubles.conversations import chat_tokenizer, chatty_policy

PHASES: tuple[str, ...] = ("rollout", "update", "weight sync", "checkpoint", "validation")
ANY = "any moment"
MEASURED = ("time/", "perf/", "memory/", "environments/waiting_share")
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT}
CODES = {"SIGKILL": -9, "SIGTERM": 143, "SIGINT": 130}
OCCURRENCES = 5
"""A process is killed in one of so many occurrences of a phase."""
ENVIRONMENT = "environments:factory=benchmarks.kill_and_resume_case.Counting,lock_step=true"
MODES = ("april", "sortedrl:unit=group", "chunked:unit=group,tokens_per_update=12", ENVIRONMENT)
METHODS = ({"entropy_target": {"coefficient": 0.01, "target": 2.0}}, {"tr_dpo": {"mixup_alpha": 0.6, "sync_steps": 3}})
PATIENCE_S = 300
SEED = 0


@dataclass(frozen=True)
class Plan:
    """Plan of kills: their number in each phase, the signal, the number of ranks, and the rollout mode.

    With ``group`` all ranks get the signal.
    """

    signal: str
    kills: dict[str, int]
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
        self.hit = ""
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


def main(options: Options) -> int:
    """Measure every plan, and compare."""
    rng, rows = random.Random(SEED), list[Row]()
    with tempfile.TemporaryDirectory() as folder:
        workplace = Workplace(Path(folder), num_updates=24 if options.quick else 48)
        for plan in _plans(options.quick):
            rows.append(workplace.measure(plan, rng))
            note(str(rows[-1]))
    settings: Row = {"seed": SEED, "updates": workplace.num_updates, "updates a batch": 2}
    return finish("kill_and_resume", options, settings, rows, _claims(rows))


def _plans(quick: bool) -> list[Plan]:
    if quick:
        return [
            Plan("SIGKILL", {"update": 1}, mode="april"),
            Plan("SIGKILL", {"rollout": 1}, mode=ENVIRONMENT),
            Plan("SIGTERM", {"rollout": 1}, 2, True),
        ]
    each = dict.fromkeys(PHASES, 1)
    return [
        Plan("SIGKILL", dict.fromkeys((*PHASES, ANY), 5)),
        Plan("SIGTERM", each),
        Plan("SIGINT", each),
        Plan("SIGTERM", each, ranks=2, group=True),
        Plan("SIGINT", each, ranks=2, group=True),
        Plan("SIGTERM", {"rollout": 1, "update": 1}, ranks=2),
        Plan("SIGKILL", {"rollout": 1, "update": 1}, ranks=2, group=True),
        *(Plan("SIGKILL", each, mode=mode) for mode in MODES),
    ]


def _claims(rows: Sequence[Row]) -> list[Claim]:
    kills = sum(int(row["kills"]) for row in rows if row["signal"] == "SIGKILL" and row["ranks"] == 1)
    different = sum(int(row["runs"]) - int(row["equal"]) for row in rows)
    claims = [
        Claim("kills by SIGKILL of one process", kills, ">=", 30),
        Claim("runs that ended unlike the one left alone", different, "<=", 0),
        Claim("lives that ended with another code than their signal's", sum(int(r["wrong"]) for r in rows), "<=", 0),
    ]
    return claims


class Workplace:
    """A folder with a policy, a config and runs.

    Args:
        folder: Empty.
        num_updates: Of each run.
    """

    def __init__(self, folder: Path, num_updates: int) -> None:
        self.folder, self.num_updates = folder, num_updates
        self._usual: dict[str, dict[str, float]] = {}  # length of each phase by the kind of run, in seconds
        save_random_policy(folder / "policy", TO_UPDATE["smallest"])
        chatty_policy(chat_tokenizer()).save_pretrained(folder / "chat")
        chat_tokenizer().save_pretrained(folder / "chat")
        prompts = [{"prompt": f"{n}={n + 1}="} for n in range(7)]
        (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
        (folder / "config.yaml").write_text(json.dumps(self._config()))

    def measure(self, plan: Plan, rng: random.Random) -> Row:
        """Kill runs as planned, and compare each with one that was left alone."""
        alone = f"alone-{plan.kind}"
        if plan.kind not in self._usual:
            life = self._begin(alone, plan)
            if life.end():
                raise RuntimeError("".join(life.said))
            self._usual[plan.kind] = _usual_lengths(life)
        targets = [phase for phase, number in plan.kills.items() for _ in range(number)]
        rng.shuffle(targets)
        died, runs, equal, wrong, began = Counter[str](), 0, 0, 0, time.perf_counter()
        while targets:
            name = f"{plan.signal}-{plan.kind}-{plan.group}-{runs}"
            for life, code in self._run(name, plan, targets, rng):
                died[life.phase if plan.signal == "SIGKILL" else life.hit] += 1
                wrong += code != CODES[plan.signal]
            runs += 1
            equal += not self._differences(alone, name)
        return {
            "signal": plan.signal,
            "mode": plan.mode or "synchronous",
            "ranks": plan.ranks,
            "to": "all" if plan.group else "the first",
            "kills": sum(plan.kills.values()),
            "runs": runs,
            "equal": equal,
            "wrong": wrong,
            **{phase: died.pop(phase, 0) for phase in PHASES},
            "elsewhere": died.total(),
            "minutes": round((time.perf_counter() - began) / 60, 2),
        }

    def _run(self, name: str, plan: Plan, targets: list[str], rng: random.Random) -> Iterator[tuple[Life, int]]:
        """Kill a run and resume it until it ends or no target is left; yield the lives that were cut off."""
        while True:
            life = self._begin(name, plan)
            if targets and targets[-1] == ANY:
                time.sleep(rng.uniform(0, self._usual[plan.kind][ANY]))
            elif targets:
                life.wait_for(targets[-1], rng.randint(2, OCCURRENCES))
                time.sleep(rng.uniform(0, self._usual[plan.kind][targets[-1]]))
            if targets:
                life.send(SIGNALS[plan.signal], plan.group)
            code = life.end()
            if code == 0:
                return
            if not targets:
                raise RuntimeError(f"{name} failed:\n" + "".join(life.said))
            note(f"{name}: {plan.signal} meant for {targets.pop()} came in {life.hit}, the last was {life.phase}")
            yield life, code

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
        scheduler = {"class_path": "torch.optim.lr_scheduler.LinearLR", "init_args": {"total_iters": self.num_updates}}
        return {
            "trainer": {
                "accelerator": "cpu",
                "max_steps": self.num_updates,
                "val_check_interval": 2,
                "enable_progress_bar": False,
                "callbacks": [{"class_path": "benchmarks.kill_and_resume_case.Announcer"}],
            },
            "model": {
                "policy": str(self.folder / "policy"),
                "generator": {"class_path": "lit_grpo.rollout.slots.SlotGenerator", "init_args": {"num_slots": 6}},
                "rewards": [{"function": "benchmarks.kill_and_resume_case.share_of_digits"}],
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

    def _differences(self, one: str, other: str) -> list[str]:
        """Return the differences of two runs."""
        import torch
        from safetensors.torch import load_file

        folders = [self.folder / "runs" / name for name in (one, other)]
        first, second = (_metrics(folder) for folder in folders)
        found = [f"metrics of {len(first)} and {len(second)} batches"] if len(first) != len(second) else []
        for before, after in zip(first, second, strict=False):
            found += [
                f"{name} at update {before['step']}: {before.get(name)} and {after.get(name)}"
                for name in sorted(before.keys() | after.keys())
                if before.get(name) != after.get(name)
            ]
        for name in ("samples.jsonl", "trace.jsonl"):
            if len({(folder / name).read_bytes() for folder in folders}) > 1:
                found.append(name)
        weights = [load_file(folder / "policy" / "model.safetensors") for folder in folders]
        found += [name for name, weight in weights[0].items() if not torch.equal(weight, weights[1][name])]
        for difference in found[:10]:
            note(f"{other} differs: {difference}")
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


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(main(parse_options(__doc__)))
