"""One rollout in a process of its own, and the memory that it took at its peak.

Run by :mod:`benchmarks.kv_memory`; prints one line of JSON.
"""

from __future__ import annotations

import gc
import json
import logging
import sys
from dataclasses import asdict, dataclass
from typing import Literal

import torch

from benchmarks.forced_lengths import ForcedGenerator, started
from benchmarks.random_policies import QWEN3_WIDE, random_qwen3
from lit_grpo.memory import PeakMemory
from lit_grpo.rollout.loop import RolloutLoop, Stepped
from lit_grpo.types import Prompt, SamplingParams

System = Literal["lit_grpo", "full group"]


@dataclass(frozen=True)
class Case:
    """What one process measures. All completions come to ``max_tokens``."""

    system: System
    device: str
    layers: int
    prompt_tokens: int
    group_size: int
    num_slots: int
    max_tokens: int


def main(argument: str) -> None:
    """Run the case that is given as JSON."""
    from lit_grpo.policy.tiny import make_tokenizer

    case = Case(**json.loads(argument))
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    policy = random_qwen3(QWEN3_WIDE | {"num_hidden_layers": case.layers}, case.device)
    prompt = Prompt("train/0", tuple(2 + i % 10 for i in range(case.prompt_tokens)), "")
    lengths = {("train/0", 0, (sample,)): case.max_tokens for sample in range(case.group_size)}
    slots = case.num_slots if case.system == "lit_grpo" else case.group_size
    generator = started(ForcedGenerator(lengths, slots), policy, make_tokenizer())
    held = 0

    def on_step(_: int) -> None:
        nonlocal held
        held = max(held, generator.capacity().kv_tokens_in_use)

    controller = RolloutLoop(generator, listeners=[Stepped(on_step)])
    gc.collect()
    memory = PeakMemory(policy.device)
    idle_gib = memory.current_gib()
    memory.reset()
    controller.collect([prompt], case.group_size, SamplingParams(max_tokens=case.max_tokens), seed=0)
    peak_mib = (memory.peak_gib() - idle_gib) * 1024
    kv_mib = held * generator._shape.bytes_per_token / 2**20
    least = (case.prompt_tokens + slots * case.max_tokens) * generator._shape.bytes_per_token / 2**20
    print(json.dumps({"rollout_mib": peak_mib, "kv_mib": kv_mib, "prompt_and_slots_mib": least}))


def to_argument(case: Case) -> str:
    """Return ``case`` as the argument that :func:`main` takes."""
    return json.dumps(asdict(case))


if __name__ == "__main__":
    main(sys.argv[1])
