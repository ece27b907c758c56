"""Weights from GPU to GPU, over vLLM's own weight transfer: its backends ``nccl`` and ``sparse_nccl``."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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


class Sent(WeightSource):
    """The tensors that travel with the next update, and an outline of all weights without content."""

    def __init__(self, outline: Mapping[str, torch.Tensor]) -> None:
        self._outline = outline
        self.shipment: Iterable[tuple[str, torch.Tensor]] = ()

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._outline.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.shipment)


class NCCLGroup:
    """This process and the workers of some servers, as a group of NCCL.

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
        self._sizes = [client.get("/get_world_size", lambda answer: int(answer["world_size"])) for client in clients]
        address = _own_address(clients[0].url)
        with socket.create_server((address, 0)) as probe:
            port = probe.getsockname()[1]
        meeting: dict[str, Any] = {"master_address": address, "master_port": port, "world_size": 1 + sum(self._sizes)}
        kind = SparseNCCLTrainerInitInfo if patches else NCCLTrainerInitInfo
        self._sent = None if patches else Sent(outline)
        self._engine: Any = WeightTransferTrainerFactory.trainer_init(
            kind(rank=0, **meeting), client=self, source=self._sent
        )

    def send(self, shipment: Shipment) -> None:
        """Send weights, or their changes, to all servers.

        Raises:
            ServerError: A server failed; the others may hold a part of what was sent.
        """
        if self._sent is not None:
            self._sent.shipment = shipment
            self._engine.send_weights()
            return
        self.start_weight_update()
        for name, index_k, value_k in shipment.patches():
            patch = SparseWeightPatch(
                name, _int32(name, index_k).to(self._device), value_k.to(self._device), tuple(self._outline[name].shape)
            )
            self._engine.send_weight_chunk([patch])
        self.finish_weight_update()

    def close(self) -> None:
        self._engine.shutdown()

    # ---- what vLLM's sender asks of the servers ---------------------------------------------------

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Let the workers join, each with a rank of its own."""
        first, infos = init_info["rank_offset"], []
        for size in self._sizes:
            infos.append({"init_info": {**init_info, "rank_offset": first}})
            first += size
        self._post("/init_weight_transfer_engine", *infos)

    def start_weight_update(self) -> None:
        self._post("/start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self._post("/update_weights", *[{"update_info": update_info}] * len(self.clients))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End; the version is given by :meth:`lit_grpo.rollout.vllm.fleet.Server.settle`."""
        self._post("/finish_weight_update")

    def _post(self, path: str, *bodies: Mapping[str, Any]) -> None:
        """Ask all servers at the same time, since each waits for the others."""
        bodies = bodies or ({},) * len(self.clients)
        with ThreadPoolExecutor(len(self.clients)) as pool:
            asked = [
                pool.submit(client.post, path, body, engine_works=True)
                for client, body in zip(self.clients, bodies, strict=True)
            ]
        for answer in asked:
            answer.result()


def _int32(name: str, index_k: torch.Tensor) -> torch.Tensor:
    if index_k.dtype != torch.int32:
        raise WeightSyncError(
            f"{name} has more than 2^31 elements, whose changes vLLM's sparse_nccl does not send; take transfer full."
        )
    return index_k


def _own_address(url: str) -> str:
    """The address of this machine from which packets go to the host of ``url``."""
    parts = urlsplit(url)
    family, _, _, _, address = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # a socket of datagrams sends nothing by this
        return probe.getsockname()[0]
