"""A vLLM server in a process that this one starts."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from getpass import getuser
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from lit_grpo.policy.architecture.vision import sees
from lit_grpo.policy.spec import TOKENIZER, PolicySpec
from lit_grpo.process.bound import PARENT_VARIABLE
from lit_grpo.rollout.vllm.arguments import (
    check_drafts,
    check_on_cpu,
    check_packages,
    draft_arguments,
    dtype_of,
    kv_bytes_of_slots,
    require_vllm,
    server_arguments,
    server_environment,
)
from lit_grpo.rollout.vllm.guard import GUARD, HOST_VARIABLE, KEY_VARIABLE, LOG_VARIABLE, OWNER_PATH
from lit_grpo.rollout.vllm.images import check_sees, image_arguments

_STOP_S = 10.0
_LONGEST_FOLDER = 70  # characters, for sockets in it, whose paths have at most 107
_LOG_PREFIX = re.compile(r"^\([^)]* pid=\d+\)(?: [A-Z]+ \S+ \S+ \[[^\]]*\])? ?|\x1b\[[0-9;]*m")
_EXCEPTION = re.compile(r"^[\w.]*(?:Error|Exception|Interrupt|Failure)\b|^[\w.-]+: error: ")
_POINTS_ELSEWHERE = re.compile(
    r"root cause|initialization failed|background process|failed to start|check the logs", re.IGNORECASE
)
_ENGINE_IS_DEAD = "EngineDeadError"  # which the front end raises for each request
_CAUSED = "The above exception was the direct cause of the following exception:"


class ServerPlan:
    """The server of a policy, as ``serve``, a run and an actor of Ray start it, each on its own machine.

    Args:
        given: vLLM's arguments by their names with underscores, which come before those that are chosen here.
        num_servers: Max number of servers that share a machine.
        flags: More of vLLM's arguments, as on a command line, which come before ``given``.
    """

    def __init__(
        self,
        policy: PolicySpec,
        num_slots: int,
        given: Mapping[str, Any],
        on_gpu: bool,
        num_servers: int = 1,
        flags: Sequence[str] = (),
    ) -> None:
        require_vllm()
        known = {**given, **_named(flags)}
        check_drafts(known, policy)
        check_sees(policy, known)
        if not on_gpu:
            check_on_cpu(policy.config.get_text_config(), known)
        check_packages(policy.config.model_type, sees(policy.module))
        kv_bytes = None  # which leaves them to vLLM
        if "gpu_memory_utilization" not in known:
            kv_bytes = kv_bytes_of_slots(policy, dtype_of(known) or policy.dtype, num_slots, known)
        self.num_servers, self._given, self._flags = num_servers, draft_arguments(known) | dict(given), flags
        self._given = image_arguments(policy, on_server=True) | self._given
        self._chosen = str(policy.dtype).removeprefix("torch."), num_slots, num_servers, kv_bytes

    def start(
        self, model: Path, token: str, environment: Mapping[str, str] | None = None, **place: Any
    ) -> ServerProcess:
        """Start a server on this machine; ``place`` is the host and port of :class:`ServerProcess`."""
        arguments = server_arguments(*self._chosen) | self._given
        variables = server_environment(self.num_servers) | dict(environment or {})
        return ServerProcess(model, arguments, variables, token, flags=self._flags, **place)


class ServerProcess:
    """Starts a guarded server, which is killed with all its workers when this process ends, however that goes.

    Its output goes to the file ``log``, which is kept if the server fails, or the user has been told of it.

    Args:
        model: The folder with configuration and tokenizer.
        arguments: vLLM's server arguments, by their names with underscores.
        port: The port, which is not taken; a free one by default.
        flags: More of vLLM's arguments, as on a command line.
    """

    def __init__(
        self,
        model: Path,
        arguments: Mapping[str, Any],
        environment: Mapping[str, str],
        token: str,
        host: str = "127.0.0.1",
        port: int | None = None,
        flags: Sequence[str] = (),
    ) -> None:
        port = _free_port(host, port)
        self._start = partial(ServerProcess, model, arguments, environment, token, host, flags=flags)
        self._port = port
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._token, self._keeps_log = token, False
        command = [sys.executable, "-m", "lit_grpo.process.bound", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(model), "--tokenizer", str(model / TOKENIZER), "--host", host, "--port", str(port)]
        command += [*_flags(arguments), *flags]
        command += ["--middleware", GUARD]  # the last one on the command line is the first to be asked
        file, name = tempfile.mkstemp(prefix="lit_grpo_server_", suffix=".log")  # readable by this user alone
        self.log = Path(name)
        own = {KEY_VARIABLE: token, HOST_VARIABLE: host, LOG_VARIABLE: name, PARENT_VARIABLE: str(os.getpid())}
        if len(str(model)) < _LONGEST_FOLDER:  # its temporary files end with the folder, but for what others can use
            kept = os.path.join(tempfile.gettempdir(), f"torchinductor_{getuser()}")
            own |= {"TMPDIR": str(model), "TORCHINDUCTOR_CACHE_DIR": environment.get("TORCHINDUCTOR_CACHE_DIR", kept)}
        try:
            self.process = _from_a_lasting_thread(
                lambda: subprocess.Popen(
                    command,
                    env={**environment, **own},
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    process_group=0,  # of this session: its members are told to go on, if stopped, when this ends
                )
            )
        finally:
            os.close(file)

    @property
    def runs(self) -> bool:
        return self.process.poll() is None

    def failed(self) -> bool:
        """Return whether it has ended before it answered."""
        return not self.runs

    def keep_log(self) -> None:
        """Leave the log where it is after the end, since the user has been told of it."""
        self._keeps_log = True

    def again(self) -> ServerProcess:
        """Start it again after its end, without waiting; at another port if its own is taken."""
        self.kill()  # workers that it has left running
        try:
            return self._start(port=self._port)
        except ValueError:
            return self._start()

    def kill(self) -> None:
        """End it and its workers at once; its log is kept."""
        self.keep_log()
        self._end(signal.SIGKILL)

    def failure(self) -> str:
        """The reason of the failure, in one sentence; the log will be kept."""
        self.keep_log()
        how = "did not answer in time" if self.runs else f"ended with code {self.process.returncode}"
        cause = root_cause(self.log.read_text(errors="replace"))
        return f"The vLLM server at {self.url} {how}. It said: {cause} All of that is in {self.log}."

    def is_ready(self) -> bool:
        """Return whether this process answers, and not another one at its address."""
        headers = {"Authorization": f"Bearer {self._token}"}
        try:
            owner = httpx.get(f"{self.url}{OWNER_PATH}", headers=headers, timeout=2.0, trust_env=False)
        except httpx.HTTPError:
            return False
        try:
            return owner.is_success and owner.json()["pid"] == self.process.pid
        except (ValueError, KeyError, TypeError):  # of another program
            return False

    def stop(self) -> None:
        """End the server and its workers; its log is removed too, unless it is to be kept."""
        if not self.runs:
            return
        self._end(signal.SIGTERM, signal.SIGKILL)
        if not self._keeps_log:
            self.log.unlink(missing_ok=True)

    def _end(self, *numbers: signal.Signals) -> None:
        """Send its group these signals, one after another until it has ended."""
        for number in numbers:
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(self.process.pid, number)
                os.killpg(self.process.pid, signal.SIGCONT)  # a process that was stopped receives no other signal
                self.process.wait(_STOP_S)
                return


def root_cause(log: str) -> str:
    """Return why a server ended by its log: the exception that caused others, and says more than that something did."""
    lines = [_LOG_PREFIX.sub("", line).rstrip() for line in log.splitlines()]
    errors = [number for number, line in enumerate(lines) if _EXCEPTION.match(line) and _ENGINE_IS_DEAD not in line]
    telling = [number for number in errors if not _POINTS_ELSEWHERE.search(lines[number])] or errors
    if not telling:
        return ([line.strip() for line in lines if line.strip()] or ["(nothing)"])[-1][-500:]
    at = telling[-1]
    for before in reversed(telling[:-1]):
        if _CAUSED not in lines[before:at]:
            break
        at = before
    details = []
    for line in lines[at + 1 : at + 4]:  # of an exception whose message has several lines
        if not line.startswith("  ") or line.lstrip().startswith(("File ", "For further")):
            break
        details.append(line.strip())
    return " ".join([lines[at].strip(), *details])[:500]


def _flags(arguments: Mapping[str, Any]) -> list[str]:
    """Write ``{"max_num_seqs": 4, "enforce_eager": True}`` as a command line, without ``None`` and ``False``."""
    flags: list[str] = []
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            flags.append(flag)
        elif value is not None and value is not False:
            flags += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    return flags


def _named(flags: Sequence[str]) -> dict[str, Any]:
    """Return the values on a command line, by the names of :func:`_flags`; without flags that have none."""
    words = [part for flag in flags for part in (flag.split("=", 1) if flag.startswith("--") else [flag])]
    named: dict[str, Any] = {}
    for flag, value in pairwise(words):
        if flag.startswith("--") and not value.startswith("--"):
            named[flag[2:].replace("-", "_")] = value
    return named


def _free_port(host: str, port: int | None) -> int:
    """Return the port, or one that is free."""
    family = socket.getaddrinfo(host, port or 0, type=socket.SOCK_STREAM)[0][0]
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as vLLM does
        try:
            probe.bind((host, port or 0))
        except OSError as error:
            raise ValueError(
                f"The server cannot listen on port {port} of {host} ({error.strerror}); end what has it, or choose "
                "another with --port."
            ) from error
        return probe.getsockname()[1]


def _from_a_lasting_thread(start: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    """Start a process from a thread that lives as long as it: for Linux the parent's end is the end of that thread.

    Workers that the process leaves running are ended after it.
    """
    started: Future[subprocess.Popen[bytes]] = Future()

    def run() -> None:
        try:
            started.set_result(start())
        except BaseException as error:
            started.set_exception(error)
            return
        while (process := started.result()).poll() is None:
            time.sleep(1.0)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # at once, while no other group can have this number

    threading.Thread(target=run, daemon=True, name="lit_grpo-server").start()
    return started.result()
