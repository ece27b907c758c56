"""The tool that runs Python which nobody has read; attacked where its interpreter is installed."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest

from lit_grpo.environments import Environments
from lit_grpo.environments.tools import load_tools

NAME = "lit_grpo.environments.sandbox"
PATH = f"{NAME}.python"


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The module is imported again within the test, and after it."""
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    yield
    sys.modules.pop(NAME, None)


@pytest.mark.usefixtures("fresh")
def test_without_its_package_a_run_that_has_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_grpo.process.packages.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs pydantic-monty; install the extra lit_grpo\[python-tool\]") as caught:
        Environments(tools=[PATH]).worker()
    assert PATH in str(caught.value) and str(caught.value).startswith("rollout.plugins environments: ")


class Session:
    """As one of pydantic-monty: prints the code, and its value is the number of its characters."""

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: Any) -> None: ...

    def feed_run(self, code: str, print_callback: Any) -> int | None:
        if code == "1/0":
            raise MontyRuntimeError("division by zero")
        print_callback.output += "" if code == "pass" else f"ran {code}\n"
        return None if code in ("pass", "print()") else len(code)


class MontyError(Exception): ...


class MontyRuntimeError(MontyError): ...


class CollectString:
    def __init__(self, max_bytes: int) -> None:
        self.output, self.max_bytes = "", max_bytes


POOLS: list[Any] = []


class Monty:
    def __init__(self, request_timeout: float) -> None:
        self.request_timeout, self.limits = request_timeout, list[dict[str, float]]()
        POOLS.append(self)

    def __enter__(self) -> Monty:
        return self

    def __exit__(self, *_: Any) -> None: ...

    def checkout(self, limits: dict[str, float]) -> Session:
        self.limits.append(limits)
        return Session()


@pytest.mark.usefixtures("fresh")
def test_calls_have_limits_and_share_one_pool_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in of its contract."""
    package = ModuleType("pydantic_monty")
    for each in (Monty, MontyError, CollectString):
        setattr(package, each.__name__, each)
    monkeypatch.setitem(sys.modules, "pydantic_monty", package)
    package.__spec__ = find_spec("json")  # so that it is found
    POOLS.clear()
    (tool,) = load_tools([PATH])
    assert tool.name == "python" and list(tool.parameters) == ["code"]
    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(tool.function, ["1+1"] * 32)) == {"ran 1+1\n3"}
    (pool,) = POOLS
    assert pool.request_timeout == 10 and len(pool.limits) == 32
    assert pool.limits[0] == {"max_feed_duration_secs": 5, "max_memory": 2**26, "max_recursion_depth": 200}
    assert tool.function("1/0") == "RuntimeError: division by zero"
    assert tool.function("print()") == "ran print()\n" and tool.function("pass") == "Nothing was printed."


# ---- the interpreter itself ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def python() -> Any:
    pytest.importorskip("pydantic_monty")
    return importlib.import_module(NAME).python


def test_it_computes(python: Any) -> None:
    assert python("x = [n**2 for n in range(4)]\nprint(sum(x))\nmax(x)") == "14\n9"
    assert python("x") != "[0, 1, 4, 9]"  # a call begins with nothing


@pytest.mark.parametrize(
    "code",
    [
        "open('/etc/passwd').read()",
        "import os\nos.listdir('/')",
        "import os\nos.environ['HOME']",
        "from pathlib import Path\nPath('/etc/passwd').read_text()",
        "import socket",
        "import subprocess",
        "import ctypes",
        "__import__('os').system('id')",
        "().__class__.__bases__[0].__subclasses__()",
        "eval('1')",
        "[0] * 10**9",
        "'x' * 10**9",
        "2 ** 10**8",
        "def f(n):\n    return f(n + 1)\nf(0)",
        "x = []\nx.append(x)\nwhile True:\n    x = [x, x]",
    ],
)
def test_files_network_processes_and_memory_are_out_of_reach(python: Any, code: str) -> None:
    answer = python(code)
    assert "Error" in answer and "root:" not in answer and len(answer) < 5000


@pytest.mark.parametrize("code", ["while True: pass", "import time\ntime.sleep(1000)", "while True: print('x' * 999)"])
def test_what_does_not_end_is_ended(python: Any, code: str) -> None:
    began = time.monotonic()
    try:
        answer = python(code)
    except Exception as error:  # the worker is killed, which is a tool's error
        answer = str(error)
    assert answer and len(answer) < 2**17 and time.monotonic() - began < 30
    assert python("1+1") == "2"
