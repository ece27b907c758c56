"""The pretended GPU itself: what it counts, and what it refuses as CUDA does."""

from __future__ import annotations

import pytest
import torch

from benchmarks.pretend_cuda import GPU, Ledger, pretend_cuda


def test_tensors_say_where_they_are_and_compute_what_the_cpu_does() -> None:
    layer = torch.nn.Linear(3, 2)
    expected = layer(torch.ones(4, 3)).detach()
    with pretend_cuda():
        layer.to("cuda")
        assert {parameter.device for parameter in layer.parameters()} == {GPU} and type(
            layer.weight
        ) is torch.nn.Parameter
        result = layer(torch.ones(4, 3, device="cuda"))
        assert result.is_cuda and result.transpose(0, 1)[0].device == GPU and not result.cpu().is_cuda
        assert torch.equal(result.cpu(), expected)
        result.sum().backward()
        assert layer.weight.grad is not None and layer.weight.grad.device == GPU
    assert result.device.type == "cpu"


def test_devices_are_not_mixed() -> None:
    with pretend_cuda():
        there = torch.zeros(3, device="cuda")
        assert (there + torch.tensor(1.0)).is_cuda  # a scalar of the host is an argument of the kernel
        for mixed in (
            lambda: there + torch.ones(3),
            lambda: torch.cat([there, torch.ones(3)]),
            lambda: there.index_select(0, torch.tensor([1])),
        ):
            with pytest.raises(RuntimeError, match=r"same device, .* \(.* at elsewhere\)"):
                mixed()
        with pytest.raises(TypeError, match="numpy"):
            there.numpy()


def waits(ledger: Ledger) -> tuple[int, int, int]:
    counts = ledger.count("wait"), ledger.count("pinned copy"), ledger.count("unpinned copy")
    ledger.reset()
    return counts


def test_waits_and_copies_are_counted() -> None:
    with pretend_cuda() as ledger:
        there = torch.arange(3.0).to("cuda")
        assert waits(ledger) == (1, 0, 1)
        torch.arange(3.0).pin_memory().to("cuda", non_blocking=True)
        assert waits(ledger) == (0, 1, 0)
        torch.arange(3.0).to("cuda", non_blocking=True)
        assert waits(ledger) == (0, 0, 1)
        pinned = torch.empty(3, pin_memory=True)
        pinned.copy_(torch.ones(3))
        there.copy_(pinned, non_blocking=True)
        assert waits(ledger) == (0, 1, 0)
        torch.tensor([1, 2], device="cuda")
        assert waits(ledger) == (1, 0, 1)
        for read in (float, bool, torch.Tensor.item, lambda scalar: scalar.cpu(), lambda scalar: scalar.tolist()):
            read(there[1])
            assert waits(ledger) == (1, 0, 0), read
        assert there[there < 1].tolist() == []
        assert waits(ledger) == (2, 0, 0)
        lengths = torch.ones(3, dtype=torch.int64).pin_memory().to("cuda", non_blocking=True)
        waits(ledger)
        there.repeat_interleave(lengths, output_size=3)
        assert waits(ledger) == (0, 0, 0)
        there.repeat_interleave(lengths)
        assert waits(ledger) == (1, 0, 0)
        there.add_(1)
        there.view(3, 1)
        torch.empty(3, device="cuda")
        assert ledger.launches == 1


def test_a_graph_computes_again_on_the_tensors_that_it_was_recorded_with() -> None:
    with pretend_cuda() as ledger:
        source, result = torch.ones(2, device="cuda"), torch.zeros(2, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result.copy_(source * 2)
        ledger.reset()
        source.fill_(5)
        graph.replay()
        assert ledger.launches == 2 and ledger.replays == 1
        assert result.tolist() == [10, 10]
        refused = "operation not permitted when stream is capturing"
        with pytest.raises(RuntimeError, match=f"{refused}: _local_scalar_dense"), torch.cuda.graph(graph):
            source[0].item()
        with pytest.raises(RuntimeError, match=refused), torch.cuda.graph(graph):
            source.copy_(torch.ones(2))


def test_autocast_of_the_gpu_lowers() -> None:
    layer = torch.nn.Linear(3, 2)
    with pretend_cuda():
        layer.to("cuda")
        with torch.autocast("cuda", torch.bfloat16):
            assert torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") == torch.bfloat16
            assert layer(torch.ones(1, 3, device="cuda")).dtype == torch.bfloat16
