"""Checks that generator and trainer agree on log-probs, and that two passes of the trainer agree."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lit_grpo.tools.doctor.patient import Patient
from lit_grpo.tools.doctor.report import CheckResult

_TEMPERATURES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.5, 2.0)
_EXPLAINS = 0.5  # a temperature explains a gap if it makes the gap smaller than this share
_REPEATS = 1e-4  # nats between two passes of the same weights; a GPU may sum in another order


def check_gap(patient: Patient) -> Iterator[CheckResult]:
    """Compare the generator's log-probs of the samples with the trainer's; find out if a temperature explains a gap."""
    limit, sampled_N = patient.sync.max_logprob_gap, patient.sampled()
    gap_N = _gap(patient, sampled_N)
    gap = float(gap_N.mean())
    figure = f"{gap:.2g} nats apart on average, {float(gap_N.max()):.2g} at most"
    if gap > 0.05 * limit:
        gaps = {t: float(_gap(patient, sampled_N, t).mean()) for t in _TEMPERATURES}
        best = min(gaps, key=gaps.__getitem__)
        if gaps[best] < _EXPLAINS * gap:
            yield CheckResult(
                "fail",
                "log-prob gap",
                figure,
                f"the generator samples as if at temperature {best}; sampling.temperature is "
                f"{patient.module.sampling.temperature}",
            )
            return
    remedy = "see that generator and trainer compute in the same precision, with the same weights"
    if gap <= 0.1 * limit:
        yield CheckResult("pass", "log-prob gap", figure)
    else:
        yield CheckResult("warn" if gap <= limit else "fail", "log-prob gap", figure, remedy)


def _gap(patient: Patient, sampled_N: torch.Tensor, temperature: float | None = None) -> torch.Tensor:
    """Return the gaps of the log-probs in evaluation mode; :func:`check_dropout` looks at training mode."""
    policy = patient.module.policy.eval()
    try:
        return (sampled_N - torch.cat(patient.logprobs(temperature))).abs()
    finally:
        policy.train()


def check_dropout(patient: Patient) -> Iterator[CheckResult]:
    """Check that two passes in training mode give the same log-probs."""
    first, second = (torch.cat(patient.logprobs()) for _ in range(2))
    difference = float(torch.nan_to_num(first - second, nan=torch.inf).abs().max())
    if difference > _REPEATS:
        yield CheckResult(
            "fail",
            "dropout",
            f"two passes in training mode differ by {difference:.2g} nats",
            "switch off randomness in the policy's forward pass; the samples' log-probs are without it",
        )
    else:
        yield CheckResult("pass", "dropout", "none: two passes in training mode are alike")
