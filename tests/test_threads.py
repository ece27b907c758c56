"""Threads wait without spinning, however this package and torch were imported."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

import pytest

SPENT = """
import time
def spent():
    numbers, before = torch.ones(2**17), time.process_time()
    for _ in range(200):
        numbers.add_(1)
        time.sleep(0.002)
    return time.process_time() - before
"""
SINGLE_RANK = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "OPENBLAS_"))}


def said(code: str, environment: Mapping[str, str] = SINGLE_RANK) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.nightly
@pytest.mark.skipif(
    sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2, reason="of GNU's OpenMP, where two threads run at once"
)
def test_where_torch_was_imported_first_its_threads_stop_spinning_at_the_start_of_a_run() -> None:
    code = f"""
import torch, numpy
torch.set_num_threads(2)
{SPENT}
import lit_grpo
from lit_grpo.process.threads import wait_without_spinning
spinning = spent()
wait_without_spinning()
print(spent() < 0.6 * spinning, torch.get_num_threads())
"""
    assert said(code) == "True 2"


def test_the_package_tells_torch_not_to_spin_unless_the_user_has_chosen() -> None:
    code = "import lit_grpo, os; print(os.environ['OMP_WAIT_POLICY'], os.environ['OPENBLAS_NUM_THREADS'])"
    assert said(code) == "PASSIVE 1"
    assert said(code, SINGLE_RANK | {"OMP_WAIT_POLICY": "ACTIVE", "OPENBLAS_NUM_THREADS": "2"}) == "ACTIVE 2"
