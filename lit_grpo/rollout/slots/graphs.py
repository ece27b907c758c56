"""A decode step in few launches: what stands between two attentions is recorded once and replayed.

A small model's step on a GPU takes as long as its kernels take to be launched, one by one. Attention's shapes change
from step to step, because the shelves grow, so a step is recorded in parts: all from the tokens to the first layer's
queries, keys and values; from each attention's result to the next layer's; and from the last result to the hidden
states. There is one recording for each of some numbers of rows, and a step takes the smallest that has room for its
rows. Sampling is not recorded: it is few operations, and a recording would keep their memory, which is that of the
whole vocabulary, throughout the update.

Everything but :func:`cuda_recorder` is tested with a stand-in for the recording. The capture itself has not been
run on a GPU yet.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Any

import torch

from lit_grpo.policy.architecture.decoder import compute_dtype
from lit_grpo.rollout.slots.attention import Attention
from lit_grpo.rollout.slots.fused import FusedDecoder

_FIRST_BUCKETS, _BUCKET_STEP = (1, 2, 4), 8
_WARM_UPS = 2

GraphPart = Callable[[], None]
"""Reads and writes tensors that stay where they are; a recording of it does the same when it is called."""
Recorder = Callable[[GraphPart], GraphPart]


def bucket_sizes(most_rows: int) -> list[int]:
    """Return the numbers of rows that are recorded, ascending, the last one ``most_rows``.

    Example:
        >>> bucket_sizes(20)
        [1, 2, 4, 8, 16, 20]
    """
    sizes = [*_FIRST_BUCKETS, *range(_BUCKET_STEP, most_rows, _BUCKET_STEP)]
    return [*(size for size in sizes if size < most_rows), most_rows]


def cuda_recorder() -> Recorder:
    """Return a recorder whose recordings share one pool of memory, for they are replayed one after another."""
    pool = torch.cuda.graph_pool_handle()
    return lambda part: _record_cuda_graph(part, pool)


def _record_cuda_graph(part: GraphPart, pool: Any) -> GraphPart:
    """Capture a part as a CUDA graph, after it has run on a side stream, as torch asks for; return its replay."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UPS):
            part()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        part()
    return graph.replay


class GraphedDecoder:
    """Runs a decoder like :class:`FusedDecoder`, its parts replayed from recordings.

    Recordings read the weights where they are, under autocast too, so weights that are updated in place need nothing;
    where one lies elsewhere than when it was recorded, there are more positions, or autocast has been switched, all is
    recorded again.

    Args:
        decoder: Computes the parts.
        weights: Called for the weights that the parts read.
        most_rows: The most rows of a step.
        record: Makes recordings; by default CUDA graphs.
    """

    def __init__(
        self,
        decoder: FusedDecoder,
        weights: Callable[[], Iterable[torch.Tensor]],
        most_rows: int,
        record: Recorder | None = None,
    ) -> None:
        self._decoder, self._weights = decoder, weights
        self._record = record or cuda_recorder()
        self._sizes = bucket_sizes(most_rows)
        self._recordings: dict[int, list[GraphPart]] = {}
        self._buffers: _Buffers | None = None
        self._dtype: torch.dtype | None = None
        self._places = self._weight_places()

    def __call__(
        self, tokens_B: torch.Tensor, positions_B: torch.Tensor, longest: int, cache: Attention
    ) -> torch.Tensor:
        """Return the hidden states of ``tokens_B`` at ``positions_B``, shape (rows, hidden size).

        No position is larger than ``longest``.
        """
        decoder, rows = self._decoder, len(tokens_B)
        buffers = self._prepare(tokens_B, longest)
        first, *others = self._recording(self._sizes[bisect_left(self._sizes, rows)])
        buffers.tokens[:rows] = tokens_B
        buffers.positions[:rows] = positions_B
        first()
        for layer, part in enumerate(others):
            inputs = decoder.inputs(layer, buffers.heads[:rows], buffers.value[:rows])
            buffers.attended[:rows] = cache.attend(layer, inputs).view(rows, -1)
            part()
        return buffers.hidden[:rows].clone()

    def refresh(self) -> None:
        """Forget the recordings if a weight lies elsewhere than it did; to be called when weights have been loaded."""
        places = self._weight_places()
        if places != self._places:
            self._forget()
            self._places = places

    def _weight_places(self) -> list[int]:
        return [weight.data_ptr() for weight in self._weights()]

    def _forget(self) -> None:
        self._recordings.clear()
        self._buffers = None

    def _prepare(self, tokens_B: torch.Tensor, longest: int) -> _Buffers:
        """Have the positions tabulated and the buffers there."""
        before = self._decoder.tables[0]
        like = self._decoder.embed(tokens_B[:1]) if self._buffers is None else self._buffers.hidden
        self._decoder.tabulate(longest + 1, like)
        dtype = compute_dtype(like.device, like.dtype)
        if self._decoder.tables[0] is not before or dtype != self._dtype:
            self._forget()
            self._dtype = dtype
        if self._buffers is None:
            self._buffers = _Buffers(self._decoder, tokens_B, self._sizes[-1])
        return self._buffers

    def _recording(self, size: int) -> list[GraphPart]:
        """The recordings of a bucket; they are made before its first step, for they run on what the buffers hold."""
        if size not in self._recordings:
            assert self._buffers is not None
            parts, kind = self._buffers.parts(self._decoder, size), self._buffers.hidden.device.type
            dtype, lowers = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
            with torch.autocast(kind, dtype, lowers, cache_enabled=False):  # a replay would find cached weights gone
                self._recordings[size] = [self._record(part) for part in parts]
        return self._recordings[size]


class _Buffers:
    """What goes into the parts and comes out of them, for the most rows; fewer rows take the first ones.

    Rows that are not in use hold what they held before: no row reads another.
    """

    def __init__(self, decoder: FusedDecoder, tokens_B: torch.Tensor, most_rows: int) -> None:
        self.tokens = tokens_B.new_zeros(most_rows)
        self.positions = torch.zeros_like(self.tokens)
        self.hidden = decoder.embed(self.tokens)
        self.cos, self.sin = decoder.angles(self.positions)
        self.heads, self.value = decoder.before(0, self.hidden, self.cos, self.sin)
        num_queries = self.heads.shape[1] - self.value.shape[1]
        self.attended = self.value.new_zeros((most_rows, num_queries * self.value.shape[2]))

    def parts(self, decoder: FusedDecoder, size: int) -> list[GraphPart]:
        """The parts of a step of ``size`` rows: one before each attention, one after the last."""
        hidden, attended = self.hidden[:size], self.attended[:size]

        def before(layer: int) -> None:
            heads, value = decoder.before(layer, hidden, self.cos[:size], self.sin[:size])
            self.heads[:size] = heads
            self.value[:size] = value

        def first() -> None:
            hidden.copy_(decoder.embed(self.tokens[:size]))
            cos, sin = decoder.angles(self.positions[:size])
            self.cos[:size] = cos
            self.sin[:size] = sin
            before(0)

        def between(layer: int) -> None:
            decoder.after(layer - 1, attended, hidden)
            before(layer)

        def last() -> None:
            hidden.copy_(decoder.norm(decoder.after(decoder.num_layers - 1, attended, hidden)))

        layers = range(1, decoder.num_layers)
        return [first, *((lambda layer=layer: between(layer)) for layer in layers), last]
