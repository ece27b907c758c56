"""Tokens per second on long-tailed lengths, with the same memory for all: our plans, and what others do.

All systems decode completions of the same given lengths, of the same prompts, in the same number of rows, and so hold
at most the same number of keys and values: rows x (prompt + longest completion). Our default follows predictions with
an error of 0.35 in the logarithm. Naive micro groups (as in Infinite Sampling, arXiv 2506.22950) decode a round of
rows to the end of its longest completion, on our engine. ``generate`` (as TRL calls it: sdpa, dynamic cache, inference
mode) does the same in batches, on transformers. Transformers' continuous batching refills, with paged sdpa attention,
at most as many requests a batch as there are rows, and a cache of as many tokens; its start is not timed.

Lengths are log-normal with a heavy tail and up to 128 tokens; the policies are the demo's and a random Qwen3 of 31
million parameters.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.forced_lengths import ForcedGenerator, ForetoldLengths, started
from benchmarks.random_policies import QWEN3_31M, random_qwen3
from benchmarks.report import Claim, Options, Row, finish, note, parse_options
from benchmarks.workloads import arithmetic_prompts, load
from lit_grpo.rollout.controller import RolloutController
from lit_grpo.scheduling.families import synthetic_lengths
from lit_grpo.scheduling.jobs import Key
from lit_grpo.scheduling.step_cost import StepCost
from lit_grpo.scheduling.traces import noisy
from lit_grpo.types import Prompt, SamplingParams

NOISE = 0.35
CASES = ((2, 32, 16), (1, 256, 64))  # prompts, group size, rows
PEERS = {"generate": 2.5, "naive micro groups": 1.8, "transformers' continuous batching": 3.0}


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


def main(options: Options) -> int:
    """Measure every system on every workload, interleaved, and report medians of paired ratios."""
    torch.set_num_threads(1)  # continuous batching decodes beside the thread that waits for it
    repeats, cases = (1, ((1, 4, 2),)) if options.quick else (3, CASES)
    limit = 12 if options.quick else 128
    rows: list[Row] = []
    claims: list[Claim] = []
    policies = {"tiny": load("tiny", options.device)}
    if not options.quick:
        policies["random Qwen3, 31 M"] = random_qwen3(QWEN3_31M, options.device), policies["tiny"][1]
    for name, (policy, tokenizer) in policies.items():
        for num_prompts, group_size, num_rows in cases:
            rng = np.random.default_rng(0)
            lengths = synthetic_lengths("lognormal_heavy", num_prompts, group_size, limit, rng).reshape(-1)
            prompts = arithmetic_prompts(tokenizer, num_prompts)
            work = Work(policy, tokenizer, prompts, _by_key(prompts, lengths), group_size, num_rows)
            case: Row = {"policy": name, "G": group_size, "rows": num_rows, "prompts": num_prompts}
            case["max/mean"] = float(lengths.max() / lengths.mean())
            measured, case_claims = _measure(work, repeats, f"{name}, G = {group_size}, {num_rows} rows")
            rows += [case | row for row in measured]
            claims += case_claims
    settings: Row = {
        "threads": torch.get_num_threads(),
        "repeats": f"{repeats}, of the large policy 1",
        "prediction error (log)": NOISE,
    }
    return finish("decode_throughput", options, settings, rows, claims)


def _by_key(prompts: list[Prompt], lengths: np.ndarray) -> dict[Key, int]:
    keys = [(p.prompt_id, p.visit, sample) for p in prompts for sample in range(len(lengths) // len(prompts))]
    return dict(zip(keys, lengths.tolist(), strict=True))


def _measure(work: Work, repeats: int, where: str) -> tuple[list[Row], list[Claim]]:
    steps = Steps([], [], [])
    num_steps: dict[str, int] = {}
    systems: dict[str, Run] = {
        "default": _ours(work, "short_last", steps),
        "first come": _ours(work, "fcfs", None),
        "naive micro groups": _naive(work),
        "generate": _generate(work),
        "transformers' continuous batching": _continuous_batching(work),
    }
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    is_small = work.policy.num_parameters() < 10**7  # a large one needs no warm-up, and takes minutes
    for repeat in range(repeats + 1) if is_small else (1,):
        for name, run in systems.items():
            num_steps[name], elapsed = run()
            note(f"{where}: {repeat or 'warm-up'}: {name}: {work.num_tokens / elapsed:.0f} tokens/s")
            if repeat:
                seconds[name].append(elapsed)
    over = {
        name: statistics.median(theirs / ours for theirs, ours in zip(seconds[name], seconds["default"], strict=True))
        for name in systems
    }
    rows: list[Row] = [
        {
            "system": name,
            "tokens_per_s": work.num_tokens / statistics.median(seconds[name]),
            "steps": num_steps[name] or "",
            "default_over_it": over[name],
        }
        for name in systems
    ]
    cost = StepCost.fit(np.array(steps.rows), np.array(steps.kv_tokens), np.array(steps.seconds))
    rows[0] |= {"a_ms": cost.step_s * 1e3, "b_us_per_row": cost.row_s * 1e6, "c_ns_per_kv_token": cost.token_s * 1e9}
    claims = [Claim(f"{where}: tokens/s over {peer}", over[peer], ">=", limit) for peer, limit in PEERS.items()]
    fewer = num_steps["first come"] / num_steps["default"]
    claims.append(Claim(f"{where}: steps of first come over the default's", fewer, ">=", 1.15))
    if work.num_rows <= 16:
        claims.append(Claim(f"{where}: time of first come over the default's", over["first come"], ">=", 1.15))
    return rows, claims


def _ours(work: Work, plan: str, steps: Steps | None) -> Run:
    """Our generator; returns the number of decode steps."""
    generator = started(ForcedGenerator(work.lengths, work.num_rows), work.policy, work.tokenizer)
    expected = noisy(np.array(list(work.lengths.values()), dtype=float), NOISE)
    foretold = ForetoldLengths(dict(zip(work.lengths, expected.tolist(), strict=True)))
    begin = 0.0

    def on_step(num_tokens: int) -> None:
        nonlocal begin
        if steps is not None:
            steps.rows.append(num_tokens)
            steps.kv_tokens.append(generator.capacity().kv_tokens_in_use)
            steps.seconds.append(time.perf_counter() - begin)
        begin = time.perf_counter()

    controller = RolloutController(generator, plan=plan, lengths=foretold, on_step=on_step)

    def run() -> int:
        nonlocal begin
        begin = time.perf_counter()
        return controller.collect(work.prompts, work.group_size, work.sampling, seed=0)[1].num_steps

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


def _naive(work: Work) -> Run:
    """Rounds on our generator, whose rows all go on to the end of the longest."""
    kept = {key: max(work.lengths[k] for k in keys) for keys in _rounds(work) for key in keys}
    generator = started(ForcedGenerator(kept, work.num_rows), work.policy, work.tokenizer)
    controller = RolloutController(generator, plan="micro_rounds")
    return _timed(lambda: controller.collect(work.prompts, work.group_size, work.sampling, seed=0)[1].num_steps)


def _generate(work: Work) -> Run:
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


def _continuous_batching(work: Work) -> Run:
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


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(main(parse_options(__doc__)))
