"""The examples run as they stand."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import forks
import pytest
from conftest import table_rows
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
UV = Path(sys.executable).with_name("uv")
EXAMPLES = {
    "train": "The trained policy, metrics and samples are in",
    "loop": "update 2: reward",
    "own_trainer": "update 2: reward",
    "galore": "Metrics of two updates by GaLore are in",
    "own_loss": "Rewards, the loss and its metrics are in",
    "two_roles": "What each role earned is in",
}


def test_every_example_is_run() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == set(EXAMPLES)
    page = (ROOT / "examples/loop.py").read_text().partition("# ///\n")[2]
    assert len(page.splitlines()) <= 60  # the page to read first, below what uv reads


def header(path: Path) -> dict[str, Any]:
    """The metadata of a script, read as PEP 723 says."""
    block = r"(?m)^# /// (?P<type>[a-zA-Z0-9-]+)$\s(?P<content>(^#(| .*)$\s)+)^# ///$"
    (found,) = [one for one in re.finditer(block, path.read_text()) if one["type"] == "script"]
    lines = found["content"].splitlines()
    return tomllib.loads("\n".join(line[2:] if line.startswith("# ") else line[1:] for line in lines))


@pytest.mark.parametrize("path", sorted((ROOT / "examples").rglob("*.py")), ids=lambda path: path.stem)
def test_the_header_of_an_example_names_what_it_imports_in_the_projects_versions(path: Path) -> None:
    told, project = header(path), tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {one.name: one for one in map(Requirement, told["dependencies"])}
    imports = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {(node.module if isinstance(node, ast.ImportFrom) else node.names[0].name) or "" for node in imports}
    modules = {name.partition(".")[0] for name in names} - sys.stdlib_module_names
    packages = metadata.packages_distributions()
    assert {canonicalize_name(name) for name in needed} == {canonicalize_name(packages[name][0]) for name in modules}
    known = [Requirement(line) for extra in project["optional-dependencies"].values() for line in extra]
    known += map(Requirement, project["dependencies"])
    for name, one in needed.items():
        assert name == "lit_grpo" or one in known, f"{one} is not one of pyproject.toml"
    source = told["tool"]["uv"]["sources"]["lit_grpo"]
    assert (path.parent / source["path"]).resolve() == ROOT and told["requires-python"] == project["requires-python"]


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("uv") is None and not UV.exists(), reason="needs uv")
def test_uv_runs_an_example_in_an_empty_folder_with_nothing_installed(tmp_path: Path) -> None:
    """With torch's build for CPUs, from where pip is told to find wheels, or else from torch's index."""
    places = os.environ.get("PIP_FIND_LINKS", "").split()
    found = [f"--find-links={place}" for place in places] or ["--index=https://download.pytorch.org/whl/cpu"]
    uv, script = str(UV if UV.exists() else "uv"), str(ROOT / "examples" / "train.py")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    environment["UV_CACHE_DIR"] = environment.get("UV_CACHE_DIR", str(Path.home() / ".cache" / "uv"))
    command = [uv, "run", "--no-project", *found, "--index-strategy", "unsafe-best-match"]
    command += ["--python", sys.executable, script]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1200)
    if done.returncode and re.search("Failed to fetch|client error|dns error|Temporary failure", done.stderr):
        pytest.skip("there is no index of packages here")
    assert done.returncode == 0, done.stderr[-3000:]
    assert EXAMPLES["train"] in done.stdout and {path.name for path in tmp_path.iterdir()} == {"runs"}


@pytest.mark.parametrize("name", table_rows(EXAMPLES, ("loop", "own_trainer", "own_loss")))
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    path = ROOT / "examples" / f"{name}.py"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = forks.run([sys.executable, str(path)], 300, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert EXAMPLES[name] in done.stdout
