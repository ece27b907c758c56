"""Checks that checkpoints and exports can be written and read again, and that the disk has room for them."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from typing import Any, cast

import torch

from lit_grpo.policy.weights import digest
from lit_grpo.tools.doctor.patient import Patient
from lit_grpo.tools.doctor.report import CheckResult
from lit_grpo.tools.doctor.trial import disturb, undone

NUM_CHECKPOINTS = 3
"""``last.ckpt``, ``best.ckpt``, and one that is being written."""


def check_checkpoint(patient: Patient) -> Iterator[CheckResult]:
    """Write a checkpoint to the run's disk, read it again, and compare every bit."""
    trainer, module = patient.trainer, patient.module
    if patient.folder is None:
        yield CheckResult("fail", "checkpoint", patient.folder_error, "choose another folder with run.dir")
        return
    path = patient.folder / "last.ckpt"
    trainer.save_checkpoint(path, weights_only=False)
    num_bytes = path.stat().st_size
    saved: Any = torch.load(path, map_location="cpu", weights_only=True)
    path.unlink()
    expected: dict[str, Any] = {"state_dict": module.state_dict()}
    module.on_save_checkpoint(expected)
    there, tensors = saved["state_dict"], expected["state_dict"]
    wrong = [name for name in {**tensors, **there} if not _equal(there.get(name), tensors.get(name))]
    if wrong:
        figure = f"{wrong[0]} differs from what was written"
        yield CheckResult("fail", "checkpoint", figure, "see to the disk, or choose another run.dir")
        return
    yield CheckResult("pass", "checkpoint", f"{_mib(num_bytes)} written, and read again bit for bit")
    free, needed = shutil.disk_usage(patient.folder).free, NUM_CHECKPOINTS * _whole(module, num_bytes)
    figure = f"{_mib(free)} free, checkpoints take up to {_mib(needed)}"
    remedy = "make room, or choose another disk with run.dir"
    verdict = "fail" if needed > free else "warn" if needed > free / 2 else "pass"
    yield CheckResult(verdict, "disk", figure, "" if verdict == "pass" else remedy)


def check_export(patient: Patient) -> Iterator[CheckResult]:
    """Change every trained weight, export the policy to the run's disk, open it again, and compare.

    Raises:
        ExportError: The export does not hold the policy.
    """
    if patient.folder is None:
        yield CheckResult("skip", "export", patient.folder_error)
        return
    folder, start = patient.folder.with_name("export"), time.perf_counter()
    try:
        with undone(patient.module), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            disturb(patient.module.policy)
            compared = patient.module.export(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    yield CheckResult(
        "pass", "export", f"{compared}, every trained weight changed, in {time.perf_counter() - start:.1f} s"
    )


def _whole(module: Any, num_bytes: int) -> int:
    """Return a checkpoint's size with the optimizer's two moments, which do not exist before the first step."""
    if cast(Any, module.optimizers()).optimizer.state:
        return num_bytes
    trained = (weight for weight in module.policy.parameters() if weight.requires_grad)
    return num_bytes + 2 * sum(weight.nbytes for weight in trained)


def _equal(saved: torch.Tensor | None, tensor: torch.Tensor | None) -> bool:
    return saved is not None and tensor is not None and digest(saved) == digest(tensor)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.2f} MiB" if num_bytes < 2**30 else f"{num_bytes / 2**30:.1f} GiB"
