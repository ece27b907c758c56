"""The wheel, installed beside a user's own ``callbacks`` and ``benchmarks``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
MINE = """
from lightning.pytorch import Callback

class Mine(Callback):
    def on_fit_end(self, *_):
        print("mine was there")
"""
PLACES = """
import benchmarks, callbacks, lit_grpo.callbacks
print(benchmarks.__file__, callbacks.__file__, lit_grpo.callbacks.__file__, sep="\\n")
assert callbacks.Mine and lit_grpo.callbacks.WeightSync.__module__ == "lit_grpo.callbacks.weight_sync"
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel installs."""
    source, wheels, site = (tmp_path_factory.mktemp(name) for name in ("source", "wheels", "site"))
    for name in ("lit_grpo", "callbacks", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", wheels, source], check=True)
    (wheel,) = wheels.glob("lit_grpo-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert [name for name in names if name.endswith(".pyi")] == []  # ours are of a checkout's folders
    folders = {name.split("/")[0] for name in names}
    assert {name for name in folders if not name.endswith(".dist-info")} == {"lit_grpo"}
    subprocess.run([*pip, "install", "--no-deps", "--target", site, wheel], check=True)
    return site


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with packages of the user's own."""
    for name in ("callbacks", "benchmarks"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(MINE)
    return tmp_path


def python(folder: Path, installed: Path, *arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(installed)}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.nightly
def test_our_callbacks_and_the_users_own_are_both_there(folder: Path, installed: Path) -> None:
    theirs = [str(folder / name / "__init__.py") for name in ("benchmarks", "callbacks")]
    ours = str(installed / "lit_grpo" / "callbacks" / "__init__.py")
    assert python(folder, installed, "-c", PLACES).splitlines() == [*theirs, ours]


@pytest.mark.nightly
def test_a_run_of_the_wheel_takes_a_callback_of_the_users_own(
    folder: Path, installed: Path, policy_folder: Path
) -> None:
    (folder / "prompts.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 2)
    config = {
        "trainer": {"accelerator": "cpu", "max_steps": 3, "callbacks": [{"class_path": "callbacks.Mine"}]},
        "model": {
            "policy": str(policy_folder),
            "rewards": [{"function": "lit_grpo.rewards.exact_match"}],
            "num_generations": 2,
            "sampling": {"max_tokens": 4},
        },
        "data": {"train": "prompts.jsonl", "batch_size": 1},
    }
    (folder / "config.yaml").write_text(json.dumps(config))
    assert "mine was there" in python(folder, installed, "-m", "lit_grpo", "fit", "--config", "config.yaml")
    assert (folder / "runs" / "grpo" / "policy" / "config.json").is_file()
    assert len((folder / "runs" / "grpo" / "metrics.csv").read_text().splitlines()) == 4  # the header, and a row each
    assert "report.html" in python(folder, installed, "-m", "lit_grpo", "report", "runs/grpo")


@pytest.mark.nightly
def test_help_of_the_wheel_and_what_it_needs(folder: Path, installed: Path) -> None:
    assert "num_generations" in python(folder, installed, "-m", "lit_grpo", "fit", "--help")
    asked = metadata.Distribution.at(next(installed.glob("lit_grpo-*.dist-info"))).requires or []
    for requirement in map(Requirement, asked):
        if requirement.marker is None:  # of no extra
            assert requirement.specifier.contains(metadata.version(requirement.name)), requirement


@pytest.mark.nightly
def test_the_embedded_policy_of_the_wheel_loads(folder: Path, installed: Path) -> None:
    load = "from lit_grpo.policy import *; print(load_policy('tiny').name_or_path, len(load_tokenizer('tiny')))"
    assert python(folder, installed, "-c", load).split() == [str(installed / "lit_grpo" / "policy" / "tiny"), "15"]


@pytest.mark.nightly
def test_configs_of_the_wheel_are_found_by_name(folder: Path, installed: Path) -> None:
    names = ["--config", "arithmetic", "--config", "generators/slots", "--print_config"]
    printed = python(folder, installed, "-m", "lit_grpo", "fit", *names)
    assert "name: arithmetic" in printed and "lit_grpo.rollout.slots.SlotGenerator" in printed
