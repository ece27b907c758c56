"""What is installed: bounds that fit what was tested with, and everything pinned there."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pins import pinned

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def requirements() -> list[Requirement]:
    extras = PROJECT["optional-dependencies"]
    lines = [line for name, extra in extras.items() if name != "docs" for line in extra]  # no test needs the site
    every = map(Requirement, [*PROJECT["dependencies"], *lines])
    untested = ("lit_grpo", "vllm")  # vLLM's CUDA build
    return [one for one in every if one.name not in untested]


def test_every_direct_dependency_is_pinned_to_what_was_tested_with() -> None:
    for one in requirements():
        assert one.specifier.contains(pinned()[canonicalize_name(one.name)]), one


def test_packages_that_were_found_to_break_things_are_kept_out() -> None:
    too_old_or_new = {"peft": "0.19.1", "bitsandbytes": "0.49.2", "transformers": "6.0.0"}
    for one in requirements():
        if one.name in too_old_or_new and one.specifier:
            assert not one.specifier.contains(too_old_or_new[one.name]), one


@pytest.mark.skipif(shutil.which("make") is None or sys.platform != "linux", reason="needs make, on Linux")
@pytest.mark.parametrize(
    ("told", "index"),
    [
        (["GPU="], "https://download.pytorch.org/whl/cpu"),
        (["GPU=/dev/nvidia0"], None),
        (["GPU=", "TORCH_INDEX="], None),
        (["GPU=/dev/nvidia0", "TORCH_INDEX=https://my.index/simple"], "https://my.index/simple"),
    ],
)
def test_torch_is_the_cpu_build_where_there_is_no_gpu_unless_one_variable_says_otherwise(
    told: list[str], index: str | None
) -> None:
    command = ["make", "--dry-run", "--always-make", "demo", *told]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert f"torch from {index or 'the index of pip'}" in said
    assert (f'test -z "{index or ""}" ||' in said) and said.index("--index-url") < said.index("constraints.txt torch")
