"""What a generator says of weights that were sent to it, and the proof that they arrived."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class WeightSyncError(RuntimeError):
    """The generator's weights are not the policy's; it must not sample until a full sync succeeds."""


class Versioned:
    """Holds the weights of one policy version, or refuses to sample."""

    _version = -1

    @property
    def version(self) -> int:
        """The policy version that samples now; -1 where no complete set of weights has arrived."""
        return self._version

    def distrust(self) -> None:
        """Refuse to sample until ``load_weights`` succeeds again, with all weights."""
        self._version = -1

    def _expect_weights(self, num_requests: int, in_flight: str) -> None:
        """Refuse to sample until all of them are here; a WeightSyncError where requests are in flight against that."""
        if in_flight == "refuse":
            check_nothing_in_flight(num_requests)
        self._version = -1

    def _check_weights(self) -> None:
        if self._version < 0:
            raise WeightSyncError("The generator has no complete set of weights; call load_weights first.")

    def _check_free(self, num_requests: int, free_slots: int) -> None:
        """Check that requests may be submitted now."""
        self._check_weights()
        if num_requests > free_slots:
            raise ValueError(f"{num_requests} requests for {free_slots} free slots; submit at most that many.")


@dataclass
class SyncReport:
    """What a generator bound of the weights that it was sent.

    ``digests`` holds the :func:`digest` of each tensor as the receiving side has it, by the policy's name for it;
    ``num_bytes`` what travelled, and ``changed_share`` the share of the elements that it told of.
    """

    digests: dict[str, str] = field(default_factory=dict)
    num_bytes: int = 0
    changed_share: float = 1.0


@dataclass
class Parcel:
    """Tensors handed over within a process, and the bytes of those that were taken."""

    tensors: Iterable[tuple[str, torch.Tensor]]
    num_bytes: int = 0


def complete(
    weights: Iterable[tuple[str, torch.Tensor]], expected: Collection[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass weights on; at their end none of those ``expected`` may be missing."""
    names = []
    for name, tensor in weights:
        names.append(name)
        yield name, tensor
    check_complete(expected, names)


def joined(digests: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Join what the workers of one engine hold.

    Raises:
        WeightSyncError: Two of them hold different tensors.
    """
    all_of_them: dict[str, str] = {}
    for of_one in digests:
        if any(all_of_them.setdefault(name, value) != value for name, value in of_one.items()):
            raise WeightSyncError("The workers of the vLLM engine hold different weights.")
    return all_of_them


def check_nothing_in_flight(num_requests: int) -> None:
    """Check that no request would be sampled by two versions without anybody having said so.

    Raises:
        WeightSyncError: Requests are in flight.
    """
    if num_requests:
        raise WeightSyncError(
            f"{num_requests} requests are in flight; abort them before the weights change, or say with in_flight what "
            "becomes of them."
        )


def check_complete(sent: Collection[str], received: Collection[str]) -> None:
    """Check that nothing is missing.

    Raises:
        WeightSyncError: Tensors are.
    """
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
