"""Imports point one way, and heavy ones stay where they belong."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = ["types", "sources", "arithmetic", "scheduling", "rewards", "policy", "update", "rollout", "module", "cli"]
LIGHTNING_ALLOWED = {"module", "evaluation", "checks", "data", "cli", "errors", "run_folder", "metrics_csv"}


def imported(path: Path) -> set[str]:
    """Names of all modules that a file imports when it runs (not for type checking only)."""
    tree = ast.parse(path.read_text())
    typing_only = [
        node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
    ]
    skipped = {id(child) for node in typing_only for child in ast.walk(node)}
    names: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def layer(module: str) -> int | None:
    parts = module.split(".")
    return LAYERS.index(parts[1]) if parts[0] == "lit_grpo" and len(parts) > 1 and parts[1] in LAYERS else None


def files() -> list[Path]:
    return sorted((ROOT / "lit_grpo").rglob("*.py"))


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_imports_a_later_layer(path: Path) -> None:
    own = layer(".".join(path.relative_to(ROOT).with_suffix("").parts))
    if own is None:
        return
    for module in imported(path):
        other = layer(module)
        assert other is None or other <= own, f"{path.name} imports {module}"


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_lightning_and_callbacks_are_imported_at_the_top_layer_only(path: Path) -> None:
    names = imported(path)
    if path.stem not in LIGHTNING_ALLOWED:
        assert not {name for name in names if name.split(".")[0] == "lightning"}
    if path.stem != "cli":
        assert not {name for name in names if name.split(".")[0] == "callbacks"}
    if not path.stem.startswith("vllm_"):
        assert not {name for name in names if name.split(".")[0] == "vllm"}


def test_scheduling_loads_neither_torch_nor_lightning_nor_transformers() -> None:
    heavy = ("torch", "lightning", "transformers", "matplotlib")
    modules = [f"lit_grpo.scheduling.{path.stem}" for path in (ROOT / "lit_grpo" / "scheduling").glob("[!_]*.py")]
    code = f"import sys, {', '.join(modules)}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
