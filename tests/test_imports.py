"""Imports point one way, type-only ones included, and heavy ones stay where they belong."""

import ast
import importlib
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from graphlib import TopologicalSorter
from importlib.util import find_spec
from pathlib import Path

import pytest

from lit_grpo.callbacks import WeightSync

ROOT = Path(__file__).parents[1]
LAYERS: tuple[set[str], ...] = (
    {"limits", "foreign", "compatibility", "trajectory", "types", "memory", "process", "ranks", "settings"},
    {"scheduling", "policy", "optim", "checkpoints", "display", "tools.migration"},
    {
        *("plugins", "budgets", "scheduling.lengths", "rewards", "rollout", "update", "strategies", "data"),
        *("faults", "faults.observers", "findings"),
    },
    {"methods", "environments", "metrics", "checks", "evaluation", "tools.dashboard"},
    {"module", "tools.simulation"},
    {"callbacks"},
    {"training"},
    {"cli", "tasks", "tools.commands", "tools.doctor", "tools.evaluation", "tools.finishing"},
)
"""Rooms from the lowest to the highest: each may import those of its own layer and of lower ones."""
ROOMS = set().union(*LAYERS)
ONLY_IN = {
    "lightning": {
        "module",
        "evaluation",
        "faults.observers",
        "checks",
        "checkpoints",
        "strategies",
        "data",
        "training",
        "tools.doctor",
        "tools.evaluation",
        "tools.commands",
        "tools.finishing",
        "cli",
        "callbacks",
    },
    "lit_grpo.callbacks": {"training", "tools.doctor", "tools.evaluation", "tools.commands", "cli", "callbacks"},
    "vllm": {"rollout.vllm"},
    "ray": {"rollout.vllm", "strategies"},
}


def files() -> dict[str, Path]:
    """All our modules by name."""
    modules = {}
    for path in [*(ROOT / "lit_grpo").rglob("*.py"), *(ROOT / "callbacks").rglob("*.py")]:
        parts = path.relative_to(ROOT).with_suffix("").parts
        modules[".".join(parts).removesuffix(".__init__")] = path
    return modules


MODULES = files()
METHODS = sorted(
    module
    for module, path in MODULES.items()
    if module.startswith("lit_grpo.methods.") and path.stem != "__init__" and ".shared." not in module
)


@cache
def syntax(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


@cache
def imported(module: str) -> set[str]:
    """Names of all modules that a file imports, for type checking only as well."""
    names: set[str] = set()
    for node in ast.walk(syntax(module)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            prefix = "callbacks." if node.level else ""
            inner = {f"{prefix}{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in MODULES else f"{prefix}{node.module}" for name in inner}
    return names


def room(module: str) -> str | None:
    """The room that a module of ours is in; None for the package itself, its start and what is not ours."""
    first, *others = module.removeprefix("lit_grpo.").split(".")
    return next((name for name in (".".join([first, *others[:1]]), first) if name in ROOMS), None)


def layer(module: str) -> int:
    own = room(module)
    return next((number for number, rooms in enumerate(LAYERS) if own in rooms), -1)


def test_a_room_imports_only_those_of_its_layer_and_below() -> None:
    outside = [module for module in MODULES if room(module) is None]
    assert set(outside) == {"lit_grpo", "lit_grpo.__main__", "lit_grpo.tools"}
    pairs = [(module, name) for module in MODULES for name in imported(module) if module not in outside]
    assert [f"{module} imports {name}" for module, name in pairs if layer(name) > layer(module)] == []


def test_heavy_packages_are_imported_where_they_belong() -> None:
    wrong = [
        f"{module} imports {package}"
        for module in MODULES
        for package, rooms in ONLY_IN.items()
        if any(name == package or name.startswith(f"{package}.") for name in imported(module))
        and not module.removeprefix("lit_grpo.").startswith(tuple(rooms))
    ]
    assert wrong == []


def test_no_module_imports_itself_through_others() -> None:
    graph = {module: {name for name in imported(module) if name in MODULES} - {module} for module in MODULES}
    list(TopologicalSorter(graph).static_order())  # raises a CycleError that names the circle


def test_no_folder_has_more_than_twelve_files() -> None:
    folders = {path.parent for path in MODULES.values()} - {ROOT / "lit_grpo" / "methods"}  # one file a paper
    for folder in folders:
        assert len([path for path in folder.glob("*.py") if path.stem != "__init__"]) <= 12, folder


def test_the_wheel_has_every_package() -> None:
    import tomllib

    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {module for module, path in MODULES.items() if path.stem == "__init__"}
    assert set(listed) == {name.replace("callbacks", "lit_grpo.callbacks") for name in found} | {
        "lit_grpo.configs",
        "lit_grpo.configs.generators",
    }


def test_scheduling_loads_neither_torch_nor_lightning_nor_transformers() -> None:
    heavy = ("torch", "lightning", "transformers", "matplotlib")
    pure = ("lit_grpo.scheduling", "lit_grpo.types", "lit_grpo.rollout.loop", "lit_grpo.rollout.buffer")
    modules = [module for module in MODULES if module.startswith(pure)]
    code = f"import sys, {', '.join(modules)}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_public_function_says_what_it_does_unless_it_is_short_or_overrides_one() -> None:
    for module in MODULES:
        tree = syntax(module)
        classes = (each for each in ast.walk(tree) if isinstance(each, ast.ClassDef) and each.name[0] != "_")
        for owner in [tree, *classes]:
            for node in owner.body:
                if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("_"):
                    continue
                num_lines = (node.end_lineno or 0) - node.body[0].lineno + 1
                if (
                    num_lines <= 4
                    or ast.get_docstring(node)
                    or (isinstance(owner, ast.ClassDef) and owner.name[0] == "_")
                ):
                    continue
                assert isinstance(owner, ast.ClassDef), f"{module}.{node.name}"
                loaded = getattr(importlib.import_module(module.replace("callbacks", "lit_grpo.callbacks")), owner.name)
                overrides = any(hasattr(base, node.name) for base in loaded.__mro__[1:])
                assert overrides, f"{module}.{owner.name}.{node.name}"


def test_a_docstring_begins_with_a_verb_or_with_what_it_is_of() -> None:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [(module, node) for module in MODULES for node in ast.walk(syntax(module)) if isinstance(node, kinds)]
    first = [(module, (ast.get_docstring(node) or "").split("\n")[0]) for module, node in nodes]
    wrong = [line for line in first if re.match(r"(?:What|Whether|How|Which|Who|When|Where)\b", line[1])]
    assert wrong == []


def test_no_file_imports_a_method() -> None:
    """What several methods share is in ``lit_grpo.methods.shared``, which imports none either."""
    users = [(module, name) for module in MODULES for name in imported(module) & {*METHODS}]
    assert users == []


def test_the_core_names_no_model_family() -> None:
    """A model's properties are measured by running it; only vLLM's defects are listed by family."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names = "|".join(re.escape(name) for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if len(name) > 3)
    of_family = re.compile(rf"(?<![a-z0-9])(?:{names})(?=$|[^a-z0-9]|for|model|config|decoder|layer|attention|mixer)")
    assert of_family.search("llamaforcausallm") and not of_family.search("llama3")
    rooms = ("lit_grpo.policy.architecture", "lit_grpo.rollout", "lit_grpo.update", "lit_grpo.scheduling")
    found = []
    for module in MODULES:
        if module.startswith(rooms) and not module.startswith("lit_grpo.rollout.vllm"):
            tree = syntax(module)
            told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
            for node in ast.walk(tree):
                words = [str(value).lower() for _, value in ast.iter_fields(node) if isinstance(value, str)]
                if id(node) not in told:
                    found += [f"{module}: {word}" for word in words if of_family.search(word)]
    assert found == []


def test_our_callbacks_exist_once() -> None:
    assert WeightSync.__module__ == "lit_grpo.callbacks.weight_sync"
    assert pickle.loads(pickle.dumps(WeightSync)) is WeightSync
    with pytest.raises(ImportError, match=r"lit_grpo\.callbacks"):
        importlib.import_module("callbacks.weight_sync")


def origins(names: Iterable[str], folder: Path, *path: str) -> list[str]:
    """Files of modules, ``None`` without one, for a Python that runs in a folder and has no package installed."""
    code = f"from importlib.util import find_spec as f; [print(f(name) and f(name).origin) for name in {[*names]}]"
    command = [sys.executable, "-S", "-c", code]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_of_a_checkout_only_callbacks_are_found_in_the_package() -> None:
    folders = ["benchmarks", "configs", "docs", "examples", "lit_grpo", "notebooks", "scripts", "tests"]
    names = [f"lit_grpo.{name}" for name in ["callbacks", *folders]]
    assert origins(names, ROOT) == [str(ROOT / "callbacks" / "__init__.py"), *["None"] * len(folders)]
    assert find_spec("lit_grpo.lit_grpo") is None and find_spec("lit_grpo.benchmarks") is None  # installed, too


def test_users_have_a_callbacks_package_of_their_own(tmp_path: Path) -> None:
    theirs = tmp_path / "callbacks" / "__init__.py"
    theirs.parent.mkdir()
    theirs.touch()
    found = origins(["callbacks", "lit_grpo.callbacks"], tmp_path, str(ROOT))
    assert found == [str(theirs), str(ROOT / "callbacks" / "__init__.py")]
