"""The proof of a sync, beside a scorer that is told what to say."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from conftest import random_policy
from transformers import PreTrainedModel

from lit_grpo.policy.loading import load_tokenizer
from lit_grpo.rollout.proof import SyncProof, given_logprobs


class Scorer:
    """Scores as a policy does, with an error."""

    longest_sequence = 64

    def __init__(self, policy: PreTrainedModel, error: float) -> None:
        self.policy, self.error = policy, error

    def score(self, sequences: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
        return {"engine": given_logprobs(self.policy, sequences) + self.error}


def test_a_policy_that_finds_all_tokens_equally_likely_is_proved_too(policy_folder: Path) -> None:
    policy = random_policy()
    assert isinstance(policy, PreTrainedModel)
    torch.nn.init.zeros_(policy.get_parameter("lm_head.weight"))
    proof = SyncProof(load_tokenizer(str(policy_folder)), max_gap=0.1, max_growth=1.3)
    assert proof.accepts(proof.measure(Scorer(policy, 1e-4), policy))
    assert not proof.accepts(proof.measure(Scorer(policy, 1e-2), policy))
