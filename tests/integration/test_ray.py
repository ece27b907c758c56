"""Runs and vLLM servers on a real Ray of two cores, which this process starts and ends."""

from __future__ import annotations

import csv
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hand_made import make_trainer
from safetensors.torch import load_file

from lit_grpo.checks import check_trainer

ray: Any = pytest.importorskip("ray", reason="Ray is not installed (lit_grpo[ray])")
pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "several_machines" / "ray_train.py"
TOLD = (
    *("--config", "arithmetic", "--data.batch_size", "2", "--data.validation.init_args.num_rows", "4"),
    *("--trainer.accelerator", "cpu", "--trainer.max_steps", "2", "--trainer.val_check_interval", "2"),
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A small Ray that tells nobody of itself, answers to a token alone, and keeps its files in the folder."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
        patch.setenv("OMP_NUM_THREADS", "1")
        started = ray.init(
            "local", num_cpus=2, include_dashboard=False, object_store_memory=80 * 2**20, log_to_driver=False
        )
        patch.setenv("RAY_ADDRESS", started.address_info["gcs_address"])
        yield home
        ray.shutdown()


def run(folder: Path, *command: str) -> str:
    """Run a program with what the ranks of other tests do not leave behind; return what it said."""
    left_out = ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "PL_GLOBAL_SEED")
    environment = {name: value for name, value in os.environ.items() if name not in left_out} | {"WORKERS": "2"}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=280
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-5000:]
    return said


def outcome(run: Path) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """What a run's updates came to, and its policy."""
    with (run / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = ("step", "reward", "loss", "grad_norm", "val/reward")
    weights = load_file(run / "policy" / "model.safetensors")
    return [{name: float(row[name]) for name in names if row[name]} for row in rows], weights


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_workers_of_ray_end_where_ranks_without_it_do(strategy: str, cluster: Path, tmp_path: Path) -> None:
    said = run(tmp_path, str(EXAMPLE), *TOLD, "--trainer.strategy", f"ray_{strategy}", "--run.name", "ray")
    assert "float32 on 2 x cpu" in said and said.count("ray: done") == 1  # the first rank speaks for both
    ranks = ("--trainer.devices", "2", "--trainer.strategy", strategy, "--run.name", "ranks")
    run(tmp_path, "-m", "lit_grpo", "fit", *TOLD, *ranks)
    (rows, weights), (same_rows, same_weights) = (outcome(tmp_path / "runs" / name) for name in ("ray", "ranks"))
    assert [row["step"] for row in rows if "reward" in row] == [1, 2]
    assert len(rows) == len(same_rows)
    for row, same in zip(rows, same_rows, strict=True):
        assert row == pytest.approx(same, rel=1e-6, abs=1e-6)
    assert weights.keys() == same_weights.keys()
    for name, tensor in weights.items():
        assert torch.allclose(tensor, same_weights[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["ray_ddp", "ray_fsdp2"])
def test_outside_of_rays_workers_its_strategies_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"trainer.strategy is {name}, but this process is no worker of Ray Train; s"):
        make_trainer(strategy=name)


def test_a_strategy_that_would_train_alone_in_each_worker_is_refused() -> None:
    from ray.train.lightning import RayDDPStrategy, RayFSDPStrategy

    with pytest.raises(ValueError, match=r"RayDDPStrategy does not know .* add ray\.train\.lightning\.RayLightningE"):
        check_trainer(make_trainer(strategy=RayDDPStrategy()))
    with pytest.raises(ValueError, match=r"trainer\.strategy RayFSDPStrategy is not supported; use one device, ddp"):
        check_trainer(make_trainer(strategy=RayFSDPStrategy()))
