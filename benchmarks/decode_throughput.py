"""Tokens per second of decoding, with the same completions and the same number of rows for all systems.

``python -m benchmarks.decode_throughput STUDY``; each study gives all systems the lengths of the completions.

``decode_throughput``: the demo's policy and a random Qwen3 of 31 million parameters, on log-normal lengths with a heavy
tail, up to 128 tokens. Our default predicts nothing here: it is told the lengths beforehand, with an assumed error of
0.35 in their logarithm, and of 0.7 in a row beside it (``planner_cost`` measures what a real predictor costs). Naive
micro groups (Infinite Sampling, arXiv 2506.22950) decode a round of rows to the end of its longest completion, on our
engine. ``generate`` (as TRL calls it: sdpa, dynamic cache, inference mode) does the same in batches. Transformers'
continuous batching refills, with paged sdpa attention and a cache of as many tokens; its start is not timed.

``hybrid_decode``: the same for a random Qwen3.5 of 31 million parameters, whose slots hold states beside keys and
values. Continuous batching of transformers has no such layers.

``decode_efficiency``: the time of bare forward passes of the policy's own (transformers, sdpa, a dynamic cache that
already holds so many tokens a row), over the time of a rollout. Bare passes have nothing around them: no sampling, no
refill, no prompt. They are timed at a sample of a rollout's steps; the other steps take what the nearest one takes.

``real_model_decode``: SmolLM2-135M-Instruct on its own replies to the word problems of its configuration, and on one
prompt of 512 tokens with 32 replies; beside the systems above vLLM's CPU build in this process with its own order of
requests. What an order can save is simulated on the same lengths, with the mean of each prompt known, and with all.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.decode_systems import LARGE_NOISE, NOISE, Run, Steps, Work, continuous_batching, generate, naive, ours
from benchmarks.random_policies import QWEN3_31M, TO_UPDATE, random_qwen3
from benchmarks.report import Claim, Options, Row, finish, note, options_parser
from benchmarks.rollouts import KnownLengths, replayed, roll_out, slots
from benchmarks.shipped_tasks import ShippedTask
from benchmarks.vllm_plan import ForcedEngine, own_queue
from benchmarks.workloads import arithmetic_prompts, load, long_tailed
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.rollout.slots.drafts.price import StepCost
from lit_grpo.scheduling.jobs import NoLengths
from lit_grpo.tools.simulation.traces import Trace
from lit_grpo.types import Key, Prompt, SamplingParams

DEFAULT, FIRST_COME, NAIVE, GENERATE = "default", "first come", "naive micro groups", "generate"
CONTINUOUS, PACKED, VLLM = "transformers' continuous batching", "default, packed weights", "vLLM"
PEERS = {GENERATE: 2.5, NAIVE: 1.8, CONTINUOUS: 3.0}
"""The least ratio of our tokens/s to theirs."""


def _vllm(work: Work) -> Run:
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


SYSTEMS: dict[str, Callable[[Work], Run]] = {
    DEFAULT: partial(ours, plan="short_last"),
    "default, larger error": partial(ours, plan="short_last", noise=LARGE_NOISE),
    FIRST_COME: partial(ours, plan="fcfs"),
    NAIVE: naive,
    GENERATE: generate,
    CONTINUOUS: continuous_batching,
    PACKED: partial(ours, plan="short_last", packed_weights=True),
    VLLM: _vllm,
}


@dataclass(frozen=True)
class Study:
    """What is decoded, by which systems, and how large a sample of steps is timed as bare passes, if any."""

    works: Callable[[Options], Iterator[tuple[Row, Work]]]
    systems: tuple[str, ...]
    claims: Callable[[Sequence[Row]], list[Claim]]
    sample: int = 0
    repeats: int = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all systems of a study on all of its work, in turn."""
    parser = options_parser(__doc__ or "")
    parser.add_argument("study", nargs="?", choices=STUDIES, default="decode_throughput")
    asked = parser.parse_args(arguments)
    options, study = Options(asked.quick, asked.device, asked.policy, asked.output), STUDIES[asked.study]
    torch.set_num_threads(1)  # continuous batching decodes beside the thread that waits for it
    torch.manual_seed(0)
    rows: list[Row] = []
    for case, work in study.works(options):
        is_small = work.policy.num_parameters() < 10**7  # a large one needs no warm-up, and takes minutes
        repeats = 1 if options.quick or not is_small else study.repeats
        found = _measured(work, {name: SYSTEMS[name](work) for name in study.systems}, repeats, is_small)
        if study.sample:
            found[0] |= _bare(work, repeats, is_small, 3 if options.quick else study.sample)
        if VLLM in study.systems:
            found += _orders(work)
        rows += [case | row for row in found]
    settings: Row = {"threads": 1, "repeats": study.repeats, "error of lengths (log)": NOISE, "larger": LARGE_NOISE}
    program = f"decode_throughput {asked.study}".replace(" decode_throughput", "")
    return finish(asked.study, options, settings, rows, study.claims(rows), program)


# ---- what is decoded ----------------------------------------------------------------------------------


def _long_tailed(
    options: Options, cases: Sequence[tuple[int, int, int]], hybrid: bool = False
) -> Iterator[tuple[Row, Work]]:
    """Long-tailed lengths for both policies, or for the hybrid; ``cases`` are prompts, completions of each and rows."""
    tiny, tokenizer = load("tiny", options.device)
    policies: dict[str, Any] = {"tiny": tiny}
    if hybrid:
        sizes = replace(TO_UPDATE["smallest hybrid" if options.quick else "hybrid, 31M"], vocab_size=16)
        policies = {"random Qwen3.5, 31 M": random_qwen3(sizes, options.device)}
    elif not options.quick:
        policies["random Qwen3, 31 M"] = random_qwen3(QWEN3_31M, options.device)
    for name, policy in policies.items():
        for num_prompts, group_size, num_rows in ((1, 4, 2),) if options.quick else cases:
            prompts = arithmetic_prompts(tokenizer, num_prompts)
            lengths = long_tailed(prompts, group_size, 12 if options.quick else 128)
            case: Row = {"policy": name, "G": group_size, "rows": num_rows, "prompts": num_prompts}
            yield case, Work(policy, tokenizer, prompts, lengths, group_size, num_rows)


def _real_replies(options: Options) -> Iterator[tuple[Row, Work]]:
    """Replies to word problems, sampled at temperature 1, and to one of them after its examples again and again."""
    num_prompts, group, limit, all_rows, long = (1, 2, 4, (2,), 120) if options.quick else (4, 16, 96, (8, 16, 32), 512)
    task = ShippedTask("word_problems")
    policy, tokenizer = load(options.policy or task.policy, options.device)
    prompts = task.prompts(tokenizer, task.rows("validation", num_prompts))
    repeated = prompts[0].token_ids * (long // len(prompts[0].token_ids) + 1)
    long_prompt = replace(prompts[0], prompt_id=f"{prompts[0].prompt_id}/long", token_ids=repeated[-long:])
    workloads: dict[str, tuple[list[Prompt], int]] = {
        "word problems": (prompts, group),
        f"a prompt of {long} tokens": ([long_prompt], 2 * group),
    }
    for name, (of_work, size) in workloads.items():
        groups, _ = roll_out(slots(policy, tokenizer, 32), of_work, size, SamplingParams(max_tokens=limit))
        completions = [rollout.completion for group in groups for rollout in group.rollouts]
        lengths: dict[Key, int] = {each.request.key: each.num_tokens for each in completions}
        note(f"{name}: lengths {sorted(lengths.values())}")
        for num_rows in all_rows:
            case: Row = {"workload": name, "G": size, "rows": num_rows}
            yield case, Work(policy, tokenizer, of_work, lengths, size, num_rows)


# ---- figures ------------------------------------------------------------------------------------------


def _measured(work: Work, runs: Mapping[str, Run], repeats: int, warms_up: bool) -> list[Row]:
    """Time all systems in turn; return a row each, with the median of paired ratios to the default."""
    steps = Steps([], [], [])
    runs = {DEFAULT: ours(work, "short_last", steps)} | {name: run for name, run in runs.items() if name != DEFAULT}
    num_steps: dict[str, int] = {}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + warms_up):
        for name, run in runs.items():
            num_steps[name], elapsed = run()
            note(f"{work.num_rows} rows: {name}: {work.num_tokens / elapsed:.0f} tokens/s")
            if repeat >= warms_up:
                seconds[name].append(elapsed)
    rows: list[Row] = [
        {
            "system": name,
            "tokens_per_s": work.num_tokens / statistics.median(times),
            "steps": num_steps[name] or "",
            "default_over_it": statistics.median(a / b for a, b in zip(times, seconds[DEFAULT], strict=True)),
        }
        for name, times in seconds.items()
    ]
    columns_3N = np.array([[1] * len(steps.rows), steps.rows, steps.kv_tokens])
    cost = StepCost.fit(columns_3N.T, np.array(steps.seconds))
    rows[0] |= {"a_ms": cost.step_s * 1e3, "b_us_per_row": cost.row_s * 1e6, "c_ns_per_kv_token": cost.token_s * 1e9}
    return rows


def _bare(work: Work, repeats: int, warms_up: bool, sample: int) -> Row:
    """The time of bare forward passes over that of a rollout first come, first served: the median of pairs."""
    generator, shares = slots(work.policy, work.tokenizer, work.num_rows, work.lengths), list[float]()
    for repeat in range(repeats + warms_up):
        steps: list[tuple[int, int]] = []  # rows, and mean tokens of a row with its prompt

        def on_step(num_tokens: int, steps: list[tuple[int, int]] = steps) -> None:
            if rows := generator._rows.requests:
                prompt_tokens = [len(request.prompt.token_ids) for request in rows]
                steps.append((num_tokens, int((generator._rows.counts[: len(rows)] + prompt_tokens).mean())))

        begin = time.perf_counter()
        roll_out(generator, work.prompts, work.group_size, work.sampling, on_step=on_step)
        seconds = time.perf_counter() - begin
        if repeat >= warms_up:
            shares.append(_bare_seconds(work.policy, steps, sample) / seconds)
    return {"share_of_bare_passes": statistics.median(shares)}


@torch.inference_mode()
def _bare_seconds(policy: Any, steps: list[tuple[int, int]], sample: int) -> float:
    """Return the seconds that bare forward passes of these rows and lengths take."""
    chosen = np.unique(np.linspace(0, len(steps) - 1, sample).astype(int))
    seconds = {}
    for number in chosen.tolist():
        rows, length = steps[number]
        ids_BT = torch.zeros((rows, length), dtype=torch.int64, device=policy.device)
        cache, times = policy(ids_BT, use_cache=True).past_key_values, list[float]()
        for _ in range(4):
            begin = time.perf_counter()
            policy(ids_BT[:, :1], past_key_values=cache, use_cache=True)
            times.append(time.perf_counter() - begin)
        seconds[number] = min(times[1:])
    nearest = chosen[np.abs(chosen[:, None] - np.arange(len(steps))).argmin(0)]
    return float(sum(seconds[number] for number in nearest.tolist()))


def _orders(work: Work) -> list[Row]:
    """Steps of orders in a simulation, over those of first come."""
    keys = list(work.lengths)
    numbers = {prompt.prompt_id: number for number, prompt in enumerate(work.prompts)}
    lengths, group = np.array(list(work.lengths.values())), np.array([numbers[key[0]] for key in keys])
    prompt_tokens = np.array([len(work.prompts[number].token_ids) for number in group])
    trace = Trace("real", keys, group, prompt_tokens, lengths, np.full(len(keys), max(lengths)))
    first = replayed(trace, "fcfs", work.num_rows, NoLengths()).steps
    means = np.array([lengths[group == number].mean() for number in group])
    rows: list[Row] = []
    for name, known in (("prompt's mean", means), ("every length", lengths.astype(float))):
        steps = replayed(trace, "short_last", work.num_rows, KnownLengths(trace.jobs, known)).steps
        rows.append({"system": f"order, knows {name}", "steps": steps, "steps_of_first_come": first})
    return rows


# ---- claims -------------------------------------------------------------------------------------------


def _throughput_claims(rows: Sequence[Row]) -> list[Claim]:
    claims, default_steps = list[Claim](), 0.0
    for row in rows:
        where, over = f"{row['policy']}, G = {row['G']}, {row['rows']} rows", float(row["default_over_it"])
        if row["system"] in PEERS:
            claims.append(Claim(f"{where}: tokens/s over {row['system']}", over, ">=", PEERS[str(row["system"])]))
        elif row["system"] == DEFAULT:
            default_steps = float(row["steps"])
        elif row["system"] == FIRST_COME:
            fewer = float(row["steps"]) / default_steps
            claims.append(Claim(f"{where}: steps of first come over the default's", fewer, ">=", 1.15))
            if int(row["rows"]) <= 16:
                claims.append(Claim(f"{where}: time of first come over the default's", over, ">=", 1.15))
    return claims


def _hybrid_claims(rows: Sequence[Row]) -> list[Claim]:
    return [
        Claim(
            f"G = {row['G']}, {row['rows']} rows: tokens/s over {row['system']}",
            float(row["default_over_it"]),
            ">=",
            1.5,
        )
        for row in rows
        if row["system"] == GENERATE
    ]


def _efficiency_claims(rows: Sequence[Row]) -> list[Claim]:
    text, least = "tokens/s over bare forward passes", {"tiny": 0.85}
    return [
        Claim(f"{row['policy']}, {row['rows']} slots: {text}", float(row["share_of_bare_passes"]), ">=",
              least.get(str(row["policy"]), 0.9))
        for row in rows
    ]  # fmt: skip


def _real_claims(rows: Sequence[Row]) -> list[Claim]:
    def of(system: str, name: str = "tokens_per_s") -> list[float]:
        return [float(row[name]) for row in rows if row["system"] == system]

    best = [max(pair) for pair in zip(of(GENERATE), of(CONTINUOUS), strict=True)]
    over = [mine / peer for mine, peer in zip(of(DEFAULT), best, strict=True)]
    over_vllm = statistics.median(mine / peer for mine, peer in zip(of(PACKED), of(VLLM), strict=True))
    text = "tokens/s over the better of generate and continuous batching"
    return [
        Claim(f"{text}, median", statistics.median(over), ">=", 1.5),
        Claim(f"{text}, least", min(over), ">=", 1.0),
        Claim("share of bare passes, least", min(of(DEFAULT, "share_of_bare_passes")), ">=", 0.85),
        Claim("tokens/s with packed weights over vLLM's CPU build, median", over_vllm, ">=", 1.0),
    ]


STUDIES = {
    "decode_throughput": Study(
        partial(_long_tailed, cases=((2, 32, 16), (1, 256, 64))), tuple(SYSTEMS)[:6], _throughput_claims
    ),
    "hybrid_decode": Study(
        partial(_long_tailed, cases=((2, 32, 16), (1, 256, 64)), hybrid=True),
        (DEFAULT, FIRST_COME, GENERATE),
        _hybrid_claims,
    ),
    "decode_efficiency": Study(
        partial(_long_tailed, cases=((8, 16, 32), (8, 32, 64))), (DEFAULT,), _efficiency_claims, sample=24
    ),
    "real_model_decode": Study(
        _real_replies, (DEFAULT, FIRST_COME, PACKED, GENERATE, CONTINUOUS, VLLM), _real_claims, sample=12
    ),
}

if __name__ == "__main__":
    sys.exit(main())
