"""A group of a model of real size on a GPU: peak memory, tokens per second, and the share of what the memory allows.

The model has the configuration of Qwen3-1.7B and random weights in bfloat16. One prompt of 512 tokens has 32 or 512
completions, of log-normal lengths with a heavy tail and up to 1,024 tokens. *Full group* decodes all of them at once,
on our engine; naive micro groups, first come and our default in a quarter or an eighth as many slots, the default
told the lengths with an assumed error of 0.35 in the logarithm, and of 0.7 in a row beside it; ``generate`` (as TRL
calls it) all of them at once, on transformers.

Memory is the allocator's peak: ``total_gib`` with the model's weights, ``peak_gib`` above them. Infinite Sampling
(arXiv 2506.22950) reports 21.55 GB for the full group and 10.64 GB for micro groups of Qwen3-1.7B. Those are totals,
so the claim compares totals; weights in float32, if that is what the paper has, would count twice as much as here.
The limit that the memory's bandwidth sets is the time to read, in every step, the weights once and the keys and
values of the rows once, the shared prompt counted once; the bandwidth is that of copies of 1 GiB on the device.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import replace
from typing import Any

import torch

from benchmarks.baseline_plans import FULL_GROUP
from benchmarks.decode_systems import LARGE_NOISE, NOISE, Run, Steps, Work, generate, naive, ours
from benchmarks.random_policies import QWEN3_1_7B, QWEN3_7M, kv_bytes, random_qwen3
from benchmarks.report import Claim, Options, Row, finish, note, parse_options
from benchmarks.workloads import long_tailed
from lit_grpo.memory import PeakMemory
from lit_grpo.types import Prompt
from scripts.make_tiny import make_tokenizer

CASES = {32: 8, 512: 64}  # group size: slots
BANDWIDTH_SHARE = 0.6
PAPERS = 2.025  # total memory of the full group over that of micro groups: 21.55 over 10.64 GB
Figures = dict[str, float]


def main(options: Options) -> int:
    """Measure every system on every group size."""
    sizes, cases, prompt_tokens, limit = QWEN3_1_7B, CASES, 512, 1024
    if options.quick:
        sizes, cases, prompt_tokens, limit = replace(QWEN3_7M, layers=2), {4: 2, 8: 2}, 16, 10
    elif options.device != "cuda":
        raise SystemExit("decode_gpu measures a GPU: give --device cuda, or --quick to see that it runs.")
    policy: Any = random_qwen3(sizes, options.device, torch.bfloat16)
    bytes_per_s = _bandwidth(options.device, 2**20 if options.quick else 2**30)
    rows: list[Row] = []
    claims: list[Claim] = []
    _all_systems(_work(policy, 4, 2, prompt_tokens, 8), bytes_per_s)  # a warm-up
    for group_size, slots in cases.items():
        figures = _all_systems(_work(policy, group_size, slots, prompt_tokens, limit), bytes_per_s)
        rows += [{"G": group_size, "system": name} | _rounded(measured) for name, measured in figures.items()]
        claims += _claims(group_size, figures)
    settings: Row = {
        "parameters": sum(weight.numel() for weight in policy.parameters()),
        "prompt tokens": prompt_tokens,
        "longest completion": limit,
        "bandwidth_gb_per_s": round(bytes_per_s / 1e9, 1),
        "error of what is told (log)": NOISE,
        "larger error (log)": LARGE_NOISE,
    }
    return finish("decode_gpu", options, settings, rows, claims)


def _work(policy: Any, group_size: int, slots: int, prompt_tokens: int, limit: int) -> Work:
    prompt = Prompt("train/0", tuple(3 + i % 10 for i in range(prompt_tokens)), "")
    return Work(policy, make_tokenizer(), [prompt], long_tailed([prompt], group_size, limit), group_size, slots)


def _all_systems(work: Work, bytes_per_s: float) -> dict[str, Figures]:
    """Measure the systems one after another; what runs out of memory has no figures."""
    whole = replace(work, num_rows=work.group_size)
    steps = {name: Steps([], [], []) for name in ("default", "first come", "full group")}
    systems: dict[str, Run] = {
        "default": ours(work, "short_last", steps["default"]),
        "default, larger error": ours(work, "short_last", noise=LARGE_NOISE),
        "first come": ours(work, "fcfs", steps["first come"]),
        "naive micro groups": naive(work),
        "full group": ours(whole, FULL_GROUP, steps["full group"]),
        "generate": generate(whole),
    }
    figures: dict[str, Figures] = {}
    for name, run in systems.items():
        try:
            figures[name] = _measure(work, run)
        except torch.OutOfMemoryError:
            figures[name] = {}
        if figures[name] and name in steps:
            figures[name]["bandwidth_share"] = _least_s(work, steps[name], bytes_per_s) / figures[name]["seconds"]
        note(f"G = {work.group_size}: {name}: {figures[name] or 'out of memory'}")
    return figures


def _measure(work: Work, run: Run) -> Figures:
    device = work.policy.device
    if device.type == "cuda":
        torch.cuda.empty_cache()
    memory = PeakMemory(device)
    idle_gib = memory.current_gib()
    memory.reset()
    num_steps, elapsed_s = run()
    total_gib = memory.peak_gib()
    return {
        "seconds": elapsed_s,
        "steps": num_steps,
        "tokens_per_s": work.num_tokens / elapsed_s,
        "total_gib": total_gib,
        "peak_gib": total_gib - idle_gib,
    }


def _least_s(work: Work, steps: Steps, bytes_per_s: float) -> float:
    """The seconds that reading weights, keys and values takes at least."""
    weights = sum(weight.nbytes for weight in work.policy.parameters())
    held = sum(len(prompt.token_ids) for prompt in work.prompts) * len(steps.rows)
    held += sum(length * (length - 1) // 2 for length in work.lengths.values())
    return (weights * len(steps.rows) + kv_bytes(work.policy) * held) / bytes_per_s


def _bandwidth(device: str, num_bytes: int) -> float:
    """The bytes that the device's memory reads and writes in a second, the median of some copies."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target, seconds = torch.empty_like(source), []
    for _ in range(20):
        begin = time.perf_counter()
        target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return 2 * num_bytes / statistics.median(seconds)


def _claims(group_size: int, figures: dict[str, Figures]) -> list[Claim]:
    default, full = figures["default"], figures["full group"]
    where = f"G = {group_size}"
    share = default["bandwidth_share"]
    claims = [Claim(f"{where}: tokens/s over what the memory's bandwidth allows", share, ">=", BANDWIDTH_SHARE)]
    if full:
        totals = full["total_gib"] / default["total_gib"]
        claims.append(
            Claim(f"{where}: peak memory of the full group over the default's, weights included", totals, ">=", PAPERS)
        )
    for peer, limit in {"naive micro groups": 1.8, "generate": 1.0}.items():
        if figures[peer]:
            over = default["tokens_per_s"] / figures[peer]["tokens_per_s"]
            claims.append(Claim(f"{where}: tokens/s over {peer}", over, ">=", limit))
    return claims


def _rounded(figures: Figures) -> Row:
    if not figures:
        return {"peak_gib": "out of memory"}
    return {name: float(f"{value:.4g}") for name, value in figures.items()}


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(main(parse_options(__doc__)))
