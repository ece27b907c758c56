"""One rollout in a process of its own, and the memory that it took at its peak.

Run by :mod:`benchmarks.kv_memory`; prints one line of JSON.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from typing import Literal

import torch

from benchmarks.processes import read_case, tell
from benchmarks.random_policies import QWEN3_WIDE, kv_bytes, random_qwen3
from benchmarks.rollouts import kv_tokens, roll_out, slots
from benchmarks.workloads import long_tailed
from lit_grpo.memory import PeakMemory
from lit_grpo.types import Prompt, SamplingParams

System = Literal["lit_grpo", "full group"]


@dataclass(frozen=True)
class Case:
    """The case of one process. All completions have ``max_tokens`` tokens, or ``tailed`` lengths up to that."""

    system: System
    device: str
    layers: int
    prompt_tokens: int
    group_size: int
    num_slots: int
    max_tokens: int
    tailed: bool = False


def main() -> None:
    """Run the case that is given as JSON."""
    from benchmarks.make_tiny import make_tokenizer

    case = Case(**read_case())
    torch.set_num_threads(1)
    policy = random_qwen3(replace(QWEN3_WIDE, layers=case.layers), case.device)
    prompt = Prompt("train/0", tuple(2 + i % 10 for i in range(case.prompt_tokens)), "")
    lengths = long_tailed([prompt], case.group_size, case.max_tokens)
    if not case.tailed:
        lengths = dict.fromkeys(lengths, case.max_tokens)
    num_slots = case.num_slots if case.system == "lit_grpo" else case.group_size
    generator = slots(policy, make_tokenizer(), num_slots, lengths)
    held = [(0, 0)]
    gc.collect()
    memory = PeakMemory(policy.device)
    idle_gib = memory.current_gib()
    memory.reset()
    sampling = SamplingParams(max_tokens=case.max_tokens)
    roll_out(generator, [prompt], case.group_size, sampling, on_step=lambda _: held.append(kv_tokens(generator)))
    peak_mib = (memory.peak_gib() - idle_gib) * 1024
    token_mib = kv_bytes(policy) / 2**20
    allocated, used = (max(tokens) for tokens in zip(*held, strict=True))
    least = case.prompt_tokens + num_slots * case.max_tokens
    tell(
        {
            "rollout_mib": peak_mib,
            "kv_mib": allocated * token_mib,
            "prompt_and_slots_mib": least * token_mib,
            "used_mib": used * token_mib,
            "allocated_tokens": allocated,
            "used_tokens": used,
        }
    )


if __name__ == "__main__":
    main()
