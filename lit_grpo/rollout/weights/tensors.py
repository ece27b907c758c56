"""Report of a generator on weights that were sent to it, and the verification that they arrived."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    Named = tuple[str, torch.Tensor]


class WeightSyncError(RuntimeError):
    """The generator's weights are not the policy's; it must not sample until a full sync succeeds."""


class Versioned:
    """Holds the weights of one policy version, or refuses to sample.

    ``version`` is the policy version that samples now; -1 where no complete set of weights has arrived.
    """

    version: int = -1

    def invalidate_weights(self) -> None:
        """Refuse to sample until ``load_weights`` succeeds again, with all weights."""
        self.version = -1

    def _check_ready(self, num_requests: int = 0, free_slots: int = 0) -> None:
        """Check that there are weights to sample with, and slots for requests that are to be submitted."""
        if self.version < 0:
            raise WeightSyncError("The generator has no complete set of weights; call load_weights first.")
        if num_requests > free_slots:
            raise ValueError(f"{num_requests} requests for {free_slots} free slots; submit at most that many.")


@dataclass
class SyncReport:
    """Report of the weights that a generator holds after a sync.

    ``digests`` has the digest of each tensor as the receiving side holds it, by the policy's name for the tensor;
    ``num_bytes`` is what traveled, and ``changed_share`` the share of all elements that were sent.
    """

    digests: dict[str, str] = field(default_factory=dict)
    num_bytes: int = 0
    changed_share: float = 1.0


def complete(weights: Iterable[Named], expected: Collection[str]) -> Iterator[Named]:
    """Pass weights on, and raise a WeightSyncError at their end if one of those ``expected`` was missing."""
    names = []
    for name, tensor in weights:
        names.append(name)
        yield name, tensor
    check_complete(expected, names)


def joined(digests: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Join what the workers of one engine hold.

    Raises:
        WeightSyncError: Two of them hold different tensors of the same name.
    """
    union: dict[str, str] = {}
    for held in digests:
        if any(union.setdefault(name, value) != value for name, value in held.items()):
            raise WeightSyncError("The workers of the vLLM engine hold different weights.")
    return union


def check_nothing_in_flight(num_requests: int) -> None:
    if num_requests:
        raise WeightSyncError(f"{num_requests} requests are in flight; abort them before the weights change.")


def check_complete(sent: Collection[str], received: Collection[str]) -> None:
    if missing := set(sent) - set(received):
        raise WeightSyncError(f"{len(missing)} of {len(sent)} weights did not arrive, {min(missing)!r} among them.")


def check_arrival(sent: Mapping[str, str], received: Mapping[str, str]) -> None:
    """Compare the digests on both sides.

    Raises:
        WeightSyncError: Tensors are missing, unknown, or not those that were sent.
    """
    check_complete(sent, received)
    if unknown := received.keys() - sent.keys():
        raise WeightSyncError(f"The generator bound {min(unknown)!r}, which the policy does not have.")
    if wrong := [name for name in sent if sent[name] != received[name]]:
        raise WeightSyncError(
            f"{len(wrong)} of {len(sent)} weights arrived with another content than the policy's, "
            f"{min(wrong)!r} among them."
        )
