"""Tokens per second on real completions of a pretrained chat model: slots, ``generate``, continuous batching, vLLM.

SmolLM2-135M-Instruct samples replies to the word problems of its configuration, at temperature 1 and with a limit that
lets it talk. All systems then decode completions of these lengths, of the same prompts, in the same number of rows, on
one thread in float32. In the second workload one prompt, the same with more examples, has 512 tokens, and G = 32.
``generate`` and transformers' continuous batching are as in ``decode_throughput``; vLLM is its CPU build in this
process, with its own order of requests. The share of bare passes is that of ``decode_efficiency``: the time of the
model's own forward passes of the same rows, over the time of the rollout, both with weights as they are.

What an order of requests can save is simulated on the same lengths: decode steps of first come, of the default plan
when it knows the mean length of each prompt (as after an earlier visit), and when it knows every length.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from benchmarks.decode_efficiency import bare_seconds, timed_rollout
from benchmarks.decode_systems import Work, continuous_batching, generate, ours
from benchmarks.report import Claim, Options, Row, finish, note, parse_options
from benchmarks.rollouts import KnownLengths, replayed, roll_out, slots
from benchmarks.shipped_tasks import ShippedTask
from benchmarks.vllm_plan import ForcedEngine, own_queue
from benchmarks.workloads import load
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.scheduling.jobs import NoLengths
from lit_grpo.tools.simulation.traces import Trace
from lit_grpo.types import Key, Prompt, SamplingParams

CONFIG = "word_problems"
OURS, FIRST_COME, PACKED, VLLM = "default", "first come", "default, packed weights", "vLLM"


@dataclass(frozen=True)
class Size:
    """Of both workloads."""

    prompts: int
    group: int
    limit: int
    rows: tuple[int, ...]
    long_prompt: int
    long_group: int
    sample: int


FULL, QUICK = Size(4, 16, 96, (8, 16, 32), 512, 32, 12), Size(1, 2, 4, (2,), 120, 2, 2)


def main(options: Options) -> int:
    """Sample real lengths, decode them by all systems, and simulate orders."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    size, task = QUICK if options.quick else FULL, ShippedTask(CONFIG)
    policy, tokenizer = load(options.policy or task.policy, options.device)
    of_task = task.prompts(tokenizer, task.rows("validation", size.prompts))
    workloads = {
        "word problems": (of_task, size.group),
        f"a prompt of {size.long_prompt} tokens": ([_long(of_task[0], size.long_prompt)], size.long_group),
    }
    rows: list[Row] = []
    for name, (prompts, group) in workloads.items():
        lengths = _real_lengths(policy, tokenizer, prompts, group, size.limit)
        note(f"{name}: lengths {sorted(lengths.values())}")
        for num_rows in size.rows:
            work = Work(policy, tokenizer, prompts, lengths, group, num_rows)
            case: Row = {"workload": name, "G": group, "rows": num_rows}
            rows += [case | row for row in [*_measured(work, size), *_orders(work)]]
    settings: Row = {"threads": 1, "prompts": size.prompts, "limit": size.limit, "policy": "SmolLM2-135M-Instruct"}
    return finish("real_model_decode", options, settings, rows, _claims(rows))


def _long(prompt: Prompt, num_tokens: int) -> Prompt:
    """Return a prompt with its examples again and again in front, and of just so many tokens."""
    repeated = prompt.token_ids * (num_tokens // len(prompt.token_ids) + 1)
    return replace(prompt, prompt_id=f"{prompt.prompt_id}/long", token_ids=repeated[-num_tokens:])


def _real_lengths(policy: Any, tokenizer: Any, prompts: Sequence[Prompt], group: int, limit: int) -> dict[Key, int]:
    groups, _ = roll_out(slots(policy, tokenizer, 32), prompts, group, SamplingParams(max_tokens=limit))
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return {rollout.completion.request.key: rollout.completion.num_tokens for rollout in rollouts}


def _measured(work: Work, size: Size) -> list[Row]:
    """Time every system once; a run of a model of this size takes long enough to be steady."""
    runs = {
        OURS: ours(work, "short_last"),
        FIRST_COME: ours(work, "fcfs"),
        PACKED: ours(work, "short_last", packed_weights=True),
        "generate": generate(work),
        "continuous batching": continuous_batching(work),
        VLLM: _vllm(work),
    }
    rows: list[Row] = []
    for name, run in runs.items():
        num_steps, seconds = run()
        rate = work.num_tokens / seconds
        note(f"{work.num_rows} rows: {name}: {rate:.1f} tokens/s")
        rows.append({"system": name, "tokens_per_s": rate, "steps": num_steps or ""})
    generator = slots(work.policy, work.tokenizer, work.num_rows, work.lengths)
    seconds, steps = timed_rollout(generator, work.prompts, work.group_size, work.sampling.max_tokens)
    rows[0]["share_of_bare_passes"] = bare_seconds(work.policy, steps, size.sample) / seconds
    return rows


def _vllm(work: Work) -> Any:
    """Return a run on vLLM's CPU build in this process, with its own order of requests; its start is not timed."""

    def run() -> tuple[int, float]:
        longest = max(len(prompt.token_ids) for prompt in work.prompts) + max(work.lengths.values())
        generator = ForcedEngine(work.num_rows, engine_args={"max_model_len": longest + 32, "block_size": 32})
        generator.lengths = work.lengths
        generator.start(PolicySpec(work.policy, work.tokenizer))
        own_queue(generator, work.policy, work.prompts[:1], 1, work.sampling)  # the kernels' first time
        order = own_queue(generator, work.policy, work.prompts, work.group_size, work.sampling)
        generator.close()
        return order.steps, order.seconds

    return run


def _orders(work: Work) -> list[Row]:
    """Steps of orders in a simulation, over those of first come."""
    keys = list(work.lengths)
    numbers = {prompt.prompt_id: number for number, prompt in enumerate(work.prompts)}
    lengths = np.array([work.lengths[key] for key in keys])
    group = np.array([numbers[key[0]] for key in keys])
    prompt_tokens = np.array([len(work.prompts[number].token_ids) for number in group])
    trace = Trace("real", keys, group, prompt_tokens, lengths, np.full(len(keys), max(lengths)))
    means = np.array([lengths[group == number].mean() for number in group])
    first = replayed(trace, "fcfs", work.num_rows, NoLengths()).steps
    known = {"prompt's mean": means, "every length": lengths.astype(float)}
    return [
        {
            "system": f"order, knows {name}",
            "steps": replayed(trace, "short_last", work.num_rows, KnownLengths(trace.jobs, values)).steps,
            "steps_of_first_come": first,
        }
        for name, values in known.items()
    ]


def _claims(rows: Sequence[Row]) -> list[Claim]:
    def rates(system: str) -> list[float]:
        return [float(row["tokens_per_s"]) for row in rows if row["system"] == system]

    best = [max(pair) for pair in zip(rates("generate"), rates("continuous batching"), strict=True)]
    over = [mine / peer for mine, peer in zip(rates(OURS), best, strict=True)]
    over_vllm = [mine / peer for mine, peer in zip(rates(PACKED), rates(VLLM), strict=True)]
    shares = [float(row["share_of_bare_passes"]) for row in rows if row["system"] == OURS]
    return [
        Claim(
            "tokens/s over the better of generate and continuous batching, median", statistics.median(over), ">=", 1.5
        ),
        Claim("the same, least", min(over), ">=", 1.0),
        Claim("share of bare passes, least", min(shares), ">=", 0.85),
        Claim("tokens/s with packed weights over vLLM's CPU build, median", statistics.median(over_vllm), ">=", 1.0),
    ]


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(main(parse_options(__doc__)))
