"""The names of a hybrid's weights beside the source of vLLM's models: a GPU is not the first to find a renamed one."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.doubles.small_models import small_model

MODELS = {  # by family, the file of vLLM's model
    "qwen3_5_text": "qwen3_5",
    "qwen3_next": "qwen3_next",
    "lfm2": "lfm2",
    "nemotron_h": "nemotron_h",
    "olmo_hybrid": "olmo_hybrid",
    "falcon_h1": "falcon_h1",
    "granitemoehybrid": "granitemoehybrid",
}
FOLLOWED = ("model_executor/models", "layers/mamba", "layers/kda")


def names_in(model: Path, root: Path) -> set[str]:
    """Attributes, and the parts of strings, of a model's file and of the models and layers that it imports."""
    todo, seen, names = [model], set[Path](), set[str]()
    while todo:
        path = todo.pop()
        if path in seen or not path.exists():
            continue
        seen.add(path)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 80:
                names.update(node.value.split("."))
            elif isinstance(node, ast.ImportFrom):
                base = path.parents[node.level - 1] if node.level else root
                place = base.joinpath(*(node.module or "").split("."))
                if any(part in place.as_posix() for part in FOLLOWED):
                    todo += [place.with_suffix(".py"), *(place / f"{each.name}.py" for each in node.names)]
    return names


@pytest.mark.parametrize("family", MODELS)
def test_every_part_of_a_weights_name_is_in_vllms_model(family: str) -> None:
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    root = Path(spec.origin).parents[1]
    known = names_in(root / "vllm/model_executor/models" / f"{MODELS[family]}.py", root)
    parts = {part for name, _ in small_model(family).named_parameters() for part in name.split(".")}
    assert {part for part in parts if not part.isdigit()} - known == set()
    assert "no_such_projection" not in known
