"""A vLLM server process of ours, on loopback."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

_PR_SET_PDEATHSIG = 1
_STOP_S = 10.0


class ServerProcess:
    """Starts a server that ends with this process, whatever ends it.

    Args:
        model: The folder with configuration and tokenizer.
        arguments: vLLM's server arguments, by their names with underscores.
        environment: Of the process.
        log: The file that takes what the server prints.
        host: The address that it listens on.
        port: The port; a free one by default.
        flags: More of vLLM's arguments, as on a command line.
    """

    def __init__(
        self,
        model: Path,
        arguments: Mapping[str, Any],
        environment: Mapping[str, str],
        log: Path,
        host: str = "127.0.0.1",
        port: int | None = None,
        flags: Sequence[str] = (),
    ) -> None:
        port = port or _free_port()
        self.url = f"http://{host}:{port}"
        self.log = log
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(model), "--host", host, "--port", str(port), *_flags(arguments), *flags]
        with log.open("w") as file:
            self.process = subprocess.Popen(
                command,
                env=dict(environment),
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            )

    def wait(self, deadline: float) -> None:
        """Wait until the server answers.

        Raises:
            ValueError: It has ended, or does not answer by ``deadline`` (of ``time.monotonic``).
        """
        while True:
            if self.process.poll() is not None:
                raise ValueError(f"The vLLM server ended with code {self.process.returncode}: {self._last_words()}")
            try:
                if httpx.get(f"{self.url}/health", timeout=2.0).is_success:
                    return
            except httpx.HTTPError:
                pass
            if time.monotonic() > deadline:
                raise ValueError(
                    f"The vLLM server at {self.url} did not answer in time; raise start_timeout_s. It said: "
                    f"{self._last_words()}"
                )
            time.sleep(0.2)

    def stop(self) -> None:
        """End the server and its workers."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.process.poll() is None:
                os.killpg(self.process.pid, number)
                try:
                    self.process.wait(_STOP_S)
                except subprocess.TimeoutExpired:
                    continue
            return

    def _last_words(self) -> str:
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line or "error" in line]
        return (errors or lines or ["(nothing)"])[-1][-500:]


def _flags(arguments: Mapping[str, Any]) -> list[str]:
    """``{"max_num_seqs": 4, "enforce_eager": True}`` as a command line; what is ``None`` or ``False`` is left out."""
    flags: list[str] = []
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            flags.append(flag)
        elif value is not None and value is not False:
            flags += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    return flags


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
