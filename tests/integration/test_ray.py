"""Runs and vLLM servers on a real Ray of two cores, which this process starts and ends."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import read_metrics
from hand_made import SERVER_ARGUMENTS, make_trainer, save_policy_for_vllm
from safetensors.torch import load_file
from test_server_faults import collect, sync

from lit_grpo.checks import check_trainer
from lit_grpo.policy.loading import load_policy, load_tokenizer
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.rollout.vllm.server import VLLMServerGenerator
from lit_grpo.strategies.ray import fit_on_workers

ray: Any = pytest.importorskip("ray", reason="Ray is not installed (lit_grpo[ray])")
pytestmark = pytest.mark.filterwarnings("ignore")

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
        patch.setenv("TMPDIR", str(home))  # of what actors write
        patch.setenv("RAY_TMPDIR", "/tmp")  # for the names of Ray's sockets must be short
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
    rows = read_metrics(run / "metrics.csv")
    names = ("step", "reward", "loss", "grad_norm", "val/reward")
    weights = load_file(run / "policy" / "model.safetensors")
    return [{name: float(row[name]) for name in names if row[name]} for row in rows], weights


@pytest.mark.nightly
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


class Failing:
    """Stands in for a trainer of Ray whose ranks have failed in some way."""

    def __init__(self, **failures: Exception) -> None:
        self._failures = {int(rank.removeprefix("rank")): error for rank, error in failures.items()}

    def fit(self) -> None:
        raise ray.train.v2.api.exceptions.WorkerGroupError("traceback", self._failures)


def test_a_worker_that_is_gone_ends_the_program_with_one_sentence_and_other_errors_stay_as_they_are() -> None:
    from ray.exceptions import ActorDiedError
    from ray.train import TrainingFailedError
    from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError

    killed = WorkerHealthCheckFailedError("A worker health check failed.", failure=ActorDiedError())
    trainer: Any = Failing(rank0=RuntimeError("gloo: connection closed by peer"), rank1=killed)
    with pytest.raises(SystemExit, match=r"^error: Rank 1 of Ray's workers is gone, .* command with --ckpt_path last"):
        fit_on_workers(trainer)
    other: Any = Failing(rank0=RuntimeError("another error"))
    with pytest.raises(TrainingFailedError):
        fit_on_workers(other)


@pytest.mark.nightly
def test_a_killed_worker_of_ray_ends_the_run_with_one_sentence(cluster: Path, tmp_path: Path) -> None:
    more = ("--trainer.max_steps", "2000", "--trainer.strategy", "ray_ddp", "--run.name", "killed")
    environment = os.environ | {"WORKERS": "2"}
    command = [sys.executable, str(EXAMPLE), *TOLD, *more]
    run = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=-1, stderr=subprocess.STDOUT, text=True)
    table, deadline = tmp_path / "runs" / "killed" / "metrics.csv", time.monotonic() + 900
    while not table.exists() or table.read_text().count("\n") < 3:
        if run.poll() is not None or time.monotonic() > deadline:
            run.kill()
            pytest.fail(run.communicate()[0][-5000:])
        time.sleep(0.1)
    ours = psutil.Process().children(recursive=True)
    workers = [process for process in ours if "TrainWorker" in " ".join(process.cmdline())]
    assert len(workers) == 2
    workers[1].kill()
    said, _ = run.communicate(timeout=600)
    assert run.returncode == 1 and "Traceback" not in said.rpartition("error: ")[2], said[-5000:]
    assert re.search(r"^error: Rank \d of Ray's workers is gone, .* --ckpt_path last to resume", said, re.MULTILINE)


@pytest.mark.parametrize("name", ["ray_ddp", "ray_fsdp2"])
def test_outside_of_rays_workers_its_strategies_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"trainer.strategy is {name}, but this process is no worker of Ray Train; s"):
        make_trainer(strategy=name)


def test_a_strategy_that_would_train_alone_in_each_worker_is_refused() -> None:
    from ray.train.lightning import RayDDPStrategy, RayFSDPStrategy

    with pytest.raises(ValueError, match=r"RayDDPStrategy does not know .* add ray\.train\.lightning\.RayLightningE"):
        check_trainer(make_trainer(strategy=RayDDPStrategy()), "float32")
    with pytest.raises(ValueError, match=r"trainer\.strategy RayFSDPStrategy is not supported; use one device, ddp"):
        check_trainer(make_trainer(strategy=RayFSDPStrategy()), "float32")


# ---- vLLM servers in actors -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy_for_vllm(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def policy(policy_folder: Path) -> Any:
    return load_policy(str(policy_folder)).eval()


def started(policy: Any, folder: Path, **options: Any) -> Any:
    """A generator with weights on all of its servers."""
    generator = VLLMServerGenerator(2, timeout_s=60.0, server_args=SERVER_ARGUMENTS, **options)
    generator.start(PolicySpec(policy, load_tokenizer(str(folder))))
    sync(generator, policy, 0)
    return generator


@pytest.fixture(scope="module")
def generator(cluster: Path, policy: Any, policy_folder: Path) -> Iterator[Any]:
    """Two servers in actors; the tests use them up one after another."""
    generator = started(policy, policy_folder, num_servers=2, ray={"num_cpus": 1})
    yield generator
    generator._fleet._stop()


def inside(generator: Any) -> list[int]:
    """The process of the server in each actor that is up."""
    actors = [server.process._actor for server in generator._fleet.alive]
    return ray.get([actor.__ray_call__.remote(lambda host: host._server.process.pid) for actor in actors])


def ends(pid: int) -> bool:
    """Whether a process ends."""
    deadline = time.monotonic() + 120
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.nightly
def test_servers_in_actors_decode_what_others_do_and_listen_on_loopback_alone(
    generator: Any, policy: Any, policy_folder: Path
) -> None:
    urls = [server.client.url for server in generator._fleet._servers]
    assert len(set(urls)) == 2 and all(url.startswith("http://127.0.0.1:") for url in urls)
    assert all(server.process.runs for server in generator._fleet.alive)
    (pid, other) = inside(generator)
    assert pid != other and os.getpid() not in [parent.pid for parent in psutil.Process(pid).parents()[:1]]
    here = started(policy, policy_folder)
    assert collect(generator) == collect(here) and len(collect(here)[0]) == 16
    here._fleet._stop()


@pytest.mark.nightly
def test_an_actor_that_is_killed_loses_and_doubles_nothing_and_ray_starts_it_again(generator: Any, policy: Any) -> None:
    expected, nothing = collect(generator)
    assert nothing == []
    (pid, other), (dead, _) = inside(generator), generator._fleet.alive
    engines = [process.pid for process in psutil.Process(pid).children(recursive=True)]
    assert engines
    tokens, messages = collect(generator, lambda: ray.kill(dead.process._actor, no_restart=False))
    assert tokens == expected
    assert len(messages) == 1 and "go on from there on the server that is left" in messages[0]
    assert f"What it said is in {dead.process.log}." in messages[0] and " on the machine " in messages[0]
    assert ends(pid) and all(ends(engine) for engine in engines)  # its server dies with it, and what vLLM started
    Path(dead.process.log.partition(" on the machine ")[0]).unlink()
    sync(generator, policy, 1)
    assert inside(generator) == [other]
    assert collect(generator) == (expected, [])
    deadline = time.monotonic() + 300.0
    while not dead.process.is_ready():
        assert time.monotonic() < deadline and not dead.process.failed()
        time.sleep(0.5)
    sync(generator, policy, 2)
    assert len(inside(generator)) == 2 and pid not in inside(generator)
    assert collect(generator) == (expected, [])


@pytest.mark.nightly
def test_when_a_generator_ends_its_actors_and_servers_do(generator: Any) -> None:
    servers, pids = generator._fleet.alive, inside(generator)
    logs = [Path(server.process.log.partition(" on the machine ")[0]) for server in servers]
    assert all(log.exists() for log in logs)
    generator._fleet._stop()
    assert all(ends(pid) for pid in pids) and not any(server.process.runs for server in servers)
    assert not any(log.exists() for log in logs)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"ray": {"num_gpus": 1}, "start_timeout_s": 3.0}, "Ray has started no actor .* has 2 CPU, 0 GPU; ask for le"),
        ({"ray": {"cpus": 1}}, r"ray is \{'cpus': 1\}, which no actor of Ray can have: Invalid option keyword cpus"),
        (
            {"ray": {}, "devices": ["0"]},
            r"devices \['0'\] needs servers on chosen devices, but ray chooses the device of each actor; set num_gpus",
        ),
        (
            {"ray": {}, "urls": ["http://a"]},
            r"ray needs servers that this run starts itself, but urls \['http://a'\] names running servers",
        ),
    ],
)
def test_servers_that_ray_cannot_start_are_refused(
    cluster: Path, policy: Any, policy_folder: Path, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        started(policy, policy_folder, **options)


@pytest.mark.nightly
@pytest.mark.parametrize("program", [("-m", "lit_grpo", "fit"), (str(EXAMPLE),)], ids=["alone", "in workers"])
def test_a_run_takes_servers_in_actors_and_leaves_none_behind(
    program: tuple[str, ...], cluster: Path, tmp_path: Path
) -> None:
    configs = ("--config", "arithmetic", "--config", "generators/vllm_servers", "--model.generator.num_servers", "1")
    small = ("--trainer.max_steps", "1", "--data.batch_size", "1", "--data.validation.init_args.num_rows", "2")
    before = set(cluster.glob("lit_grpo_*"))  # logs that a message has named stay, and other servers may be up
    said = run(tmp_path, *program, *configs, *small, "--model.generator.ray", '{"num_cpus": 0}')
    assert "HTTP Request" not in said
    rows, _ = outcome(tmp_path / "runs" / "arithmetic")
    assert [row["step"] for row in rows if "reward" in row] == [1]
    assert set(cluster.glob("lit_grpo_*")) <= before  # neither its folder nor its log
