"""Time saved by decoding during the update: two vLLM servers on one core, and the trainer on another.

A random Qwen3 of 4 M parameters, large enough that decoding and learning cost more than HTTP does, and completions of
geometric lengths, with a mean of about 60 tokens; the servers stay up. Modes go in turn, several times, on the same
prompts. A step is from the end of one update to that of the next, sync included. The time that a mode hides is what its
steps are shorter than synchronous ones, as a share of the shorter of the two synchronous phases, rollout and all else:
all of it is hidden where a step takes as long as the longer. Medians over steps; the first two of each run are left
out. On the same machine servers and trainer share memory bandwidth, and the servers' two processes one core.

The gradient of ``periodic`` is compared with that of ``synchronous`` at the first step, which has the same weights.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from benchmarks.processes import quiet_trainer, stay_on
from benchmarks.random_policies import Sizes, save_random_policy
from benchmarks.report import Claim, Options, Row, finish, note, parse_options
from benchmarks.workloads import arithmetic_rows
from lit_grpo.callbacks import RolloutScheduler, WeightSync
from lit_grpo.data.module import PromptDataModule
from lit_grpo.module import GRPOModule
from lit_grpo.policy.loading import load_policy, load_tokenizer
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.rewards import RewardSpec
from lit_grpo.rollout.vllm.server import VLLMServerGenerator
from lit_grpo.types import SamplingParams

MODES = ("synchronous", "periodic", "asynchronous")
POLICY = Sizes(4, 256, 768, 4, 2, 64, vocab_size=64)
"""Each token ends a completion with a probability of about one in its vocabulary."""
FIRST = 2
"""Steps at the beginning that are left out."""


class Watch(pl.Callback):
    """Times steps, and keeps the gradient of the first."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.logs: list[dict[str, float]] = []
        self.gradient = torch.empty(0)

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        """Keep it."""
        if not len(self.gradient):
            grads = [parameter.grad for parameter in pl_module.policy.parameters()]
            self.gradient = torch.cat([grad.flatten().clone() for grad in grads if grad is not None])

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        """Note the time; the callback comes after the sync."""
        self.ends.append(time.perf_counter())
        self.logs.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    @property
    def steps(self) -> list[float]:
        """Seconds of each step."""
        return [end - begin for begin, end in zip(self.ends[FIRST:], self.ends[FIRST + 1 :], strict=False)]

    def median(self, name: str) -> float:
        """Over the steps that count."""
        return statistics.median(log[name] for log in self.logs[FIRST + 1 :])


def main(options: Options) -> int:
    """Run all modes in turn."""
    num_updates, repeats = (4, 1) if options.quick else (6, 2)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    cores = sorted(os.sched_getaffinity(0))
    engine = {"max_model_len": 192, "block_size": 32, "kv_cache_memory_bytes": 64 * 2**20, "dtype": "float32"}
    generator = VLLMServerGenerator(16, num_servers=1 if options.quick else 2, server_args=engine)
    watches: dict[str, list[Watch]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory() as folder:
        save_random_policy(Path(folder), Sizes(2, 64, 128, 2, 2, 32) if options.quick else POLICY)
        stay_on(cores[:1])  # which servers inherit
        generator.start(PolicySpec(load_policy(folder), load_tokenizer(folder)))
        stay_on(cores[1:] or cores)
        for _ in range(repeats):
            for mode, runs in watches.items():
                runs.append(run(mode, folder, generator, num_updates, options.quick))
                note(f"{mode}: steps {statistics.median(runs[-1].steps):.3f} s")
    generator.close()
    stay_on(cores)
    rows = [_row(mode, runs, watches["synchronous"]) for mode, runs in watches.items()]
    settings: Row = {"updates": num_updates, "repeats": repeats, "threads": 1, "servers": 2, "servers_cores": 1}
    one, other = watches["synchronous"][0].gradient, watches["periodic"][0].gradient
    claims = [
        *(
            Claim(f"{row['mode']}: share of the shorter phase that is hidden", float(row["hidden"]), ">=", 0.8)
            for row in rows[1:]
        ),
        Claim("periodic: distance of the gradient from synchronous", _distance(other, one), "<=", 1e-6),
    ]
    return finish("overlap", options, settings, rows, claims)


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


def even(completion: str) -> float:
    """A reward that about half of all completions get."""
    return float(len(completion) % 2 == 0)


def run(mode: str, policy: str, generator: VLLMServerGenerator, num_updates: int, quick: bool) -> Watch:
    """Train for a while in a mode."""
    watch = Watch()
    data = PromptDataModule(policy, train=arithmetic_rows(64 if quick else 2048), batch_size=4 if quick else 16)
    module = GRPOModule(
        policy=policy,
        generator=generator,
        rewards=[RewardSpec(f"{__file__}:{even.__name__}")],
        num_generations=4 if quick else 16,
        sampling=SamplingParams(max_tokens=32 if quick else 128),
        max_tokens_per_micro_batch=2048,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-5),
    )
    with tempfile.TemporaryDirectory() as folder:
        callbacks = [RolloutScheduler(plugins=[] if mode == "synchronous" else [mode]), WeightSync(), watch]
        trainer = quiet_trainer("cpu", callbacks, max_steps=num_updates, max_epochs=-1, default_root_dir=Path(folder))
        trainer.fit(module, datamodule=data)
    return watch


def _row(mode: str, runs: list[Watch], synchronous: list[Watch]) -> Row:
    step = statistics.median(step for each in runs for step in each.steps)
    before = statistics.median(step for each in synchronous for step in each.steps)
    rollout = statistics.median(each.median("time/rollout_s") for each in synchronous)
    row: Row = {
        "mode": mode,
        "step_s": round(step, 4),
        "waits_for_rollout_s": round(statistics.median(each.median("time/rollout_s") for each in runs), 4),
        "weight_sync_s": round(statistics.median(each.median("time/weight_sync_s") for each in runs), 4),
        "staleness_mean": round(statistics.median(each.median("staleness/mean") for each in runs), 3),
        "bubble": round(statistics.median(each.median("rollout/bubble_ratio") for each in runs), 3),
        "ratio": round(step / before, 4),
    }
    return row | {"hidden": round((before - step) / min(rollout, before - rollout), 4)}


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(main(parse_options(__doc__)))
