"""What engines in process, their workers and sleep use of vLLM 0.32 and 0.33 is in the source of each, as recorded."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_interfaces.record import USED

from lit_grpo.rollout.vllm import arguments, fleet
from lit_grpo.rollout.vllm.arguments import engine_arguments, lora_arguments, sampling_fields, server_arguments
from lit_grpo.types import Prompt, Request, SamplingParams

VLLM = Path(arguments.__file__).parent
RECORDS = Path(__file__).parent / "vllm_interfaces"
OF_ENGINE = "self._engine"
ROUTES = re.compile(r"""\.(get|post),?\(?\s*["'](/[^"'?]+)""")


@pytest.fixture(params=["0.32", "0.33"])
def version(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def used(version: str) -> dict[str, dict[str, list[str] | None]]:
    return json.loads((RECORDS / f"{version}.json").read_text())["used"]


def calls(path: str, owner: str) -> list[ast.Call]:
    """Calls of methods of ``owner`` in a file."""
    tree = ast.parse((VLLM / path).read_text())
    found = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute))
    return [call for call in found if ast.unparse(call.func.value) == owner]  # pyright: ignore


def keys(path: str, function: str) -> set[str]:
    """String keys of the dicts in a function."""
    tree = ast.parse((VLLM / path).read_text())
    (node,) = (each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef) and each.name == function)
    dicts = (each for each in ast.walk(node) if isinstance(each, ast.Dict))
    return {str(key.value) for each in dicts for key in each.keys if isinstance(key, ast.Constant)}


def methods(path: str, name: str) -> set[str]:
    tree = ast.parse((VLLM / path).read_text())
    (node,) = (each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == name)
    return {each.name for each in node.body if isinstance(each, ast.FunctionDef)}


def test_everything_that_is_used_is_there(version: str, used: Any) -> None:
    for name, (_, members) in USED.items():
        assert set(used[name]) == set(members), name


def test_every_version_has_the_routes_that_are_asked(version: str) -> None:
    asked = {f"{method.upper()} {path}" for method, path in ROUTES.findall(Path(fleet.__file__).read_text())}
    assert {"POST /update_weights", "GET /server_info", "POST /pause", "GET /version"} <= asked
    assert asked <= set(json.loads((RECORDS / f"{version}.json").read_text())["routes"])


def test_the_engines_methods_take_what_they_are_given(used: Any) -> None:
    """Every call of the engine in our source, with as many values and with those names."""
    made = calls("engine.py", OF_ENGINE)
    assert {"add_request", "abort_request", "sleep", "wake_up", "collective_rpc", "add_lora", "step"} == {
        call.func.attr  # pyright: ignore
        for call in made
    }
    for call in made:
        takes = used["LLMEngine"][call.func.attr]  # pyright: ignore
        assert takes[0] == "self" and len(call.args) < len(takes), ast.unparse(call)
        assert {keyword.arg for keyword in call.keywords} <= set(takes[1 + len(call.args) :]), ast.unparse(call)


def test_workers_have_the_methods_that_are_called_by_name(used: Any) -> None:
    names = {ast.literal_eval(call.args[0]) for call in calls("engine.py", OF_ENGINE) if call.args
             and isinstance(call.args[0], ast.Constant)}  # fmt: skip
    own = methods("worker/extension.py", "WorkerExtension")
    assert len(names) > 5 and names - own == {"start_weight_update", "update_weights", "finish_weight_update"}
    for name in names - own:
        assert used["Worker"][name][0] == "self"
    assert len(used["Worker"]["update_weights"]) == 2
    assert used["Worker"]["sleep"][:2] == ["self", "level"] and used["Worker"]["wake_up"][:2] == ["self", "tags"]


def test_arguments_and_sampling_parameters_are_fields(used: Any) -> None:
    request = Request(Prompt("a", (1,), ""), (0,), SamplingParams(max_tokens=4))
    assert {*sampling_fields(request, 0, [1], True), *keys("engine.py", "_fields")} <= set(used["SamplingParams"])
    server_alone = {"stream_interval", "disable_uvicorn_access_log"}
    given = {*engine_arguments("bfloat16", 8, True), *lora_arguments(8), *server_arguments("bfloat16", 8)}
    given |= keys("engine.py", "_own_arguments")
    assert given - server_alone <= set(used["EngineArgs"])


def test_sleep_wakes_all_memory_that_does_not_wake_by_itself(version: str) -> None:
    """We wake weights, then keys and values; other pools must come back with either."""
    record = json.loads((RECORDS / f"{version}.json").read_text())
    tree = ast.parse((VLLM / "engine.py").read_text())
    woken = {
        ast.literal_eval(node.args[0])
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "self._wake"
    }
    assert woken == {"weights", "kv_cache"} <= set(record["pools"])
    stays_asleep = set(record["deferred"]) if record["deferred"] else set(record["pools"])
    assert stays_asleep == woken


def test_adapters_are_found_by_the_models_own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    from lit_grpo.rollout.vllm.worker import extension

    asked: list[Any] = []
    utils = SimpleNamespace(parse_fine_tuned_lora_name=lambda name, mapper: asked.append(mapper) or (name[:-2], True))
    monkeypatch.setitem(__import__("sys").modules, "vllm.lora.utils", utils)
    renames = object()
    mapper: Any = SimpleNamespace(get_rename_mapper=lambda: renames)
    layer = SimpleNamespace(lora_a="A", lora_b="B")
    adapter = SimpleNamespace(get_lora=lambda name: layer)
    manager = SimpleNamespace(packed_modules={}, modules={"q"})
    held = list(extension.held_adapter(SimpleNamespace(hf_to_vllm_mapper=mapper), manager, adapter, ["q.a"]))
    assert held == [("q.a", "A")] and asked == [renames]
    assert list(extension.held_adapter(SimpleNamespace(), manager, adapter, ["q.a"])) and asked[1] is None
