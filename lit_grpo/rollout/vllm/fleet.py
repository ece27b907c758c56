"""The servers of a run: which are up, what they hold, and how they are brought up to date together."""

from __future__ import annotations

import os
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import Any, TypeVar

import torch

from lit_grpo.policy.spec import PolicySpec
from lit_grpo.rollout.vllm.arguments import (
    check_on_cpu,
    require_vllm,
    server_arguments,
    server_environment,
)
from lit_grpo.rollout.vllm.guard import TOKEN_VARIABLE
from lit_grpo.rollout.vllm.http import EventLoop, ServerClient, ServerError
from lit_grpo.rollout.vllm.members import Introduction, Server
from lit_grpo.rollout.vllm.process import ServerProcess
from lit_grpo.rollout.vllm.transports import Transport
from lit_grpo.rollout.weights.files import PrivateFolder
from lit_grpo.rollout.weights.shipments import Shipment
from lit_grpo.rollout.weights.tensors import SyncReport, WeightSyncError

_LOOK_S = 3.0  # in which a server that is well answers
_ENDING_S = 0.2  # in which the process ends of one whose connections have ended with it


Answer = TypeVar("Answer")


@dataclass(eq=False)
class Fleet:
    """See :class:`lit_grpo.rollout.vllm.server.VLLMServerGenerator` for the arguments."""

    num_slots: int
    num_servers: int
    devices: list[str] | None
    urls: list[str] | None
    sends_changes: bool
    transport: Transport
    timeout_s: float
    start_timeout_s: float
    ray: dict[str, Any] | None
    restarts: int = 0
    token: str = ""
    loop: EventLoop = field(default_factory=EventLoop)
    _servers: list[Server] = field(default_factory=list)
    _held: dict[str, torch.Tensor] = field(default_factory=dict)
    _version: int = -1
    _starting_again: list[Server] = field(default_factory=list)

    @property
    def alive(self) -> list[Server]:
        """The servers that have not failed."""
        return [server for server in self._servers if server.up]

    @property
    def context(self) -> int:
        """The most tokens of a request, on any of them."""
        return min(server.context for server in self.alive or self._servers)

    @property
    def clients(self) -> list[ServerClient]:
        """All of them."""
        return [server.client for server in self._servers]

    # ---- start ------------------------------------------------------------------------------------

    def start(self, policy: PolicySpec, server_args: Mapping[str, Any]) -> None:
        """Start the servers, or look at those named; either way they are taken for this run.

        Raises:
            ValueError: One cannot be started, does not answer, or does not decode for the policy.
        """
        self._stop()
        weakref.finalize(self, self.loop.close)
        self._run = token_hex(8)
        try:
            if self.urls:
                self._name(self.urls)
            else:
                self._start_own(policy, server_args)
            self._introduction = Introduction(policy, server_args.get("max_lora_rank", 0))
            for server in self._servers:
                server.introduce(self._introduction)
        except BaseException:
            self._stop()
            raise

    def _name(self, urls: list[str]) -> None:
        self.token = os.environ.get(TOKEN_VARIABLE, "")
        if not self.token:
            raise ValueError(
                f"urls names servers, but {TOKEN_VARIABLE} is not set; set it to the token that python -m lit_grpo "
                "serve has named."
            )
        self._servers = [Server(self._client(url)) for url in _own_share(urls)]
        for server in self._servers:
            server.client.check_guarded()

    def _client(self, url: str) -> ServerClient:
        return ServerClient(url, self.token, self._run, self.timeout_s, self.loop)

    def _start_own(self, policy: PolicySpec, server_args: Mapping[str, Any]) -> None:
        require_vllm()
        on_gpu = torch.cuda.is_available() if self.ray is None else bool(self.ray.get("num_gpus"))
        if not on_gpu:
            check_on_cpu(policy.config.get_text_config(), server_args)
        self.token = token_hex(32)
        self._folder = PrivateFolder("lit_grpo_vllm_")
        policy.save_skeleton(self._folder.path)
        dtype = str(policy.dtype).removeprefix("torch.")
        deadline = time.monotonic() + self.start_timeout_s
        sizes = (dtype, self.num_slots, self.num_servers)
        if self.ray is None:
            processes = self._processes(server_arguments(*sizes) | dict(server_args))
        else:
            from lit_grpo.rollout.vllm.actors.server import start_actors

            processes = start_actors(self._folder.path, *sizes, server_args, self.token, self.ray, deadline)
        for process in processes:
            weakref.finalize(self, process.stop)
            self._servers.append(Server(self._client(process.url), process))
        for server in self._servers:
            assert server.process is not None
            server.process.wait(deadline)

    def _processes(self, arguments: Mapping[str, Any]) -> Iterator[ServerProcess]:
        """Start servers on this machine, one after another."""
        environment = server_environment(self.num_servers)
        for number in range(self.num_servers):
            visible = {} if self.devices is None else {"CUDA_VISIBLE_DEVICES": self.devices[number]}
            yield ServerProcess(self._folder.path, arguments, environment | visible, self.token)

    # ---- weights ----------------------------------------------------------------------------------

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> SyncReport:
        """Bring all servers that answer up to date; those that do not are left out until the next time.

        Raises:
            WeightSyncError: No server took the weights, or not all of them bound the same.
        """
        self._look()
        known = bool(self._held) and all(server.version == self._version >= 0 for server in self.alive)
        shipment = Shipment(weights, self._held if self.sends_changes else None, self.sends_changes and known)
        about = {"keeps": self.sends_changes, "changes": shipment.changes}
        answers = self.transport.send(
            shipment, lambda server, where: server.update({**where, **about}, version), self._ask_all
        )
        self._version = version
        return SyncReport(_agreed(answers), shipment.num_bytes, shipment.changed_share)

    def exchange(self, folder: Path, version: int) -> dict[str, str]:
        """Bring adapters to all servers that have the weights that they stand beside; return their digests.

        Raises:
            WeightSyncError: No server took them, or not all of them hold the same.
        """
        self._look()
        for server in self.alive:
            server.up = server.holds_base
        answers = self.transport.send_folder(
            folder, lambda server, where: server.exchange(where, version), self._ask_all
        )
        return _agreed(answers)

    def lacks_base(self) -> bool:
        """Whether there is a server without the weights that adapters stand beside, such as one that began anew."""
        self._look()
        return not all(server.holds_base for server in self.alive)

    def forget_weights(self) -> None:
        """Take it that no server holds weights of the policy."""
        for server in self._servers:
            server.version, server.holds_base = -1, False

    def _look(self) -> None:
        """See which servers are up, all at the same time.

        Those that were have the whole time-out to answer, and those that were not a short one, unless none answers. A
        process of ours that did not answer before, and does not now, is ended and started again.
        """
        were_up = set(self.alive)
        were_down = [server for server in self._servers if server not in were_up]
        short_s = min(_LOOK_S, self.timeout_s)
        self._look_at({server: self.timeout_s if server in were_up else short_s for server in self._servers})
        if not self.alive:
            self._look_at(dict.fromkeys(were_down, self.timeout_s))
        self._starting_again = [server for server in self._starting_again if not server.up]
        for server in self._servers:
            if server.up:
                continue
            if server.hung and server in were_up:
                warnings.warn(
                    f"The vLLM server at {server.client.url} is left out: it, or its engine, has not answered for "
                    f"{self.timeout_s:g} s.{server.log}",
                    stacklevel=2,
                )
            if said := self.restart(server, server.hung and server not in were_up):
                warnings.warn(f"The vLLM server at {server.client.url} has ended or hung.{said}", stacklevel=2)
        self._wait_for_restarted()

    def _look_at(self, timeouts_s: Mapping[Server, float]) -> None:
        """Look at servers, all at the same time, each with its own time to answer."""
        with ThreadPoolExecutor(max(len(timeouts_s), 1)) as pool:
            looks = [
                pool.submit(server.look, self._introduction, timeout_s) for server, timeout_s in timeouts_s.items()
            ]
        for look in looks:
            look.result()

    def restart(self, server: Server, hung: bool = False) -> str:
        """Start a server of ours again that has ended or ``hung``, and go on meanwhile; return what to say of it."""
        process = server.process
        if not isinstance(process, ServerProcess) or self.restarts < 1:
            return ""
        if hung and server not in self._starting_again:
            process.kill()
        if not process.has_ended(_ENDING_S):
            return ""
        self.restarts -= 1
        try:
            server.process = process.again()
        except ValueError as error:
            return f" It is not started again: {error}"
        weakref.finalize(self, server.process.stop)
        if server.process.url != server.client.url:
            server.client.leave()  # another program is at the address, and would hear the token
            server.client = self._client(server.process.url)
        if server not in self._starting_again:
            self._starting_again.append(server)
        return f" It is started again, and decodes after a sync that finds it up ({self.restarts} restarts are left)."

    def _wait_for_restarted(self) -> None:
        """Where no server is up, wait for those that have been started again, until one is or none can be."""
        deadline = time.monotonic() + self.start_timeout_s
        while self._starting_again and not self.alive:
            server = self._starting_again.pop(0)
            assert server.process is not None
            try:
                server.process.wait(deadline)
            except ValueError as error:
                warnings.warn(f"{error}{self.restart(server)}", stacklevel=2)
            else:
                server.look(self._introduction, self.timeout_s)

    def score(self, sequences: Sequence[Sequence[int]], salt: str) -> dict[str, list[list[float]]]:
        """Return the log-probs of all tokens after the first of each sequence, by each server's name.

        Raises:
            WeightSyncError: No server answers.
        """
        scores = self._ask_all(lambda server: server.client.score(sequences, salt))
        return {f"the vLLM server at {server.client.url}": rows for server, rows in scores.items()}

    def _ask_all(
        self,
        call: Callable[[Server], Answer],
        meanwhile: Callable[[Callable[[Server], bool]], None] = lambda listens: None,
    ) -> dict[Server, Answer]:
        """Call for all servers that are up at the same time; those that fail are left out, unless all do.

        In between, ``meanwhile`` is called with what tells whether a server is still at it.
        """
        answers: dict[Server, Answer] = {}
        failures: list[str] = []
        with ThreadPoolExecutor(max(len(self.alive), 1)) as pool:
            pending = {server: pool.submit(call, server) for server in self.alive}
            meanwhile(lambda server: not pending[server].done())
            for server, answer in pending.items():
                try:
                    answers[server] = answer.result()
                except ServerError as error:
                    server.lose()
                    failures.append(f"{error}{server.log}")
        if failures and not answers:
            raise WeightSyncError(f"The policy's weights could not be loaded: {failures[0]}")
        if not answers:
            logs = "".join(server.log for server in self._servers)
            raise WeightSyncError(f"No vLLM server took the policy's weights: none is up with what they need.{logs}")
        return answers

    # ---- end --------------------------------------------------------------------------------------

    def release(self) -> None:
        """Let other runs have the servers, until the next look."""
        for server in self._servers:
            server.client.release()

    def _stop(self) -> None:
        for server in self._servers:
            server.client.release()
            if server.process is not None:
                server.process.stop()
        self._servers = []
        self.loop.close()


def _agreed(answers: Mapping[Server, dict[str, str]]) -> dict[str, str]:
    """Return what all servers hold.

    Raises:
        WeightSyncError: Not all of them hold the same.
    """
    first, *others = answers.values()
    if any(digests != first for digests in others):
        raise WeightSyncError("The vLLM servers have bound different weights.")
    return first


def _own_share(urls: list[str]) -> list[str]:
    """The servers of this rank."""
    if not torch.distributed.is_initialized():
        return urls
    rank, num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if len(urls) < num_ranks:
        raise ValueError(f"urls names {len(urls)} servers for {num_ranks} ranks; each rank needs one of its own.")
    return urls[rank::num_ranks]
