"""Weights over the network: a sender and its receivers, each with a thread for a process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from lit_grpo.rollout.weights import network
from lit_grpo.rollout.weights.network import Link, LinkError, Meeting, MeetingPoint, send

URL = "http://127.0.0.1:8000"
TENSORS = [
    *((f"t{rows}", torch.randn(rows, 7).to(torch.bfloat16 if rows % 2 else torch.float32)) for rows in range(40)),
    ("scalar", torch.tensor(3.0)),
    ("bytes", torch.arange(5, dtype=torch.uint8)),
    ("counts", torch.arange(5, dtype=torch.int32)),
    ("transposed", torch.arange(12.0).view(3, 4).T),
]


class Receiver(threading.Thread):
    """Takes what comes to one rank of a link, and keeps it, or what was the matter."""

    def __init__(self, meeting: Meeting, rank: int = 1, take: Callable[[Link], Any] | None = None) -> None:
        super().__init__(daemon=True)
        self.meeting, self.rank = meeting, rank
        self.take = take or (lambda link: {name: tensor.clone() for name, tensor in link.receive()})
        self.received: Any = None
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self.received = self.take(Link(self.meeting, self.rank))
        except Exception as error:
            self.error = error


@pytest.fixture
def point() -> MeetingPoint:
    return MeetingPoint("gloo")


def meet(point: MeetingPoint, *takes: Callable[[Link], Any] | None) -> tuple[Link, list[Receiver]]:
    meeting = point.arrange(URL, len(takes))
    receivers = [Receiver(meeting, rank, take) for rank, take in enumerate(takes, 1)]
    return point.join(meeting), receivers


@pytest.mark.parametrize("packet_bytes", [1, 1000, 2**20])
def test_what_arrives_is_what_was_sent_by_name_to_the_bit_again_and_again(
    point: MeetingPoint, monkeypatch: pytest.MonkeyPatch, packet_bytes: int
) -> None:
    monkeypatch.setattr(network, "PACKET_BYTES", packet_bytes)

    def thrice(link: Link) -> list[dict[str, torch.Tensor]]:
        return [dict(link.receive()) for _ in range(3)]

    link, receivers = meet(point, thrice, thrice)  # two workers of one engine
    for tensors in (TENSORS, [], TENSORS[:3]):
        send({"engine": link}, tensors, lambda other: True)
    for receiver in receivers:
        receiver.join(20)
        assert [list(each) for each in receiver.received] == [[n for n, _ in TENSORS], [], ["t0", "t1", "t2"]]
        for name, tensor in TENSORS:
            arrived = receiver.received[0][name]
            assert arrived.dtype == tensor.dtype and torch.equal(arrived, tensor)


def test_one_that_leaves_takes_no_other_with_it(point: MeetingPoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "PACKET_BYTES", 1)
    whole, (first,) = meet(point, None)
    broken, (second,) = meet(point, lambda link: [next(link.receive()), link.close()])
    taken: list[str] = []

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in TENSORS:
            taken.append(name)
            yield name, tensor

    send({"first": whole, "second": broken}, tensors(), lambda other: True)
    first.join(20)
    second.join(20)
    assert first.received.keys() == dict(TENSORS).keys() and not whole.closed
    assert broken.closed
    send({"second": meet(point, lambda link: link.close())[0]}, tensors(), lambda other: True)
    assert len(taken) == 2 * len(TENSORS)  # others may have to take part in making them


def test_one_that_no_longer_listens_is_not_waited_for(point: MeetingPoint) -> None:
    link, _ = meet(point, lambda link: time.sleep(3))
    start = time.monotonic()
    send({"engine": link}, [("large", torch.zeros(2**24))], lambda other: time.monotonic() < start + 0.3)
    assert link.closed and time.monotonic() - start < 2


def test_a_sender_that_fails_lets_nobody_wait(point: MeetingPoint) -> None:
    link, (receiver,) = meet(point, None)

    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield TENSORS[0]
        raise RuntimeError("a gather failed")

    with pytest.raises(RuntimeError, match="a gather failed"):
        send({"engine": link}, failing(), lambda other: True)
    receiver.join(10)
    assert isinstance(receiver.error, LinkError) and "A link broke" in str(receiver.error)


def test_a_stranger_without_the_name_meets_nobody(point: MeetingPoint) -> None:
    meeting = point.arrange(URL, 1)
    wrong = Meeting(meeting.backend, meeting.host, meeting.port, "guessed", meeting.size)
    with pytest.raises(LinkError, match=r"No link to 127\.0\.0\.1:\d+ came about"):
        Link(wrong, 1, timeout_s=1)


def test_the_store_listens_on_the_address_that_leads_to_the_engine_alone(point: MeetingPoint) -> None:
    assert point.arrange(URL, 1).host == "127.0.0.1"
    assert point.arrange("http://localhost:1", 1).host in ("127.0.0.1", "::1")
    assert point.arrange(URL, 1).port == point.arrange(URL, 2).port  # one store for all
    assert point.arrange(URL, 1).name != point.arrange(URL, 1).name
