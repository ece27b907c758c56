"""Kernels of a decode step in Triton's interpreter: of attention beside the shelves, between the products of a layer
beside torch, and in whole decode steps."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from lit_grpo.rollout.slots.kernels import LayerKernels
from tests.cuda.row_attention_case import largest_gap
from tests.doubles.layer_kernels import PlainKernels

ROWS = 3


def rounded(numbers: Any, own_dtype: Any, dtype: Any, mode: Any) -> Any:
    """Convert between float32 and bfloat16 as a GPU does: the interpreter cuts off what a GPU rounds."""
    if (own_dtype, dtype) != (tl.float32, tl.bfloat16):
        return converted(numbers, own_dtype, dtype, mode)
    return torch.from_numpy(numbers.astype(np.float32)).bfloat16().view(torch.uint16).numpy()


converted = interpreter._convert_float
interpreter._convert_float = rounded  # pyrefly: ignore[bad-assignment]


def piecewise(dtype: torch.dtype, weights_in: torch.dtype) -> dict[str, float]:
    """Return the largest difference from torch's by piece, relative to the largest number."""
    numbers, ours, plain = torch.Generator().manual_seed(0), LayerKernels(), PlainKernels()

    def random(*size: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(size, generator=numbers).to(dtype)

    gaps: dict[str, float] = {}

    def compare(name: str, *arguments: Any) -> None:
        pairs = zip(*(getattr(each, name.partition(" ")[0])(*arguments) for each in (ours, plain)), strict=True)
        for one, other in pairs:
            assert one.dtype == other.dtype and one.shape == other.shape
            gap = float((one.double() - other.double()).abs().max() / other.double().abs().max())
            gaps[name] = max(gap, gaps.get(name, 0.0))

    for size in (64, 100):  # the second one is no power of two
        weight = random(size, dtype=weights_in)
        hidden = random(ROWS, size, dtype=weights_in)
        compare("add_and_norm", hidden, random(ROWS, size), weight, 1e-6, dtype)
        compare("add_and_norm first", hidden, None, weight, 1e-6, dtype)
    query, key, _ = random(ROWS, 7 * 16).split([64, 32, 16], -1)  # of one matrix
    angles = torch.outer(torch.arange(50), torch.rand(8, generator=numbers)).repeat(1, 2)
    sine = torch.cat([-angles[:, :8].sin(), angles[:, 8:].sin()], -1)
    tables = (angles.cos().to(weights_in), sine.to(weights_in))
    norms = (*(random(16, dtype=weights_in) for _ in range(2)), 1e-5)
    for kind, given in ("", norms), (" plain", None):
        compare("norm_and_rotate" + kind, query, key, given, tables, torch.tensor([0, 49, 7]), dtype)
    both = random(ROWS, 2 * 1100, dtype=dtype) * 20
    compare("silu_and_multiply", *both.split(1100, -1))
    return gaps


def decoded(family: str) -> dict[str, list[float]]:
    """Return how far log-probs after decode steps are off those of the model's forward in float32: largest and mean.

    Decode steps are those of kernels and of operations, in float32, with weights in bfloat16, and under autocast.
    """
    from lit_grpo.policy.architecture.attention import attention_calls
    from lit_grpo.policy.architecture.decoder import hidden_states, token_logits
    from lit_grpo.rollout.slots.attention import use_slot_attention
    from lit_grpo.rollout.slots.binding import _NUM_TOKENS, _decode, shape_of_calls
    from lit_grpo.rollout.slots.forward import FusedDecoder
    from tests.test_fused_decoder import make

    ids, gaps = torch.arange(_NUM_TOKENS)[None], dict[str, list[torch.Tensor]]()
    for seed in range(3):
        exact = torch.empty(0)
        for case in ("float32", "bfloat16", "autocast"):
            model: Any = make(family)
            numbers = torch.Generator().manual_seed(seed)
            for weight in model.parameters():
                weight.data.add_(0.1 * torch.randn(weight.shape, generator=numbers))
            model = model.bfloat16() if case == "bfloat16" else model
            with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
                calls = attention_calls(model, 256)
                shape = shape_of_calls(calls, model.device)
                if case == "float32":
                    exact = token_logits(model, hidden_states(model, ids)[0, -1]).log_softmax(-1)
                use_slot_attention(model)
                for way, kernels in ("kernels", LayerKernels()), ("operations", None):
                    hidden = _decode(model, ids, shape, FusedDecoder(model, calls, kernels))
                    gap = (token_logits(model, hidden).log_softmax(-1) - exact).abs()
                    gaps.setdefault(f"{case}, {way}", []).append(gap)
    return {name: [float(torch.cat(each).max()), float(torch.cat(each).mean())] for name, each in gaps.items()}


def main() -> None:
    """Print what comes of each case, which is a word: what is done, and with what, as in ``pieces-float32-float32``."""
    found: dict[str, Any] = {}
    for case in sys.argv[1:]:
        match case.split("-"):
            case "rows", steps:
                found[case] = largest_gap("cpu", int(steps))
            case "decoded", family:
                found[case] = decoded(family)
            case _, *names:
                found[case] = piecewise(*(getattr(torch, name) for name in names))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # the interpreter's threads would be waited for
