"""fit-check's estimate beside what was measured on an H100, by the rows of its result file.

Measured figures are those of torch's allocator, which does not see the CUDA context.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.baseline_plans import FULL_GROUP, MICRO_ROUNDS
from benchmarks.random_policies import QWEN3_7M, random_qwen3
from benchmarks.rollouts import kv_tokens, roll_out, slots
from benchmarks.update_vs_trl import WORKS
from benchmarks.workloads import long_tailed
from lit_grpo.memory import step_without_temporaries
from lit_grpo.training.forecast import LOGITS, WORKSPACES, Demand, Forecast, forecast
from lit_grpo.types import Prompt, SamplingParams
from lit_grpo.update.batches.microbatch import make_micro_batches
from scripts.make_tiny import make_tokenizer
from scripts.what_fits import sizes_of
from tests.doubles.pretend_cuda import pretend_cuda

GIB, MIB = 2**30, 2**20
RESULT = Path(__file__).parents[1] / "benchmarks" / "results" / "gpu-2026-11-27.json"
ROWS: list[dict[str, Any]] = json.loads(RESULT.read_text())["rows"]
FIT = Demand(64, 32, 512, 1024, 16_384, device="cuda", mixed=True, checkpointing=True, fused=False)
"""The settings of the measured fit; 64 slots are the default. AdamW was not fused there."""


def measured(stage: str, **where: Any) -> dict[str, Any]:
    (row,) = [row for row in ROWS if row["stage"].startswith(stage) and where.items() <= row.items()]
    return row


def fit() -> Forecast:
    return forecast(sizes_of("Qwen3 1.7B", True, 4), FIT)


def of_phase(taken: Forecast, *phases: dict[str, float]) -> float:
    """Bytes of torch's allocator."""
    resident = sum(num_bytes for part, num_bytes in taken.resident.items() if part != "device")
    return resident + max(sum(phase.values()) for phase in phases)


def test_the_peaks_of_a_fit_are_within_three_hundredths() -> None:
    row, taken = measured("fit of Qwen3-1.7B, bf16-mixed, 4 prompts", step=2.0), fit()
    assert of_phase(taken, taken.update, taken.step) == pytest.approx(row["memory/update_peak_gib"] * GIB, rel=0.03)
    assert of_phase(taken, taken.rollout) == pytest.approx(row["memory/rollout_peak_gib"] * GIB, rel=0.03)


def test_the_peak_of_the_first_update_is_that_of_its_step() -> None:
    """Its backward passes had no moments beside them, so that only the step can have come to it."""
    row, taken = measured("fit of Qwen3-1.7B, bf16-mixed, 4 prompts", step=1.0), fit()
    backward = of_phase(taken, taken.update) - taken.resident["optimizer"]
    assert of_phase(taken, taken.step) == pytest.approx(row["memory/update_peak_gib"] * GIB, rel=0.03)
    assert backward < 0.7 * row["memory/update_peak_gib"] * GIB


def test_the_first_rollout_has_no_moments_and_is_below_the_estimate() -> None:
    """No completion was as long as the limit for all slots at once, as fit-check assumes."""
    row, taken = measured("fit of Qwen3-1.7B, bf16-mixed, 4 prompts", step=1.0), fit()
    expected = of_phase(taken, taken.rollout) - taken.resident["optimizer"]
    assert 1.0 <= expected / (row["memory/rollout_peak_gib"] * GIB) < 1.15


def test_an_update_by_itself_is_within_a_tenth_above_its_state() -> None:
    """Padded rows, by a defect of that commit, in two micro-batches; in the second all gradients are there."""
    row = measured("update beside TRL", system="lit_grpo")
    (group,) = replace(WORKS["a"], vocab_size=151_936).groups()
    for rollout in group.rollouts:
        rollout.advantage = 1.0
    last = make_micro_batches(group.rollouts, 16_384, False)[-1].input_ids_BT.numel()
    taken = forecast(sizes_of("Qwen3 1.7B", True, 4), replace(FIT, micro_batch_tokens=last, fused=True))
    above = sum(taken.update.values()) - taken.update["gradients"] + taken.resident["workspaces"]
    assert above == pytest.approx(row["above_state_mib"] * MIB, rel=0.1)
    total = taken.resident["optimizer"] + taken.update["gradients"] + above
    assert total == pytest.approx(row["peak_mib"] * MIB, rel=0.03)


@pytest.mark.parametrize(
    ("system", "plan", "num_rows", "streams"),
    [
        ("ours", "short_last", 8, 2),
        pytest.param("full group", FULL_GROUP, 32, 2, marks=pytest.mark.nightly),
        pytest.param("naive", MICRO_ROUNDS, 8, 1, marks=pytest.mark.nightly),
    ],
)
def test_memory_of_a_group_above_the_weights_is_within_a_tenth(
    system: str, plan: str, num_rows: int, streams: int
) -> None:
    """Tokens that memory is taken for are those of the same rollout of a tiny policy, which takes the same steps.

    The naive rounds came last, when the stream that decodes had its workspace.
    """
    from benchmarks.decode_systems import NOISE
    from benchmarks.rollouts import ForetoldLengths
    from lit_grpo.tools.simulation.traces import noisy

    row = measured("the paper's pair", system=system, code="bd64b0fe")
    prompt = Prompt("train/0", tuple(3 + i % 10 for i in range(512)), "")
    lengths = long_tailed([prompt], row["G"], 1024)
    expected = noisy(np.array([*lengths.values()], dtype=float), NOISE)
    foretold = ForetoldLengths(dict(zip(lengths, expected, strict=True)))
    sampling, held = SamplingParams(max_tokens=max(lengths.values())), list[int]()
    if system == "naive":  # all rows of a round go on to the end of its longest
        keys = [*lengths]
        rounds = [keys[first : first + num_rows] for first in range(0, len(keys), num_rows)]
        lengths = {key: max(map(lengths.__getitem__, its)) for its in rounds for key in its}
    policy = random_qwen3(replace(QWEN3_7M, layers=1, hidden=16, intermediate=16, heads=1, kv_heads=1, head_dim=16))
    generator = slots(policy, make_tokenizer(), num_rows, lengths)
    _, stats = roll_out(generator, [prompt], row["G"], sampling, plan, foretold,
                        on_step=lambda _: held.append(kv_tokens(generator)[0]))  # fmt: skip
    assert stats.num_steps == row["steps"]
    sizes = sizes_of("Qwen3 1.7B", False, 2)
    kv = max(held) * sizes.num_layers * sizes.kv_values * 2
    logits = LOGITS * 4 * num_rows * sizes.vocabulary
    workspaces = WORKSPACES["cuda"] * streams / 3
    assert kv + logits + workspaces == pytest.approx(row["peak_gib"] * GIB, rel=0.1)
    bound = forecast(sizes, Demand(num_rows, row["G"], 512, sampling.max_tokens, 0, device="cuda", weight_bytes=2))
    assert sum(bound.rollout.values()) >= kv + logits


def test_what_is_cut_from_the_peak_of_that_fit() -> None:
    """Figures of docs/memory_and_cost.md."""
    sizes = sizes_of("Qwen3 1.7B", True, 4)
    changed: list[dict[str, Any]] = [
        {},
        {"fused": True},
        {"micro_batch_tokens": 4096},
        {"fused": True, "micro_batch_tokens": 4096},
        {"optimizer": "AdamW8bit", "micro_batch_tokens": 4096},
    ]
    peaks = [forecast(sizes, replace(FIT, **changes)).peak / GIB for changes in changed]
    assert peaks == pytest.approx([36.4, 36.4, 36.0, 32.0, 22.5], abs=0.06)


@pytest.mark.parametrize(
    ("kind", "arguments", "fused"),
    [
        (torch.optim.AdamW, {}, True),
        (torch.optim.AdamW, {"foreach": True}, None),
        (torch.optim.AdamW, {"fused": False}, False),
        (torch.optim.SGD, {}, None),
    ],
)
def test_adam_takes_one_kernel_on_a_gpu_unless_told_otherwise(
    kind: Any, arguments: dict[str, Any], fused: bool | None
) -> None:
    here = torch.nn.Parameter(torch.linspace(-1, 1, 8))
    beside = kind([here], lr=0.1, **({} if fused else arguments))
    with pretend_cuda():
        there = torch.nn.Parameter(torch.linspace(-1, 1, 8).to("cuda"))
        optimizer = kind([there], lr=0.1, **arguments)
        step_without_temporaries(optimizer)
        assert optimizer.param_groups[0]["fused"] == fused
        for _ in range(3):
            here.grad, there.grad = here.detach() * 2, there.detach() * 2
            beside.step()
            optimizer.step()
        assert torch.allclose(there.detach().cpu(), here.detach(), rtol=1e-6)
    step_without_temporaries(beside)
    assert beside.param_groups[0]["fused"] == ({} if fused else arguments).get("fused")
