"""Without a package that only some runs need, the others go on, and those that need it say so in one sentence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

BLOCKED = """
import importlib.machinery, importlib.metadata, sys

blocked = sys.argv[1].split(",")
finder, distribution = importlib.machinery.PathFinder, importlib.metadata.distribution
find = finder.find_spec

def find_spec(name, *rest):
    return None if name.split(".")[0] in blocked else find(name, *rest)

def distribution_of(name):
    if name.replace("-", "_") in blocked:
        raise importlib.metadata.PackageNotFoundError(name)
    return distribution(name)

finder.find_spec, importlib.metadata.distribution = staticmethod(find_spec), distribution_of
sys.argv = ["lit_grpo", *sys.argv[2:]]
from lit_grpo.__main__ import main
main()
"""
ROWS = '{"prompt": "1+1=", "answer": "2"}\n' * 2
FIT = [
    "--trainer.accelerator",
    "cpu",
    "--trainer.max_steps",
    "1",
    "--model.num_generations",
    "2",
    "--data.batch_size",
    "1",
]
REWARDS = ["--model.rewards", '[{"function": "lit_grpo.rewards.exact_match"}]', "--model.sampling.max_tokens", "4"]


def without(packages: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BLOCKED, packages, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


def test_a_run_that_needs_none_of_them_goes_on(tmp_path: Path, policy_folder: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(ROWS)
    packages = "datasets,math_verify,matplotlib,tensorboard,tensorboardX,wandb,peft,bitsandbytes,vllm"
    run = ["fit", *FIT, *REWARDS, "--model.policy", str(policy_folder), "--data.train", "rows.jsonl"]
    done = without(packages, tmp_path, *run, "--trainer.logger", "false")
    assert done.returncode == 0, done.stderr
    assert "for matplotlib is not installed" in done.stderr
    assert len((tmp_path / "runs" / "grpo" / "timeline.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("packages", "arguments", "said"),
    [
        ("datasets", ["fit", *FIT, *REWARDS, "--data.train", "owner/name"], "The package datasets is not installed"),
        ("matplotlib", ["simulate", "--output", "plans.png"], "The package matplotlib is not installed"),
        (
            "tensorboard,tensorboardX",
            ["fit", *FIT, *REWARDS, "--data.train", "rows.jsonl"],
            "Neither `tensorboard` nor",
        ),
    ],
    ids=["datasets", "matplotlib", "tensorboard"],
)
def test_a_run_that_needs_one_names_it(
    tmp_path: Path, policy_folder: Path, packages: str, arguments: list[str], said: str
) -> None:
    (tmp_path / "rows.jsonl").write_text(ROWS)
    policy = ["--model.policy", str(policy_folder)] if arguments[0] == "fit" else []
    done = without(packages, tmp_path, *arguments, *policy)
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"error: {said}"), done.stderr
    assert "Traceback" not in done.stderr
