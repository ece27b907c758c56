"""What engines in process, their workers and sleep use of vLLM 0.32 is in its source, as recorded."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_interfaces.record import USED

from lit_grpo.policy.weights import digest
from lit_grpo.rollout.vllm import arguments, fleet
from lit_grpo.rollout.vllm.arguments import engine_arguments, lora_arguments, sampling_fields, server_arguments
from lit_grpo.rollout.vllm.http import _GENERATE
from lit_grpo.rollout.vllm.images import _OTHER_PIXELS
from lit_grpo.rollout.weights.shipments import Shipment
from lit_grpo.types import Prompt, Request, SamplingParams

VLLM = Path(arguments.__file__).parent
RECORDS = Path(__file__).parent / "vllm_interfaces"
OF_ENGINE = "self._engine"
ROUTES = re.compile(r"""\.ask\(\s*"(GET|POST)",\s*"(/[^"?]+)""")


@pytest.fixture(params=["0.32"])
def version(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def used(version: str) -> dict[str, dict[str, list[str] | None]]:
    return json.loads((RECORDS / f"{version}.json").read_text())["used"]


def calls(path: str, owner: str) -> list[ast.Call]:
    """Calls of methods of ``owner`` in a file."""
    tree = ast.parse((VLLM / path).read_text())
    found = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute))
    return [call for call in found if ast.unparse(call.func.value) == owner]  # pyrefly: ignore[missing-attribute]


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
    source = Path(fleet.__file__).read_text()
    asked = {f"{method} {path}" for method, path in ROUTES.findall(source)}
    nccl = (VLLM / "gpus.py").read_text()
    asked |= {f"POST {path}" for path in re.findall(r'_post\("(/[^"]+)"', nccl)} | {f"POST {_GENERATE}"}
    assert len(re.findall(r'_post\("', nccl)) == 4
    assert {"POST /update_weight_version", "GET /server_info", "POST /pause", "GET /version"} <= asked
    assert asked <= set(json.loads((RECORDS / f"{version}.json").read_text())["routes"])


def test_the_engines_methods_take_what_they_are_given(used: Any) -> None:
    """Every call of the engine in our source, with as many values and with those names."""
    made = calls("engine.py", OF_ENGINE)
    assert {"add_request", "abort_request", "sleep", "wake_up", "collective_rpc", "add_lora", "step"} == {
        call.func.attr  # pyrefly: ignore[missing-attribute]
        for call in made
    }
    for call in made:
        takes = used["LLMEngine"][call.func.attr]
        assert takes[0] == "self" and len(call.args) < len(takes), ast.unparse(call)
        assert {keyword.arg for keyword in call.keywords} <= set(takes[1 + len(call.args) :]), ast.unparse(call)


def test_workers_have_the_methods_that_are_called_by_name(used: Any) -> None:
    names = {ast.literal_eval(call.args[0]) for call in calls("engine.py", OF_ENGINE) if call.args
             and isinstance(call.args[0], ast.Constant)}  # fmt: skip
    own = methods("worker/extension.py", "WorkerExtension")
    assert len(names) == 3 and names <= own
    assert used["Worker"]["sleep"][:2] == ["self", "level"] and used["Worker"]["wake_up"][:2] == ["self", "tags"]


def test_arguments_and_sampling_parameters_are_fields(used: Any) -> None:
    request = Request(Prompt("a", (1,), ""), (0,), SamplingParams(max_tokens=4))
    assert {*sampling_fields(request, 0, [1], True, [2])} <= set(used["SamplingParams"])
    server_alone = {"stream_interval", "disable_uvicorn_access_log", "enable_scale_out"}
    given = {*engine_arguments("bfloat16", 8, True), *lora_arguments(8), *server_arguments("bfloat16", 8)}
    given |= keys("engine.py", "_own_arguments") | {*_OTHER_PIXELS, "limit_mm_per_prompt"}
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


class Worker:
    """A server with one worker, whose model notes what vLLM gives it, and a group that carries tensors to it.

    On the sender's side it is the group and the client of the server, on the other side the worker's extension.
    """

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        from lit_grpo.rollout.vllm.worker import WorkerExtension

        self.url, self.device, self.rank = "http://127.0.0.1:1", torch.device("cpu"), 0
        self.asked: list[tuple[str, Any]] = []
        self.sent: list[torch.Tensor] = []
        self.model = Model(shapes)
        self.worker: Any = WorkerExtension()
        self.worker.get_model = lambda: self.model
        text = SimpleNamespace(tie_word_embeddings=False)
        config = SimpleNamespace(model_config=SimpleNamespace(hf_text_config=text), speculative_config=None)
        self.worker.vllm_config = config

    def ask(self, method: str, path: str, body: Any = None, read: Any = None, engine_works: bool = False) -> Any:
        if method == "GET":
            return read({"world_size": 2})
        assert engine_works
        self.asked.append((path, body))

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any) -> None:
        assert src == 0
        self.sent.append(tensor.clone())

    def destroy(self) -> None:
        self.asked.append(("destroyed", None))


class Model(torch.nn.Module):
    """What vLLM's model is to a reload, with the names of checkpoints."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            part = torch.nn.Module()
            part.weight = torch.nn.Parameter(torch.zeros(shape))
            self.add_module(name.partition(".")[0], part)

    def load_weights(self, weights: Any) -> set[str]:
        loaded = set()
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)
            loaded.add(name)
        return loaded


@pytest.fixture
def carried(monkeypatch: pytest.MonkeyPatch) -> list[list[Worker]]:
    """Two servers and, where vLLM opens a group of NCCL, one whose tensors stay on this host."""
    pytest.importorskip("vllm")
    from vllm.distributed.weight_transfer import nccl_engine, sparse_nccl_engine

    workers = [Worker({"embed.weight": (2, 3), "norm.weight": (3,)}) for _ in range(2)]
    for module in (nccl_engine, sparse_nccl_engine):
        monkeypatch.setattr(module, "open_trainer_endpoint", lambda info: opened.append(info) or workers[0])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(
        nccl_engine,
        "packed_nccl_broadcast_producer",
        lambda iterator, **_: workers[0].sent.extend(tensor.clone() for _, tensor in iterator),
    )
    opened: list[Any] = []
    return [workers, opened]


WEIGHTS = {"embed.weight": torch.arange(6.0).view(2, 3), "norm.weight": torch.ones(3)}
OUTLINE = {name: tensor.to("meta") for name, tensor in WEIGHTS.items()}


def test_all_weights_reach_the_workers_of_all_servers_over_nccl(carried: Any) -> None:
    from lit_grpo.rollout.vllm.gpus import NCCLGroup

    workers, opened = carried
    group = NCCLGroup(workers, OUTLINE, False, torch.device("cpu"))
    assert (opened[0].world_size, opened[0].packed) == (5, True)  # this process, and two workers of each server
    joined = [worker.asked.pop()[1]["init_info"] for worker in workers]
    assert [info["rank_offset"] for info in joined] == [1, 3] and joined[0]["packed"]
    for worker in workers:
        worker.worker.begin_update()
    group.send(Shipment(WEIGHTS.items()))
    for worker in workers:
        paths = [path for path, _ in worker.asked]
        assert paths == ["/start_weight_update", "/update_weights", "/finish_weight_update"]
        told = worker.asked[1][1]["update_info"]
        assert told["names"] == list(WEIGHTS) and told["shapes"] == [[2, 3], [3]]
        worker.model.load_weights(zip(told["names"], workers[0].sent, strict=True))  # as vLLM's worker does
        assert worker.worker.end_update() == {name: digest(tensor) for name, tensor in WEIGHTS.items()}
        assert "load_weights" not in vars(worker.model)
    group.close()
    assert workers[0].asked[-1][0] == "destroyed"


def test_changes_reach_a_worker_as_patches_that_vllm_applies_in_place(carried: Any) -> None:
    from vllm.model_executor.model_loader.checkpoint_weight_patch import (
        CheckpointWeightPatch,
        load_checkpoint_weight_patches,
    )

    from lit_grpo.rollout.vllm.gpus import NCCLGroup

    worker = carried[0][0]
    group = NCCLGroup([worker], OUTLINE, True, torch.device("cpu"))
    new = {name: tensor.clone() for name, tensor in WEIGHTS.items()}
    new["embed.weight"][1, 2] = 9.0
    held: dict[str, torch.Tensor] = {}
    for weights, changes, num_patches in ((WEIGHTS, False, 2), (new, True, 1)):
        worker.asked.clear(), worker.sent.clear()
        worker.worker.begin_update(patches=True)
        shipment = Shipment(weights.items(), held, changes)
        group.send(shipment)
        told = [body["update_info"] for path, body in worker.asked if path == "/update_weights"]
        assert len(told) == num_patches and len(worker.asked) == num_patches + 2
        for info, indices, values in zip(told, worker.sent[::2], worker.sent[1::2], strict=True):
            assert indices.dtype == torch.int32 and len(indices) == info["num_updates_list"][0]
            patch = CheckpointWeightPatch(
                info["names"][0], tuple(info["shapes"][0]), values.dtype, values=values, indices=indices
            )
            load_checkpoint_weight_patches(worker.model, [patch])  # as vLLM's worker does
        assert worker.worker.end_update() == {name: digest(tensor) for name, tensor in weights.items()}
        assert all(torch.equal(worker.model.get_parameter(name), tensor) for name, tensor in weights.items())
    assert shipment.changed_share == 1 / 9


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
