"""The proof of a sync, beside a scorer that is told what to say."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import random_policy
from transformers import PreTrainedModel

from lit_grpo.callbacks import WeightSync
from lit_grpo.policy.loading import load_tokenizer
from lit_grpo.rollout.proof import SyncProof, given_logprobs
from lit_grpo.rollout.vllm import VLLMGenerator, VLLMServerGenerator
from lit_grpo.rollout.weights.tensors import WeightSyncError


def measured(proof: SyncProof, scorer: Any, policy: PreTrainedModel) -> Any:
    """What a scorer that is no generator is measured to be."""
    return proof.measure(scorer, policy)


class Scorer:
    """Scores as a policy does, with an error."""

    longest_sequence = 64

    def __init__(self, policy: PreTrainedModel, error: float) -> None:
        self.policy, self.error = policy, error

    def score(self, sequences: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
        return {"engine": given_logprobs(self.policy, sequences) + self.error}


class Rounding(Scorer):
    """Scores as a policy does whose embeddings have a relative error."""

    def score(self, sequences: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
        other = copy.deepcopy(self.policy)
        with torch.no_grad():
            table: Any = other.get_input_embeddings().weight
            table *= 1 + self.error * torch.randn(table.shape, generator=torch.Generator().manual_seed(1))
        return {"engine": given_logprobs(other, sequences)}


def test_a_policy_in_which_rounding_errors_grow_is_proved_as_before(policy_folder: Path) -> None:
    policy = random_policy()
    assert isinstance(policy, PreTrainedModel)
    proof = SyncProof(load_tokenizer(str(policy_folder)), max_gap=0.1, max_growth=1.3)
    first = measured(proof, Rounding(policy, 1e-5), policy)
    assert proof.accepts(first)
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if any(part in name for part in ("layernorm", "o_proj", "q_norm")):
                weight *= 10  # attention becomes a choice of one token, and counts
    second = measured(proof, Rounding(policy, 1e-5), policy)
    assert second.relative > 2 * 1.3 * first.relative
    assert proof.accepts(second)
    assert not proof.accepts(measured(proof, Rounding(policy, 3e-5), policy))


@pytest.mark.parametrize(
    "generator, precision, limit",
    [
        (VLLMGenerator(), "32-true", 0.02),
        (VLLMGenerator(), "bf16-mixed", 0.1),
        (VLLMGenerator(engine_args={"dtype": "bfloat16"}), "32-true", 0.1),
        (VLLMServerGenerator(), "32-true", 0.02),
        (VLLMServerGenerator(urls=["http://127.0.0.1:9"]), "32-true", 0.1),  # it may compute in any type
    ],
)
def test_what_computes_in_float32_has_to_agree_closely(generator: Any, precision: str, limit: float) -> None:
    trainer: Any = SimpleNamespace(precision=precision)
    module: Any = SimpleNamespace(policy=random_policy(), lora=None, generator=generator)
    assert WeightSync()._relative_limit(trainer, module) == limit
    assert WeightSync(max_relative_gap=0.05)._relative_limit(trainer, module) == 0.05
    with pytest.raises(ValueError, match="max_relative_gap must be above 0, or auto, not 0"):
        WeightSync(max_relative_gap=0)


def test_an_engine_that_computes_the_model_in_another_way_is_named_with_it(policy_folder: Path) -> None:
    policy = random_policy()
    assert isinstance(policy, PreTrainedModel)
    proof = SyncProof(load_tokenizer(str(policy_folder)), max_gap=0.02, max_growth=1.3)
    gap = measured(proof, Scorer(policy, 0.2), policy)
    assert not proof.accepts(gap)
    with pytest.raises(WeightSyncError, match=f"or it computes {type(policy).__name__} in another way than transf"):
        proof.check(gap, 0)
