"""The servers of a run: started or found, brought up to date, left out when they fail."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from lit_grpo.rollout.generator import WeightSyncError
from lit_grpo.rollout.vllm_client import ServerClient, ServerError
from lit_grpo.rollout.vllm_process import ServerProcess
from lit_grpo.rollout.vllm_setup import require_vllm, save_skeleton, server_arguments, server_environment
from lit_grpo.rollout.weight_files import write_full, write_patch
from lit_grpo.rollout.weights import SyncReport

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_SHARED_MEMORY = Path("/dev/shm")
_COMPARED = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@dataclass(eq=False)
class Server:
    """A server, with its process where it is ours, and the policy version that it holds."""

    client: ServerClient
    process: ServerProcess | None = None
    version: int = -1
    up: bool = True


class Fleet:
    """See :class:`lit_grpo.rollout.vllm_server.VLLMServerGenerator` for the arguments."""

    def __init__(
        self,
        num_slots: int,
        num_servers: int,
        devices: list[str] | None,
        urls: list[str] | None,
        transfer: Literal["full", "changes"],
        weights_folder: str | None,
        timeout_s: float,
        start_timeout_s: float,
    ) -> None:
        self.num_slots, self.num_servers, self.devices, self.urls = num_slots, num_servers, devices, urls
        self.sends_changes = transfer == "changes"
        self.weights_folder = weights_folder
        self.timeout_s, self.start_timeout_s = timeout_s, start_timeout_s
        self.context = 0
        self._servers: list[Server] = []
        self._held: dict[str, torch.Tensor] = {}
        self._version = -1

    @property
    def alive(self) -> list[Server]:
        """The servers that have not failed."""
        return [server for server in self._servers if server.up]

    @property
    def clients(self) -> list[ServerClient]:
        """All of them."""
        return [server.client for server in self._servers]

    # ---- start ------------------------------------------------------------------------------------

    def start(
        self, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, server_args: Mapping[str, Any]
    ) -> None:
        """Start the servers, or look at those named."""
        self._stop()
        self._folder = Path(tempfile.mkdtemp(prefix="lit_grpo_vllm_"))
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        if self.urls:
            self._servers = [Server(ServerClient(url, self.timeout_s)) for url in _own_share(self.urls)]
            self._check_named(policy, tokenizer)
        else:
            self._start_own(policy, tokenizer, server_args)
        models = [server.client.get("/v1/models")["data"][0] for server in self._servers]
        for server, model in zip(self._servers, models, strict=True):
            server.client.model = model["id"]
        self.context = min(model["max_model_len"] for model in models)

    def _start_own(
        self, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, server_args: Mapping[str, Any]
    ) -> None:
        require_vllm()
        save_skeleton(policy, tokenizer, self._folder)
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

    def _check_named(self, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Compare the model and the tokenizer of each named server with the policy's.

        Raises:
            ValueError: They are not the same, or a server does not answer.
        """
        config = policy.config.get_text_config()
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

    # ---- weights ----------------------------------------------------------------------------------

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> SyncReport:
        """Bring all servers that answer up to date; those that do not are left out until the next time.

        Raises:
            WeightSyncError: No server took the weights, or not all of them bound the same.
        """
        for server in self._servers:
            server.up = self.is_well(server)
        base = self.weights_folder or (str(_SHARED_MEMORY) if _SHARED_MEMORY.is_dir() else None)
        with tempfile.TemporaryDirectory(prefix="lit_grpo_weights_", dir=base) as folder:
            path = Path(folder) / "weights.safetensors"
            num_bytes, changed = self._write(weights, path)
            receipts = self._tell(lambda number, server: self._update(server, path, version, number))
        if not receipts:
            raise WeightSyncError("No vLLM server took the policy's weights; see its log for why.")
        first = next(iter(receipts.values()))
        if any(receipt != first for receipt in receipts.values()):
            raise WeightSyncError("The vLLM servers have bound different weights.")
        self._version = version
        return SyncReport(first, num_bytes, changed)

    def _write(self, weights: Iterable[tuple[str, torch.Tensor]], path: Path) -> tuple[int, float]:
        """Write what the servers need to know; changes only where all of them hold what was sent last."""
        known = self._held and all(server.version == self._version >= 0 for server in self.alive)
        if self.sends_changes and known:
            return write_patch(weights, self._held, path)
        held = self._held if self.sends_changes else None
        return write_full(weights, path, held), 1.0

    def _update(self, server: Server, path: Path, version: int, number: int) -> dict[str, str]:
        """Bring one server up to date; return the digests that its workers have received."""
        server.version = -1
        receipt = path.parent / f"receipt-{number}"
        info = {"path": str(path), "receipt": str(receipt), "patches_follow": self.sends_changes}
        server.client.post("/start_weight_update")
        server.client.post("/update_weights", {"update_info": info})
        server.client.post("/finish_weight_update", {"weight_version": str(version)})
        server.client.post("/reset_prefix_cache")
        reported = server.client.get("/weight_info")["weight_version"]
        if reported != str(version):
            raise WeightSyncError(
                f"The vLLM server at {server.client.url} says that its weights are version {reported}, where the "
                f"policy's are {version}."
            )
        receipts = [json.loads(file.read_text()) for file in path.parent.glob(f"{receipt.name}-*.json")]
        if not receipts or any(digests != receipts[0] for digests in receipts):
            raise WeightSyncError(
                f"The workers of the vLLM server at {server.client.url} have bound different weights."
            )
        server.version = version
        return receipts[0]

    def _tell(self, call: Callable[[int, Server], dict[str, str]]) -> dict[int, dict[str, str]]:
        """Call for all servers that are up at the same time; those that fail are left out, unless all do."""
        results: dict[int, dict[str, str]] = {}
        failures: list[ServerError] = []
        with ThreadPoolExecutor(max(len(self.alive), 1)) as pool:
            pending = {number: (s, pool.submit(call, number, s)) for number, s in enumerate(self._servers) if s.up}
            for number, (server, result) in pending.items():
                try:
                    results[number] = result.result()
                except ServerError as error:
                    server.up = False
                    failures.append(error)
        if failures and not results:
            raise WeightSyncError(f"The policy's weights could not be loaded: {failures[0]}")
        return results

    # ---- end --------------------------------------------------------------------------------------

    def is_well(self, server: Server) -> bool:
        """Whether a server runs and answers."""
        if server.process is not None and server.process.process.poll() is not None:
            return False
        return server.client.answers()

    def lose(self, server: Server) -> None:
        """Leave a server out; a process of ours is ended, since it may hang."""
        server.up, server.version = False, -1
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
