"""Without the packages of the extras a run goes on, and one that needs such a package says so before it begins."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import table_rows

from lit_grpo import __version__
from lit_grpo.rewards import MathEquivalence

HIDE = """
import importlib.machinery, importlib.metadata, os

hidden = os.environ["HIDDEN_PACKAGES"].split(",")
finder, distribution = importlib.machinery.PathFinder, importlib.metadata.distribution
find = finder.find_spec

def find_spec(name, *rest):
    return None if name.split(".")[0] in hidden else find(name, *rest)

def distribution_of(name):
    if name.replace("-", "_") in hidden:
        raise importlib.metadata.PackageNotFoundError(name)
    return distribution(name)

finder.find_spec, importlib.metadata.distribution = staticmethod(find_spec), distribution_of
"""
EXTRAS = (
    "datasets,pyarrow,math_verify,matplotlib,tensorboard,tensorboardX,wandb,"
    "peft,bitsandbytes,gguf,reasoning_gym,vllm,ray"
)
FIT = [
    "fit",
    *("--trainer.accelerator", "cpu", "--trainer.max_steps", "1"),
    *("--model.num_generations", "2", "--model.sampling.max_tokens", "4", "--data.batch_size", "1"),
]
REWARD = ["--model.rewards", '[{"function": "lit_grpo.rewards.exact_match"}]']
MATHS = ["--model.rewards", '[{"function": "lit_grpo.rewards.MathEquivalence"}]']
ROWS = ["--data.train", "rows.jsonl"]


def hiding(packages: str, folder: Path) -> dict[str, str]:
    """Variables with which a Python, and those that it starts, do not find the packages."""
    (folder / "hide").mkdir(exist_ok=True)
    (folder / "hide" / "sitecustomize.py").write_text(HIDE)
    path = os.pathsep.join(filter(None, [str(folder / "hide"), os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": path, "HIDDEN_PACKAGES": packages}


def without(packages: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 2)
    environment = os.environ | hiding(packages, folder)
    command = [sys.executable, "-m", "lit_grpo", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.nightly
def test_a_run_and_the_commands_that_it_names_work_without_any_extra(tmp_path: Path, policy_folder: Path) -> None:
    held_out = ["--data.validation", "rows.jsonl"]
    done = without(EXTRAS, tmp_path, *FIT, *REWARD, *ROWS, *held_out, "--model.policy", str(policy_folder))
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert not [name for name in ("tensorboard", "matplotlib", "warning") if name in done.stdout.lower()]
    made = {path.name for path in (tmp_path / "runs" / "grpo").iterdir()}
    assert "metrics.csv" in made and not any(name.startswith("events.out") for name in made)
    assert len((tmp_path / "runs" / "grpo" / "timeline.jsonl").read_text().splitlines()) == 1
    named = [line.split()[3:] for line in done.stdout.splitlines() if line.startswith("  python -m lit_grpo ")]
    assert [words[0] for words in named] == ["predict", "report", "fit", "finish"]
    for words in (named[1], named[3], ["evaluate", str(policy_folder), "runs/grpo", "--samples", "2", "--k", "1"]):
        done = without(EXTRAS, tmp_path, *words)
        assert done.returncode == 0 and done.stderr == "", done.stderr
        needs_gguf = "A GGUF file needs gguf, which the extra lit_grpo[smollm2] installs." in done.stdout
        assert "matplotlib" not in done.stdout and needs_gguf == (words[0] == "finish")


NEEDS = [
    (
        "datasets",
        [*FIT, *REWARD, "--data.train", "owner/name"],
        "data.train: The dataset owner/name (split train) needs the package datasets, which is not installed; "
        "install the extra lit_grpo[datasets], or give a .jsonl, .json or .csv file.",
    ),
    (
        "math_verify",
        [*FIT, *MATHS, *ROWS],
        "reward function 'lit_grpo.rewards.MathEquivalence': it compares with the package math-verify, which is "
        "not installed; install the extra lit_grpo[math], or take lit_grpo.rewards.ExactMatch.",
    ),
    (
        "reasoning_gym",
        [*FIT, *REWARD, "--data.train", "ReasoningGymRows", "--data.train.init_args.tasks", "gcd"],
        "it takes its tasks from the package reasoning-gym, which is not installed; install the extra "
        "lit_grpo[reasoning-gym], or take other rows and rewards.",
    ),
    (
        "matplotlib",
        ["simulate", "--output", "plans.png"],
        "--output is plans.png, but matplotlib, which draws, is not installed; install the extra lit_grpo[plots], "
        "or leave it out.",
    ),
    (
        "ray",
        [*FIT, *REWARD, *ROWS, "--trainer.strategy", "ray_ddp"],
        "trainer.strategy is ray_ddp, but Ray is not installed; install lit_grpo[ray], or take ddp.",
    ),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("packages", "arguments", "said"), table_rows(NEEDS, NEEDS[:1]), ids=[row[0] for row in NEEDS])
def test_a_run_that_needs_one_names_its_extra_before_it_begins(
    tmp_path: Path, packages: str, arguments: list[str], said: str
) -> None:
    policy = [] if arguments[0] == "simulate" else ["--model.policy", "nowhere"]  # which is not even looked for
    done = without(packages, tmp_path, *arguments, *policy)
    assert done.returncode == 2, done.stderr
    assert f"error: {said}" in done.stderr and "Traceback" not in done.stderr
    assert done.stdout in ("", f"lit_grpo {__version__}, loading ...\n")
    assert not (tmp_path / "runs" / "grpo").exists()


def test_math_verify_that_is_there_without_what_it_needs_is_told_of_where_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in hiding("sympy", tmp_path).items():
        monkeypatch.setenv(name, value)
    why = r"math-verify does not start \(No module named 'sympy'\); install lit_grpo\[math\] again"
    with pytest.raises(RuntimeError, match=why):
        MathEquivalence()("0.5", answer="1/2")
