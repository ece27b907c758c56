"""Whether weights that change arrive in the generator."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from lit_grpo.doctor.patient import Patient
from lit_grpo.doctor.report import Finding
from lit_grpo.doctor.trial import undone
from lit_grpo.rollout.proof import logprob_gap
from lit_grpo.rollout.weights.tensors import WeightSyncError

_NOISE = 0.5  # of a tensor's own spread: enough for log-probs to tell old weights from new ones
_LEAST_GAP = 0.02  # nats


def check_sync(patient: Patient) -> Iterator[Finding]:
    """Change every trained weight visibly, sync, have that proved, and put everything back.

    With the weights as they are a tensor that does not travel would look right, and after one update almost so.

    Raises:
        WeightSyncError: The generator does not hold them, or computes with others.
    """
    module, trainer = patient.module, patient.trainer
    patient.sync.on_train_start(trainer, module)
    before = _gap(patient)
    start = time.perf_counter()
    with undone(module), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        _disturb(module.policy)
        patient.sync.on_train_start(trainer, module)
        seconds, after = time.perf_counter() - start, _gap(patient)
    patient.sync.on_train_start(trainer, module)
    if not after <= _LEAST_GAP + 10 * before:
        raise WeightSyncError(
            f"The generator's log-probs were {before:.2g} nats from the policy's, and are {after:.2g} after every "
            "weight has changed: one of them has not arrived, or is not computed with."
        )
    how = "the policy's own tensors" if module.generator.decodes_on_policy else f"sent and proved in {seconds:.1f} s"
    yield Finding("pass", "weight sync", f"{how}, every weight changed")


def _gap(patient: Patient) -> float:
    module = patient.module
    if module.generator.decodes_on_policy:
        return 0.0
    with patient.trainer.precision_plugin.forward_context():
        return logprob_gap(module.generator, module.policy, patient.prompts[0], module.policy_version)


@torch.no_grad()
def _disturb(policy: torch.nn.Module) -> None:
    for weight in policy.parameters():
        if weight.requires_grad:
            spread = float(weight.float().std()) if weight.numel() > 1 else 0.0
            noise = torch.randn(weight.shape, dtype=torch.float32) * (_NOISE * spread or 0.01)
            weight.add_(noise.to(weight.device, weight.dtype))
