"""A decode step in one launch: all from the tokens to the last hidden states is recorded once and replayed.

A small model's step on a GPU takes as long as its kernels take to be launched, one by one. Attention reads tables of
what lies where (:mod:`lit_grpo.rollout.slots.kv.tables`), so a recording stays right while completions grow, come and
go. There is one recording for each of some numbers of rows, and a step takes the smallest that has room for its rows;
steps with drafts, whose keys are written before any row attends, have their own.
Sampling is not recorded: it is few operations, and a recording would keep their memory, which is that of the whole
vocabulary, throughout the update.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Any

import torch

from lit_grpo.policy.architecture.decoder import compute_dtype
from lit_grpo.rollout.slots.forward import FusedDecoder
from lit_grpo.rollout.slots.kv.tables import RowTables

_FIRST_BUCKETS, _BUCKET_STEP = (1, 2, 4), 8
_WARM_UPS = 2

RecordedStep = Callable[[], None]
"""Reads and writes tensors that stay where they are; a recording of it does the same when it is called."""
Recorder = Callable[[RecordedStep], RecordedStep]


def bucket_sizes(most_rows: int) -> list[int]:
    """Return the numbers of rows that are recorded, ascending, the last one ``most_rows``.

    Example:
        >>> bucket_sizes(20)
        [1, 2, 4, 8, 16, 20]
    """
    sizes = [*_FIRST_BUCKETS, *range(_BUCKET_STEP, most_rows, _BUCKET_STEP)]
    return [*(size for size in sizes if size < most_rows), most_rows]


def cuda_recorder() -> Recorder:
    """Return a recorder whose recordings share one pool of memory, for they are replayed one after another.

    The pool ends with the last of its recordings, and so does the recorder: torch records nothing more in it.
    """
    pool = torch.cuda.graph_pool_handle()
    return lambda step: _record_cuda_graph(step, pool)


def _record_cuda_graph(step: RecordedStep, pool: Any) -> RecordedStep:
    """Capture a step as a CUDA graph, after it has run on a side stream, as torch asks for; return its replay."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UPS):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        step()
    return graph.replay


class GraphedDecoder:
    """Runs a decoder like :class:`FusedDecoder`, a whole step replayed from a recording.

    Recordings read the weights where they are, under autocast too, so weights that are updated in place need nothing;
    where one lies elsewhere than when it was recorded, there are more positions, a table has grown, or autocast has
    been switched, all is recorded again. Rows that a recording has room for and a step has not are idle: they have no
    column in the tables.

    Args:
        decoder: Decoder that computes a step of all slots.
        tables: Say what lies where, and attend.
        weights: Called for the weights that a step reads.
        make_recorder: Makes what records a step, once for all recordings that are there at a time; by default as CUDA
            graphs.
    """

    def __init__(
        self,
        decoder: FusedDecoder,
        tables: RowTables,
        weights: Callable[[], Iterable[torch.Tensor]],
        make_recorder: Callable[[], Recorder] = cuda_recorder,
    ) -> None:
        self._decoder, self._tables, self._weights = decoder, tables, weights
        self._make_recorder = make_recorder
        self._sizes = bucket_sizes(len(tables.columns))
        self._forget()
        self._made_with: tuple[object, ...] = ()
        self._tokens, self._positions = torch.zeros_like(tables.columns), torch.zeros_like(tables.columns)
        with torch.no_grad():
            self._hidden = decoder.embed(self._tokens)
        self._weight_places = [weight.data_ptr() for weight in weights()]

    def __call__(self, tokens_B: torch.Tensor, positions_B: torch.Tensor, longest: int) -> torch.Tensor:
        """Return the hidden states of ``tokens_B`` at ``positions_B``, shape (rows, hidden size).

        No position is larger than ``longest``.
        """
        rows, kind = len(tokens_B), self._tokens.device.type
        self._tokens[:rows], self._positions[:rows] = tokens_B, positions_B
        self._decoder.tabulate(longest + 1, self._hidden)
        dtype = compute_dtype(self._tokens.device, self._hidden.dtype)
        made_with = (*self._tables.places, self._decoder.tables[0].data_ptr(), dtype)
        if made_with != self._made_with:
            self._forget()
            self._made_with = made_with
        size = self._sizes[bisect_left(self._sizes, rows)]
        kind_of_step = size, self._tables.is_drafted
        if kind_of_step not in self._recordings:
            lowered, lowers = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
            with torch.autocast(kind, lowered, lowers, cache_enabled=False):  # a replay would find cached weights gone
                self._recordings[kind_of_step] = self._record(lambda: self._step(size, longest))
        self._recordings[kind_of_step]()
        return self._hidden[:rows].clone()

    def refresh(self) -> None:
        """Forget the recordings if a weight lies elsewhere than it did; to be called when weights have been loaded."""
        places = [weight.data_ptr() for weight in self._weights()]
        if places != self._weight_places:
            self._forget()
            self._weight_places = places

    def _forget(self) -> None:
        self._recordings: dict[tuple[int, bool], RecordedStep] = {}
        self._record = self._make_recorder()

    def _step(self, size: int, longest: int) -> None:
        hidden_BD = self._decoder(self._tokens[:size], self._positions[:size], longest, self._tables)
        self._hidden[:size] = hidden_BD
