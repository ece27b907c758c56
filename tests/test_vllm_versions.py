"""The backend of vLLM's weight transfer against the interfaces of 0.24 to 0.33, as recorded from their wheels.

Version 0.32 is tested for real (tests/integration). Here vLLM's modules are stood in for by classes with the recorded
methods and parameters, and the backend is driven as a worker of that version does.
"""

from __future__ import annotations

import abc
import dataclasses
import importlib.util
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

import pytest
import torch

from lit_grpo.policy.weights import digest
from lit_grpo.rollout.vllm import fleet
from lit_grpo.rollout.vllm.arguments import check_version
from lit_grpo.rollout.weights.files import write
from lit_grpo.rollout.weights.shipments import Shipment
from lit_grpo.rollout.weights.tensors import WeightSyncError

RECORDS = Path(__file__).parent / "vllm_interfaces"
VERSIONS = sorted(path.stem for path in RECORDS.glob("*.json"))
TRANSFER = "lit_grpo.rollout.vllm.worker.transfer"
WEIGHTS = [("embed.weight", torch.arange(6.0).view(2, 3)), ("norm.weight", torch.ones(3))]
Init = TypeVar("Init")
Update = TypeVar("Update")


def recorded(version: str) -> dict[str, Any]:
    return json.loads((RECORDS / f"{version}.json").read_text())


def stand_in(record: dict[str, Any], reloads: list[str]) -> dict[str, ModuleType]:
    """The modules of vLLM that the backend imports, with what has been recorded of them."""
    engine = record["classes"]["WeightTransferEngine"]
    takes = engine["methods"]["__init__"][1:]

    def construct(self: Any, *context: Any) -> None:
        assert len(context) == len(takes)
        vars(self).update(zip(takes, context, strict=True))
        if "vllm_config" in takes:
            self.parallel_config, self.model_config = self.vllm_config.parallel_config, self.vllm_config.model_config

    abstract = {name: abc.abstractmethod(lambda self, *args: None) for name in engine["abstract"]}
    parsing = {
        f"parse_{kind}_info": lambda self, fields, kind=kind: getattr(self, f"{kind}_info_cls")(**fields)
        for kind in ("init", "update")
    }
    assert parsing.keys() <= engine["methods"].keys()

    class WeightTransferEngine(abc.ABC, Generic[Init, Update]):
        __init__ = construct

    for name, method in {**abstract, **parsing}.items():
        setattr(WeightTransferEngine, name, method)
    abc.update_abstractmethods(WeightTransferEngine)
    infos = {
        name: dataclasses.make_dataclass(
            name,
            [
                (field, Any, dataclasses.field(default=None, kw_only=True))
                for field in record["classes"][name]["fields"][1:]
            ],
        )
        for name in ("WeightTransferInitInfo", "WeightTransferUpdateInfo")
    }
    engines: dict[str, Any] = {}
    factory = SimpleNamespace(register_engine=engines.setdefault, engines=engines)
    reload = {
        name: lambda model, *config, name=name: reloads.append(name)
        for name in ("initialize_layerwise_reload", "finalize_layerwise_reload")
    }
    assert reload.keys() == record["reload"].keys()
    contents = {
        "vllm": {},
        "vllm.distributed": {},
        "vllm.distributed.weight_transfer": {},
        "vllm.distributed.weight_transfer.base": {"WeightTransferEngine": WeightTransferEngine, **infos},
        "vllm.distributed.weight_transfer.factory": {"WeightTransferEngineFactory": factory},
        "vllm.model_executor": {},
        "vllm.model_executor.model_loader": {},
        "vllm.model_executor.model_loader.reload": reload,
    }
    modules = {name: ModuleType(name) for name in contents}
    for name, members_of in contents.items():
        vars(modules[name]).update(members_of)
    return modules


class Model(torch.nn.Module):
    """What vLLM's model is to the backend."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(hidden_size=3, tie_word_embeddings=False)
        for name, tensor in WEIGHTS:
            part = torch.nn.Module()
            part.weight = torch.nn.Parameter(torch.zeros_like(tensor))
            self.add_module(name.partition(".")[0], part)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = set()
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)
            loaded.add(name)
        return loaded


@dataclasses.dataclass
class Worker:
    """Drives a backend as the worker of a recorded version does."""

    record: dict[str, Any]
    transfer: Any
    model: Model
    reloads: list[str]

    def update(self, info: dict[str, Any]) -> None:
        if "start_weight_update" in self.record["worker_calls"]:
            self.transfer.start_weight_update()
            self.transfer.update_weights(info)
            self.transfer.finish_weight_update()
            return
        self.reloads.append("initialize_layerwise_reload")
        typed = self.transfer.parse_update_info(info)
        assert typed.update_kind is None  # a field of vLLM's, which keeps its default
        self.transfer.receive_weights(typed, load_weights=self.model.load_weights)
        self.reloads.append("finalize_layerwise_reload")


@pytest.fixture(params=VERSIONS)
def record(request: pytest.FixtureRequest) -> dict[str, Any]:
    return recorded(request.param)


@pytest.fixture
def worker(record: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Worker:
    reloads: list[str] = []
    modules = stand_in(record, reloads)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, TRANSFER, raising=False)
    path = Path(fleet.__file__).parent / "worker" / "transfer.py"
    spec: Any = importlib.util.spec_from_file_location("transfer_of_a_version", path)
    transfer: Any = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "transfer_of_a_version", transfer)
    spec.loader.exec_module(transfer)
    transfer.register()
    factory: Any = modules["vllm.distributed.weight_transfer.factory"]
    parallel, model = SimpleNamespace(rank=0, world_size=1), Model()
    known = {
        "config": None,
        "parallel_config": parallel,
        "vllm_config": SimpleNamespace(
            parallel_config=parallel, model_config=SimpleNamespace(hf_text_config=model.config)
        ),
        "device": torch.device("cpu"),
        "model": model,
    }
    creates = record["classes"]["WeightTransferEngineFactory"]["methods"]["create_engine"][1:]
    backend = factory.WeightTransferEngineFactory.engines["lit_grpo"]
    return Worker(record, backend(*(known[name] for name in creates)), model, reloads)


def test_weights_arrive_and_what_arrived_is_told(worker: Worker, tmp_path: Path) -> None:
    transfer = worker.transfer
    transfer.init_transfer_engine(transfer.parse_init_info({"fields": {"hidden_size": 3}}))
    held: dict[str, torch.Tensor] = {}
    new = [(name, tensor.clone()) for name, tensor in WEIGHTS]
    new[0][1][1, 2] += 0.5
    for version, (weights, changes) in enumerate(((WEIGHTS, False), (new, True))):
        path = tmp_path / f"{version}.safetensors"
        write(Shipment(weights, held, changes), path)
        worker.update({"path": str(path), "keeps": True, "changes": changes})
        transfer.settle(str(version))
        assert transfer.version == str(version)
        assert {name: each.digest for name, each in transfer.arrived.items()} == {n: digest(t) for n, t in weights}
        assert all(torch.equal(worker.model.get_parameter(name), tensor) for name, tensor in weights)
    assert worker.reloads == ["initialize_layerwise_reload", "finalize_layerwise_reload"] * 2


def test_what_is_missing_and_what_is_another_model_is_said(worker: Worker, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="its hidden_size is 3, the policy's is 4"):
        worker.transfer.init_transfer_engine(worker.transfer.parse_init_info({"fields": {"hidden_size": 4}}))
    write(WEIGHTS[:1], tmp_path / "weights.safetensors")
    with pytest.raises(WeightSyncError, match=r"1 of 2 parameters of vLLM's model got no weight, 'norm.weight'"):
        worker.update({"path": str(tmp_path / "weights.safetensors")})
    assert worker.transfer.version == ""


def test_each_method_takes_what_a_worker_gives_it(worker: Worker) -> None:
    """What the stand-in calls is what the recorded worker calls, and every method takes the recorded parameters."""
    engine = worker.record["classes"]["WeightTransferEngine"]
    calls = set(worker.record["worker_calls"]) & set(vars(type(worker.transfer)))
    assert {"init_transfer_engine", "shutdown"} <= calls
    for name in calls | set(engine["abstract"]):
        method: Callable[..., Any] = getattr(worker.transfer, name)
        given = [None] * (len(engine["methods"][name]) - ("self" in engine["methods"][name]))
        inspect.signature(method).bind(*given)
    worker.transfer.shutdown()


ROUTES = re.compile(r"""\.(get|post),?\(?\s*["'](/[^"'?]+)""")


def test_every_version_has_the_routes_that_are_asked(record: dict[str, Any]) -> None:
    source = Path(fleet.__file__).read_text()
    asked = {f"{method.upper()} {path}" for method, path in ROUTES.findall(source)}
    assert {"POST /update_weights", "GET /server_info", "POST /pause", "GET /version"} <= asked
    assert asked <= set(record["routes"])


@pytest.mark.parametrize("version", ["0.23.1", "0.9.2", "0.34.0", "1.0.0"])
def test_a_server_of_another_version_than_the_seam_knows_is_refused(version: str) -> None:
    with pytest.raises(ValueError, match=rf"The server at http://h:1 runs vLLM {version}, .* 0\.24 to 0\.33"):
        check_version("The server at http://h:1", version)


@pytest.mark.parametrize("version", ["0.24.0", "0.28.0", "0.32.0", "0.33.1", "0.33.0rc1", "0.32.0+cpu"])
def test_servers_of_versions_that_it_knows_are_taken(version: str) -> None:
    check_version("The server at http://h:1", version)
