"""One rollout of one prompt in a process of its own: its peak of memory, its steps and its time.

Run by :mod:`benchmarks.infinite_sampling`; prints one line of JSON.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.decode_systems import NOISE, Work, generate
from benchmarks.one_prompt import SYSTEMS, Figures, Runner
from benchmarks.processes import read_case, tell
from benchmarks.random_policies import QWEN3_31M, random_qwen3
from benchmarks.workloads import by_key
from lit_grpo.memory import PeakMemory
from lit_grpo.tools.simulation.traces import noisy, synthetic_lengths
from lit_grpo.types import Prompt


@dataclass(frozen=True)
class Case:
    """The case of one process: ``system`` is the name of one of ``SYSTEMS``, or ``generate``."""

    system: str
    device: str
    group_size: int
    num_slots: int
    limit: int
    seed: int


def main() -> None:
    """Run the case that is given as JSON."""
    from scripts.make_tiny import make_tokenizer

    case = Case(**read_case())
    torch.set_num_threads(1)
    torch.manual_seed(case.seed)
    policy = random_qwen3(QWEN3_31M, case.device)
    prompts = [Prompt(f"train/{case.seed}", tuple(2 + i % 10 for i in range(64)), "")]
    rng = np.random.default_rng(case.seed)
    lengths = by_key(prompts, synthetic_lengths("lognormal_heavy", 1, case.group_size, case.limit, rng))
    told = dict(zip(lengths, noisy(np.array(list(lengths.values())), NOISE, case.seed).tolist(), strict=True))
    figures = Figures()
    if case.system == "generate":
        peer = generate(Work(policy, make_tokenizer(), prompts, lengths, case.group_size, case.group_size))

        def run() -> None:
            figures.steps, figures.seconds = peer()
            figures.tokens = sum(lengths.values())

    else:
        (system,) = [each for each in SYSTEMS if each.name == case.system]
        runner = Runner(system, policy, make_tokenizer(), case.num_slots, case.group_size, case.limit, lengths, told)

        def run() -> None:
            runner.run(prompts, figures, lengths)

    gc.collect()
    memory = PeakMemory(policy.device)
    idle_gib = memory.current_gib()
    memory.reset()
    run()
    tell(
        {
            "peak_mib": (memory.peak_gib() - idle_gib) * 1024,
            "weights_mib": sum(weight.nbytes for weight in policy.parameters()) / 2**20,
            "steps": figures.steps,
            "tokens": figures.tokens,
            "seconds": figures.seconds,
            "matches": figures.tokens == sum(lengths.values()),
        }
    )


if __name__ == "__main__":
    main()
