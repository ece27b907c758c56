"""Two ranks that share the tokens of every row do what one process does: real processes, gloo.

This file is also the script that the ranks run: ``python test_sequence_parallel.py POLICY OUTPUT``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import forks  # pyright: ignore[reportMissingImports]
import pytest
import torch
from conftest import random_policy  # pyright: ignore[reportMissingImports]
from hand_made import assert_ranks_end_as_one, make_module, make_trainer  # pyright: ignore[reportMissingImports]
from test_fsdp2 import OWN, run_own  # pyright: ignore[reportMissingImports]
from test_two_ranks import (  # pyright: ignore[reportMissingImports]
    CASES,
    MIXED,
    TESTS,
    Case,
    rank_and_world_size,
    run_case,
)

from lit_grpo.callbacks import RolloutScheduler, WeightSync
from lit_grpo.module import GRPOModule
from lit_grpo.update.arriving import check_arriving
from lit_grpo.update.objective.controllers import EntropyBonus
from lit_grpo.update.objective.objective import Objective
from lit_grpo.update.prefix.sequence_parallel import SequenceParallel

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

NAMES = (
    *("token", "constant_with_kl", "batch_scale_and_clipping", "one_rank_uniform_with_kl", "one_rank_missing"),
    *("two_iterations_of_two_minibatches", "not_finite_on_one_rank", "all_uniform_after_an_update"),
    *("ragged_over_the_batch", "parts_of_rollouts_and_tokens", "loss_gspo_composed", "advantages_least_variance"),
)
MORE = OWN | {
    "entropy": Case([MIXED, MIXED], {"objective": Objective(entropy=EntropyBonus(0.1))}),
    "long rows": Case([MIXED, MIXED], {"max_tokens_per_micro_batch": 1000}),
    "split prompts": Case([MIXED, MIXED], {"max_tokens_per_micro_batch": 14, "gradient_checkpointing": True}),
}
SHARDED = ("two_iterations_of_two_minibatches", "advantages_least_variance", "lora, checkpointed", "split prompts")
RUNS = [("ddp", name) for name in (*NAMES, *MORE)] + [("fsdp2", name) for name in SHARDED]


def runs(policy: str, output: Path, **trainer_options: Any) -> dict[str, Callable[[], dict[str, Any]]]:
    """All runs by name, each with rows that all ranks share."""
    size = trainer_options.get("devices", 1)
    cases: dict[str, Callable[[], dict[str, Any]]] = {}
    for name, case in ({name: CASES[name] for name in NAMES} | MORE).items():
        shared = replace(case, options=case.options | {"sequence_parallel_size": size})
        run = run_own if name in OWN else run_case
        cases[name] = lambda run=run, case=shared: run(case, policy, default_root_dir=str(output), **trainer_options)
    return cases


def main(policy: str, output: str) -> None:
    """Do all runs as one of two ranks, and save what came of them."""
    torch.set_num_threads(1)
    results = {}
    for strategy, name in RUNS:
        results[strategy, name] = runs(policy, Path(output), devices=2, strategy=strategy)[name]()
        print(f"rank {rank_and_world_size()} has finished {strategy} {name}", flush=True)
    torch.save(results, Path(output) / f"rank-{rank_and_world_size()[0]}.pt")


Outcomes = dict[tuple[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all runs have their folders."""
    return tmp_path_factory.mktemp("sequence_parallel")


@pytest.fixture(scope="module")
def single(policy_folder: Path, output: Path) -> dict[str, dict[str, Any]]:
    """What comes of all runs in one process."""
    return {name: run() for name, run in runs(str(policy_folder), output).items()}


@pytest.fixture(scope="module")
def ranks(policy_folder: Path, output: Path) -> list[Outcomes]:
    """What came of all runs, on rank 0 and on rank 1."""
    python_path = os.pathsep.join([str(TESTS / "integration"), str(TESTS), str(TESTS.parent)])
    environment = os.environ | {"PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(policy_folder), str(output)]
    process = forks.run(command, 300, env=environment, cwd=output)
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]
    return [torch.load(output / f"rank-{rank}.pt", weights_only=False) for rank in (0, 1)]


@pytest.mark.parametrize(("strategy", "name"), RUNS)
def test_ranks_that_share_rows_end_with_the_weights_and_the_metrics_of_one_process(
    strategy: str, name: str, ranks: list[Outcomes], single: dict[str, dict[str, Any]]
) -> None:
    assert_ranks_end_as_one(ranks[0][strategy, name], ranks[1][strategy, name], single[name])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"sequence_parallel_size": 2},
            r"sequence_parallel_size is 2, but the run has 1 ranks .* take a divisor",
        ),
        ({"sequence_parallel_size": 0}, r"sequence_parallel_size must be at least 1, not 0"),
        (
            {"sequence_parallel_size": 2, "max_tokens_per_micro_batch": "auto"},
            r"model\.sequence_parallel_size 2 needs .* and model\.max_tokens_per_micro_batch auto .* give a number",
        ),
    ],
)
def test_what_ranks_cannot_share_is_refused(policy_folder: Path, options: dict[str, Any], sentence: str) -> None:
    devices = 2 if "max_tokens_per_micro_batch" in options else 1
    with pytest.raises(ValueError, match=sentence):
        module: GRPOModule = make_module(policy_folder, **options)
        module.trainer = make_trainer(RolloutScheduler(), WeightSync(), devices=devices)
        module.setup("fit")


def test_heads_and_rows_that_cannot_be_shared_are_refused() -> None:
    with pytest.raises(ValueError, match=r"is 3, which does not divide the policy's 2 heads .*; take a d"):
        SequenceParallel.of(random_policy(), 3, shares_prefix=True)
    with pytest.raises(ValueError, match="needs packed rows, which this policy cannot have"):
        SequenceParallel.of(random_policy(), 2, shares_prefix=False)


def test_modes_that_learn_as_groups_come_are_refused(policy_folder: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.sequence_parallel_size 2 needs the whole batch, of all ranks"):
        check_arriving(make_module(policy_folder, sequence_parallel_size=2).settings, num_ranks=2)


if __name__ == "__main__":
    main(*sys.argv[1:])
