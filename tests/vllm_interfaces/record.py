"""Record what the seam touches of a version of vLLM: ``python tests/vllm_interfaces/record.py WHEEL > VERSION.json``.

Nothing of vLLM is imported or copied: names of classes, methods, parameters and fields, and the routes of its server.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from typing import Any

BASE = "vllm/distributed/weight_transfer/base.py"
FACTORY = "vllm/distributed/weight_transfer/factory.py"
RELOAD = "vllm/model_executor/model_loader/reload/layerwise.py"
WORKER = "vllm/v1/worker/gpu_worker.py"
CLASSES = {
    BASE: ("WeightTransferEngine", "WeightTransferInitInfo", "WeightTransferUpdateInfo"),
    FACTORY: ("WeightTransferEngineFactory",),
}
FUNCTIONS = ("initialize_layerwise_reload", "finalize_layerwise_reload")
CALLS = re.compile(r"weight_transfer_engine\.(\w+)\(")
ROUTE = re.compile(r"""@router\.(get|post)\(\s*["']([^"']+)["']""")


def of_class(node: ast.ClassDef) -> dict[str, Any]:
    """Its fields, and the parameters of its methods; those that a subclass must have."""
    methods = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
    return {
        "fields": [
            each.target.id
            for each in node.body
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        ],
        "methods": {name: [arg.arg for arg in method.args.args] for name, method in methods.items()},
        "abstract": [
            name
            for name, method in methods.items()
            if any("abstractmethod" in ast.unparse(d) for d in method.decorator_list)
        ],
    }


def record(wheel: str) -> dict[str, Any]:
    """Read a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        sources = {name: archive.read(name).decode() for name in archive.namelist() if name.endswith(".py")}
    classes = {
        node.name: of_class(node)
        for path, names in CLASSES.items()
        for node in ast.parse(sources[path]).body
        if isinstance(node, ast.ClassDef) and node.name in names
    }
    functions = {
        node.name: [arg.arg for arg in node.args.args] or [f"*{node.args.vararg.arg}" if node.args.vararg else ""]
        for node in ast.parse(sources[RELOAD]).body
        if isinstance(node, ast.FunctionDef) and node.name in FUNCTIONS
    }
    routes = {
        (method.upper(), path)
        for name, source in sources.items()
        if name.startswith("vllm/entrypoints/")
        for method, path in ROUTE.findall(source)
    }
    return {
        "classes": classes,
        "reload": functions,
        "worker_calls": sorted(set(CALLS.findall(sources[WORKER]))),
        "routes": sorted(" ".join(route) for route in routes),
    }


if __name__ == "__main__":
    print(json.dumps(record(sys.argv[1]), indent=1))
