"""The memory of a run by part, as measured and as ``fit-check`` estimates it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from lit_grpo.process.terminal import visible

GIB = 2**30
MOST_BYTES = 2**60
PARTS = ("weights", "gradients", "optimizer", "KV cache", "activations", "everything else")
"""The parts of all bars, in their order."""
OF_ESTIMATE = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "keys and values": "KV cache",
    "states": "KV cache",
    "activations": "activations",
    "head": "activations",
    "logits": "activations",
    "temporaries": "activations",
}
"""The part that each part of an estimate belongs to; others, such as copies of weights, are everything else."""


def memory_bars(told: Mapping[str, Any], columns: Mapping[str, np.ndarray]) -> dict[str, Any] | None:
    """Return the bars of rollout and update, each with the GiB of all parts; None if nothing was recorded.

    ``told`` is the content of memory.json; columns are (rows,). Measured activations are the largest peak of the phase
    minus all other parts, so in a rollout they contain copies of weights too.
    """
    measured, estimate = _numbers(told.get("measured")), told.get("forecast")
    bars = []
    for phase in ("rollout", "update"):
        expected = _numbers(estimate.get(phase)) if isinstance(estimate, Mapping) else {}
        if expected:
            bars.append({"phase": phase, "kind": "forecast", **_sums(expected)})
        peaks = columns.get(f"memory/{phase}_peak_gib")
        if measured and peaks is not None:
            bars.append({"phase": phase, "kind": "measured", **_measured(phase, measured, peaks, columns)})
    if not bars:
        return None
    why = estimate.get("why") if isinstance(estimate, Mapping) else "the run was not started with fit"
    return {
        "parts": list(PARTS),
        "bars": bars,
        "device": visible(str(told.get("device"))),
        "why": None if any(bar["kind"] == "forecast" for bar in bars) else visible(str(why)),
    }


def _measured(
    phase: str, measured: Mapping[str, float], peaks: np.ndarray, columns: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    peak = float(np.nanmax(peaks))
    gib = {"weights": measured.get("weights", 0.0), "optimizer": measured.get("optimizer", 0.0)}
    gib["everything else"] = measured.get("other", 0.0)
    if phase == "update":
        gib["gradients"] = measured.get("gradients", 0.0)
    elif "kv_token" in measured and "rollout/kv_tokens_peak" in columns:
        gib["KV cache"] = measured["kv_token"] * float(np.nanmax(columns["rollout/kv_tokens_peak"]))
    gib = {part: num_bytes / GIB for part, num_bytes in gib.items()}
    gib["activations"] = max(peak - sum(gib.values()), 0.0)
    return {"gib": [round(gib.get(part, 0.0), 6) for part in PARTS], "total": round(peak, 6)}


def _sums(estimate: Mapping[str, float]) -> dict[str, Any]:
    gib: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    for name, num_bytes in estimate.items():
        gib[OF_ESTIMATE.get(name, "everything else")] += num_bytes / GIB
    return {"gib": [round(value, 6) for value in gib.values()], "total": round(sum(gib.values()), 6)}


def _numbers(parts: Any) -> dict[str, float]:
    """Return the parts that are numbers of bytes; a file may have been written by hand."""
    if not isinstance(parts, Mapping):
        return {}
    numbers = {str(name): value for name, value in parts.items() if isinstance(value, int | float)}
    return {name: float(value) for name, value in numbers.items() if 0 <= value < MOST_BYTES}
