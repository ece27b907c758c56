"""The attention of an update on a GPU, by torch's flash kernels and by FlexAttention: what is compiled, and how exact.

Nothing runs on a GPU. FlexAttention is compiled for sm_90 (``compile_only``), with empty caches and once more with what
the first run has left in them; CPU seconds are one thread's. Flash kernels are compiled already: their launches are
counted under the pretended GPU (``pretend_cuda``), where plain operations stand for them, and where the gradient of a
small random Qwen3 is held beside padded rows.
"""

from __future__ import annotations

import copy
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
from lit_grpo.update.prefix.flash import flash_attention, plan_launches
from lit_grpo.update.prefix.layout import Stretch
from lit_grpo.update.prefix.sharing import shared_prefixes
from tests.doubles.pretend_cuda import pretend_cuda

SIZES = Sizes(4, 64, 128, 4, 2, 16, tied=True)
OF_A_BACKWARD = 2 + 2
"""Kernels of one backward operation besides the one that is counted: softmax sums, the queries' gradient rounded, and
keys and values summed over the heads that share them (read in torch's source)."""


def main(options: Options) -> int:
    """Compile, count and compare."""
    rows: list[Row] = []
    if not options.quick:
        with tempfile.TemporaryDirectory() as caches:
            for turn in ("empty caches", "the same again"):
                steps = measured("benchmarks.first_update_case", Case(caches))
                rows += [{"way": "FlexAttention", "caches": turn, "step": name} | its for name, its in steps.items()]
    rows += _launches()
    gradients = _gradients()
    rows.append({"way": "gradient beside padded rows"} | gradients)
    claims = [
        Claim("gradient by flash kernels beside padded rows, float32", gradients["flash, float32"], "<=", 4e-6),
        Claim(
            "error of the gradient in bf16-mixed, flash kernels over padded rows",
            gradients["flash, bf16-mixed"] / gradients["rows, bf16-mixed"],
            "<=",
            1.25,
        ),
    ]
    settings: Row = {"heads": HEADS, "kv_heads": KV_HEADS, "head_size": HEAD_SIZE, "capability": "sm_90"}
    return finish("first_update", options, settings, rows, claims)


def _launches() -> list[Row]:
    """Count the launches of a layer's attention by flash kernels, forward and backward, and what it keeps."""
    row = (Stretch(0, 0, 12, last=3), *(Stretch(12 + 5 * at, 12, 5, last=at + 1) for at in range(3)))
    tree = (
        *(Stretch(0, 0, 12, last=3), Stretch(12, 12, 5, last=3), Stretch(17, 17, 5, last=2)),
        Stretch(22, 17, 5, last=3),
    )
    rows: list[Row] = []
    for name, stretches, window in (("a group", row, None), ("a tree", tree, None), ("a window", row, 4)):
        with pretend_cuda() as gpu:
            plan = plan_launches(stretches, window).to(torch.device("cuda", 0), {})
            query, key, value = (
                torch.zeros((1, heads, 27, HEAD_SIZE), dtype=torch.bfloat16, device="cuda").requires_grad_()
                for heads in (HEADS, KV_HEADS, KV_HEADS)
            )
            gpu.reset()
            output = flash_attention(query, key, value, plan, HEAD_SIZE**-0.5)
            forward = gpu.launches
            above = torch.ones_like(output)
            gpu.reset()
            torch.autograd.grad(output, [query, key, value], above)
            rows.append(
                {
                    "way": "flash kernels",
                    "step": name,
                    "forward": forward,
                    "backward": gpu.launches + OF_A_BACKWARD * len(plan.launches),
                    "binaries": 0,
                }
            )
    return rows


def _gradients() -> dict[str, float]:
    """Return the gradient's relative error, beside padded rows in float32, by way and precision."""
    (group,) = Work(24, 16, 6, vocab_size=16).groups()
    for rollout in group.rollouts:
        rollout.advantage = rollout.reward - 0.5
    policy: Any = random_qwen3(SIZES).train()
    found = {"rows, float32": _gradient(policy, group.rollouts, None, flash=False, shares=False)}
    for name, flash, shares in (("flash", True, True), ("compiled", False, True), ("rows", False, False)):
        for precision in (None, torch.bfloat16) if shares else (torch.bfloat16,):
            label = "float32" if precision is None else "bf16-mixed"
            found[f"{name}, {label}"] = _gradient(policy, group.rollouts, precision, flash, shares)
    exact = found.pop("rows, float32")
    return {name: float((each - exact).norm() / exact.norm()) for name, each in found.items()}


def _gradient(policy: Any, rollouts: Any, precision: torch.dtype | None, flash: bool, shares: bool) -> torch.Tensor:
    takes = mock.Mock(return_value=flash)
    with pretend_cuda(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says which way attention goes
        there = copy.deepcopy(policy).to("cuda")
        row = make_micro_batches(rollouts, 4096, shares)[0].filled(rollouts).to("cuda")
        with (
            mock.patch.object(torch.backends.cuda, "can_use_flash_attention", takes),
            shared_prefixes(there) if shares else nullcontext(),
            torch.autocast("cuda", precision or torch.bfloat16, enabled=precision is not None, cache_enabled=False),
        ):
            logprobs_N, _ = micro_batch_logprobs(there, row, 1.0)
            (logprobs_N * row.advantages_N).sum().backward()
        return torch.cat([weight.grad.flatten().float().cpu() for weight in there.parameters()])


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(main(parse_options(__doc__)))
