"""The attention of an update on a GPU, by torch's kernels and by FlexAttention: what is compiled, and how exact.

Nothing runs on a GPU. FlexAttention is compiled for sm_90 (``compile_only``), with empty caches and once more with what
the first run has left in them; CPU seconds are one thread's. Torch's kernels are compiled already: which of them a
precision goes by, and their launches, are found under the pretended GPU (``pretend_cuda``), where plain operations
stand for them, and where the gradient of a small random Qwen3 is held beside padded rows.
"""

from __future__ import annotations

import copy
import itertools
import sys
import tempfile
import warnings
from contextlib import nullcontext
from typing import Any
from unittest import mock

import peft  # noqa: F401  # it asks for CUDA when it is first imported under the pretended GPU
import torch

from benchmarks.first_update_case import HEAD_SIZE, HEADS, KV_HEADS, Case
from benchmarks.processes import measured
from benchmarks.random_policies import Sizes, random_qwen3
from benchmarks.report import Claim, Options, Row, finish, parse_options
from benchmarks.update_work import Work
from lit_grpo.update.batches.microbatch import make_micro_batches
from lit_grpo.update.logprobs.forward import micro_batch_logprobs
from lit_grpo.update.prefix.flash import fused_attention, fused_kernels, plan_launches
from lit_grpo.update.prefix.kernels import KERNELS
from lit_grpo.update.prefix.layout import Stretch
from lit_grpo.update.prefix.sharing import shared_prefixes
from tests.doubles.pretend_cuda import pretend_cuda

SIZES = Sizes(4, 64, 128, 4, 2, 16, tied=True)
OF_A_BACKWARD = {"flash": 2 + 2, "memory-efficient": 1}
"""Kernels of one backward operation besides the one that is counted: softmax sums, the queries' gradient rounded, and
keys and values summed over the heads that share them; memory filled with zeros (read in torch's source)."""
PRECISIONS = {
    "bfloat16": ("bfloat16", None),
    "float16": ("float16", None),
    "float32": ("float32", None),
    "bfloat16, capped scores (Gemma 2)": ("bfloat16", 50.0),
}
"""By precision, the dtype of attention and the limit of its scores."""


def main(options: Options) -> int:
    """Compile, count and compare."""
    rows: list[Row] = []
    claims: list[Claim] = []
    for precision, (dtype, cap) in PRECISIONS.items():
        ours = _way(getattr(torch, dtype), cap)
        flex: list[dict[str, Any]] = []
        if not options.quick:
            with tempfile.TemporaryDirectory() as caches:
                for turn in ("empty caches", "the same again"):
                    steps = measured("benchmarks.first_update_case", Case(caches, dtype, cap))
                    flex += [{"caches": turn, "step": name} | its for name, its in steps.items()]
        rows += [
            {"precision": precision, "way": "FlexAttention", "attends now": ours == "FlexAttention"} | row
            for row in flex
        ]
        spent = [row for row in flex if row["caches"] == "empty caches" and ours == "FlexAttention"]
        seconds, binaries = (round(sum(row[name] for row in spent), 2) for name in ("cpu_s", "binaries"))
        now: Row = {"precision": precision, "way": ours, "attends now": True}
        rows.append(now | {"compiled in a first run, CPU s": seconds, "compiled in a first run, binaries": binaries})
        if not options.quick:
            claims.append(Claim(f"CPU seconds that a first run compiles, {precision}", seconds, "<=", 5))
    rows += _launches()
    gradients = _gradients()
    rows.append({"way": "gradient beside padded rows"} | gradients)
    claims += [
        Claim(f"gradient by {name} kernels beside padded rows, float32", gradients[f"{name}, float32"], "<=", 4e-6)
        for name in ("flash", "memory-efficient")
    ]
    claims.append(
        Claim(
            "error of the gradient in bf16-mixed, flash kernels over padded rows",
            gradients["flash, bf16-mixed"] / gradients["rows, bf16-mixed"],
            "<=",
            1.25,
        )
    )
    settings: Row = {"heads": HEADS, "kv_heads": KV_HEADS, "head_size": HEAD_SIZE, "capability": "sm_90"}
    return finish("first_update", options, settings, rows, claims)


def _way(dtype: torch.dtype, cap: float | None) -> str:
    with pretend_cuda(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says which way attention goes
        query, key = (torch.empty((1, heads, 2, HEAD_SIZE), dtype=dtype, device="cuda") for heads in (HEADS, KV_HEADS))
        kernels = fused_kernels(query, key, cap)
    return "FlexAttention" if kernels is None else kernels.name


def _launches() -> list[Row]:
    """Count the launches of a layer's attention by torch's kernels, forward and backward."""
    row = (Stretch(0, 0, 12, last=3), *(Stretch(12 + 5 * at, 12, 5, last=at + 1) for at in range(3)))
    tree = (
        *(Stretch(0, 0, 12, last=3), Stretch(12, 12, 5, last=3), Stretch(17, 17, 5, last=2)),
        Stretch(22, 17, 5, last=3),
    )
    rows: list[Row] = []
    kinds = (("a group", row, None), ("a tree", tree, None), ("a window", row, 4))
    for kernels, (name, stretches, window) in itertools.product(KERNELS, kinds):
        with pretend_cuda() as gpu:
            plan = plan_launches(stretches, window).to(torch.device("cuda", 0), {})
            query, key, value = (
                torch.zeros((1, heads, 27, HEAD_SIZE), dtype=torch.bfloat16, device="cuda").requires_grad_()
                for heads in (HEADS, KV_HEADS, KV_HEADS)
            )
            gpu.reset()
            output = fused_attention(query, key, value, plan, HEAD_SIZE**-0.5, None, kernels)
            forward = gpu.launches
            above = torch.ones_like(output)
            gpu.reset()
            torch.autograd.grad(output, [query, key, value], above)
            backward = gpu.launches + OF_A_BACKWARD[kernels.name] * len(plan.launches)
            way = f"{kernels.name} kernels"
            rows.append({"way": way, "step": name, "forward": forward, "backward": backward, "binaries": 0})
    return rows


def _gradients() -> dict[str, float]:
    """Return the gradient's relative error, beside padded rows in float32, by way and precision."""
    (group,) = Work(24, 16, 6, vocab_size=16).groups()
    for rollout in group.rollouts:
        rollout.advantage = rollout.reward - 0.5
    policy: Any = random_qwen3(SIZES).train()
    found = {"rows, float32": _gradient(policy, group.rollouts, None, None)}
    for name in ("flash", "memory-efficient", "compiled", "rows"):
        for precision in (torch.bfloat16,) if name == "rows" else (None, torch.bfloat16):
            label = "float32" if precision is None else "bf16-mixed"
            found[f"{name}, {label}"] = _gradient(policy, group.rollouts, precision, None if name == "rows" else name)
    exact = found.pop("rows, float32")
    return {name: float((each - exact).norm() / exact.norm()) for name, each in found.items()}


def _gradient(policy: Any, rollouts: Any, precision: torch.dtype | None, way: str | None) -> torch.Tensor:
    shares, cuda = way is not None, torch.backends.cuda
    with pretend_cuda(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says which way attention goes
        there = copy.deepcopy(policy).to("cuda")
        row = make_micro_batches(rollouts, 4096, shares)[0].filled(rollouts).to("cuda")
        with (
            mock.patch.object(cuda, "can_use_flash_attention", lambda _: way == "flash"),
            mock.patch.object(cuda, "can_use_efficient_attention", lambda _: way == "memory-efficient"),
            shared_prefixes(there) if shares else nullcontext(),
            torch.autocast("cuda", precision or torch.bfloat16, enabled=precision is not None, cache_enabled=False),
        ):
            logprobs_N, _ = micro_batch_logprobs(there, row, 1.0)
            (logprobs_N * row.advantages_N).sum().backward()
        return torch.cat([weight.grad.flatten().float().cpu() for weight in there.parameters()])


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(main(parse_options(__doc__)))
