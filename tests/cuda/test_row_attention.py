"""The kernels of a decode step, run by Triton's interpreter, beside the attention of the shelves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import table_rows

pytest.importorskip("triton")


@pytest.mark.parametrize("num_steps", table_rows([2, 12], [2]))  # a step takes the interpreter some seconds
def test_rows_that_come_grow_and_go_attend_as_by_the_shelves(num_steps: int) -> None:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(root)}
    command = [sys.executable, "tests/cuda/row_attention_case.py", "cpu", str(num_steps)]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=240)
    assert float(done.stdout) < 1e-5, done.stderr
