"""Checkpoints and exports of two ranks that hold shards of the policy: real processes, gloo, and FSDP2.

That their updates are those of one process is in ``test_two_ranks.py``. This file is also the script that the ranks
run: ``python test_fsdp2.py POLICY OUTPUT RUN...``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import forks
import lightning.pytorch as pl
import pytest
import torch
from conftest import read_metrics, table_rows
from hand_made import make_module, make_trainer, relative_error, weights_of
from safetensors.torch import load_file
from test_two_ranks import (
    TESTS,
    SlotsApart,
    even_length,  # noqa: F401 (this file is where the runs of its processes look for it)
    momentum,
    rank_and_world_size,
)
from transformers import AutoModelForCausalLM

from lit_grpo.callbacks import PolicyExporter, RolloutScheduler, RunCheckpoint, WeightSync
from lit_grpo.checkpoints import read
from lit_grpo.data.module import PromptDataModule
from lit_grpo.module import GRPOModule
from lit_grpo.policy.adapters import LoraSettings
from lit_grpo.policy.named import NAMED, TINY
from lit_grpo.policy.sharding import is_scattered
from lit_grpo.rewards import RewardSpec
from lit_grpo.types import SamplingParams
from lit_grpo.update.objective.kl import KLTerm
from lit_grpo.update.objective.objective import Objective

pytestmark = pytest.mark.filterwarnings("ignore")


class Shards(pl.Callback):
    """Sees that a rank holds a part of the weights and of the moments, once an update has been made.

    Args:
        always: Also before and after the rollout, that is after the weights have traveled.
    """

    def __init__(self, always: bool = False) -> None:
        self.always = always

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        assert pl_module.settings.shares_prefix
        if rank_and_world_size()[1] > 1:
            layers = pl_module.policy.get_decoder().layers
            assert is_scattered(layers) == self.always

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        assert rank_and_world_size()[1] == 1 or is_scattered(pl_module.policy)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if rank_and_world_size()[1] == 1:
            return
        for optimizer in trainer.optimizers:
            for weight, state in optimizer.state.items():
                held = sum(tensor.to_local().numel() for tensor in (cast(Any, weight), state["momentum_buffer"]))
                assert held <= 1.1 * weight.numel() + 2 * max(weight.shape[1:], default=1) * weight.ndim


def train(
    policy: str,
    output: Path,
    name: str,
    updates: int = 4,
    checkpoint: Path | None = None,
    lora: LoraSettings | None = None,
    apart: bool = False,
    **trainer_options: Any,
) -> dict[str, Any]:
    """Updates of four prompts in all, with checkpoints of the last; return what must not depend on ranks."""
    pl.seed_everything(1, verbose=False)
    rows = "\n".join(json.dumps({"prompt": f"{number}+{number}="}) for number in range(6))
    (output / f"{name}.jsonl").write_text(rows)
    batch_size = 4 // trainer_options.get("devices", 1)
    data = PromptDataModule(policy, train=str(output / f"{name}.jsonl"), batch_size=batch_size)
    generator: dict[str, Any] = {"generator": SlotsApart()} if apart else {}
    module = make_module(
        policy,
        optimizer=momentum,
        rewards=[RewardSpec(f"{__file__}:even_length")],
        sampling=SamplingParams(max_tokens=9),
        objective=Objective(kl=KLTerm(0.1)),
        max_tokens_per_micro_batch=24,
        lora=lora,
        **generator,
    )
    callbacks = (PolicyExporter(), RunCheckpoint(every_n_updates=0), RolloutScheduler(), Shards(apart), WeightSync())
    options = {"max_epochs": -1, "max_steps": updates, "limit_val_batches": 0, **trainer_options}
    trainer = make_trainer(*callbacks, default_root_dir=str(output / name), **options)
    trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=False)
    return {"weights": weights_of(module), "version": module.policy_version, "stream": data.state_dict()}


def last(output: Path, name: str) -> Path:
    return output / name / "checkpoints" / "last.ckpt"


def runs(policy: str, output: Path, **trainer_options: Any) -> dict[str, Callable[[], dict[str, Any]]]:
    """All runs by name; those of one process have been made where ranks go on from one of theirs."""
    own = "ranks" if "devices" in trainer_options else "one"
    return {
        "apart": lambda: train(policy, output, f"{own}-apart", apart=True, **trainer_options),
        "adapters apart": lambda: train(
            policy, output, f"{own}-adapters apart", 2, lora=LoraSettings(r=2), apart=True, **trainer_options
        ),
        "whole": lambda: train(policy, output, f"{own}-whole", **trainer_options),
        "adapters": lambda: train(policy, output, f"{own}-adapters", 2, lora=LoraSettings(r=2), **trainer_options),
        "adapters whole": lambda: train(
            policy, output, f"{own}-adapters-whole", lora=LoraSettings(r=2), **trainer_options
        ),
        **{
            f"adapters, {which} -> {to}": lambda which=which, to=to: train(
                *(policy, output, f"adapters-{which}-{to}"),
                checkpoint=last(output, "one-adapters" if which == 1 else "ranks-adapters"),
                lora=LoraSettings(r=2),
                **trainer_options,
            )
            for which, to in ((1, 2), (2, 2), (2, 1))
        },
        "hybrid": lambda: train(str(Path(policy, "hybrid")), output, f"{own}-hybrid", 2, **trainer_options),
        "half": lambda: train(policy, output, f"{own}-half", 2, **trainer_options),
        "2 -> 2": lambda: train(policy, output, "2-2", checkpoint=last(output, "ranks-half"), **trainer_options),
        "1 -> 2": lambda: train(policy, output, "1-2", checkpoint=last(output, "one-half"), **trainer_options),
        "apart, 2 -> 2": lambda: train(
            policy, output, "apart-2-2", checkpoint=last(output, "ranks-half"), apart=True, **trainer_options
        ),
        "2 -> 1": lambda: train(policy, output, "2-1", checkpoint=last(output, "ranks-half"), **trainer_options),
    }


def main(policy: str, output: str, *names: str) -> None:
    """Do runs as one of two ranks, and save what came of them."""
    torch.set_num_threads(1)
    results, todo = {}, runs(policy, Path(output), devices=2, strategy="fsdp2")
    for name in names:
        results[name] = todo[name]()
        print(f"rank {rank_and_world_size()} has finished {name}", flush=True)
    torch.save(results, Path(output) / f"rank-{rank_and_world_size()[0]}.pt")


Outcomes = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all runs have their folders."""
    return tmp_path_factory.mktemp("fsdp2")


@pytest.fixture(scope="module")
def single(policy_folder: Path, hybrid_folder: Path, output: Path) -> Callable[[str], dict[str, Any]]:
    """What comes of a run in one process over all groups."""
    assert hybrid_folder.is_relative_to(policy_folder)
    by_name = runs(str(policy_folder), output)
    known: Outcomes = {}

    def run(name: str) -> dict[str, Any]:
        if name not in known:
            known[name] = by_name[name]()
        return known[name]

    return run


@pytest.fixture(scope="module")
def ranks(
    policy_folder: Path, output: Path, single: Callable[[str], dict[str, Any]], request: pytest.FixtureRequest
) -> list[Outcomes]:
    """What came of the runs that the selected tests look at, on rank 0 and on rank 1."""
    single("half"), single("adapters")
    items = [item for item in request.session.items if item.path == request.path]
    asked = {item.callspec.params.get("name") for item in items if hasattr(item, "callspec")}
    own = [name for name in runs("", output) if name in {"half", "adapters"} | asked and not name.endswith("-> 1")]
    names = sorted(own, key=lambda name: "->" in name)  # those that go on from others' checkpoints come last
    python_path = os.pathsep.join([str(TESTS / "integration"), str(TESTS), str(TESTS.parent)])
    environment = os.environ | {"PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(policy_folder), str(output), *names]
    process = forks.run(command, 200, env=environment, cwd=output)
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]
    return [torch.load(output / f"rank-{rank}.pt", weights_only=False) for rank in (0, 1)]


@pytest.mark.parametrize(
    "name",
    table_rows(["whole", "2 -> 2", "1 -> 2", "2 -> 1", "apart", "apart, 2 -> 2"], ["1 -> 2"]),
)
def test_any_number_of_ranks_goes_on_from_a_checkpoint_of_any(
    name: str, ranks: list[Outcomes], single: Callable[[str], dict[str, Any]]
) -> None:
    expected = single("whole")
    for outcome in [single(name)] if name == "2 -> 1" else [rank[name] for rank in ranks]:
        assert outcome["version"] == expected["version"] == 4 and outcome["stream"] == expected["stream"]
        torch.testing.assert_close(outcome["weights"], expected["weights"], rtol=0, atol=5e-6)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["hybrid"])
def test_shards_of_recurrent_layers_roll_out_and_end_where_one_process_does(
    name: str, ranks: list[Outcomes], single: Callable[[str], dict[str, Any]]
) -> None:
    expected = single(name)
    for outcome in (rank[name] for rank in ranks):
        assert outcome["version"] == expected["version"] == 2 and outcome["stream"] == expected["stream"]
        torch.testing.assert_close(outcome["weights"], expected["weights"], rtol=0, atol=5e-6)


@pytest.mark.parametrize(
    "name",
    table_rows(
        ["adapters whole", "adapters, 2 -> 2", "adapters, 1 -> 2", "adapters, 2 -> 1"],
        ["adapters, 2 -> 2", "adapters, 2 -> 1"],
    ),
)
def test_adapters_go_on_from_a_checkpoint_that_has_nothing_else(
    name: str, output: Path, ranks: list[Outcomes], single: Callable[[str], dict[str, Any]]
) -> None:
    expected = single("adapters whole")
    for outcome in [single(name)] if name.endswith("-> 1") else [rank[name] for rank in ranks]:
        assert outcome["version"] == expected["version"] == 4 and outcome["stream"] == expected["stream"]
        torch.testing.assert_close(outcome["weights"], expected["weights"], rtol=0, atol=5e-6)
    assert all(".lora_" in weight for weight in read(last(output, "ranks-adapters"))["state_dict"])


@pytest.mark.parametrize(
    "name", table_rows(["whole", "adapters", "apart", "adapters apart", "hybrid"], ["whole", "adapters apart"])
)
def test_what_is_exported_of_shards_is_a_whole_policy(
    name: str, output: Path, ranks: list[Outcomes], single: Callable[[str], dict[str, Any]]
) -> None:
    same = {"apart": "whole", "adapters apart": "adapters"}.get(name, name)
    assert ranks[0][name]["version"] == single(same)["version"]
    exported, expected = output / f"ranks-{name}" / "policy", output / f"one-{same}" / "policy"
    files = sorted(path.relative_to(exported) for path in exported.rglob("*.safetensors"))
    assert len(files) == (2 if same == "adapters" else 1)
    for file in files:
        ours, theirs = load_file(exported / file), load_file(expected / file)
        assert ours.keys() == theirs.keys() and any(key.startswith("mtp.") for key in ours) == (name == "hybrid")
        assert all(torch.allclose(tensor, theirs[key], rtol=0, atol=1e-5) for key, tensor in ours.items())
    AutoModelForCausalLM.from_pretrained(exported)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"max_tokens_per_micro_batch": "auto"},
            r"trainer\.strategy fsdp2 needs .* but model\.max_tokens_per_micro_batch auto .* give a number",
        ),
        (
            {"lora": LoraSettings(base="nf4")},
            r"model\.lora\.base nf4 needs the full weights on each rank, but trainer\.strategy fsdp2 shards them",
        ),
    ],
)
def test_what_needs_whole_weights_is_refused(policy_folder: Path, options: dict[str, Any], sentence: str) -> None:
    module: GRPOModule = make_module(policy_folder, **options)
    module.trainer = make_trainer(RolloutScheduler(), WeightSync(), strategy="fsdp2")
    with pytest.raises(ValueError, match=sentence):
        module.setup("fit")


def test_a_mode_in_which_ranks_come_to_layers_at_different_times_is_refused(policy_folder: Path) -> None:
    scheduler = RolloutScheduler(plugins=["periodic"])
    module: GRPOModule = make_module(policy_folder, generator=SlotsApart())
    module.trainer = make_trainer(scheduler, WeightSync(), strategy="fsdp2")
    with pytest.raises(
        ValueError, match=r"needs the full weights .* trainer\.strategy fsdp2 .* take a plug-in with overlap none"
    ):
        scheduler.setup(module.trainer, module, "fit")


@pytest.mark.nightly
def test_in_mixed_precision_shards_end_where_whole_copies_do(tmp_path: Path) -> None:
    small = ["--data.batch_size", "2", "--model.num_generations", "8", "--trainer.limit_val_batches", "0"]
    small += ["--trainer.devices", "2", "--trainer.max_steps", "2", "--trainer.precision"]
    environment = os.environ | {"PYTHONPATH": str(TESTS.parent), "OMP_NUM_THREADS": "1"}
    runs = {
        "ddp": ["bf16-mixed", "--trainer.strategy", "ddp"],
        "fsdp2": ["bf16-mixed", "--trainer.strategy", "fsdp2"],
        "float32": ["32-true", "--trainer.strategy", "ddp"],
    }
    for name, more in runs.items():
        command = [sys.executable, "-m", "lit_grpo", "fit", "--config", "arithmetic", *small, *more, "--run.name", name]
        process = forks.run(command, 150, env=environment, cwd=tmp_path)
        assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]
    weights = {name: load_file(tmp_path / "runs" / name / "policy" / "model.safetensors") for name in runs}
    assert all(tensor.dtype == torch.float32 for tensor in weights["fsdp2"].values())
    first = load_file(NAMED[TINY].folder / "model.safetensors")
    moves = {
        name: torch.cat([(tensor - first[key]).flatten() for key, tensor in sorted(of_run.items())])
        for name, of_run in weights.items()
    }
    assert relative_error(moves["fsdp2"], moves["ddp"]) < 1e-5
    assert relative_error(moves["float32"], moves["ddp"]) > 0.1


@pytest.mark.nightly
@pytest.mark.parametrize(("generator", "strategies"), [("vllm_servers", ["fsdp2"]), ("vllm", ["ddp", "fsdp2"])])
def test_with_servers_or_engines_of_their_own_two_ranks_end_where_one_process_does(
    generator: str, strategies: list[str], tmp_path: Path
) -> None:
    small = ["--data.validation.init_args.num_rows", "4", "--trainer.val_check_interval", "2"]
    small += ["--trainer.max_steps", "2", "--model.num_generations", "8"]
    small += ["--model.generator.init_args.num_servers", "1"] if generator == "vllm_servers" else []
    environment = os.environ | {"PYTHONPATH": str(TESTS.parent), "OMP_NUM_THREADS": "1"}
    ranks = ["--data.batch_size", "2", "--trainer.devices", "2", "--trainer.strategy"]
    told = {strategy: [*ranks, strategy] for strategy in strategies} | {"one": ["--data.batch_size", "4"]}
    processes = []
    for name, more in told.items():
        configs = ["--config", "arithmetic", "--config", f"generators/{generator}"]
        command = [sys.executable, "-m", "lit_grpo", "fit", *configs, *small, *more, "--run.name", name]
        with (tmp_path / f"{name}.log").open("w") as log:
            options = {"cwd": tmp_path, "env": environment, "stdout": log, "stderr": log}
            processes.append(forks.Forked(command, imports=forks.VLLM, **options))
    assert [process.wait(timeout=300) for process in processes] == [0] * len(told), [
        (tmp_path / f"{name}.log").read_text()[-4000:] for name in told
    ]
    one = tmp_path / "runs" / "one"
    for two in (tmp_path / "runs" / strategy for strategy in strategies):
        assert steps(two) == steps(one) == [1, 2]
        for ours, alone in zip(rows(two), rows(one), strict=True):
            assert ours["reward"] == alone["reward"] and ours["val/reward"] == alone["val/reward"]
            assert float(ours["grad_norm"] or 0) == pytest.approx(float(alone["grad_norm"] or 0), rel=1e-4)
            assert float(ours["sync/relative_gap"] or 0) < 1e-4
        weights = [load_file(run / "policy" / "model.safetensors") for run in (two, one)]
        assert all(torch.allclose(tensor, weights[1][name], rtol=0, atol=1e-5) for name, tensor in weights[0].items())


def rows(run: Path) -> list[dict[str, str]]:
    """The metrics of a run."""
    return read_metrics(run / "metrics.csv")


def steps(run: Path) -> list[int]:
    """Which updates a run has a row of."""
    return [int(float(row["step"])) for row in rows(run) if row["reward"]]


if __name__ == "__main__":
    main(*sys.argv[1:])
