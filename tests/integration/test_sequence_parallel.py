"""What ranks cannot share of rows is refused; what they do share ends as one process does, in ``test_two_ranks.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import random_policy
from hand_made import make_module, make_trainer

from lit_grpo.callbacks import RolloutScheduler, WeightSync
from lit_grpo.module import GRPOModule
from lit_grpo.update.learner_settings import check_arriving
from lit_grpo.update.prefix.sequence_parallel import SequenceParallel

pytestmark = pytest.mark.filterwarnings("ignore")


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
            r"model\.sequence_parallel_size 2 needs .* but model\.max_tokens_per_micro_batch auto .* give a number",
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
    with pytest.raises(ValueError, match=r"size is 2, but layers of Qwen3_5ForCausalLM have .* states, .* take 1"):
        SequenceParallel.of(random_policy(hybrid=True), 2, shares_prefix=True)


def test_modes_that_learn_as_groups_come_are_refused(policy_folder: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.sequence_parallel_size 2 needs the whole batch, of all ranks"):
        check_arriving(make_module(policy_folder, sequence_parallel_size=2).settings, num_ranks=2)
