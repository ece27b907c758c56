"""The update on the pretended GPU: the CPU's gradient, no wait in a micro-batch, and one in a step."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from conftest import random_policy, table_rows
from hand_made import relative_error
from on_gpu import KeepsGradients, Steps, check_update, learn

from lit_grpo.methods.vcpo import EffectiveSamples
from lit_grpo.policy.adapters import LoraSettings, add_adapters
from lit_grpo.update.logprobs.checkpointing import checkpoint_layers
from lit_grpo.update.logprobs.reference import Reference, ReferenceSettings
from lit_grpo.update.objective.corrections import Correction
from lit_grpo.update.objective.kl import KLTerm
from lit_grpo.update.objective.objective import EntropyBonus, Objective
from lit_grpo.update.prefix.support import prefix_refusal
from tests.doubles.pretend_cuda import GPU, pretend_cuda

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rows": {"shares_prefix": False, "max_tokens_per_micro_batch": 64},
    "split prompts": {"max_tokens_per_micro_batch": 14},
    "lora": {},
    "checkpointing": {"gradient_checkpointing": True},
    "selective": {"gradient_checkpointing": "selective"},
    "auto": {"max_tokens_per_micro_batch": "auto"},
    "sequence ratios": {"objective": Objective(loss="gspo")},
    "corrected": {
        "objective": Objective(correction=Correction("sequence_truncate")),
        "plugins": [EffectiveSamples()],
    },
    "entropy": {"objective": Objective(entropy=EntropyBonus(0.01))},
    "two steps": {"num_minibatches": 2},
}
PRECISIONS: dict[str, tuple[torch.dtype, torch.dtype | None, float]] = {
    "float32": (torch.float32, None, 1e-5),
    "bf16-mixed": (torch.float32, torch.bfloat16, 0.05),
    "bf16-true": (torch.bfloat16, None, 0.01),
}
"""By name, the dtype of weights, of autocast, and how far the gradient may be off: attention is rounded elsewhere."""
CASES = [*(("plain", precision) for precision in PRECISIONS), *((kind, "float32") for kind in KINDS if kind != "plain")]
CASES += [("lora", "bf16-mixed"), ("checkpointing", "bf16-mixed")]
QUICK = [("plain", "bf16-mixed"), ("lora", "bf16-mixed")]
QUICK += [(kind, "float32") for kind in ("rows", "split prompts", "auto", "corrected")]


def make(kind: str, dtype: torch.dtype) -> Any:
    policy: Any = random_policy().to(dtype)  # pyrefly: ignore[bad-argument-type]
    if kind == "lora":
        with torch.random.fork_rng():
            torch.manual_seed(0)
            add_adapters(policy, LoraSettings(r=4))
            for name, weight in policy.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.normal_(weight, std=0.1)
    policy = policy.train()
    checkpoint_layers(policy, KINDS[kind].get("gradient_checkpointing", False))
    return policy


@pytest.mark.parametrize(("kind", "precision"), table_rows(CASES, QUICK))
def test_the_gradient_is_the_cpus(kind: str, precision: str) -> None:
    dtype, autocast, tolerance = PRECISIONS[precision]
    policy = make(kind, dtype)
    steps = KeepsGradients(policy, autocast)
    _, expected = learn(policy, steps, **KINDS[kind])
    with pretend_cuda():
        there = make(kind, dtype).to("cuda")
        steps_there = KeepsGradients(there, autocast)
        _, actual = learn(there, steps_there, **KINDS[kind])
        assert {weight.device for weight in there.parameters()} == {GPU}
    gradient, its = (each.gradients[0].float() for each in (steps, steps_there))
    if precision == "bf16-true":  # both are rounded; the one is no further from float32 than the other
        exact = KeepsGradients(make(kind, dtype).float())
        learn(exact.policy, exact, **KINDS[kind])
        assert relative_error(its, exact.gradients[0]) < 1.5 * relative_error(gradient, exact.gradients[0]) + tolerance
    else:
        assert relative_error(its, gradient) < tolerance
    assert actual.keys() == expected.keys()
    if precision == "float32":
        assert actual == pytest.approx(expected, rel=1e-3, abs=1e-5, nan_ok=True)


WAITS = [kind for kind in KINDS if kind not in ("auto", "entropy", "corrected")]


@pytest.mark.parametrize("kind", table_rows(WAITS, ["rows", "two steps"]))
def test_a_micro_batch_waits_for_nothing_and_a_step_once(kind: str) -> None:
    with pretend_cuda() as gpu:
        policy = make(kind, torch.float32).to("cuda")
        steps = Steps(policy, torch.bfloat16)
        learn(policy, steps, **KINDS[kind])  # finds out what is asked once
        gpu.reset()
        learner, logs = learn(policy, steps, **KINDS[kind])
        of_transformers = {line for line in gpu.lines("wait") if "architecture/decoder.py" in line}
        assert bool(of_transformers) == (kind == "rows")  # it looks for packed rows in a padded one
        ours = gpu.count("wait") - sum(int(line.split()[0]) for line in of_transformers)
        assert ours == learner.settings.updates_per_batch, gpu.lines("wait")
        assert gpu.count("unpinned copy") == 0, gpu.lines("unpinned copy")
        assert math.isfinite(logs["loss"]) and logs["grad_norm"] > 0


def test_a_micro_batch_is_one_pinned_copy() -> None:
    check_update()


@pytest.mark.parametrize("offload", table_rows([False, True], [True]))
def test_a_reference_costs_one_wait_more(offload: bool) -> None:
    objective = Objective(kl=KLTerm(0.1))
    policy: Any = random_policy(1).train()
    reference = Reference(copy.deepcopy(random_policy()), torch.device("cpu"), ReferenceSettings())
    steps = KeepsGradients(policy)
    _, expected = learn(policy, steps, reference, objective=objective)
    with pretend_cuda() as gpu:
        there: Any = random_policy(1).train()
        there.to("cuda")
        kept: Any = copy.deepcopy(random_policy())
        reference = Reference(kept, GPU, ReferenceSettings(offload=offload))
        steps_there = KeepsGradients(there)
        assert prefix_refusal(there) is None  # as at the start of a run, with the trial of its attention
        gpu.reset()
        _, actual = learn(there, steps_there, reference, objective=objective)
        assert gpu.count("wait") == 3, gpu.lines("wait")  # one of them reads the gradient for this test
        assert gpu.count("unpinned copy") == 0, gpu.lines("unpinned copy")
        assert {weight.device.type for weight in kept.parameters()} == {"cpu" if offload else "cuda"}
    assert relative_error(steps_there.gradients[0], steps.gradients[0]) < 1e-5
    assert actual["kl"] == pytest.approx(expected["kl"], rel=1e-4)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_the_trial_of_shared_prefixes_runs_there(autocast: torch.dtype | None) -> None:
    policy: Any = random_policy()
    with pretend_cuda(), torch.autocast("cuda", torch.bfloat16, enabled=autocast is not None):
        assert prefix_refusal(policy.to("cuda")) is None
