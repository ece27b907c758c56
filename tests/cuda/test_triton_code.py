"""The attention of packed groups on GPUs that are not there: its Triton code compiled, run, and counted.

Torch's Inductor makes masks and attention of the update, forward and backward, and Triton makes binaries of them with
its own ``ptxas`` (``tests/doubles/compile_only.py``). A kernel that needs more shared memory than a GPU has is refused,
as its driver refuses it. Triton's interpreter then runs the same code in float32 on the CPU. Nothing here says how fast
it is.
"""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from benchmarks.processes import measured
from tests.cuda.compiled_case import Case
from tests.doubles.compile_only import SHARED_MEMORY

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++"),
]
MOST_COMPILATIONS, LARGEST_GAP = 6, 1e-5


def figures(case: Case) -> dict[str, Any]:
    pytest.importorskip("triton", reason="triton is not installed")
    return measured("tests.cuda.compiled_case", case)


@pytest.mark.parametrize(
    ("capability", "head_size", "cap"),
    [((8, 0), 64, None), ((8, 9), 128, None), ((9, 0), 128, None), ((9, 0), 128, 50.0)],
    ids=["A100", "RTX 40 and L4", "H100", "H100, capped scores"],
)
def test_masks_and_attention_compile_to_binaries(
    capability: tuple[int, int], head_size: int, cap: float | None
) -> None:
    kernels = figures(Case(capability, head_size, "bfloat16", None, cap=cap))["kernels"]
    assert len(kernels) >= 8
    names = {kernel["name"].partition("fused_")[2] for kernel in kernels if kernel["shared_bytes"]}
    assert {"flex_attention_0", "flex_attention_backward_1"} <= names
    assert all(kernel["shared_bytes"] <= SHARED_MEMORY[capability] for kernel in kernels)


@pytest.mark.parametrize("window", [None, 20])
def test_the_code_computes_output_and_gradients_of_each_completion_alone(window: int | None) -> None:
    gaps = figures(Case((8, 0), 16, "float32", window, interpreted=True))["gaps"]
    assert gaps.keys() == {"output", "query", "key", "value"} and max(gaps.values()) <= LARGEST_GAP


def test_a_hundred_rows_of_other_shapes_are_compiled_a_few_times() -> None:
    counts = figures(Case((9, 0), 64, "bfloat16", None, rows=100))["compilations"]
    assert counts.keys() == {"masks", "attention"} and max(counts.values()) <= MOST_COMPILATIONS
