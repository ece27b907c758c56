"""Time cost of a checkpoint, blocking or written in the background, with our writer and with Lightning's.

A policy of random parameters with AdamW's moments is saved, and then a fixed number of matrix products is computed, as
a run would go on with its next rollout. What a checkpoint costs is the time of both, until the checkpoint is there,
less that of the products alone, which are measured in between. Lightning's own writers leave it to the system when a
file reaches the disk; ours do not call it written before (fsync). The ways take turns.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from benchmarks.random_policies import TO_UPDATE, random_qwen3
from benchmarks.report import Claim, Options, Row, finish, parse_options
from lit_grpo.checkpoints import BackgroundIO, WholeFileIO

OURS, BESIDE = "written by the run", "written beside the run"
THEIRS, THEIRS_BESIDE = "Lightning, written by the run", "Lightning, written beside the run"


def main(options: Options) -> int:
    """Save in each way, in turn."""
    torch.set_num_threads(1)
    name, repeats, products = ("smallest", 2, 4) if options.quick else ("34M", 7, 160)
    checkpoint = _checkpoint(random_qwen3(TO_UPDATE[name]))
    square = torch.randn(128 if options.quick else 1024, 128 if options.quick else 1024)

    def work() -> None:
        for _ in range(products):
            square @ square

    ways = {OURS: _by_it(WholeFileIO()), BESIDE: _beside(), THEIRS: _by_it(TorchCheckpointIO()), THEIRS_BESIDE: _theirs}
    alone: list[float] = []
    stalls: dict[str, list[float]] = {way: [] for way in ways}
    costs: dict[str, list[float]] = {way: [] for way in ways}
    disk: list[float] = []
    with tempfile.TemporaryDirectory(dir=options.output.parent if options.output else Path.cwd()) as folder:
        path = Path(folder) / "last.ckpt"
        for _ in range(repeats):
            alone.append(_seconds(work))
            for way, save in ways.items():
                stall, total = save(checkpoint, path, work)
                stalls[way].append(stall)
                costs[way].append(total - alone[-1])
            disk.append(_plain(path, Path(folder) / "plain"))
        num_bytes = path.stat().st_size
    rows: list[Row] = [
        {"way": way, "stall_s": statistics.median(stalls[way]), "cost_s": statistics.median(costs[way])} for way in ways
    ]
    rows.append({"way": "the disk alone, one write of as many bytes and fsync", "cost_s": statistics.median(disk)})
    settings: Row = {"policy": name, "bytes": num_bytes, "repeats": repeats, "work_s": statistics.median(alone)}
    return finish("checkpoint_stall", options, settings, rows, _claims(stalls, costs))


def _claims(stalls: dict[str, list[float]], costs: dict[str, list[float]]) -> list[Claim]:
    def ratio(figures: dict[str, list[float]], one: str, other: str) -> float:
        return statistics.median(a / b for a, b in zip(figures[one], figures[other], strict=True))

    return [
        Claim("a run stands still beside over by itself", ratio(stalls, BESIDE, OURS), "<=", 0.25),
        Claim("a checkpoint costs beside over by itself", ratio(costs, BESIDE, OURS), "<=", 0.5),
        Claim("a run stands still beside, ours over Lightning's", ratio(stalls, BESIDE, THEIRS_BESIDE), "<=", 1.1),
    ]


def _checkpoint(policy: Any) -> dict[str, Any]:
    """Weights and moments, as a run saves them."""
    states = {
        number: {"step": torch.tensor(1.0), "exp_avg": torch.rand_like(weight), "exp_avg_sq": torch.rand_like(weight)}
        for number, weight in enumerate(policy.parameters())
    }
    groups = [{"lr": 1e-6, "params": list(states)}]
    return {"state_dict": policy.state_dict(), "optimizer_states": [{"state": states, "param_groups": groups}]}


Save = Callable[[dict[str, Any], Path, Callable[[], None]], tuple[float, float]]
"""Saves and works; returns the seconds until the run goes on, and those until all is done."""


def _by_it(writer: Any) -> Save:
    def save(checkpoint: dict[str, Any], path: Path, work: Callable[[], None]) -> tuple[float, float]:
        stall = _seconds(lambda: writer.save_checkpoint(checkpoint, path))
        return stall, stall + _seconds(work)

    return save


def _beside() -> Save:
    io = BackgroundIO(WholeFileIO())

    def save(checkpoint: dict[str, Any], path: Path, work: Callable[[], None]) -> tuple[float, float]:
        stall = _seconds(lambda: io.save_checkpoint(checkpoint, path))
        return stall, stall + _seconds(work) + _seconds(io.wait)

    return save


def _theirs(checkpoint: dict[str, Any], path: Path, work: Callable[[], None]) -> tuple[float, float]:
    io = AsyncCheckpointIO(TorchCheckpointIO())
    stall = _seconds(lambda: io.save_checkpoint(checkpoint, path))
    return stall, stall + _seconds(work) + _seconds(io.teardown)


def _plain(path: Path, to: Path) -> float:
    content = path.read_bytes()

    def write() -> None:
        with to.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    return _seconds(write)


def _seconds(do: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    do()
    return time.perf_counter() - begin


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(main(parse_options(__doc__)))
