"""The open token budget: its estimate, and steps that begin anew when memory runs out."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from conftest import random_policy
from hand_made import fit, flat, make_micro_batch, make_module, make_rollout, random_groups, relative_error
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lit_grpo.module import GRPOModule
from lit_grpo.update import micro_batch_size as token_budget
from lit_grpo.update.batches.microbatch import least_tokens
from lit_grpo.update.logprobs.checkpointing import checkpoint_layers
from lit_grpo.update.logprobs.forward import micro_batch_logprobs
from lit_grpo.update.logprobs.reference import Reference, ReferenceSettings
from lit_grpo.update.micro_batch_size import MOST_TOKENS, MicroBatchSize, estimate_tokens
from lit_grpo.update.objective.corrections import Correction
from lit_grpo.update.objective.kl import KLTerm
from lit_grpo.update.objective.objective import Objective
from lit_grpo.update.prefix.sharing import shared_prefixes

REWARDS = [[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.2, 0.5], [0.3, 0.1, 0.9, 0.0]]


class ScarceMemory(pl.Callback):
    """Raises what a full device raises, wherever more than ``room`` tokens go through the policy at once."""

    def __init__(self, room: int, of_the_reference: bool = False) -> None:
        self.room, self.of_the_reference = room, of_the_reference
        self.sizes: list[int] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, GRPOModule)
        pl_module.learner.passes.budget = MicroBatchSize(200)
        reference = pl_module.learner.reference
        model = reference.model if self.of_the_reference and isinstance(reference, Reference) else pl_module.policy
        model.get_decoder().layers[1].register_forward_hook(self._check)  # pyrefly: ignore[bad-index, missing-attribute]

    def _check(self, _: Any, inputs: tuple[torch.Tensor, ...], __: Any) -> None:
        self.sizes.append(inputs[0].shape[1])
        if self.sizes[-1] > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory.")


def test_a_step_that_ran_out_of_memory_begins_anew_and_ends_the_same(policy_folder: Path) -> None:
    groups = random_groups(random_policy(), REWARDS)
    ample = fit(make_module(policy_folder), groups, groups)
    scarce = ScarceMemory(room=40)
    with pytest.warns(match="They have at most 50 from now on and the step starts again") as warned:
        recorder = fit(
            make_module(policy_folder, max_tokens_per_micro_batch="auto"), groups, groups, callbacks=[scarce]
        )
    said = [str(warning.message) for warning in warned if "Memory ran out" in str(warning.message)]
    assert len(said) == 2 and "of 200 tokens" in said[0] and "of 100 tokens" in said[1]
    assert len([size for size in scarce.sizes if size > 40]) == 2  # and none in the second step
    for actual, expected in zip(recorder.gradients, ample.gradients, strict=True):
        assert relative_error(flat(actual), flat(expected)) < 1e-5
    for name, value in ample.logs[0].items():
        assert recorder.logs[0][name] == pytest.approx(value, rel=1e-4, abs=1e-6, nan_ok=True), name


@pytest.mark.parametrize("what", ["old", "reference", "entropy"])
def test_a_measurement_that_ran_out_of_memory_begins_anew_and_ends_the_same(policy_folder: Path, what: str) -> None:
    groups = random_groups(random_policy(), REWARDS)
    options: dict[str, Any] = {
        "old": {"objective": Objective(correction=Correction("sequence_mask")), "num_iterations": 2},
        "reference": {"objective": Objective(kl=KLTerm(0.1)), "reference": ReferenceSettings(offload=True)},
        "entropy": {"objective": Objective(top_entropy_quantile=0.5)},
    }[what]
    ample = fit(make_module(policy_folder, **options), groups)
    scarce = ScarceMemory(room=40, of_the_reference=what == "reference")
    with pytest.warns(match="They have at most 50 from now on and the step starts again"):
        recorder = fit(
            make_module(policy_folder, max_tokens_per_micro_batch="auto", **options), groups, callbacks=[scarce]
        )
    assert sum(size > 40 for size in scarce.sizes) == 2
    for actual, expected in zip(recorder.gradients, ample.gradients, strict=True):
        assert relative_error(flat(actual), flat(expected)) < 1e-5


def test_where_one_completion_is_too_much_the_error_says_what_to_do(policy_folder: Path) -> None:
    groups = random_groups(random_policy(), REWARDS)
    least = least_tokens([rollout for group in groups for rollout in group.rollouts], shared_prefix=True)
    with (
        pytest.warns(match="Memory ran out"),
        pytest.raises(torch.OutOfMemoryError, match=f"micro-batches of {least} tokens, .* set gradient_checkpointing"),
    ):
        fit(make_module(policy_folder, max_tokens_per_micro_batch="auto"), groups, callbacks=[ScarceMemory(room=3)])


def test_the_budget_is_halved_down_to_the_longest_sequence() -> None:
    budget = MicroBatchSize(100)
    budget.halve(least=40)
    assert budget.tokens == 50
    budget.halve(least=40)
    assert budget.tokens == 40
    with pytest.raises(torch.OutOfMemoryError, match="micro-batches of 40 tokens"):
        budget.halve(least=40)


@pytest.mark.parametrize("shares_prefix", [True, False])
def test_the_estimate_grows_with_the_memory_and_with_checkpointing(shares_prefix: bool) -> None:
    model: Any = random_policy(num_hidden_layers=6).train()
    some, more = (estimate_tokens(model, size, shares_prefix) for size in (4_000_000, 8_000_000))
    assert 100 < some < more < 3 * some
    checkpoint_layers(model, True)
    least = estimate_tokens(model, 4_000_000, shares_prefix)
    assert some < estimate_tokens(model, 4_000_000, shares_prefix, selective=True) < least
    assert model.training
    assert estimate_tokens(model, 10**15, shares_prefix) == MOST_TOKENS


SIZES = ({}, {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4})


def autocast(precision: str) -> torch.autocast:
    """As Lightning has it."""
    return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed", cache_enabled=False)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("sizes", SIZES)
def test_the_estimate_counts_what_a_forward_pass_keeps(sizes: dict[str, Any], precision: str) -> None:
    model: Any = random_policy(max_position_embeddings=1024, **sizes).train()
    parameters = {parameter.data_ptr() for parameter in model.parameters()}
    with autocast(precision):
        estimate = token_budget.activation_bytes(model, True)
        for num_tokens in (99, 499):
            held: dict[int, int] = {}

            def note(tensor: torch.Tensor, held: dict[int, int] = held) -> torch.Tensor:
                held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
                return tensor

            micro_batch = make_micro_batch([make_rollout([3] * 20, [4] * (num_tokens - 19))], [0.0])
            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                logprobs_N, _ = micro_batch_logprobs(model, micro_batch, 1.0)
            assert logprobs_N.requires_grad
            kept = sum(size for place, size in held.items() if place not in parameters)
            assert estimate.of(num_tokens) == pytest.approx(kept, rel=0.15)


class LiveBytes(TorchDispatchMode):
    """Follows the bytes of tensors that are made inside and still live."""

    def __init__(self) -> None:
        super().__init__()
        self.peak, self._live = 0, {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage())._cdata not in self._live:
                self._live[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self._live.pop, storage._cdata)
        self.peak = max(self.peak, sum(self._live.values()))
        return result


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_the_estimate_under_autocast_is_near_the_peak_that_torch_tracks(
    sizes: dict[str, Any], checkpointing: bool
) -> None:
    model: Any = random_policy(max_position_embeddings=1024, **sizes).train()
    checkpoint_layers(model, checkpointing)
    peaks = []
    with autocast("bf16-mixed"):
        estimate = token_budget.activation_bytes(model, True)
        for num_tokens in (256, 768):
            micro_batch = make_micro_batch([make_rollout([3] * 20, [4] * (num_tokens - 19))], [0.0])
            with shared_prefixes(model), LiveBytes() as live:
                micro_batch_logprobs(model, micro_batch, 1.0)[0].sum().backward()
            peaks.append(live.peak)
            model.zero_grad()
    assert estimate.of_token == pytest.approx((peaks[1] - peaks[0]) / 512, rel=0.2)
