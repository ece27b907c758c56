"""Whether weights that change arrive in the generator."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from lit_grpo.tools.doctor.patient import Patient
from lit_grpo.tools.doctor.report import Finding
from lit_grpo.tools.doctor.trial import disturb, undone


def check_sync(patient: Patient) -> Iterator[Finding]:
    """Change every trained weight visibly, sync, have that proved, and put everything back.

    With the weights as they are a tensor that does not travel would look right, and after one update almost so.

    Raises:
        WeightSyncError: The generator does not hold them, or computes with others.
    """
    module, trainer = patient.module, patient.trainer
    patient.sync.on_train_start(trainer, module)
    start = time.perf_counter()
    with undone(module), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        disturb(module.policy)
        patient.sync.on_train_start(trainer, module)
        seconds = time.perf_counter() - start
    patient.sync.on_train_start(trainer, module)
    scores = "scores" in module.generator.abilities
    how = f"sent and proved in {seconds:.1f} s" if scores else "the policy's own tensors"
    yield Finding("pass", "weight sync", f"{how}, every weight changed")
