"""A vLLM server in an actor of Ray; imported only where Ray is installed and asked for."""

from __future__ import annotations

import atexit
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util import get_node_ip_address

from lit_grpo.rollout.vllm.arguments import server_arguments, server_environment
from lit_grpo.rollout.vllm.process import ServerProcess
from lit_grpo.rollout.weights.files import PrivateFolder

_ANSWER_S = 10.0  # for an actor that has nothing else to do
_STOP_S = 30.0


class Host:
    """What an actor runs, in its own process: a server that ends with it, whatever ends it.

    The server listens on loopback where those who ask are on this machine, else on the address that Ray has of it.

    Args:
        files: Configuration and tokenizer, by their paths in a folder.
        dtype: Of the weights.
        num_slots: Of the server.
        num_servers: How many may share this machine.
        server_args: The user's.
        token: What it lets requests in with.
        asking: Ray's name of the machine of those who ask.
    """

    def __init__(
        self,
        files: Mapping[str, bytes],
        dtype: str,
        num_slots: int,
        num_servers: int,
        server_args: Mapping[str, Any],
        token: str,
        asking: str,
    ) -> None:
        self._folder = PrivateFolder("lit_grpo_vllm_")
        for name, content in files.items():
            (self._folder.path / name).parent.mkdir(parents=True, exist_ok=True)
            (self._folder.path / name).write_bytes(content)
        arguments = server_arguments(dtype, num_slots, num_servers) | dict(server_args)
        address = get_node_ip_address()
        host = "127.0.0.1" if ray.get_runtime_context().get_node_id() == asking else address
        self._server = ServerProcess(self._folder.path, arguments, server_environment(num_servers), token, host)
        self._log = f"{self._server.log} on the machine {address}"

    def places(self) -> tuple[str, str]:
        """Where it answers, and where to read what it has said."""
        return self._server.url, self._log

    def runs(self) -> bool:
        """Whether the server has not ended."""
        return self._server.runs

    def wait(self, timeout_s: float) -> str:
        """Wait until the server answers; return what went wrong where it does not."""
        try:
            self._server.wait(time.monotonic() + timeout_s)
        except ValueError as error:
            return str(error)
        return ""

    def stop(self) -> None:
        """End the server, and remove its folder: Ray ends actors without another word."""
        self._server.stop()
        self._folder.remove()


class ActorServer:
    """A server in an actor of Ray, as one of our own processes is seen.

    Args:
        actor: Handle of a :class:`Host`.
        deadline: Until when it may have been started (of ``time.monotonic``).

    Attributes:
        url: Where it answers.
        log: Where what it prints is.

    Raises:
        ValueError: Ray could not start it.
    """

    def __init__(self, actor: Any, deadline: float) -> None:
        self._actor = actor
        try:
            self.url, self.log = ray.get(actor.places.remote(), timeout=max(deadline - time.monotonic(), 0.0))
        except GetTimeoutError as error:
            raise ValueError(
                "Ray has started no actor for a vLLM server in time: its cluster has "
                f"{_named(ray.cluster_resources())}; ask for less in the generator's ray, or raise start_timeout_s."
            ) from error
        except RayError as error:
            raise ValueError(f"Ray could not start an actor for a vLLM server: {_last_line(error)}") from error
        atexit.register(self.stop)  # Ray ends before what else goes with this process

    @property
    def runs(self) -> bool:
        """Whether actor and server have not ended."""
        try:
            return ray.get(self._actor.runs.remote(), timeout=_ANSWER_S)
        except RayError:
            return False

    def wait(self, deadline: float) -> None:
        """Wait until the server answers.

        Raises:
            ValueError: It has ended, or does not answer by ``deadline`` (of ``time.monotonic``).
        """
        left_s = max(deadline - time.monotonic(), 0.0)
        try:
            failure = ray.get(self._actor.wait.remote(left_s), timeout=left_s + _ANSWER_S)
        except RayError as error:
            raise ValueError(f"The actor of the vLLM server at {self.url} is gone: {_last_line(error)}") from error
        if failure:
            raise ValueError(f"{failure} (It was started in an actor of Ray: {self.log}.)")

    def stop(self) -> None:
        """End the server and its actor."""
        atexit.unregister(self.stop)
        if not ray.is_initialized():
            return  # both have ended with Ray
        with suppress(RayError):
            ray.get(self._actor.stop.remote(), timeout=_STOP_S)
        ray.kill(self._actor)


def start_actors(
    model: Path,
    dtype: str,
    num_slots: int,
    num_servers: int,
    server_args: Mapping[str, Any],
    token: str,
    options: Mapping[str, Any],
    deadline: float,
) -> list[ActorServer]:
    """Start servers in actors of the cluster that this process belongs to, or else can find, or else begins.

    Args:
        model: The folder with configuration and tokenizer, whose files go along.
        dtype: Of the weights.
        num_slots: Of each server.
        num_servers: How many.
        server_args: The user's, of each.
        token: What they let requests in with.
        options: Of each actor, as Ray takes them.
        deadline: Until when actors may have been started (of ``time.monotonic``).

    Raises:
        ValueError: Ray does not take the options, or has not started an actor.
    """
    if not ray.is_initialized():
        ray.init()
    files = {str(path.relative_to(model)): path.read_bytes() for path in model.rglob("[!.]*") if path.is_file()}
    asking = ray.get_runtime_context().get_node_id()
    try:
        kind = ray.remote(Host).options(**options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"ray is {dict(options)}, which no actor of Ray can have: {error}") from error
    told = (files, dtype, num_slots, num_servers, dict(server_args), token, asking)
    actors: list[Any] = [kind.remote(*told) for _ in range(num_servers)]
    servers: list[ActorServer] = []
    try:
        servers += (ActorServer(actor, deadline) for actor in actors)
    except BaseException:
        for actor in actors:
            ray.kill(actor)
        raise
    return servers


def _named(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{resources.get(name, 0):g} {name}" for name in ("CPU", "GPU"))


def _last_line(error: Exception) -> str:
    return ([line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__])[-1]
