"""What is installed: bounds that fit what was tested with, and everything pinned there."""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def requirements() -> list[Requirement]:
    extras = PROJECT["optional-dependencies"].values()
    every = map(Requirement, [*PROJECT["dependencies"], *(line for extra in extras for line in extra)])
    return [one for one in every if one.name not in ("lit_grpo", "vllm")]  # vLLM's CUDA build is not tested with


def test_every_direct_dependency_is_pinned_to_what_was_tested_with() -> None:
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    for one in requirements():
        assert one.specifier.contains(pins[canonicalize_name(one.name)]), one
    assert {"huggingface-hub", "numpy", "pyarrow", "tokenizers"} <= pins.keys()


def test_packages_that_were_found_to_break_things_are_kept_out() -> None:
    too_old_or_new = {"peft": "0.19.1", "bitsandbytes": "0.49.2", "transformers": "6.0.0"}
    for one in requirements():
        if one.name in too_old_or_new and one.specifier:
            assert not one.specifier.contains(too_old_or_new[one.name]), one
