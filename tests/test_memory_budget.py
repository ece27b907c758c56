"""The memory that keys and values may take."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import random_policy

from lit_grpo.rollout.slots.kv import cache as memory_budget
from lit_grpo.rollout.slots.kv.cache import kv_budget_bytes
from lit_grpo.scheduling.memory_amount import MemoryAmount


def test_an_amount_is_taken_as_it_is_and_a_share_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_budget, "free_bytes", lambda device: 2**30)
    policy: Any = random_policy()
    assert kv_budget_bytes(MemoryAmount("1MiB"), policy) == 2**20
    assert kv_budget_bytes(MemoryAmount("25%"), policy) == 2**28


def test_auto_leaves_what_the_update_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_budget, "free_bytes", lambda device: 2**30)
    policy: Any = random_policy()
    trained = kv_budget_bytes(MemoryAmount("auto"), policy)
    policy.requires_grad_(False)
    frozen = kv_budget_bytes(MemoryAmount("auto"), policy)
    assert trained < frozen <= 2**30
