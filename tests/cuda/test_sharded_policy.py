"""FSDP2's handling of devices, with two ranks and GPUs that are not there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
@pytest.mark.parametrize(("rank", "loaded"), [(0, "cpu"), (1, "meta")])
def test_a_policy_in_shards_of_gpus_mixes_no_devices(rank: int, loaded: str) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(TESTS.parent), str(TESTS))), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(TESTS / "cuda" / "sharded_case.py"), str(rank)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("loaded") == [f"FakeTensor on {loaded}"]
    assert found.pop("gathered") == ["FakeTensor on cuda:0"]
    assert found.pop("saved") == ["DTensor on cpu"]
    assert found == {name: ["DTensor on cuda:0"] for name in ("sharded", "gradients", "moments", "restored")}
