"""Deleting the file of a method removes this method and nothing else."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import forks
import pytest
from conftest import table_rows
from test_imports import METHODS, MODULES

ROOT = Path(__file__).parents[1]
LISTS = """
import importlib, json, pkgutil, sys
for name in [name for name in sys.modules if name.startswith("lit_grpo")]:
    del sys.modules[name]  # which a fork has got
def tables():  # what can be named and built, by the file that has it
    methods, plans = (importlib.import_module(f"lit_grpo.methods{name}") for name in ("", ".plans"))
    for name in methods.shipped():
        methods.make_plugins([name])
    names = [*methods.shipped(), *plans.shipped_plans()]
    files = {name: vars(module) for name, module in sys.modules.items() if name.startswith("lit_grpo.methods.")}
    of_files = {name: [*each.get("PLUGINS", ()), *each.get("PLANS", ())] for name, each in files.items()}
    of_files = {file: [name for name in own if name in names] for file, own in of_files.items()}
    return {file: own for file, own in of_files.items() if own and file != "lit_grpo.methods.plans"}
"""
ALONE = """
modules = sys.argv[1:]
class Gone:  # all methods but one
    def find_spec(self, name, path=None, target=None):
        if name in others():
            raise ModuleNotFoundError(name)
def others():
    return [name for name in modules if name != gone.kept]
def listed(path=None, prefix="", find=pkgutil.iter_modules):
    folder = ".".join(["lit_grpo", *str(path).strip("[']").rpartition("lit_grpo/")[2].split("/"), ""])
    return [each for each in find(path, prefix) if folder + each.name not in others()]
found, gone, pkgutil.iter_modules = {}, Gone(), listed
sys.meta_path.insert(0, gone)
for gone.kept in modules:
    for name in [name for name in sys.modules if name.startswith("lit_grpo.methods")]:
        del sys.modules[name]
    found[gone.kept] = tables()
print(json.dumps(found))
"""
DELETED = f"""{LISTS}
import lit_grpo
for name in ("callbacks", "module", "training", "cli.command_line", "tools.commands.simulate"):
    importlib.import_module(f"lit_grpo.{{name}}")
print(json.dumps([lit_grpo.__file__, tables()]))
"""


def test_each_method_can_be_named_where_no_other_one_is_there() -> None:
    done = forks.run([sys.executable, "-c", LISTS + ALONE, *METHODS], timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert {*METHODS} == found.keys()
    for module, tables in found.items():
        assert tables.keys() == {module} and tables[module], module


@pytest.fixture(scope="module")
def everything() -> dict[str, list[str]]:
    done = forks.run([sys.executable, "-c", DELETED], timeout=300, cwd=ROOT)
    return json.loads(done.stdout.splitlines()[-1])[1]


@pytest.mark.parametrize("module", table_rows(METHODS, []))
def test_a_copy_without_a_method_starts_and_names_the_others(
    module: str, everything: dict[str, list[str]], tmp_path: Path
) -> None:
    assert {*METHODS} == everything.keys()
    for folder in ("lit_grpo", "callbacks", "configs"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / MODULES[module].relative_to(ROOT)).unlink()
    done = forks.run([sys.executable, "-c", DELETED], timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    file, left = json.loads(done.stdout.splitlines()[-1])
    assert Path(file).is_relative_to(tmp_path)
    assert left == {name: own for name, own in everything.items() if name != module}
