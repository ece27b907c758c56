"""Cost of a rollout in each rollout mode: idle slots, discarded tokens, and time, on long-tailed lengths.

A random Qwen3 really decodes, in slots and, some of the modes, by vLLM in this process; completions end after long-
tailed lengths that are given beforehand. Every mode draws the same prompts in the same order and gives out batch after
batch, the policy's version rising with each; there is no update in between, so that times are of rollouts alone. The
first batch of each is left out. A useful token is one that is not sampled again; rates of useful tokens compare, for
modes that leave the long ones for later have trained on other completions at any moment. Modes go in turn, several
times; times are medians of CPU seconds of one thread. Steps and tokens are the same every time. Here a step costs
about as much as the slots that decode in it, so an idle slot costs little; on a GPU it costs nearly as much as a busy
one, and useful tokens a step tell more of the time.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.random_policies import TO_UPDATE, Sizes, random_qwen3
from benchmarks.report import Claim, Options, Row, finish, note, parse_options
from benchmarks.rollouts import ForetoldLengths, slots
from benchmarks.vllm_plan import ForcedEngine
from benchmarks.workloads import long_tailed
from lit_grpo.methods import make_plugins
from lit_grpo.methods.plans import find_plan
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.rollout.buffer import RolloutBuffer, group_requests
from lit_grpo.rollout.generator import Generator
from lit_grpo.rollout.loop import RolloutLoop
from lit_grpo.rollout.rules import RolloutMode
from lit_grpo.scheduling.jobs import FittedLengths, NoLengths
from lit_grpo.types import Key, Prompt, SamplingParams
from scripts.make_tiny import make_tokenizer

REPEATS = 3
SIZES = TO_UPDATE["smallest"]
VLLM_SIZES = Sizes(2, 64, 128, 2, 2, 32)
"""Of the policy that vLLM decodes, whose heads are large enough for it."""
VLLM_BATCHES, VLLM_REPEATS = 4, 1
"""Fewer, for its steps take several times as long."""
SLOTS, VLLM = "slots", "vLLM"
NOISE = 0.35
"""Of the lengths that the default plan is told, in their logarithm."""


@dataclass(frozen=True)
class Work:
    """``num_batches`` batches of P prompts of G completions of at most ``limit`` tokens, in so many slots."""

    num_batches: int = 10
    num_prompts: int = 16
    num_generations: int = 8
    num_slots: int = 64
    limit: int = 384

    @property
    def prompts(self) -> list[Prompt]:
        """More than any mode draws."""
        return [
            Prompt(f"train/{n}", tuple(2 + (n + i) % 10 for i in range(24)), "")
            for n in range(self.num_prompts * 2 * (self.num_batches + 4))
        ]


@dataclass(frozen=True)
class Arm:
    """A mode, and the order in which it decodes."""

    mode: str
    plan: str = "fcfs"
    batches: int = 1
    """That a rollout is of; as many updates learn from it, its shortest completions first."""
    system: str = SLOTS

    @property
    def name(self) -> str:
        """As in the table."""
        sorted_afterwards = f", {self.batches} batches sorted afterwards" * (self.batches > 1)
        return f"{self.system}: {self.mode}, {self.plan}{sorted_afterwards}"


def arms(limit: int) -> list[Arm]:
    """The compared modes: synchronous in two orders, and the others.

    SortedRL has loadings of several sizes and none; beside it the same loading sampled at once, and sorted afterwards.
    """
    return [
        Arm("synchronous"),
        Arm("synchronous", "short_last"),
        Arm("april"),
        Arm("sortedrl"),
        *(Arm(f"sortedrl:batches_in_work={number}") for number in (2, 8)),
        Arm("sortedrl:refill=always"),
        Arm("synchronous", batches=4),
        Arm("sortedrl_partial"),
        Arm(f"chunked:tokens_per_update={limit // 4}"),
        Arm("synchronous", system=VLLM),
        Arm("synchronous", "short_last", system=VLLM),
        *(Arm(mode, system=VLLM) for mode in ("april", "sortedrl", "sortedrl_partial")),
    ]


def main(options: Options) -> int:
    """Measure all modes in turn."""
    work = Work(3, 4, 4, 8, 32) if options.quick else Work()
    torch.set_num_threads(1)
    small, large = (random_qwen3(each, options.device) for each in (SIZES, VLLM_SIZES))
    works = {SLOTS: work, VLLM: replace(work, num_batches=min(work.num_batches, VLLM_BATCHES))}
    lengths = long_tailed(work.prompts, work.num_generations, work.limit)
    generators = {SLOTS: slots(small, make_tokenizer(), work.num_slots, lengths), VLLM: engine(large, lengths, work)}
    measured: dict[Arm, list[Row]] = {arm: [] for arm in arms(work.limit)}
    for turn in range(1 if options.quick else REPEATS):
        for arm, rows in measured.items():
            if arm.system == SLOTS or turn < VLLM_REPEATS:
                rows.append(measure(arm, works[arm.system], generators[arm.system], lengths))
                note(f"{arm.name}: {rows[-1]}")
    rows = [
        {"system": arm.system, "mode": arm.mode, "plan": arm.plan, "batches": arm.batches, **_median(runs)}
        for arm, runs in measured.items()
    ]
    for generator in generators.values():
        generator.close()
    settings: Row = {**vars(work), "threads": 1, "repeats": REPEATS, "length_noise": NOISE}
    settings |= {"batches, vLLM": works[VLLM].num_batches, "repeats, vLLM": VLLM_REPEATS}
    by_name = dict(zip([arm.name for arm in measured], rows, strict=True))
    claims = [claim for system in generators for claim in _claims(system, by_name)]
    return finish("modes", options, settings, rows, claims)


def engine(policy: Any, lengths: dict[Key, int], work: Work) -> ForcedEngine:
    """Return vLLM in this process, with as many slots, and the policy's weights."""
    generator = ForcedEngine(work.num_slots, engine_args={"max_model_len": 64 + work.limit, "block_size": 32})
    generator.lengths = lengths
    generator.start(PolicySpec(policy, make_tokenizer()))
    return generator


def _mode(spec: str) -> RolloutMode:
    (mode,) = [RolloutMode()] if spec == "synchronous" else make_plugins([spec]).values()
    assert isinstance(mode, RolloutMode)
    return mode


def measure(arm: Arm, work: Work, generator: Generator, lengths: dict[Key, int]) -> Row:
    """Give out ``num_batches`` batches."""
    mode, prompts = _mode(arm.mode), iter(work.prompts)
    num_prompts = work.num_prompts * arm.batches
    buffer = RolloutBuffer(mode.rule(num_prompts, work.num_generations))
    foretold: FittedLengths = NoLengths()
    if arm.plan != "fcfs":
        foretold = ForetoldLengths(_noisy(lengths))
    loop, sampling = (
        RolloutLoop(generator, buffer, find_plan(arm.plan), foretold),
        SamplingParams(max_tokens=work.limit),
    )
    total: dict[str, float] = dict.fromkeys(("slot_steps", "active", "tokens", "discarded", "continued", "s"), 0.0)
    staleness: list[int] = []
    for version in range(0, max(work.num_batches, 2 * arm.batches), arm.batches):
        generator.load_weights(generator.weights(), version)
        start = time.process_time()
        drawn = [next(prompts) for _ in range(mode.num_wanted(len(buffer), num_prompts))]
        buffer.open(group_requests(drawn, work.num_generations, sampling, seed=0))
        stats = loop.run(buffer.ready)
        buffer.close()
        completions = [rollout.completion for group in buffer.take() for rollout in group.fresh]
        buffer.end_update()
        if version:
            for place, one in enumerate(sorted(completions, key=lambda completion: completion.num_tokens)):
                update = version + place * arm.batches // len(completions)
                staleness += [update - each for each in one.versions_T.tolist()]
            total["s"] += time.process_time() - start
            total["slot_steps"] += stats.slot_steps
            total["active"] += stats.active_slot_steps
            total["tokens"] += stats.num_tokens
            total["discarded"] += stats.num_discarded
            total["continued"] += stats.num_continued
    useful = total["tokens"] - total["discarded"]
    return {
        "bubble": 1 - total["active"] / total["slot_steps"],
        "discarded": total["discarded"] / total["tokens"],
        "computed_again": total["continued"] / total["tokens"],
        "staleness": statistics.fmean(staleness),
        "stalest": max(staleness),
        "steps": total["slot_steps"] / work.num_slots,
        "useful_tokens_per_step": useful / (total["slot_steps"] / work.num_slots),
        "useful_tokens_per_cpu_s": useful / total["s"],
    }


def _noisy(lengths: dict[Key, int]) -> dict[Key, float]:
    keys = list(lengths)
    noise = torch.randn(len(keys), generator=torch.Generator().manual_seed(0)) * NOISE
    return {key: lengths[key] * float(factor) for key, factor in zip(keys, noise.exp(), strict=True)}


def _median(runs: list[Row]) -> Row:
    return {name: statistics.median(float(run[name]) for run in runs) for name in runs[0]}


def _claims(system: str, rows: dict[str, Row]) -> list[Claim]:
    def ratio(name: str, mode: str, to: str) -> float:
        return float(rows[f"{system}: {mode}, fcfs"][name]) / max(
            float(rows[f"{system}: synchronous, {to}"][name]), 1e-9
        )

    per_step, per_s = "useful_tokens_per_step", "useful_tokens_per_cpu_s"
    first, default = "first come, synchronous", "the default plan, synchronous"
    claims = [
        Claim(f"bubble of sortedrl over {first}", ratio("bubble", "sortedrl", "fcfs"), "<=", 0.5),
        Claim(f"bubble of sortedrl_partial over {first}", ratio("bubble", "sortedrl_partial", "fcfs"), "<=", 0.5),
        Claim(f"bubble of april over {first}", ratio("bubble", "april", "fcfs"), "<=", 0.2),
        Claim(f"useful tokens a step of april over {first}", ratio(per_step, "april", "fcfs"), ">=", 1.225),
        Claim(f"useful tokens a CPU second of april over {first}", ratio(per_s, "april", "fcfs"), ">=", 1.225),
        Claim(f"the same over {default}", ratio(per_s, "april", "short_last"), ">=", 1.0),
    ]
    return [replace(claim, text=f"{system}: {claim.text}") for claim in claims]


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(main(parse_options(__doc__)))
