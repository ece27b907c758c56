"""The tool that runs Python which nobody has read; attacked where its interpreter is installed."""

from __future__ import annotations

import importlib
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from lit_grpo.environments import Environments

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


@pytest.mark.parametrize(
    ("code", "most_s"),
    [
        ("while True: pass", 4),
        ("while True:\n    try:\n        while True: pass\n    except BaseException: pass", 4),
        ("x = 3 ** 10**7\ny = x * x * x", 4),  # one operation, which the interpreter cannot leave
        ("while True: print('x' * 999)", 4),
        ("import time\nfor _ in range(1000):\n    time.sleep(0.4)", 3),
    ],
)
def test_what_does_not_end_is_ended(python: Any, code: str, most_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[NAME]
    assert module.LIMITS["max_feed_duration_secs"] == module.COMPUTING_S == 5
    monkeypatch.setitem(module.LIMITS, "max_feed_duration_secs", 1.0)
    began = time.monotonic()
    answer = python(code)
    assert answer and len(answer) < 2**17 and time.monotonic() - began < most_s
    assert python("1+1") == "2"


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
