"""Weights from GPU to GPU, over vLLM's own weight transfer: its backends ``nccl`` and ``sparse_nccl``."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, repeat
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
from vllm.distributed.weight_transfer.sparse_nccl_engine import SparseNCCLTrainerInitInfo, SparseWeightPatch

from lit_grpo.rollout.weights.tensors import WeightSyncError

if TYPE_CHECKING:
    from lit_grpo.rollout.vllm.http import ServerClient
    from lit_grpo.rollout.weights.shipments import Shipment


class NCCLGroup(WeightSource):
    """This process and the workers of some servers, as a group of NCCL, and the source of what vLLM's sender sends.

    It does not outlive the loss of a server: vLLM's transfer fails then as a whole, and a new group has to be made.

    Args:
        outline: All weights by name, without content.
        patches: Whether to send changes, which vLLM applies in place (``sparse_nccl``).
        device: The GPU that sends.
    """

    def __init__(
        self,
        clients: Sequence[ServerClient],
        outline: Mapping[str, torch.Tensor],
        patches: bool,
        device: torch.device,
    ) -> None:
        self.clients, self._outline, self._device = list(clients), outline, device
        size = "/get_world_size"
        self._sizes = [client.ask("GET", size, read=lambda answer: int(answer["world_size"])) for client in clients]
        address = _own_address(clients[0].url)
        with socket.create_server((address, 0)) as probe:
            port = probe.getsockname()[1]
        meeting: dict[str, Any] = {"master_address": address, "master_port": port, "world_size": 1 + sum(self._sizes)}
        kind = SparseNCCLTrainerInitInfo if patches else NCCLTrainerInitInfo
        self._patches = patches
        self._shipment: Iterable[tuple[str, torch.Tensor]] = ()
        begin = WeightTransferTrainerFactory.trainer_init
        self._engine: Any = begin(kind(rank=0, **meeting), client=self, source=None if patches else self)

    def send(self, shipment: Shipment) -> None:
        """Send weights, or their changes, to all servers; after an error they may hold a part of what was sent."""
        if not self._patches:
            self._shipment = shipment
            self._engine.send_weights()
            return
        self.start_weight_update()
        for name, index_k, value_k in shipment.patches():
            if index_k.dtype != torch.int32:
                raise WeightSyncError(
                    f"{name} has more than 2^31 elements, whose changes vLLM's sparse_nccl does not send; take "
                    "transfer full."
                )
            shape = tuple(self._outline[name].shape)
            patch = SparseWeightPatch(name, index_k.to(self._device), value_k.to(self._device), shape)
            self._engine.send_weight_chunk([patch])
        self.finish_weight_update()

    def close(self) -> None:
        self._engine.shutdown()

    # ---- what vLLM's sender asks of its source, and of the servers ----------------------------------

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._outline.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._shipment)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Let the workers join, each with a rank of its own."""
        firsts = accumulate(self._sizes, initial=init_info["rank_offset"])
        self._post("/init_weight_transfer_engine", ({"init_info": init_info | {"rank_offset": at}} for at in firsts))

    def start_weight_update(self) -> None:
        self._post("/start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self._post("/update_weights", repeat({"update_info": update_info}))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End; the version is given by :meth:`lit_grpo.rollout.vllm.fleet.Server.settle`."""
        self._post("/finish_weight_update")

    def _post(self, path: str, bodies: Iterable[Mapping[str, Any]] | None = None) -> None:
        """Ask all servers at the same time, since each waits for the others."""

        def post(client: ServerClient, body: Mapping[str, Any]) -> None:
            client.ask("POST", path, body, engine_works=True)

        with ThreadPoolExecutor(len(self.clients)) as pool:
            list(pool.map(post, self.clients, bodies or repeat({})))


def _own_address(url: str) -> str:
    """The address of this machine from which packets go to the host of ``url``."""
    parts = urlsplit(url)
    family, _, _, _, address = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # a socket of datagrams sends nothing by this
        return probe.getsockname()[0]
