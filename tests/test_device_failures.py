"""Trials on a few tokens tell a model that does not fit from a device that fails."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import random_policy
from torch._dynamo.exc import BackendCompilerFailed

from lit_grpo.policy.architecture.attention import attention_calls
from lit_grpo.policy.architecture.decoder import logit_map
from lit_grpo.policy.architecture.support import check_policy
from lit_grpo.rollout.slots.binding import _fused_decoder, check_slot_support
from lit_grpo.update.prefix.support import prefix_refusal

ARCHITECTURE, SLOTS, PREFIX = "lit_grpo.policy.architecture", "lit_grpo.rollout.slots.binding", "lit_grpo.update.prefix"
TRIALS: dict[str, tuple[str, Callable[[Any], object]]] = {
    "policy": (f"{ARCHITECTURE}.support.hidden_states", check_policy),
    "logits": (f"{ARCHITECTURE}.decoder._instead", logit_map),
    "attention": (f"{ARCHITECTURE}.attention.hidden_states", lambda model: attention_calls(model, 256)),
    "slots": (f"{SLOTS}.hidden_states", check_slot_support),
    "fused": (f"{SLOTS}.FusedDecoder", check_slot_support),
    "prefix": (f"{PREFIX}.support._relative_error", prefix_refusal),
}
"""By name, the function that fails and the trial that calls it."""
FAILURES: dict[str, Exception] = {
    "memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
    "assert": torch.AcceleratorError("CUDA error: device-side assert triggered"),
    "cublas": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
}


def failing(failure: Exception) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise failure

    return fail


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("trial", TRIALS)
def test_a_failing_device_is_not_taken_for_a_model_that_does_not_fit(
    trial: str, failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, run = TRIALS[trial]
    monkeypatch.setattr(place, failing(FAILURES[failure]))
    with pytest.raises(type(FAILURES[failure])) as raised:
        run(random_policy())
    assert raised.value is FAILURES[failure]


def test_memory_that_runs_out_in_a_compilation_is_told_from_a_compilation_that_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy: Any = random_policy()
    monkeypatch.setattr(TRIALS["prefix"][0], failing(BackendCompilerFailed(print, FAILURES["memory"], None)))
    with pytest.raises(torch.OutOfMemoryError):
        prefix_refusal(policy)
    monkeypatch.setattr(TRIALS["prefix"][0], failing(BackendCompilerFailed(print, RuntimeError("no compiler"), None)))
    said = prefix_refusal(policy)
    assert said is not None and said.startswith("torch.compile fails on its attention (backend='print'")


def test_the_run_says_why_there_are_no_cuda_graphs() -> None:
    model: Any = SimpleNamespace(device=torch.device("cuda"))
    shape: Any = SimpleNamespace(dtype=torch.float32)
    with pytest.warns(UserWarning, match=r"SimpleNamespace is decoded without CUDA graphs, .* longer: .*has no"):
        assert _fused_decoder(model, [], shape, torch.zeros(1, 6), torch.zeros(1), 0.0) is None
