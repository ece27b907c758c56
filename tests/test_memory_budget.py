"""The memory that keys and values may take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import random_policy

from lit_grpo.memory import update_bytes
from lit_grpo.policy import load_tokenizer
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.rollout.slots import SlotGenerator
from lit_grpo.rollout.slots import generator as slot_generator
from lit_grpo.scheduling.memory_amount import MemoryAmount


def test_an_amount_is_taken_as_it_is_and_a_share_of_what_is_free() -> None:
    assert MemoryAmount("1MiB").bytes(2**30, 2**29) == 2**20
    assert MemoryAmount("25%").bytes(2**30, 2**29) == 2**28


def test_auto_leaves_what_the_update_needs_where_one_follows(
    monkeypatch: pytest.MonkeyPatch, policy_folder: Path
) -> None:
    policy: Any = random_policy()
    free = 2 * update_bytes(policy)
    monkeypatch.setattr(slot_generator, "free_bytes", lambda device: free)
    granted = []
    for trained in (True, False):
        generator: Any = SlotGenerator(4)
        generator.start(PolicySpec(policy, load_tokenizer(str(policy_folder)), trained=trained))
        granted.append(generator.budget.granted_tokens * generator.budget.bytes_per_token)
    policy.requires_grad_(False)
    assert granted == pytest.approx([0.45 * free, 0.9 * free], abs=1000)
    assert PolicySpec(policy, load_tokenizer(str(policy_folder)), trained=True).update_bytes == 0
