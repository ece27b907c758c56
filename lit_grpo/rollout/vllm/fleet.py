"""One server of a fleet: what it holds, and how it is brought up to date."""

from __future__ import annotations

import os
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from lit_grpo.policy.spec import PolicySpec
from lit_grpo.rollout.vllm.arguments import (
    all_draw_by_position,
    check_on_cpu,
    require_vllm,
    server_arguments,
    server_environment,
)
from lit_grpo.rollout.vllm.guard import TOKEN_VARIABLE
from lit_grpo.rollout.vllm.http import EventLoop, ServerClient, ServerError
from lit_grpo.rollout.vllm.introduction import Introduction
from lit_grpo.rollout.vllm.process import ServerProcess
from lit_grpo.rollout.weights.files import PrivateFolder, weights_folder, write_full, write_patch
from lit_grpo.rollout.weights.tensors import SyncReport, WeightSyncError, joined

if TYPE_CHECKING:
    from lit_grpo.rollout.vllm.actors.server import ActorServer

_LOOK_S = 3.0  # in which a server that is well answers


@dataclass(eq=False)
class Server:
    """A server, with its process where it is ours, and the policy version that it holds.

    With adapters alone, ``holds_base`` tells whether it has the weights that they stand beside, and ``adapter`` what it
    calls the one that it decodes with. ``kv_tokens`` in blocks of ``block`` are its memory for keys and values, as far
    as it tells, and ``keyed`` says that it draws random numbers by position.
    """

    client: ServerClient
    process: ServerProcess | ActorServer | None = None
    version: int = -1
    up: bool = True
    holds_base: bool = False
    adapter: str = ""
    context: int = 0
    kv_tokens: int | None = None
    block: int = 1
    keyed: bool = False

    def is_well(self) -> bool:
        """Whether it runs, answers, and is as we left it."""
        return (self.process is None or self.process.runs) and self.client.answers() and self.client.is_ours()

    def look(self, introduction: Introduction, timeout_s: float) -> None:
        """Find out whether it is up, and still holds what it was sent last; introduce it anew where it began anew."""
        self.up = (self.process is None or self.process.runs) and self.client.answers(timeout_s)
        try:
            if self.up and not self.client.is_ours():
                self.introduce(introduction)
            if self.holds_base:
                self.holds_base = self.up and self._reported_version() == str(self.version)
        except (ServerError, ValueError) as error:
            warnings.warn(f"A server is left out: {error}", stacklevel=2)
            self.up = False

    def introduce(self, introduction: Introduction) -> None:
        """Take it for this run, with nothing known of what it holds.

        Raises:
            ValueError: It serves another model, or not for us.
        """
        self.version, self.holds_base, self.adapter = -1, False, ""
        offer = introduction.of(self.client)
        self.context, self.kv_tokens, self.block = offer.context, offer.kv_tokens, offer.block

    def lose(self) -> None:
        """Leave it out, until a look finds it well again."""
        self.up, self.version, self.holds_base = False, -1, False

    @property
    def log(self) -> str:
        """Where to read of a server of ours; one that has just broken off may not have ended yet."""
        return "" if self.process is None else f" What it said is in {self.process.log}."

    def _reported_version(self) -> str:
        try:
            return self.client.get("/weight_info")["weight_version"]
        except ServerError:
            return ""

    def update(self, path: Path, version: int, patches_follow: bool) -> dict[str, str]:
        """Load the weights of a file; return the digests of what all workers hold."""
        self.version, self.holds_base = -1, False
        info = {"path": str(path), "patches_follow": patches_follow}
        with self._paused():
            self.client.post("/start_weight_update")
            self.client.post("/update_weights", {"update_info": info})
            self.client.post("/finish_weight_update", {"weight_version": str(version)})
        self._settle(version)
        held = self.client.ask_workers("held_digests")
        self.version, self.holds_base = version, True
        return joined(held)

    def exchange(self, folder: Path, version: int) -> dict[str, str]:
        """Take another adapter, by another name; return the digests of what the workers hold of it."""
        self.version = -1
        new, old = f"version-{version}-{folder.name}", self.adapter
        self.client.post("/v1/load_lora_adapter", {"lora_name": new, "lora_path": str(folder)})
        self.adapter = self.client.model = new
        if old:
            self.client.post("/v1/unload_lora_adapter", {"lora_name": old})
        self.client.post("/update_weight_version", {"new_version": str(version)})
        self._settle(version)
        self.client.ask_workers("compute_head_plainly")
        held = self.client.ask_workers("adapter_digests", str(folder))
        self.version = version
        return joined(held)

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Decode nothing for a while: what has been withdrawn may not have heard of it yet."""
        self.client.post("/pause?mode=abort&clear_cache=false")
        try:
            yield
        finally:
            with suppress(ServerError):  # it will not answer then either
                self.client.post("/resume")

    def _settle(self, version: int) -> None:
        """Compare versions, and see to random numbers, which a server that began anew draws in its own way."""
        try:
            self.keyed = all_draw_by_position(
                answer == "True" for answer in self.client.ask_workers("draw_by_position")
            )
        except ServerError:  # it has another worker_extension_cls, or none
            self.keyed = all_draw_by_position([False])
        reported = self.client.get("/weight_info")["weight_version"]
        if reported != str(version):
            raise WeightSyncError(
                f"The vLLM server at {self.client.url} says that its weights are version {reported}, where the "
                f"policy's are {version}."
            )


Answer = TypeVar("Answer")


@dataclass(eq=False)
class Fleet:
    """See :class:`lit_grpo.rollout.vllm.server.VLLMServerGenerator` for the arguments."""

    num_slots: int
    num_servers: int
    devices: list[str] | None
    urls: list[str] | None
    sends_changes: bool
    weights_folder: str | None
    timeout_s: float
    start_timeout_s: float
    ray: dict[str, Any] | None
    token: str = ""
    loop: EventLoop = field(default_factory=EventLoop)
    _servers: list[Server] = field(default_factory=list)
    _held: dict[str, torch.Tensor] = field(default_factory=dict)
    _version: int = -1

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
        with weights_folder(self.weights_folder) as folder:
            path = folder / "weights.safetensors"
            num_bytes, changed = self._write(weights, path)
            digests = self._agreed(lambda server: server.update(path, version, self.sends_changes))
        self._version = version
        return SyncReport(digests, num_bytes, changed)

    def exchange(self, folder: Path, version: int) -> dict[str, str]:
        """Bring adapters to all servers that have the weights that they stand beside; return their digests.

        Raises:
            WeightSyncError: No server took them, or not all of them hold the same.
        """
        self._look()
        for server in self.alive:
            server.up = server.holds_base
        return self._agreed(lambda server: server.exchange(folder, version))

    def lacks_base(self) -> bool:
        """Whether there is a server without the weights that adapters stand beside, such as one that began anew."""
        self._look()
        return not all(server.holds_base for server in self.alive)

    def forget_weights(self) -> None:
        """Take it that no server holds weights of the policy."""
        for server in self._servers:
            server.version, server.holds_base = -1, False

    def _look(self) -> None:
        """See which servers are up, all at the same time: shortly, or, where none answers, with the whole time-out."""
        for timeout_s in (min(_LOOK_S, self.timeout_s), self.timeout_s):
            with ThreadPoolExecutor(len(self._servers)) as pool:
                looks = [pool.submit(server.look, self._introduction, timeout_s) for server in self._servers]
            for look in looks:
                look.result()
            if self.alive:
                break

    def _write(self, weights: Iterable[tuple[str, torch.Tensor]], path: Path) -> tuple[int, float]:
        """Write what the servers need to know; changes only where all of them hold what was sent last."""
        known = self._held and all(server.version == self._version >= 0 for server in self.alive)
        if self.sends_changes and known:
            return write_patch(weights, self._held, path)
        held = self._held if self.sends_changes else None
        return write_full(weights, path, held), 1.0

    def score(self, sequences: Sequence[Sequence[int]], salt: str) -> dict[str, list[list[float]]]:
        """Return the log-probs of all tokens after the first of each sequence, by each server's name.

        Raises:
            WeightSyncError: No server answers.
        """
        scores = self._ask_all(lambda server: server.client.score(sequences, salt))
        return {f"the vLLM server at {server.client.url}": rows for server, rows in scores.items()}

    def _agreed(self, call: Callable[[Server], dict[str, str]]) -> dict[str, str]:
        """Call for all servers that are up, and return the digests, on which all must agree."""
        first, *others = self._ask_all(call).values()
        if any(digests != first for digests in others):
            raise WeightSyncError("The vLLM servers have bound different weights.")
        return first

    def _ask_all(self, call: Callable[[Server], Answer]) -> dict[Server, Answer]:
        """Call for all servers that are up at the same time; those that fail are left out, unless all do."""
        answers: dict[Server, Answer] = {}
        failures: list[str] = []
        with ThreadPoolExecutor(max(len(self.alive), 1)) as pool:
            pending = [(server, pool.submit(call, server)) for server in self.alive]
            for server, answer in pending:
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


def _own_share(urls: list[str]) -> list[str]:
    """The servers of this rank."""
    if not torch.distributed.is_initialized():
        return urls
    rank, num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if len(urls) < num_ranks:
        raise ValueError(f"urls names {len(urls)} servers for {num_ranks} ranks; each rank needs one of its own.")
    return urls[rank::num_ranks]
