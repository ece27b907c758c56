"""Attention of packed groups compiled for a GPU that is not there, or run in Triton's interpreter; a process each.

Run by ``test_triton_code.py``.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.processes import read_case, tell
from tests.doubles.compile_only import Twins, begin

NUM_HEADS, NUM_KV_HEADS = 4, 2
PROMPT, RESPONSES = 60, (50, 3, 61)  # two blocks of 128 tokens, the second one not full
CARRIED = 30  # tokens of a prompt whose keys and values follow the row


@dataclass(frozen=True)
class Case:
    """The case that is compiled or run.

    Args:
        capability: Of the GPU: major and minor.
        head_size: Of queries, keys and values.
        dtype: Theirs, by its name in torch.
        window: How many tokens back a token sees; None for all.
        interpreted: Run in the interpreter, with numbers, and compare them; or else compile to binaries.
        cap: The limit of scores; None for none.
        rows: Packed rows of other shapes that are attended in forward afterwards, to count compilations.
    """

    capability: tuple[int, int]
    head_size: int
    dtype: str
    window: int | None
    interpreted: bool = False
    cap: float | None = None
    rows: int = 0


def main() -> None:
    """Compile or run forward and backward, and tell what came of it."""
    told: dict[str, Any] = read_case()
    major, minor = told.pop("capability")
    case = Case((major, minor), **told)
    if case.interpreted:
        os.environ["TRITON_INTERPRET"] = "1"
    twins, kernels = begin(case.capability)
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from lit_grpo.update.prefix.flex import flex_prefix_attention, prefix_block_mask
    from lit_grpo.update.prefix.layout import key_labels

    stretches = _row([(PROMPT, RESPONSES, False), (CARRIED, (20,), True)])
    num_tokens, labels_3K = PROMPT + sum(RESPONSES) + 20, key_labels(stretches)
    torch.manual_seed(0)
    shape, dtype = (1, NUM_HEADS, num_tokens, case.head_size), getattr(torch, case.dtype)
    keys = (1, NUM_KV_HEADS, labels_3K.shape[1], case.head_size)
    real = [torch.randn(each, dtype=dtype, requires_grad=True) for each in (shape, keys, keys)]
    weights, scaling = torch.randn(shape, dtype=dtype), case.head_size**-0.5
    plain_mask = prefix_block_mask(labels_3K, case.window, num_tokens) if case.interpreted else None
    with FakeTensorMode():
        query, key, value = inputs = [twins.fake(each) for each in real]
        labels = twins.fake(labels_3K)
        mask = prefix_block_mask(labels, case.window, num_tokens) if plain_mask is None else _on_gpu(plain_mask, twins)
        if plain_mask is not None:
            mask.mask_mod = _sees_by(labels, case.window)
        output = flex_prefix_attention(query, key, value, mask, scaling, case.cap)
        gradients = torch.autograd.grad(output, inputs, twins.fake(weights))
        found = [twins.real(each) for each in (output, *gradients)] if case.interpreted else []
    figures: dict[str, Any] = {"kernels": [asdict(kernel) for kernel in kernels]}
    if case.interpreted:
        expected = _one_by_one(stretches, [each.detach().double() for each in real], weights, scaling, case.window)
        names = ("output", "query", "key", "value")
        figures["gaps"] = {
            name: float((one.double() - other).abs().max())
            for name, one, other in zip(names, found, expected, strict=True)
        }
    if case.rows:
        with FakeTensorMode():
            figures["compilations"] = _compilations(case, twins)
    tell(figures)


def _compilations(case: Case, twins: Twins) -> dict[str, int]:
    """Return how often masks and attention are compiled over packed rows of many shapes."""
    import torch
    from torch._dynamo.utils import counters

    from lit_grpo.update.prefix.flex import flex_prefix_attention, prefix_block_mask
    from lit_grpo.update.prefix.layout import key_labels

    torch._dynamo.reset()
    count = {"masks": 0, "attention": 0}
    dtype, graphs = getattr(torch, case.dtype), lambda: counters["stats"]["unique_graphs"]
    for stretches in _layouts(case.rows):
        labels_3K = key_labels(stretches)
        num_tokens = sum(stretch.length for stretch in stretches if not stretch.carried)
        query = torch.empty((1, NUM_HEADS, num_tokens, case.head_size), dtype=dtype, device="cuda", requires_grad=True)
        keys = (1, NUM_KV_HEADS, labels_3K.shape[1], case.head_size)
        key = torch.empty(keys, dtype=dtype, device="cuda", requires_grad=True)
        labels = twins.fake(labels_3K)
        for window in (None, 16):
            before = graphs()
            mask = prefix_block_mask(labels, window, num_tokens)
            between = graphs()
            flex_prefix_attention(query, key, key, mask, 0.3)
            count["masks"] += between - before
            count["attention"] += graphs() - between
    return count


def _row(groups: Sequence[tuple[int, Sequence[int], bool]]) -> list[Any]:
    """Return the stretches of a row of groups: tokens of the prompt, of each response, and whether it is carried."""
    from lit_grpo.update.prefix.layout import Stretch

    stretches = list[Stretch]()
    start, carried_at = 0, sum(sum(lengths) + (0 if carried else prompt) for prompt, lengths, carried in groups)
    for prompt, lengths, carried in groups:
        stretches.append(Stretch(carried_at if carried else start, 0, prompt, len(stretches) + len(lengths), carried))
        carried_at, start = (carried_at + prompt, start) if carried else (carried_at, start + prompt)
        for length in lengths:
            stretches.append(Stretch(start, prompt, length, last=len(stretches)))
            start += length
    return stretches


def _layouts(num_rows: int) -> Iterator[list[Any]]:
    """First a short row, then rows of one to four groups of one to six responses; some have a carried prompt."""
    yield _row([(60, (20, 20), False)])
    rng = random.Random(0)
    for number in range(1, num_rows):
        groups = list[tuple[int, Sequence[int], bool]]()
        for _ in range(rng.randint(1, 4)):
            groups.append((rng.randint(1, 60), [rng.randint(0, 40) for _ in range(rng.randint(1, 6))], False))
        if number % 5 == 4:
            groups.append((7, (3, 5), True))
        yield _row(groups)


def _on_gpu(mask: Any, twins: Twins) -> Any:
    """Return a block mask that was made on the CPU, for it is made of integers alone, as one on the GPU."""
    import copy

    import torch

    moved = copy.copy(mask)
    for name, each in vars(mask).items():
        if isinstance(each, torch.Tensor):
            setattr(moved, name, twins.fake(each.contiguous()))
    return moved


def _sees_by(labels: Any, window: int | None) -> Any:
    """Return the mask of the product with other labels."""
    from unittest import mock

    from lit_grpo.update.prefix import flex

    with mock.patch.object(flex, "create_block_mask", lambda sees, *_, **__: sees):
        return flex.prefix_block_mask(labels, window, 0)


def _one_by_one(
    stretches: Sequence[Any], inputs: list[Any], weights: Any, scaling: float, window: int | None
) -> list[Any]:
    """Return output and gradients of each response with its prompt by itself, in float64, without any packing."""
    import torch

    query, key, value = (each.requires_grad_() for each in inputs)
    output, prompt = torch.zeros_like(query), stretches[0]
    for stretch in stretches:
        prompt = prompt if stretch.first else stretch
        if stretch.carried or not stretch.length:
            continue
        asking = torch.arange(stretch.start, stretch.start + stretch.length)
        before = torch.arange(prompt.start, prompt.start + prompt.length)
        seen = asking if stretch is prompt else torch.cat([before, asking])
        distance = torch.arange(len(seen))[-len(asking) :, None] - torch.arange(len(seen))
        sees = (distance >= 0) & (distance < (window or len(seen)))
        alone = torch.nn.functional.scaled_dot_product_attention(
            query[:, :, asking], key[:, :, seen], value[:, :, seen], sees, scale=scaling, enable_gqa=True
        )
        output = output.index_add(2, asking, alone)
    return [output.detach(), *torch.autograd.grad(output, (query, key, value), weights.double())]


if __name__ == "__main__":
    main()
