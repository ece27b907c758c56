"""vLLM servers in actors of Ray, on whichever machines of a cluster have room; imported only where ray is given.

Ray supervises them: it places them, ends them with the run, and starts an actor again that has died (``max_restarts``).
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayError
from ray.util import get_node_ip_address

from lit_grpo.process.files import PrivateFolder
from lit_grpo.process.terminal import say
from lit_grpo.rollout.vllm.process import ServerPlan

_ANSWER_S = 10.0  # for an actor that has nothing else to do
_LOOK_S = 3.0  # for an actor that may be starting
_STOP_S = 30.0
_TELL_S = 5.0  # without an actor, after which the user is told


class Host:
    """A server in a Ray actor's process; it ends with the actor, and once it has been ready, the actor ends with it.

    The server listens on loopback if the run is on the same machine, and otherwise on the address that Ray knows.

    Args:
        files: Configuration and tokenizer, by their paths in a folder.
        caller: Ray's name of the machine of the run.
    """

    def __init__(self, files: Mapping[str, bytes], plan: ServerPlan, token: str, caller: str) -> None:
        self._folder = PrivateFolder("lit_grpo_vllm_")
        for name, content in files.items():
            (self._folder.path / name).parent.mkdir(parents=True, exist_ok=True)
            (self._folder.path / name).write_bytes(content)
        address = get_node_ip_address()
        host = "127.0.0.1" if ray.get_runtime_context().get_node_id() == caller else address
        self._server = plan.start(self._folder.path, token, host=host)
        self._log = f"{self._server.log} on the machine {address}"
        self._was_well = False

    def state(self) -> tuple[str, str, bool]:
        """Return the server's URL, where its output is, and whether it runs."""
        return self._server.url, self._log, self._server.runs

    def is_ready(self) -> bool:
        """Return whether the server answers; from then on the actor ends with it, so that Ray starts both again."""
        ready = self._server.is_ready()
        if ready and not self._was_well:
            self._was_well = True
            threading.Thread(target=self._end_with_server, daemon=True).start()
        return ready

    def _end_with_server(self) -> None:
        self._server.process.wait()
        if self._was_well:
            os._exit(1)

    def keep_log(self) -> None:
        self._server.keep_log()

    def failure(self) -> str:
        return self._server.failure()

    def stop(self) -> None:
        """End the server and remove its folder, since Ray ends actors without calling anything."""
        self._was_well = False
        self._server.stop()
        self._folder.remove()


class ActorServer:
    """A server in an actor of Ray, with the interface of :class:`lit_grpo.rollout.vllm.process.ServerProcess`.

    ``actor`` is the handle of a :class:`Host`, which Ray has to start by ``deadline`` (of ``time.monotonic``).
    """

    def __init__(self, actor: Any, deadline: float) -> None:
        self._actor = actor
        state, resources = actor.state.remote(), ray.cluster_resources()
        has = f"its cluster has {resources.get('CPU', 0):g} CPU, {resources.get('GPU', 0):g} GPU"
        left_s = max(deadline - time.monotonic(), 0.0)
        try:
            if not ray.wait([state], timeout=min(_TELL_S, left_s))[0]:
                say(f"Waiting up to {left_s:.0f} s for Ray to start an actor for a vLLM server; {has}.", flush=True)
            self.url, self.log, _ = ray.get(state, timeout=max(deadline - time.monotonic(), 0.0))
        except GetTimeoutError as error:
            raise ValueError(
                f"Ray has started no actor for a vLLM server in time: {has}; ask for less in the generator's ray, or "
                "raise start_timeout_s."
            ) from error
        except RayError as error:
            raise ValueError(f"Ray could not start an actor for a vLLM server: {_last_line(error)}") from error
        atexit.register(self.stop)  # Ray ends before the finalizers of this process are called

    @property
    def runs(self) -> bool:
        try:
            return ray.get(self._actor.state.remote(), timeout=_LOOK_S)[2]
        except RayError:
            return False

    def again(self) -> ActorServer:
        """Have Ray start the actor again, unless it does so already, without waiting for it."""
        with suppress(RayError):
            if ray.get(self._actor.state.remote(), timeout=_LOOK_S)[0] == self.url:  # it lives, and its server hangs
                ray.kill(self._actor, no_restart=False)
        return self

    def is_ready(self) -> bool:
        """Return whether the server answers; of an actor that was started again its new places are known then."""
        try:
            state = ray.get(self._actor.state.remote(), timeout=_LOOK_S)
            if not ray.get(self._actor.is_ready.remote(), timeout=_LOOK_S):
                return False
        except RayError:
            return False
        self.url, self.log, _ = state
        return True

    def failed(self) -> bool:
        """Return whether Ray starts the actor no more, or its server has ended before it answered."""
        try:
            return not ray.get(self._actor.state.remote(), timeout=_LOOK_S)[2]
        except (GetTimeoutError, ActorUnavailableError):
            return False
        except RayError:
            return True

    def keep_log(self) -> None:
        """Leave the log on its machine, without waiting for the actor."""
        with suppress(RayError):
            self._actor.keep_log.remote()

    def failure(self) -> str:
        """The reason of the failure, in one sentence."""
        try:
            said = ray.get(self._actor.failure.remote(), timeout=_ANSWER_S)
        except RayError as error:
            said = f"The actor of the vLLM server at {self.url} is gone: {_last_line(error)}"
        return f"{said} (It was started in an actor of Ray: {self.log}.)"

    def stop(self) -> None:
        """End the server and its actor."""
        atexit.unregister(self.stop)
        if not ray.is_initialized():
            return  # both have ended with Ray
        with suppress(RayError):
            ray.get(self._actor.stop.remote(), timeout=_STOP_S)
        ray.kill(self._actor)


def start_actors(
    model: Path, plan: ServerPlan, token: str, restarts: int, options: Mapping[str, Any], deadline: float
) -> list[ActorServer]:
    """Start servers in actors of the cluster that this process belongs to, or finds, or else starts.

    The files of the folder ``model``, configuration and tokenizer, are sent to them. Ray restarts a dead actor at most
    ``restarts`` times, unless ``options`` has ``max_restarts``. ``deadline`` is one of ``time.monotonic``.
    """
    if not ray.is_initialized():
        ray.init()
    files = {str(path.relative_to(model)): path.read_bytes() for path in model.rglob("[!.]*") if path.is_file()}
    caller = ray.get_runtime_context().get_node_id()
    try:
        kind = ray.remote(Host).options(**{"max_restarts": restarts, **options})
    except (TypeError, ValueError) as error:
        raise ValueError(f"ray is {dict(options)}, which no actor of Ray can have: {error}") from error
    actors: list[Any] = [kind.remote(files, plan, token, caller) for _ in range(plan.num_servers)]
    try:
        return [ActorServer(actor, deadline) for actor in actors]
    except BaseException:
        for actor in actors:
            ray.kill(actor)
        raise


def _last_line(error: Exception) -> str:
    return ([line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__])[-1]
