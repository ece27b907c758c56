"""How weights get to servers: as files that they can read, or over the network."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from lit_grpo.rollout.weights.files import weights_folder, write
from lit_grpo.rollout.weights.network import BACKENDS, Link, MeetingPoint, send

Named = tuple[str, torch.Tensor]
Digests = dict[str, str]
Ask = Callable[..., dict[Any, Any]]
"""Calls for all servers that are up, at the same time. ``meanwhile`` is called in between, with what tells whether a
server is still at it."""

Take = Callable[[Any, Mapping[str, Any]], Digests]
"""Asks one server to take the tensors that come, and tells it where from."""

TRANSPORTS = ("files", *BACKENDS)


class Transport(Protocol):
    """Brings named tensors, or small files, to servers.

    What the servers answer is returned.
    """

    def send(self, tensors: Iterable[Named], take: Take, ask: Ask) -> dict[Any, Digests]:
        """Bring tensors."""
        ...

    def send_folder(self, folder: Path, take: Callable[[Any, str | None], Digests], ask: Ask) -> dict[Any, Digests]:
        """Bring the files in a folder; those who take them are told where it is, or ``None`` where it comes to them."""
        ...


class Files:
    """Tensors in a file of shared memory, or of a folder that all servers can read."""

    def __init__(self, folder: str | None) -> None:
        self._folder = folder

    def send(self, tensors: Iterable[Named], take: Take, ask: Ask) -> dict[Any, Digests]:
        """Bring tensors."""
        with weights_folder(self._folder) as folder:
            path = folder / "weights.safetensors"
            write(tensors, path)
            return ask(lambda server: take(server, {"path": str(path)}))

    def send_folder(self, folder: Path, take: Callable[[Any, str | None], Digests], ask: Ask) -> dict[Any, Digests]:
        """Say where the folder is."""
        return ask(lambda server: take(server, str(folder)))


class Network:
    """Tensors over a process group for each server, of torch's gloo or NCCL.

    Each has a link of its own, so that a server that dies takes no other with it.
    """

    def __init__(self, backend: str) -> None:
        self._point = MeetingPoint(backend)

    def send(self, tensors: Iterable[Named], take: Take, ask: Ask) -> dict[Any, Digests]:
        """Bring tensors."""
        links = self._links(ask)
        return ask(lambda server: take(server, {"linked": True}), lambda listens: send(links, tensors, listens))

    def send_folder(self, folder: Path, take: Callable[[Any, str | None], Digests], ask: Ask) -> dict[Any, Digests]:
        """Bring the files, as tensors of bytes."""
        links = self._links(ask)
        files = [
            (path.name, torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8))
            for path in sorted(folder.iterdir())
            if path.suffix in (".json", ".safetensors")
        ]
        return ask(lambda server: take(server, None), lambda listens: send(links, files, listens))

    def _links(self, ask: Ask) -> dict[Any, Link]:
        """The links to all servers that are up, of which new ones are made."""

        def linked(server: Any) -> Any:
            if server.link is None or server.link.closed:
                server.link = server.join(self._point)
            return server.link

        return ask(linked)


def transport_of(name: str, folder: str | None) -> Transport:
    """Return the transport of one of the names in ``TRANSPORTS``."""
    return Files(folder) if name == "files" else Network(name)
