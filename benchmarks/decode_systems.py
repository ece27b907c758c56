"""Systems that decode completions of given lengths, of the same prompts, in the same number of rows."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.baseline_plans import MICRO_ROUNDS
from benchmarks.rollouts import ForetoldLengths, kv_tokens, roll_out, slots
from lit_grpo.tools.simulation.traces import noisy
from lit_grpo.types import Key, Prompt, SamplingParams

NOISE, LARGE_NOISE = 0.35, 0.7
"""The errors that our plan's predictions are given, in their logarithm; both are assumed."""

Run = Callable[[], tuple[int, float]]
"""Decodes everything; returns the number of decode steps, 0 where it is not known, and the seconds."""


@dataclass(frozen=True)
class Work:
    """Completions of given lengths, in a number of rows."""

    policy: Any
    tokenizer: Any
    prompts: list[Prompt]
    lengths: dict[Key, int]
    group_size: int
    num_rows: int

    @property
    def num_tokens(self) -> int:
        """Tokens of all completions."""
        return sum(self.lengths.values())

    @property
    def sampling(self) -> SamplingParams:
        """Sampling with a limit that no completion passes."""
        return SamplingParams(max_tokens=max(self.lengths.values()))


@dataclass
class Steps:
    """Active rows, KV tokens held and seconds of each decode step."""

    rows: list[int]
    kv_tokens: list[int]
    seconds: list[float]


def ours(work: Work, plan: str, steps: Steps | None = None, noise: float = NOISE, packed_weights: bool = False) -> Run:
    """Return our generator with a plan that is told the lengths with an error; ``steps`` takes down what steps cost."""
    generator = slots(work.policy, work.tokenizer, work.num_rows, work.lengths, packed_weights=packed_weights)
    expected = noisy(np.array(list(work.lengths.values()), dtype=float), noise)
    foretold = ForetoldLengths(dict(zip(work.lengths, expected.tolist(), strict=True)))
    begin = 0.0

    def on_step(num_tokens: int) -> None:
        nonlocal begin
        if steps is not None:
            steps.rows.append(num_tokens)
            steps.kv_tokens.append(kv_tokens(generator)[0])
            steps.seconds.append(time.perf_counter() - begin)
        begin = time.perf_counter()

    def run() -> int:
        nonlocal begin
        begin = time.perf_counter()
        stats = roll_out(generator, work.prompts, work.group_size, work.sampling, plan, foretold, on_step)[1]
        return stats.num_steps

    return _timed(run)


def _timed(run: Callable[[], int]) -> Run:
    def timed() -> tuple[int, float]:
        begin = time.perf_counter()
        num_steps = run()
        return num_steps, time.perf_counter() - begin

    return timed


def _rounds(work: Work) -> list[list[Key]]:
    keys = list(work.lengths)
    return [keys[i : i + work.num_rows] for i in range(0, len(keys), work.num_rows)]


def naive(work: Work) -> Run:
    """Return rounds on our generator, whose rows all go on to the end of the longest, as in a padded batch.

    The plan ``MicroRounds`` by itself would leave out the rows that have ended, and take less time.
    """
    kept = {key: max(work.lengths[k] for k in keys) for keys in _rounds(work) for key in keys}
    generator = slots(work.policy, work.tokenizer, work.num_rows, kept)
    rounds = partial(roll_out, generator, work.prompts, work.group_size, work.sampling, MICRO_ROUNDS)
    return _timed(lambda: rounds()[1].num_steps)


def generate(work: Work) -> Run:
    """Return Hugging Face ``generate`` as TRL calls it, in batches of the rows."""
    by_id = {prompt.prompt_id: list(prompt.token_ids) for prompt in work.prompts}
    batches = []
    for keys in _rounds(work):
        rows = [by_id[key[0]] for key in keys]
        longest = max(map(len, rows))
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows], device=work.policy.device)
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=work.policy.device)
        batches.append((ids, mask, max(work.lengths[key] for key in keys)))

    @torch.inference_mode()
    def run() -> int:
        for ids, mask, limit in batches:
            work.policy.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=limit,
                min_new_tokens=limit,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                pad_token_id=0,
            )
        return sum(limit for _, _, limit in batches)

    return _timed(run)


def continuous_batching(work: Work) -> Run:
    """Return transformers' continuous batching with as many requests at a time as there are rows."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    by_id = {prompt.prompt_id: list(prompt.token_ids) for prompt in work.prompts}
    page = 32
    tokens = work.num_rows * (max(map(len, by_id.values())) + max(work.lengths.values()) + page)
    settings = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=-1, pad_token_id=0, max_new_tokens=1
    )
    batching = ContinuousBatchingConfig(
        page_size=page,
        num_blocks=-(-tokens // page),
        max_batch_tokens=max(256, work.num_rows),
        max_requests_per_batch=work.num_rows,
        use_async_batching=False,
        use_cuda_graph=work.policy.device.type == "cuda",
    )

    def run() -> tuple[int, float]:
        before = work.policy.config._attn_implementation
        with work.policy.continuous_batching_context_manager(
            generation_config=settings, continuous_batching_config=batching
        ) as manager:
            begin = time.perf_counter()
            for number, (key, length) in enumerate(work.lengths.items()):
                manager.add_request(by_id[key[0]], request_id=str(number), max_new_tokens=length, eos_token_id=-1)
            done = 0
            while done < len(work.lengths):
                result = manager.get_result(timeout=60)
                assert result is not None, "no result within a minute"
                done += bool(result.is_finished())
            elapsed = time.perf_counter() - begin
        work.policy.set_attn_implementation(before)
        return 0, elapsed

    return run
