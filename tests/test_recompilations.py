"""How often the attention of a GPU is compiled over packed rows of many shapes, counted without a GPU.

What makes torch compile again are Dynamo's guards, which are the same whatever computes what was compiled: here plain
operations, and nightly Inductor's C++.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from lit_grpo.update.prefix import flex
from lit_grpo.update.prefix.layout import PackedGroup, key_labels

NUM_ROWS, MOST = 100, 6


def layouts(seed: int = 0) -> Iterator[list[PackedGroup]]:
    """Rows of one to four groups, of one to six responses, of all lengths; every fifth one has a carried prompt."""
    rng = random.Random(seed)
    for number in range(NUM_ROWS):
        groups, start = list[PackedGroup](), 0
        for _ in range(rng.randint(1, 4)):
            group = PackedGroup(start, rng.randint(1, 60), tuple(rng.randint(0, 40) for _ in range(rng.randint(1, 6))))
            start = group.response_start + sum(group.response_tokens)
            groups.append(group)
        if number % 5 == 4:
            groups.append(PackedGroup(start, 7, (3, 5), carried_at=start + 8))
        yield groups


def compiled_with(backend: str, compile_: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compile`` with another backend, whatever it is asked for."""

    def compiling(function: Any = None, *_: Any, dynamic: bool | None = None, **__: Any) -> Any:
        return compile_(function, backend=backend, dynamic=dynamic)

    return compiling


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_rows_of_many_shapes_share_a_few_compilations(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    make_mask = flex.create_block_mask
    monkeypatch.setattr(torch, "compile", compiled_with(backend, torch.compile))
    monkeypatch.setattr(
        flex, "create_block_mask", lambda *a, **options: make_mask(*a, **(options | {"_compile": True}))
    )
    attend = torch.compile(flex.flex_attention, dynamic=True)
    graphs = {"masks": 0, "attention": 0}

    def counted(name: str, run: Callable[[], Any]) -> Any:
        before = counters["stats"]["unique_graphs"]
        result = run()
        graphs[name] += counters["stats"]["unique_graphs"] - before
        return result

    for groups in layouts():
        labels_3K = key_labels(groups)
        num_tokens = groups[-1].response_start + sum(groups[-1].response_tokens)
        for window in (None, 16):
            mask = counted("masks", lambda: flex.prefix_block_mask(labels_3K, window, num_tokens))  # noqa: B023
            query = torch.randn(1, 4, num_tokens, 16)
            key = torch.randn(1, 2, labels_3K.shape[1], 16)
            counted("attention", lambda: attend(query, key, key, block_mask=mask, scale=0.3, enable_gqa=True))  # noqa: B023
    assert 0 < graphs["masks"] <= MOST and 0 < graphs["attention"] <= MOST, graphs
