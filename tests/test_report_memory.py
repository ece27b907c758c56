"""The memory of a run by part: what is counted, and the bars that a report draws of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import random_policy
from made_runs import make_run

from lit_grpo.memory import held_bytes
from lit_grpo.tools.dashboard.report import read_folder
from lit_grpo.tools.dashboard.report.content import report_content
from lit_grpo.tools.dashboard.report.memory import PARTS, memory_bars

GIB = 2**30
MEASURED = {"weights": GIB, "gradients": GIB, "optimizer": 2 * GIB, "other": GIB / 2, "kv_token": 2**20}
FORECAST = {
    "rollout": {"weights": GIB, "optimizer": 2 * GIB, "device": 0.0, "keys and values": GIB, "states": GIB / 4},
    "update": {"weights": GIB, "optimizer": 2 * GIB, "gradients": GIB, "activations": 2 * GIB, "head": GIB / 8},
}
COLUMNS = {
    "memory/rollout_peak_gib": np.array([np.nan, 4.5, 4.25]),
    "memory/update_peak_gib": np.array([6.0, 6.5, np.nan]),
    "rollout/kv_tokens_peak": np.array([256.0, 512.0, np.nan]),
}


def bars(told: dict[str, Any], columns: dict[str, np.ndarray] = COLUMNS) -> dict[str, dict[str, float]]:
    """The bars by phase and kind, without parts that are 0."""
    made = memory_bars(told, columns)
    assert made is not None and made["parts"] == list(PARTS)
    return {
        f"{bar['phase']} {bar['kind']}": {part: gib for part, gib in zip(PARTS, bar["gib"], strict=True) if gib}
        | {"peak": bar["total"]}
        for bar in made["bars"]
    }


def test_measured_activations_are_the_largest_peak_less_what_was_counted() -> None:
    assert bars({"measured": MEASURED, "forecast": FORECAST, "device": "cpu"}) == {
        "rollout forecast": {"weights": 1, "optimizer": 2, "KV cache": 1.25, "peak": 4.25},
        "rollout measured": {
            "weights": 1, "optimizer": 2, "KV cache": 0.5, "activations": 0.5, "everything else": 0.5, "peak": 4.5,
        },
        "update forecast": {"weights": 1, "gradients": 1, "optimizer": 2, "activations": 2.125, "peak": 6.125},
        "update measured": {
            "weights": 1, "gradients": 1, "optimizer": 2, "activations": 2, "everything else": 0.5, "peak": 6.5,
        },
    }  # fmt: skip


def test_parts_of_a_forecast_that_are_copies_or_the_devices_own_are_everything_else() -> None:
    rollout = {"weights": GIB, "packed copies": GIB, "device": GIB / 2, "engine's weights": GIB}
    made = bars({"forecast": {"rollout": rollout}}, {})
    assert made == {"rollout forecast": {"weights": 1, "everything else": 2.5, "peak": 3.5}}


def test_a_run_that_lacks_a_forecast_or_a_measurement_shows_the_other_and_says_why() -> None:
    made = memory_bars({"measured": MEASURED, "forecast": {"why": "model.optimizer is GaLore\x1b[2J"}}, COLUMNS)
    assert made is not None and [bar["kind"] for bar in made["bars"]] == ["measured", "measured"]
    assert made["why"] == "model.optimizer is GaLore\\x1b[2J"
    made = memory_bars({"measured": MEASURED, "forecast": None}, COLUMNS)
    assert made is not None and made["why"] == "the run was not started with fit"
    assert list(bars({"forecast": FORECAST}, {})) == ["rollout forecast", "update forecast"]


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"measured": None},
        {"measured": [1], "forecast": "much"},
        {"measured": {"weights": "1"}},
        {"forecast": {"rollout": 3}},
        {"measured": {"weights": float("inf"), "other": float("nan")}, "forecast": {"update": {"head": 10**400}}},
    ],
)
def test_a_file_without_memory_gives_no_bars(told: dict[str, Any]) -> None:
    assert memory_bars(told, COLUMNS) is None


def test_a_report_reads_the_file_and_does_without_it(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", updates=2)
    assert report_content(read_folder(run))["memory"] is None
    (run / "memory.json").write_text('{"measured": {"weights"')
    assert report_content(read_folder(run))["memory"] is None
    (run / "memory.json").write_text(json.dumps({"measured": MEASURED, "forecast": FORECAST, "device": "cuda"}))
    assert len(report_content(read_folder(run))["memory"]["bars"]) == 4


def test_bytes_of_weights_gradients_and_states_are_those_of_their_tensors() -> None:
    policy: Any = random_policy()
    policy.lm_head.weight.requires_grad_(False)  # tied to the embeddings: one tensor
    optimizer = torch.optim.AdamW([weight for weight in policy.parameters() if weight.requires_grad])
    numbers = sum(weight.numel() for weight in policy.parameters())
    trained = sum(weight.numel() for weight in policy.parameters() if weight.requires_grad)
    buffers = sum(buffer.nbytes for buffer in policy.buffers())
    counted = held_bytes(policy, [optimizer])
    assert counted == {"weights": 4 * numbers + buffers, "gradients": 4 * trained, "optimizer": 0}
    policy(input_ids=torch.ones(1, 4, dtype=torch.long)).logits.sum().backward()
    optimizer.step()
    states = held_bytes(policy, [optimizer])["optimizer"]
    steps = 4 * len([weight for weight in policy.parameters() if weight.grad is not None])
    assert states == 8 * trained + steps  # two moments, and a count for each tensor
