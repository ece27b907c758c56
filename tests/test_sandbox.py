"""The tool that runs Python which nobody has read; attacked where its interpreter is installed."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from conftest import table_rows

from lit_grpo.environments import Environments
from lit_grpo.environments.contract import EnvironmentFailed
from lit_grpo.process.calls import CallTimeout

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
        Environments(tools=[PATH]).setup()
    assert PATH in str(caught.value) and str(caught.value).startswith("rollout.plugins environments: ")


# ---- the interpreter itself ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def python() -> Any:
    pytest.importorskip("pydantic_monty")
    return importlib.import_module(NAME).python


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
        "eval('open(\"/etc/passwd\").read()')",
        "exec('import socket')",
        "import os\nos.system('id')",
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


ENDLESS = [
    "while True: pass",
    "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    "x = 3 ** 10**7\ny = x * x * x",  # one operation, which the interpreter cannot leave
]


@pytest.mark.parametrize("code", table_rows(ENDLESS, ENDLESS[:1]))
def test_what_computes_without_end_is_ended_by_its_cpu_time(
    python: Any, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules[NAME]
    assert module.COMPUTING_S == 5
    monkeypatch.setattr(module, "COMPUTING_S", 1)
    answer = python(code)
    assert answer == "TimeoutError: the code computes for more than 1 s."
    assert python("1+1") == "2"


@pytest.mark.parametrize(
    "code", ["while True: print('é' * 999)", "for _ in range(99): print('é' * 999)", "print('é' * 99999)"]
)
def test_endless_output_ends(python: Any, code: str) -> None:
    answer = python(code)
    assert answer.endswith("MemoryError: the code prints more than 65536 bytes.") and len(answer.encode()) < 65600
    assert answer.startswith("é" * 999)


def test_code_that_sleeps_does_not_wait(python: Any) -> None:
    assert python("import time\nfor _ in range(900):\n    time.sleep(3600)\n1") == "1"


def test_what_the_machine_ends_is_no_answer(python: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of wall time, or the system's end of the process: the trajectory fails, and its policy reads nothing."""
    module = sys.modules[NAME]
    monkeypatch.setattr(module, "_pools", [])
    monkeypatch.setattr(module, "LASTING_S", 0.2)
    monkeypatch.setattr(module, "COMPUTING_S", 3600)
    with pytest.raises(CallTimeout):
        python("while True: pass")
    monkeypatch.setattr(module, "_pools", [])
    monkeypatch.setattr(module, "LASTING_S", 60.0)
    monkeypatch.setattr(module, "_limit_cpu", lambda process: os.kill(process, signal.SIGKILL))
    with pytest.raises(EnvironmentFailed, match="the system has ended the process that ran the code"):
        python("1+1")


CANNOT = "The value of the last line cannot be shown; print what you need. ("


@pytest.mark.parametrize("code", ["print('a')\n10 ** 5000", "print('a')\nclass A:\n    pass\n[A()]"])
def test_a_last_value_that_cannot_be_written_out_is_said_to_be_so(python: Any, code: str) -> None:
    assert python(code).startswith(f"a\n{CANNOT}")


@pytest.mark.nightly
def test_a_small_value_that_is_an_endless_text_is_not_written_out_here() -> None:
    """In a process of its own, which would be killed: Python would write 2**40 lists, and do nothing else meanwhile."""
    pytest.importorskip("pydantic_monty")
    code = "x = [1]\nfor _ in range(40):\n    x = [x, x]\nx"
    script = f"from {NAME} import python\nprint(python({code!r})[:200])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=90)
    assert CANNOT in done.stdout, done.stderr


def test_calls_beside_each_other_are_apart(python: Any) -> None:
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(python, [f"x = {number}\nprint(x)\nx + 1" for number in range(200)]))
    assert answers == [f"{number}\n{number + 1}" for number in range(200)]
