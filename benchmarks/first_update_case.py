"""FlexAttention of an update compiled for an H100 that is not there: CPU seconds, binaries, and launches per layer.

Run by ``first_update``, twice with the same caches, in processes of their own.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.processes import read_case, tell
from tests.doubles.compile_only import Twins, begin

HEADS, KV_HEADS, HEAD_SIZE = 16, 8, 128  # of Qwen3-1.7B
ROWS = {"trial": (3, (2, 3)), "first": (512, (700, 300, 900)), "second": (300, (100, 900, 50, 77))}
"""By step, the tokens of a prompt and of its completions: what runs before the first update, and two updates."""


@dataclass(frozen=True)
class Case:
    """The case that is compiled.

    Args:
        caches: A folder for the caches of Inductor and Triton.
        dtype: Of queries, keys and values.
        cap: The limit of scores, or None.
    """

    caches: str
    dtype: str = "bfloat16"
    cap: float | None = None


def main() -> None:
    """Compile what the steps need; tell seconds, binaries and launches of each."""
    case = Case(**read_case())
    caches = Path(case.caches)
    os.environ |= {"TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"), "TRITON_CACHE_DIR": str(caches / "triton")}
    twins, _ = begin((9, 0))
    from torch._inductor import config
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    config.fx_graph_cache = True
    run, launched = CachingAutotuner.run, list[str]()

    def counted(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        launched.append(kernel.inductor_meta["kernel_name"])
        return run(kernel, *args, **kwargs)

    CachingAutotuner.run = counted
    steps: dict[str, dict[str, float]] = {}
    for name, (prompt, responses) in ROWS.items():
        before, begun = len(list(caches.rglob("*.cubin"))), time.process_time()
        launched.clear()
        of_mask = _attend(twins, case, prompt, responses, launched, backward=name != "trial")
        steps[name] = {
            "cpu_s": round(time.process_time() - begun, 2),
            "binaries": len(list(caches.rglob("*.cubin"))) - before,
            "launches_of_mask": of_mask,
            "launches_per_layer": len(launched) - of_mask,
        }
    tell(steps)


def _attend(
    twins: Twins, case: Case, prompt: int, responses: tuple[int, ...], launched: list[str], backward: bool
) -> int:
    """Attend once; return how many launches were those of the mask, which all layers share."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from lit_grpo.update.prefix.flex import flex_prefix_attention, prefix_block_mask
    from lit_grpo.update.prefix.layout import Stretch, key_labels

    stretches, num_tokens = [Stretch(0, 0, prompt, last=len(responses))], prompt
    for number, length in enumerate(responses):
        stretches.append(Stretch(num_tokens, prompt, length, last=number + 1))
        num_tokens += length
    labels_3K, dtype = key_labels(stretches), getattr(torch, case.dtype)
    with FakeTensorMode():
        query, key, value = (
            torch.empty((1, heads, num_tokens, HEAD_SIZE), dtype=dtype, device="cuda", requires_grad=backward)
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        mask = prefix_block_mask(twins.fake(labels_3K), None, num_tokens)
        of_mask = len(launched)
        output = flex_prefix_attention(query, key, value, mask, HEAD_SIZE**-0.5, case.cap)
        if backward:
            torch.autograd.grad(output, [query, key, value], torch.empty_like(output))
    return of_mask


if __name__ == "__main__":
    main()
