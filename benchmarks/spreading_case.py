"""One rank that decodes the prompts it is told, in a process of its own.

Run by :mod:`benchmarks.spreading`; reads a line of JSON with the places of its prompts for each rollout, and answers
with the seconds that it took.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.processes import read_case, stay_on, tell
from lit_grpo.types import Prompt, SamplingParams


@dataclass(frozen=True)
class Workload:
    """The workload of a rank.

    Args:
        num_prompts: Number of prompts of each rank.
        group_size: Completions per prompt.
        num_slots: Number of slots of each rank.
        limit: Tokens of a completion.
        between: Share of the variance of log lengths that is between prompts.
    """

    num_prompts: int
    group_size: int
    num_slots: int
    limit: int
    between: float

    def __str__(self) -> str:
        """Return what it is called in tables."""
        return f"{self.num_prompts} x {self.group_size} on {self.num_slots}, {self.between:g} between prompts"


@dataclass(frozen=True)
class Case:
    """The workload, and the rank of this process."""

    workload: Workload
    rank: int


def draw_visits(workload: Workload, num_ranks: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the lengths of two visits of the prompts of all ranks, each of shape (prompts, group)."""
    rng = np.random.default_rng(seed)
    shape = (workload.num_prompts * num_ranks, workload.group_size)
    of_prompts = np.sqrt(workload.between) * rng.standard_normal((shape[0], 1))
    within = np.sqrt(1 - workload.between)
    visits = [0.12 * workload.limit * np.exp(of_prompts + within * rng.standard_normal(shape)) for _ in range(2)]
    first, second = (np.clip(np.rint(visit), 1, workload.limit).astype(np.int64) for visit in visits)
    return first, second


def dealt_first_come(work: np.ndarray, num_ranks: int) -> list[list[int]]:
    """Give each prompt in turn to the rank that would be done with what it has first."""
    dealt: list[list[int]] = [[] for _ in range(num_ranks)]
    for place, _ in enumerate(work):
        min(dealt, key=lambda places: work[places].sum()).append(place)
    return dealt


def main() -> None:
    """Decode what each line of the input says."""
    import torch

    from benchmarks.make_tiny import make_tokenizer
    from benchmarks.random_policies import QWEN3_7M, random_qwen3
    from benchmarks.rollouts import ForcedGenerator, roll_out, slots

    told: dict[str, Any] = read_case()
    workload, rank = Workload(**told["workload"]), int(told["rank"])
    torch.set_num_threads(1)
    stay_on({rank})
    generator = slots(random_qwen3(QWEN3_7M), make_tokenizer(), workload.num_slots, {})
    assert isinstance(generator, ForcedGenerator)
    sampling = SamplingParams(max_tokens=workload.limit)
    tell({"ready": True})
    for visit, line in enumerate(sys.stdin):
        seed, places = json.loads(line)
        _, lengths = draw_visits(workload, 2, seed)
        prompt_ids = tuple(2 + i % 10 for i in range(32))
        prompts = [Prompt(f"train/{place}", prompt_ids, "", visit=visit) for place in places]
        generator.lengths = {
            (prompt.prompt_id, visit, (sample,)): int(lengths[place, sample])
            for prompt, place in zip(prompts, places, strict=True)
            for sample in range(workload.group_size)
        }
        start = time.perf_counter()
        roll_out(generator, prompts, workload.group_size, sampling)
        tell({"seconds": time.perf_counter() - start})


if __name__ == "__main__":
    main()
