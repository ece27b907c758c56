"""One server of a fleet: what it holds, and how it is brought up to date."""

from __future__ import annotations

import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from lit_grpo.policy.spec import PolicySpec
from lit_grpo.rollout.vllm.arguments import (
    all_draw_by_position,
    check_head_size,
    require_vllm,
    server_arguments,
    server_environment,
)
from lit_grpo.rollout.vllm.http import ServerClient, ServerError
from lit_grpo.rollout.vllm.process import ServerProcess
from lit_grpo.rollout.weights.files import weights_folder, write_full, write_patch
from lit_grpo.rollout.weights.tensors import SyncReport, WeightSyncError, joined


@dataclass(eq=False)
class Server:
    """A server, with its process where it is ours, and the policy version that it holds.

    With adapters alone, ``holds_base`` tells whether it has the weights that they stand beside, and ``adapter`` what it
    calls the one that it decodes with. ``kv_tokens`` in blocks of ``block`` are its memory for keys and values, as far
    as it tells, and ``keyed`` says that it draws random numbers by position.
    """

    client: ServerClient
    process: ServerProcess | None = None
    version: int = -1
    up: bool = True
    holds_base: bool = False
    adapter: str = ""
    kv_tokens: int | None = None
    block: int = 1
    keyed: bool = False

    def is_well(self) -> bool:
        """Whether it runs and answers."""
        if self.process is not None and self.process.process.poll() is not None:
            return False
        return self.client.answers()

    def look(self) -> None:
        """Find out whether it is up, and whether it still holds what it was sent last."""
        self.up = self.is_well()
        if self.holds_base:
            self.holds_base = self.up and self._reported_version() == str(self.version)

    def introduce(self) -> int:
        """Ask for its model's name and its memory; return the most tokens of a request."""
        model = self.client.get("/v1/models")["data"][0]
        self.client.model = model["id"]
        try:
            cache = self.client.get("/server_info", config_format="json")["vllm_config"]["cache_config"]
            self.block = int(cache["block_size"])
            self.kv_tokens = (int(cache["num_gpu_blocks"]) - 1) * self.block  # one block stands for none
        except (ServerError, KeyError, TypeError):
            self.kv_tokens = None
        return int(model["max_model_len"])

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
        held = self._ask_workers("held_digests")
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
        self._ask_workers("compute_head_plainly")
        held = self._ask_workers("adapter_digests", str(folder))
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
            self.keyed = all_draw_by_position(answer == "True" for answer in self._ask_workers("draw_by_position"))
        except ServerError:  # it has another worker_extension_cls, or none
            self.keyed = all_draw_by_position([False])
        reported = self.client.get("/weight_info")["weight_version"]
        if reported != str(version):
            raise WeightSyncError(
                f"The vLLM server at {self.client.url} says that its weights are version {reported}, where the "
                f"policy's are {version}."
            )

    def max_adapter_rank(self) -> int:
        """The largest rank of LoRA adapters that it takes; 0 where it takes none."""
        try:
            return min(int(rank) for rank in self._ask_workers("max_adapter_rank"))
        except ServerError:
            return 0

    def _ask_workers(self, method: str, *arguments: str) -> list[Any]:
        """Return what each worker answers; numbers and truth values come as text."""
        return self.client.post("/collective_rpc", {"method": method, "args": list(arguments)})["results"]


Answer = TypeVar("Answer")
_COMPARED = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


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
    context: int = 0
    _servers: list[Server] = field(default_factory=list)
    _held: dict[str, torch.Tensor] = field(default_factory=dict)
    _version: int = -1

    @property
    def alive(self) -> list[Server]:
        """The servers that have not failed."""
        return [server for server in self._servers if server.up]

    @property
    def clients(self) -> list[ServerClient]:
        """All of them."""
        return [server.client for server in self._servers]

    # ---- start ------------------------------------------------------------------------------------

    def start(self, policy: PolicySpec, server_args: Mapping[str, Any]) -> None:
        """Start the servers, or look at those named."""
        self._stop()
        self._folder = Path(tempfile.mkdtemp(prefix="lit_grpo_vllm_"))
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        if self.urls:
            self._servers = [Server(ServerClient(url, self.timeout_s)) for url in _own_share(self.urls)]
            self._check_named(policy, server_args.get("max_lora_rank", 0))
        else:
            self._start_own(policy, server_args)
        self.context = min([server.introduce() for server in self._servers])

    def _start_own(self, policy: PolicySpec, server_args: Mapping[str, Any]) -> None:
        require_vllm()
        if not torch.cuda.is_available():
            check_head_size(policy.config.get_text_config())
        policy.save_skeleton(self._folder)
        arguments = server_arguments(str(policy.dtype).removeprefix("torch."), self.num_slots) | dict(server_args)
        environment = server_environment(self.num_servers)
        for number in range(self.num_servers):
            log = self._folder / f"server-{number}.log"
            visible = {} if self.devices is None else {"CUDA_VISIBLE_DEVICES": self.devices[number]}
            process = ServerProcess(self._folder, arguments, environment | visible, log)
            weakref.finalize(self, process.stop)
            self._servers.append(Server(ServerClient(process.url, self.timeout_s), process))
        deadline = time.monotonic() + self.start_timeout_s
        try:
            for server in self._servers:
                assert server.process is not None
                server.process.wait(deadline)
        except BaseException:
            self._stop()
            raise

    def _check_named(self, policy: PolicySpec, rank: int) -> None:
        """Compare the model and the tokenizer of each named server with the policy's, and the rank that it takes.

        Raises:
            ValueError: They are not the same, or too low, or a server does not answer.
        """
        config, tokenizer = policy.config.get_text_config(), policy.tokenizer
        fields = {name: getattr(config, name) for name in _COMPARED}
        text = str(tokenizer.decode(list(range(min(config.vocab_size, 200))), skip_special_tokens=True))
        for server in self._servers:
            try:
                tokens = server.client.post("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
                server.client.post("/init_weight_transfer_engine", {"init_info": {"fields": fields}})
            except ServerError as error:
                raise ValueError(
                    f"{error} Start it with the policy's model, as python -m lit_grpo serve does."
                ) from error
            if tokens != tokenizer.encode(text, add_special_tokens=False):
                raise ValueError(
                    f"The server at {server.client.url} has another tokenizer than the policy; start it with the "
                    "policy's."
                )
            if rank and server.max_adapter_rank() < rank:
                raise ValueError(
                    f"The server at {server.client.url} does not take LoRA adapters of rank {rank}; start it with "
                    f"--max-lora-rank {rank}, or take adapters: merged."
                )

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
            server.holds_base = False

    def _look(self) -> None:
        """See which servers are up."""
        for server in self._servers:
            server.look()

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
        failures: list[ServerError] = []
        with ThreadPoolExecutor(max(len(self.alive), 1)) as pool:
            pending = [(server, pool.submit(call, server)) for server in self.alive]
            for server, answer in pending:
                try:
                    answers[server] = answer.result()
                except ServerError as error:
                    server.up = False
                    failures.append(error)
        if failures and not answers:
            raise WeightSyncError(f"The policy's weights could not be loaded: {failures[0]}")
        if not answers:
            raise WeightSyncError("No vLLM server took the policy's weights; see its log for why.")
        return answers

    # ---- end --------------------------------------------------------------------------------------

    def lose(self, server: Server) -> None:
        """Leave a server out; a process of ours is ended, since it may hang."""
        server.up, server.version, server.holds_base = False, -1, False
        if server.process is not None:
            server.process.stop()

    def _stop(self) -> None:
        for server in self._servers:
            server.client.close()
            if server.process is not None:
                server.process.stop()
        self._servers = []


def _own_share(urls: list[str]) -> list[str]:
    """The servers of this rank."""
    if not torch.distributed.is_initialized():
        return urls
    rank, num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if len(urls) < num_ranks:
        raise ValueError(f"urls names {len(urls)} servers for {num_ranks} ranks; each rank needs one of its own.")
    return urls[rank::num_ranks]
