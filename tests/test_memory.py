import subprocess
import sys

import numpy as np
import pytest
import torch

from lit_grpo.memory import PeakMemory, in_one_copy


def test_peak_is_that_since_the_last_reset() -> None:
    peak = PeakMemory(torch.device("cpu"))
    peak.reset()
    idle = peak.peak_gib()
    block = torch.ones(64 * 2**20)  # 256 MiB
    del block
    assert 0.2 < peak.peak_gib() - idle < 0.5
    peak.reset()
    assert peak.peak_gib() - idle < 0.1


_HOLES = """
import sys, torch
from lit_grpo.memory import PeakMemory, return_freed_memory
peak = PeakMemory(torch.device("cpu"))
del [torch.ones(2**21) for _ in range(2)][:]  # 8 MiB each: glibc learns to keep blocks of that size
blocks = [torch.ones(2**20) for _ in range(64)]
before = peak.current_gib()
del blocks[:-1]
if sys.argv[1] == "return":
    return_freed_memory()
print((before - peak.current_gib()) * 1024)
"""


@pytest.mark.nightly
def test_holes_in_the_heap_go_back_to_the_system() -> None:
    run = [sys.executable, "-c", _HOLES]
    returned = float(subprocess.run([*run, "return"], capture_output=True, text=True, check=True).stdout)
    assert returned > 0.9 * 63 * 4
    kept = float(subprocess.run([*run, "keep"], capture_output=True, text=True, check=True).stdout)
    assert kept < 0.1 * 63 * 4


def test_what_is_copied_from_the_host_is_on_the_host_whatever_torchs_default_device_is() -> None:
    with torch.device("meta"):  # as Lightning makes the GPU the default while it loads a policy
        copied = in_one_copy({"rows": np.arange(3)}, torch.device("cpu"))
    assert copied["rows"].tolist() == [0, 1, 2]
