"""The servers of a run: which are up, how those of this machine are started again, and how all get the same weights."""

from __future__ import annotations

import asyncio
import json
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from lit_grpo.policy.architecture.vision import sees
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.process.calls import EventLoop
from lit_grpo.process.files import PrivateFolder
from lit_grpo.process.terminal import counted, say, warn
from lit_grpo.ranks import Ranks
from lit_grpo.rollout.vllm.arguments import all_draw_by_position, check_drafter, check_version, drafting, dtype_of
from lit_grpo.rollout.vllm.guard import TOKEN_VARIABLE
from lit_grpo.rollout.vllm.http import SERVE, ServerClient, ServerError
from lit_grpo.rollout.vllm.images import check_sees
from lit_grpo.rollout.vllm.process import ServerPlan, ServerProcess
from lit_grpo.rollout.weights.files import weights_folder, write
from lit_grpo.rollout.weights.shipments import Shipment
from lit_grpo.rollout.weights.tensors import SyncReport, WeightSyncError, joined

if TYPE_CHECKING:
    from lit_grpo.rollout.vllm.actors import ActorServer
    from lit_grpo.rollout.vllm.gpus import NCCLGroup
    from lit_grpo.rollout.weights.tensors import Named

_COMPARED = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_REQUIRED: dict[str, tuple[str, tuple[Any, ...], str]] = {
    "logprobs_mode": ("model_config", ("processed_logprobs",), "start it with --logprobs-mode processed_logprobs"),
    "generation_config": ("model_config", ("vllm",), "start it with --generation-config vllm"),
    "override_generation_config": ("model_config", ({}, None), "start it without --override-generation-config"),
    "watermark_config": ("", (None,), "start it without --watermark-config"),
    "kv_transfer_config": ("", (None,), "start it without --kv-transfer-config, which keeps what old weights made"),
}
"""Each setting of a server that decides what is sampled: the part of vLLM's configuration that holds it, the values
that are allowed, and the remedy."""
_DRAFTS_COMPARED = ("method", "num_speculative_tokens", "rejection_sample_method", "prompt_lookup_max")
_LOOK_S = 3.0  # in which a server that is well answers
_POLL_S = 0.2  # between two looks at processes that start
_TEND_S = 1.0  # between two looks at processes
_TELL_S = 5.0  # of a start, after which the user is told who is waited for

_Answer = TypeVar("_Answer")


def check_settings(url: str, config: Mapping[str, Any]) -> None:
    """Raise a ValueError if a server's settings, and not the request alone, would decide what is sampled."""
    for name, (part, allowed, remedy) in _REQUIRED.items():
        holder = config.get(part) if part else config
        value = holder.get(name, allowed[0]) if isinstance(holder, Mapping) else allowed[0]
        if value not in allowed:
            raise ValueError(
                f"The server at {url} has {name} {value!r}, which changes what is sampled or told of it; {remedy}."
            )


def check_server_drafts(url: str, served: Any, given: Mapping[str, Any] | None, policy: PolicySpec) -> None:
    """Raise a ValueError if a server's drafts would change what is sampled, or are not those that the run asks for.

    ``served`` is the server's ``speculative_config``, and ``given`` that of the run, among ``server_args``; a run
    without one takes the server as it is.
    """
    if not isinstance(served, Mapping | None):
        raise ValueError(f"The server at {url} has the speculative_config {served!r}, as no vLLM has. {SERVE}")
    if served:
        check_sees(policy, {"speculative_config": served})
        check_drafter(served, policy, f"At the server {url} speculative_config.")
    told = {name: value for name, value in (served or {}).items() if name in _DRAFTS_COMPARED and value is not None}
    if any(name in _DRAFTS_COMPARED and value != told.get(name) for name, value in (given or {}).items()):
        raise ValueError(
            f"The server at {url} has the speculative_config {told or None}, and server_args.speculative_config is "
            f"{dict(given or {})}; start it with --speculative-config '{json.dumps(given)}', or leave "
            "speculative_config out of server_args."
        )


def wait_for(server: ServerProcess | ActorServer, deadline: float, remedy: str = "") -> None:
    """Wait until a server that is starting answers, or raise a ValueError: it has ended, or does not in time.

    ``deadline`` is one of ``time.monotonic``, and ``remedy`` the user's for a server that does not answer by then.
    """
    tell_at = time.monotonic() + _TELL_S
    while not server.is_ready():
        if (ended := server.failed()) or time.monotonic() >= deadline:
            raise ValueError(server.failure() + ("" if ended else remedy))
        if time.monotonic() >= tell_at:
            tell_at = math.inf
            left = f"up to {deadline - time.monotonic():.0f} s"
            say(f"Waiting {left} for the vLLM server at {server.url} to start; its log is {server.log}", flush=True)
        time.sleep(_POLL_S)


class Introduction:
    """Requirements on a server to decode for a policy.

    Args:
        rank: The rank of the adapters that the server is to take; 0 for none.
        backend: The backend of vLLM's weight transfer that the server must have; empty for files.
        drafting: The ``speculative_config`` that a server named by ``urls`` must have; None for any.
    """

    def __init__(self, policy: PolicySpec, rank: int, backend: str, drafting: Mapping[str, Any] | None) -> None:
        config, tokenizer = policy.config.get_text_config(), policy.tokenizer
        self.policy, self.drafting = policy, drafting
        self.rank, self.backend = rank, backend
        self.fields = {name: getattr(config, name) for name in _COMPARED}
        self.more = {"sees": True} if sees(policy.module) else {}
        self.text = str(tokenizer.decode(list(range(min(config.vocab_size, 200))), skip_special_tokens=True))
        self.text_ids: list[int] = tokenizer.encode(self.text, add_special_tokens=False)


@dataclass(eq=False)
class Server:
    """A server, its process if this run has started it, and what it holds.

    Attributes:
        version: The policy version of its weights; -1 where that is not known.
        up: Whether it is asked for anything.
        answered: Whether it answered the last look, also where it is not this run's.
        starting: Whether its process was started again, and has not answered since.
        holds_base: Whether it has the base weights that adapters need.
        adapter: The server's name for the adapters that it decodes with.
        context: The most tokens of a request.
        kv_tokens: Size of its KV cache in tokens, in blocks of ``block``; ``None`` if the server does not report it.
        keyed: Whether it draws random numbers by position.
    """

    client: ServerClient
    process: ServerProcess | ActorServer | None = None
    version: int = -1
    up: bool = True
    answered: bool = True
    starting: bool = False
    holds_base: bool = False
    adapter: str = ""
    context: int = 0
    kv_tokens: int | None = None
    block: int = 1
    keyed: bool = False

    def kept_log(self) -> str:
        """Say where the output of a process of ours is and keep it, unless another one was started in its place."""
        if self.process is None or self.starting:
            return ""
        self.process.keep_log()  # the process may still run, and would remove it when this run ends it
        return f" What it said is in {self.process.log}."

    def look(self, introduction: Introduction, timeout_s: float) -> None:
        """Find out whether it is up and what it still holds; introduce a server that has been restarted."""
        self.up = self.answered = self.client.answers(timeout_s)
        try:
            if self.up and not self.client.is_ours():
                self.introduce(introduction)
            self.holds_base = self.holds_base and self.up
            if self.holds_base:
                told = self.client.ask("GET", "/weight_info", read=lambda answer: str(answer["weight_version"]))
                self.holds_base = told == self.client.weights
        except (ServerError, ValueError) as error:
            warn(f"A server is left out: {error}", stacklevel=2)
            self.up = False

    def introduce(self, introduction: Introduction) -> None:
        """Take the server for this run, and raise a ValueError if it would sample something else than the policy does.

        Nothing is known of the weights that it holds.
        """
        self.adapter = ""
        self.forget_weights()
        client = self.client
        try:
            client.take()
            version = client.ask("GET", "/version", read=lambda answer: str(answer["version"]))
            check_version(f"The server at {client.url}", version)
            config = client.ask(
                "GET", "/server_info?config_format=json", read=lambda answer: dict(answer["vllm_config"])
            )
            check_settings(client.url, config)
            drafts, given = config.get("speculative_config"), None if self.process else introduction.drafting
            check_server_drafts(client.url, drafts, given, introduction.policy)
            client.model, self.context = client.ask(
                "GET",
                "/v1/models",
                read=lambda answer: (str(answer["data"][0]["id"]), int(answer["data"][0]["max_model_len"])),
            )
            text = {"prompt": introduction.text, "add_special_tokens": False}
            text_ids = client.ask("POST", "/tokenize", text, lambda answer: list(answer["tokens"]))
            client.ask_workers("check_model", fields=introduction.fields, **introduction.more)
        except ServerError as error:
            ours = self.process is not None  # which nobody else starts
            said = f"{error}{self.kept_log()}" if ours else error.with_remedy()
            raise ValueError(said) from error
        if text_ids != introduction.text_ids:
            raise ValueError(
                f"The server at {client.url} has another tokenizer than the policy; start it with the policy's, as "
                "python -m lit_grpo serve does."
            )
        if self._largest_rank(introduction.rank) < introduction.rank:
            raise ValueError(
                f"The server at {client.url} does not take LoRA adapters of rank {introduction.rank}; start it with "
                f"--max-lora-rank {introduction.rank}, or take adapters: merged."
            )
        backend = (config.get("weight_transfer_config") or {}).get("backend", "")
        if introduction.backend and backend != introduction.backend:
            raise ValueError(
                f"The server at {client.url} has the weight transfer {backend or 'none'}; start it with "
                f'--weight-transfer-config \'{{"backend": "{introduction.backend}"}}\', or take transport files.'
            )
        self.block, blocks = int(config["cache_config"]["block_size"]), config["cache_config"]["num_gpu_blocks"]
        self.kv_tokens = None if blocks is None else (int(blocks) - 1) * self.block  # one block is a placeholder

    def _largest_rank(self, wanted: int) -> int:
        try:
            return min(int(rank) for rank in self.client.ask_workers("max_adapter_rank")) if wanted else 0
        except ServerError:
            return 0

    def lose(self) -> None:
        """Leave it out, until a look finds it well again."""
        self.up = False
        self.forget_weights()

    def forget_weights(self) -> None:
        self.version, self.holds_base = -1, False

    # ---- weights ------------------------------------------------------------------------------------

    def reload(self, version: int, **source: Any) -> dict[str, str]:
        """Load all weights, as :meth:`lit_grpo.rollout.vllm.worker.WorkerExtension.reload` does; return its digests."""
        self.forget_weights()
        with self.paused():
            held = self.client.ask_workers("reload", **source)
        self.settle(version)
        self.holds_base = True
        return joined(held)

    def exchange(self, folder: str, version: int) -> dict[str, str]:
        """Take new adapters from a folder in the place of the old ones; return the digests of what the workers hold."""
        self.version = -1
        new, old = f"version-{version}-{Path(folder).name}", self.adapter
        self.client.ask("POST", "/v1/load_lora_adapter", {"lora_name": new, "lora_path": folder}, engine_works=True)
        self.adapter = self.client.model = new
        if old:
            self.client.ask("POST", "/v1/unload_lora_adapter", {"lora_name": old}, engine_works=True)
        held = self.client.ask_workers("adapter_digests", folder=folder)
        self.settle(version)
        return joined(held)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Decode nothing for a while: the server may not have heard yet of requests that were withdrawn."""
        self.client.ask("POST", "/pause?mode=abort&clear_cache=false")
        try:
            yield
        except BaseException as error:
            if not (isinstance(error, ServerError) and error.kind == "hung"):
                with suppress(ServerError):
                    self.client.ask("POST", "/resume")
            raise
        self.client.ask("POST", "/resume")

    def settle(self, version: int) -> None:
        """Give the weights a name, and let the workers draw by position, which a new process does not do yet."""
        try:
            answers = [answer == "True" for answer in self.client.ask_workers("draw_by_position")]
        except ServerError:  # the server has another worker_extension_cls, or none
            answers = [False]
        self.keyed = all_draw_by_position(answers)
        self.client.weights = f"{version}-{token_hex(4)}"  # of these weights alone, also if others had this version
        self.client.ask("POST", "/update_weight_version", {"new_version": self.client.weights}, engine_works=True)
        self.version = version


@dataclass(eq=False, kw_only=True)
class Fleet:
    """The servers of one rank; :class:`lit_grpo.rollout.vllm.server.VLLMServerGenerator` describes most arguments.

    Args:
        sends_changes: Whether a sync sends only changes, if all servers hold the weights sent before.
        over_nccl: Whether weights are sent over NCCL instead of in files.
        timeout_s: Max seconds of silence of a server (:class:`lit_grpo.rollout.vllm.http.Watch`).
        ray: Options of Ray actors; None for processes on this machine.
        restarts: Number of restarts left.
    """

    num_slots: int
    num_servers: int = 1
    devices: list[str] | None = None
    urls: list[str] | None = None
    sends_changes: bool = False
    over_nccl: bool = False
    weights_folder: str | None = None
    timeout_s: float = 60.0
    start_timeout_s: float = 300.0
    ray: dict[str, Any] | None = None
    restarts: int = 0
    token: str = field(default="", init=False)
    loop: EventLoop = field(default_factory=EventLoop, init=False)
    _servers: list[Server] = field(default_factory=list, init=False)
    _held: dict[str, torch.Tensor] = field(default_factory=dict, init=False)  # by all servers, where changes are sent
    _version: int = field(default=-1, init=False)
    _group: NCCLGroup | None = field(default=None, init=False)
    _restarts_lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    @property
    def alive(self) -> list[Server]:
        return [server for server in self._servers if server.up]

    @property
    def context(self) -> int:
        """The most tokens of a request that every server takes."""
        return min(server.context for server in self.alive or self._servers)

    # ---- which are up -------------------------------------------------------------------------------

    def muster(self) -> None:
        """Between two rollouts: leave out servers that are not well, and start ours again.

        A server that was up has the patience of its watch to answer, and one that was not a short time; if none
        answers, each has what is left of ``timeout_s``. A process of ours that does not answer is ended and started
        again, if it was left out before or if no other server is up. Nobody waits for it, unless no server is up: then
        the first that answers is waited for.
        """
        were_up = set(self.alive)
        self._look_at({each: each.client.watch.patience_s if each.up else _LOOK_S for each in self._servers})
        if not self.alive:
            left_s = {each: self.timeout_s - each.client.watch.lost_s for each in self._servers}
            self._look_at({server: left for server, left in left_s.items() if left > 0.0})
        for server in self._servers:
            if server.answered or server.starting:
                continue
            if server in were_up and (server.process is None or server.process.runs):
                warn(
                    f"The vLLM server at {server.client.url} is left out: it, or its engine, has not answered for "
                    f"{server.client.watch.lost_s:.0f} s.{server.kept_log()}",
                    stacklevel=2,
                )
                if self.alive:
                    continue  # it may only be slow
            self._start_again(server)
        began, tell_s = time.monotonic(), 0.0
        while not self.alive and (waited_for := [server for server in self._servers if server.starting]):
            waited_s = time.monotonic() - began
            if waited_s > self.start_timeout_s:
                return
            if waited_s >= tell_s:
                tell_s = 2 * waited_s + 5.0
                urls = " and ".join(f"{each.client.url} (its log is {each.process.log})" for each in waited_for)  # pyrefly: ignore[missing-attribute]
                warn(
                    f"No vLLM server is up. The run waits for {urls}, and goes on with the first that answers; "
                    f"{waited_s:.0f} s of at most {self.start_timeout_s:g} s have passed.",
                    stacklevel=2,
                )
            self._look_at(dict.fromkeys(waited_for, self.timeout_s))
            time.sleep(_POLL_S)

    def _look_at(self, timeouts_s: Mapping[Server, float]) -> None:
        """Look at servers, all at the same time, each with its own time to answer."""
        with ThreadPoolExecutor(max(len(timeouts_s), 1)) as pool:
            list(pool.map(self._look, timeouts_s, timeouts_s.values()))

    def _look(self, server: Server, timeout_s: float) -> None:
        process = server.process
        if process is not None and not server.up:  # it may have been started again, by Ray too
            if server.starting and process.failed():
                server.starting = False
                warn(process.failure(), stacklevel=2)
                self._start_again(server)
                return
            if not process.is_ready():
                server.answered = False
                return
            server.starting = False
            if process.url != server.client.url:
                server.client.leave()  # another program may be at the old address, and would hear the token
                server.client = self._client(process.url)
        server.look(self._introduction, timeout_s)

    def _start_again(self, server: Server) -> None:
        """End a process of ours that has ended or hung, and start it again without waiting for it."""
        with self._restarts_lock:
            if server.process is None or server.starting or self.restarts < 1 or server not in self._servers:
                return
            self.restarts -= 1
            server.lose()
            said = f"The vLLM server at {server.client.url} has ended or hung.{server.kept_log()}"
            try:
                server.process, server.starting = server.process.again(), True
            except ValueError as error:
                warn(f"{said} It is not started again: {error}", stacklevel=2)
                return
            self._end_with_us(server.process)
        warn(
            f"{said} It is started again, and decodes after a sync that finds it up ("
            f"{counted(self.restarts, 'restart')} left).",
            stacklevel=2,
        )

    # ---- start and end ------------------------------------------------------------------------------

    def start(self, policy: PolicySpec, server_args: Mapping[str, Any]) -> None:
        """Start the servers, or look at those named by ``urls``, and take all of them for this run."""
        self._stop()
        self._run, self._policy, self._dtype = token_hex(8), policy, dtype_of(server_args)
        backend = ("sparse_nccl" if self.sends_changes else "nccl") if self.over_nccl else ""
        transfer = {"weight_transfer_config": {"backend": backend}} if backend else {}
        try:
            if self.urls:
                weakref.finalize(self, self.loop.close)
                self._name(self.urls)
            else:
                self._start_own(policy, transfer | dict(server_args))
            self._introduction = Introduction(
                policy, server_args.get("max_lora_rank", 0), backend, drafting(server_args)
            )
            for server in self._servers:
                server.introduce(self._introduction)
            for server in self._servers:  # until then a failure ends the start, and no server stands in for another
                server.up = True
            self.loop.begin(_tend(weakref.ref(self)))
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
        ranks = Ranks()
        if len(urls) < ranks.size:
            raise ValueError(
                f"urls names {counted(len(urls), 'server')} for {ranks.size} ranks; each rank needs one of its own."
            )
        self._servers = [Server(self._client(url), up=False) for url in urls[ranks.rank :: ranks.size]]
        for server in self._servers:
            server.client.check_guarded()

    def _client(self, url: str) -> ServerClient:
        client = ServerClient(url, self.token, self._run, self.timeout_s, self.loop)
        fleet = weakref.ref(self)

        def is_last() -> bool:
            others = [each.client for each in getattr(fleet(), "alive", ()) if each.client is not client]
            return all(other.watch.is_silent for other in others)

        client.watch.is_last = is_last
        return client

    def _start_own(self, policy: PolicySpec, server_args: Mapping[str, Any]) -> None:
        on_gpu = torch.cuda.is_available() if self.ray is None else bool(self.ray.get("num_gpus"))
        plan = ServerPlan(policy, self.num_slots, server_args, on_gpu, self.num_servers)
        self.token = token_hex(32)
        self._folder = PrivateFolder("lit_grpo_vllm_")
        policy.save_skeleton(self._folder.path)
        deadline = time.monotonic() + self.start_timeout_s
        processes: Iterable[ServerProcess | ActorServer]
        if self.ray is None:
            visible = [{"CUDA_VISIBLE_DEVICES": devices} for devices in self.devices or []] or [{}] * self.num_servers
            processes = (plan.start(self._folder.path, self.token, variables) for variables in visible)
        else:
            from lit_grpo.rollout.vllm.actors import start_actors

            processes = start_actors(self._folder.path, plan, self.token, self.restarts, self.ray, deadline)
        for process in processes:
            self._end_with_us(process)
            self._servers.append(Server(self._client(process.url), process, up=False))
        for server in self._servers:
            assert server.process is not None
            wait_for(server.process, deadline, " Raise start_timeout_s if it is only slow.")

    def _end_with_us(self, process: ServerProcess | ActorServer) -> None:
        """End a server with this process, after the connections, which it would wait for."""
        weakref.finalize(self, process.stop)
        weakref.finalize(self, self.loop.close)  # what comes last is done first

    def release(self) -> None:
        """Let other runs have the servers, until the next look."""
        with ThreadPoolExecutor(max(len(self._servers), 1)) as pool:
            list(pool.map(lambda server: server.client.release(), self._servers))

    def _stop(self) -> None:
        self._leave_group()
        self.release()
        with self._restarts_lock:
            servers, self._servers = self._servers, []
        for server in servers:
            if server.process is not None:
                server.process.stop()
        self.loop.close()

    # ---- weights ------------------------------------------------------------------------------------

    def load_weights(self, weights: Iterable[Named], version: int) -> SyncReport:
        """Bring weights to all servers that answer, which then hold the same; leave out others until the next sync."""
        self.muster()
        known = bool(self._held) and all(server.version == self._version >= 0 for server in self.alive)
        shipment = Shipment(weights, self._held if self.sends_changes else None, self.sends_changes and known)
        if self.over_nccl:
            answers = self._send_over_nccl(shipment, version)
        else:
            with weights_folder(self.weights_folder) as folder:
                path = folder / "weights.safetensors"
                write(shipment, path)
                source = {"source": str(path), "changes": shipment.changes, "keeps": self.sends_changes}
                answers = self._ask_all(lambda server: server.reload(version, **source))
        self._version = version
        return SyncReport(_agreed(answers), shipment.num_bytes, shipment.changed_share)

    def _send_over_nccl(self, shipment: Shipment, version: int) -> dict[Server, dict[str, str]]:
        """Send weights from GPU to GPU, to all servers at once; one that fails fails the sync."""
        from lit_grpo.rollout.vllm.gpus import NCCLGroup

        servers = self.alive
        try:
            with ExitStack() as pauses:
                for server in servers:
                    server.forget_weights()
                    pauses.enter_context(server.paused())
                    server.client.ask_workers("begin_update", patches=self.sends_changes)
                clients = [server.client for server in servers]
                if self._group is None or self._group.clients != clients:
                    self._leave_group()
                    outline = self._policy.weights(dtype=self._dtype).outline
                    self._group = NCCLGroup(clients, outline, self.sends_changes, self._policy.device)
                self._group.send(shipment)
                answers = {server: joined(server.client.ask_workers("end_update")) for server in servers}
            for server in servers:
                server.settle(version)
                server.holds_base = True
        except Exception as error:
            self._leave_group()
            if isinstance(error, WeightSyncError):
                raise
            raise WeightSyncError(f"The policy's weights could not be sent over NCCL: {error}") from error
        return answers

    def _leave_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def exchange(self, folder: Path, version: int) -> dict[str, str]:
        """Bring adapters to all servers that have the base weights; return their digests, which are the same."""
        self.muster()
        for server in self.alive:
            if not server.holds_base:
                server.lose()
        return _agreed(self._ask_all(lambda server: server.exchange(str(folder), version)))

    def lacks_base(self) -> bool:
        """Return whether a server has no base weights for adapters, such as one that was restarted."""
        self.muster()
        return not all(server.holds_base for server in self.alive)

    def forget_weights(self) -> None:
        for server in self._servers:
            server.forget_weights()

    def score(self, sequences: Sequence[Sequence[int]], salt: str) -> dict[str, list[list[float]]]:
        """Return the log-probs of all tokens after the first of each sequence, by each server's name."""
        scores = self._ask_all(lambda server: server.client.score(sequences, salt))
        return {f"the vLLM server at {server.client.url}": rows for server, rows in scores.items()}

    def _ask_all(self, call: Callable[[Server], _Answer]) -> dict[Server, _Answer]:
        """Call for all servers that are up at the same time; those that fail are left out, unless all do."""
        answers: dict[Server, _Answer] = {}
        failures: list[str] = []
        with ThreadPoolExecutor(max(len(self.alive), 1)) as pool:
            pending = {server: pool.submit(call, server) for server in self.alive}
        for server, answer in pending.items():
            try:
                answers[server] = answer.result()
            except ServerError as error:
                server.lose()
                failures.append(f"{error}{server.kept_log()}")
        if failures and not answers:
            raise WeightSyncError(f"The policy's weights could not be loaded: {failures[0]}")
        for failure in failures:
            warn(f"A server is left out until a sync finds it well: {failure}", stacklevel=2)
        if not answers:
            logs = "".join(server.kept_log() for server in self._servers)
            raise WeightSyncError(f"No vLLM server took the policy's weights: none is up with what they need.{logs}")
        return answers


async def _tend(found: weakref.ref[Fleet]) -> None:
    """Start processes of this machine again as soon as they have ended, as long as there is a fleet."""
    while (fleet := found()) is not None:
        for server in list(fleet._servers):
            if isinstance(server.process, ServerProcess) and not (server.starting or server.process.runs):
                await asyncio.to_thread(fleet._start_again, server)
        del fleet
        await asyncio.sleep(_TEND_S)


def _agreed(answers: Mapping[Server, dict[str, str]]) -> dict[str, str]:
    first, *others = answers.values()
    if any(digests != first for digests in others):
        raise WeightSyncError("The vLLM servers have bound different weights.")
    return first
