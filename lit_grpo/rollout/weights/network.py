"""Weights over the network: process groups of torch between a sender and the workers of an engine.

Tensors travel in packets of some hundred megabytes. Each packet is broadcast while the next one is put together. It is
the same between GPUs (NCCL) and between hosts (gloo).
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from itertools import chain
from secrets import token_hex
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch
from torch.distributed import (
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    Store,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)

if TYPE_CHECKING:
    from lit_grpo.rollout.weights.tensors import Named

BACKENDS = ("gloo", "nccl")
PACKET_BYTES = 256 * 2**20
PATIENCE_S = 300.0  # for a busy machine; whether the other side is well is asked in other ways
_ALIGNMENT = 16
_POLL_S = 0.0005


class LinkError(RuntimeError):
    """The other side is gone, or does not take what is sent."""


@dataclass(frozen=True)
class Meeting:
    """Where the members of a link find each other: a store at an address, and a name in it that nobody can guess.

    ``size`` counts the sender, and ``backend`` is ``gloo`` or ``nccl``.
    """

    backend: str
    host: str
    port: int
    name: str
    size: int


class MeetingPoint:
    """The sender's store. It listens on the one address that leads to the engines.

    Args:
        backend: ``gloo`` or ``nccl``.
        timeout_s: How long members wait for each other.
    """

    def __init__(self, backend: str, timeout_s: float = PATIENCE_S) -> None:
        self._backend, self._timeout_s = backend, timeout_s
        self._stores: dict[str, TCPStore] = {}
        self._arranging = threading.Lock()  # meetings with several engines are arranged at a time

    def arrange(self, url: str, num_workers: int) -> Meeting:
        """Name a meeting with the workers of the engine at ``url``."""
        host = _own_address(url)
        with self._arranging:
            if host not in self._stores:
                self._stores[host] = _listen(host, timedelta(seconds=self._timeout_s))
        return Meeting(self._backend, host, self._stores[host].port, token_hex(16), 1 + num_workers)

    def join(self, meeting: Meeting) -> Link:
        """Return the sender's end, once all members are there."""
        return Link(meeting, 0, self._stores[meeting.host], self._timeout_s)


def _listen(host: str, wait: timedelta) -> TCPStore:
    family = socket.AF_INET6 if ip_address(host).version == 6 else socket.AF_INET
    with socket.socket(family) as listening:
        listening.bind((host, 0))
        listening.listen()
        port = listening.getsockname()[1]
        number = listening.detach()
    return TCPStore(host, port, None, True, wait, wait_for_workers=False, master_listen_fd=number)


class Link:
    """One end of a process group whose rank 0 sends to all others.

    Args:
        meeting: Where they meet.
        rank: Which member this is.
        store: The store of the meeting, which the sender has; the others reach it by its address.
        timeout_s: How long members wait for each other.

    Raises:
        LinkError: Not all members came.
    """

    def __init__(self, meeting: Meeting, rank: int, store: Store | None = None, timeout_s: float = PATIENCE_S) -> None:
        wait = timedelta(seconds=timeout_s)
        try:
            store = PrefixStore(meeting.name, store or TCPStore(meeting.host, meeting.port, None, False, wait))
            self._group: Any = (_nccl if meeting.backend == "nccl" else _gloo)(store, rank, meeting, wait)
        except RuntimeError as error:
            raise LinkError(f"No link to {meeting.host}:{meeting.port} came about: {error}") from error
        self.rank = rank
        self._device = torch.device("cuda" if meeting.backend == "nccl" else "cpu")

    @property
    def closed(self) -> bool:
        """Whether this end has left."""
        return self._group is None

    def broadcast(self, tensor: torch.Tensor) -> Any:
        """Begin to send a tensor, or to fill it with what is sent; return torch's work, which has to be waited for."""
        if self.closed:
            raise LinkError("A link is used that was left.")
        try:
            return self._group.broadcast([tensor], torch.distributed.BroadcastOptions())
        except RuntimeError as error:
            raise LinkError(f"A link broke: {error}") from error

    def receive(self) -> Iterator[Named]:
        """Yield the tensors of one :func:`send`, on the link's device; raise a LinkError if it breaks off."""
        while True:
            header_bytes, payload_bytes = self._take(2, torch.int64).tolist()
            if not header_bytes:
                return
            header = bytes(self._take(header_bytes, torch.uint8).tolist())
            payload = self._take(payload_bytes, torch.uint8)
            for name, dtype_name, shape, begin in json.loads(header):
                dtype: torch.dtype = getattr(torch, dtype_name)
                end = begin + dtype.itemsize * torch.Size(shape).numel()
                yield name, payload[begin:end].view(dtype).view(shape)

    def _take(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.empty(size, dtype=dtype, device=self._device)
        if size:
            _finish(self.broadcast(tensor))
        return tensor

    def packet(self, tensors: list[Named]) -> list[torch.Tensor]:
        """Return what is broadcast for some tensors: sizes, where each tensor lies, and their bytes.

        The packet of no tensors marks the end.
        """
        places, size = [], 0
        for name, tensor in tensors:
            places.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), size))
            size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        if not places:
            return [torch.zeros(2, dtype=torch.int64, device=self._device)]
        payload = torch.empty(size, dtype=torch.uint8, device=self._device)
        for (_, tensor), (_, _, _, begin) in zip(tensors, places, strict=True):
            payload[begin : begin + tensor.nbytes] = tensor.detach().contiguous().view(-1).view(torch.uint8)
        header = torch.frombuffer(bytearray(json.dumps(places).encode()), dtype=torch.uint8).to(self._device)
        sizes = torch.tensor([len(header), len(payload)], device=self._device)
        return [part for part in (sizes, header, payload) if len(part)]

    def close(self) -> None:
        """Leave; the others see it."""
        if self._group is not None:
            group, self._group = [self._group], None
            group[0].abort()
            # Gloo's connections end with the last reference, and dropping it waits for what is on its way.
            threading.Thread(target=group.clear, daemon=True).start()


def send(links: Mapping[Any, Link], tensors: Iterable[Named], listens: Callable[[Any], bool]) -> None:
    """Send tensors over all links at the same time.

    Args:
        links: The link to each receiver. A link that breaks, or whose receiver no longer ``listens``, is closed and
            left out from then on; the receiver's own answer says why.
        tensors: They are iterated over to the end even when no link is left, since other ranks may help to make them.
        listens: Whether a receiver still takes what comes.
    """
    going, works = dict(links), dict[Any, list[Any]]()

    def settle() -> None:
        for receiver in list(works):
            try:
                for work in works.pop(receiver):
                    _finish(work, lambda receiver=receiver: listens(receiver))
            except LinkError:
                going.pop(receiver).close()

    try:
        for packet in chain(_packets(tensors), [[]]):
            parts = next(iter(going.values())).packet(packet) if going else []  # while the last packet travels
            settle()
            for receiver, link in list(going.items()):
                try:
                    works[receiver] = [link.broadcast(part) for part in parts]
                except LinkError:
                    going.pop(receiver).close()
        settle()
    except BaseException:
        for link in going.values():
            link.close()  # so that the receivers wait no longer
        raise


def _packets(tensors: Iterable[Named]) -> Iterator[list[Named]]:
    """Put tensors together, up to ``PACKET_BYTES`` a packet."""
    packet: list[Named] = []
    num_bytes = 0
    for name, tensor in tensors:
        if packet and num_bytes + tensor.nbytes > PACKET_BYTES:
            yield packet
            packet, num_bytes = [], 0
        packet.append((name, tensor))
        num_bytes += tensor.nbytes
    if packet:
        yield packet


def _finish(work: Any, listens: Callable[[], bool] = lambda: True) -> None:
    """Wait until a broadcast has ended, as long as the other side listens."""
    try:
        while not work.is_completed():
            if not listens():
                raise LinkError("The other side no longer takes what is sent.")
            time.sleep(_POLL_S)
        work.wait()
    except RuntimeError as error:
        raise error if isinstance(error, LinkError) else LinkError(f"A link broke: {error}") from error


def _own_address(url: str) -> str:
    """The address of this machine from which packets go to the host of ``url``."""
    parts = urlsplit(url)
    family, _, _, _, address = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # a socket of datagrams sends nothing by this
        return probe.getsockname()[0]


def _gloo(store: Store, rank: int, meeting: Meeting, wait: timedelta) -> Any:
    from torch.distributed.distributed_c10d import ProcessGroupGloo

    gloo: Any = ProcessGroupGloo
    host = f"[{meeting.host}]" if ":" in meeting.host else meeting.host
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=_own_address(f"tcp://{host}:{meeting.port}"))]
    options._timeout, options._threads = wait, 2
    return gloo(store, rank, meeting.size, options)


def _nccl(store: Store, rank: int, meeting: Meeting, wait: timedelta) -> Any:
    from torch.distributed.distributed_c10d import ProcessGroupNCCL

    options: Any = ProcessGroupNCCL.Options()
    options._timeout = wait
    return ProcessGroupNCCL(store, rank, meeting.size, options)
