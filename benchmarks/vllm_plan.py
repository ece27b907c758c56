"""Our plan on vLLM beside vLLM's own queue: one engine, one ``max_num_seqs``, the same completions in turn.

vLLM's own order is all requests of a batch handed over at once, first come, first served. Ours admits by ``short_last``
and learns lengths from what vLLM puts out, tokens and log-probs, and from earlier epochs, as in training; where a probe
or time slices would have saved steps, rollouts go on with them. Two workloads of several epochs: ``per_prompt``,
completions ended at made-up lengths (a prompt's are alike, in every epoch), and ``demo``, the demo's policy before its
training, which answers the same exercise now at once and now in full.

What an order gains depends on the lengths, so ``per_prompt`` is drawn from several seeds, and figures are means over
them, with their spread. The last epoch is simulated too, from many more seeds: first come beside ``short_last`` with
the prompt's mean over the earlier epochs as estimate.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from benchmarks.report import Claim, Options, Row, finish, note, parse_options
from benchmarks.rollouts import KnownLengths, replayed, roll_out
from benchmarks.workloads import arithmetic_prompts, by_key, load
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.policy.weights import PolicyWeights
from lit_grpo.rollout.vllm.engine import VLLMGenerator
from lit_grpo.rollout.vllm.streams import EngineRequest
from lit_grpo.scheduling.jobs import NoLengths
from lit_grpo.scheduling.lengths import LengthPredictor
from lit_grpo.scheduling.plans.plan import slot_bound
from lit_grpo.scheduling.plans.probe_choice import ProbeChoice
from lit_grpo.tools.simulation.traces import Trace, synthetic_lengths
from lit_grpo.types import Key, Prompt, Request, SamplingParams

POINTS = (0, 8, 32, 64)
LEAST_OVER_FEWEST, LEAST_RATIO = 1.25, 1.15


@dataclass(frozen=True)
class Sizes:
    """Of a measurement."""

    batches: int = 2
    prompts: int = 12
    group: int = 16
    slots: int = 48
    epochs: int = 5
    max_tokens: int = 192
    seeds: int = 4
    simulated_seeds: int = 40

    def lengths(self, seed: int) -> np.ndarray:
        """Return the lengths of ``per_prompt``, shape (prompts, epochs, group): a prompt's median stays."""
        shape = self.batches * self.prompts, self.epochs * self.group
        lengths = synthetic_lengths("per_prompt", *shape, self.max_tokens, np.random.default_rng(seed))
        return lengths.reshape(-1, self.epochs, self.group)


@dataclass
class Order:
    """The cost of one order for one batch."""

    steps: int
    seconds: float
    tokens: dict[Key, list[int]] = field(repr=False)
    parked: int = 0  # how often a completion gave up its slot


@dataclass
class Epoch:
    """What both orders took for all batches of an epoch, and the fewest steps that are possible."""

    fewest: int = 0
    own_steps: int = 0
    our_steps: int = 0
    own_s: float = 0.0
    our_s: float = 0.0
    parked: int = 0

    @property
    def steps_ratio(self) -> float:
        """Decode steps of vLLM's own order divided by those of ours."""
        return self.own_steps / self.our_steps


class ForcedEngine(VLLMGenerator):
    """VLLMGenerator whose completions end after a given number of tokens, where one is given."""

    lengths: dict[Key, int] = {}  # noqa: RUF012

    def _fields(self, stream: EngineRequest, keyed: bool) -> dict[str, Any]:
        fields, length = super()._fields(stream, keyed), self.lengths.get(stream.request.key)
        if length is None:
            return fields
        rest = length - stream.num_begun
        return fields | {"max_tokens": rest, "min_tokens": rest, "ignore_eos": True, "stop_token_ids": []}


def main(options: Options) -> int:
    """Sample each batch of each epoch by both orders, seed after seed, and compare."""
    sizes = Sizes(1, 2, 2, 2, 2, 16, seeds=2, simulated_seeds=2) if options.quick else Sizes()
    policy, tokenizer = load(options.policy or "tiny", options.device)
    generator = ForcedEngine(sizes.slots, engine_args={"max_model_len": 256, "block_size": 32})
    generator.start(PolicySpec(policy, tokenizer))
    prompts = arithmetic_prompts(tokenizer, sizes.batches * sizes.prompts)
    sampling = SamplingParams(max_tokens=sizes.max_tokens)
    own_queue(generator, policy, prompts[:2], 2, sampling)  # the kernels' first time
    runs: dict[str, list[list[Epoch]]] = {"demo": [_measure(generator, policy, prompts, sizes)], "per_prompt": []}
    for seed in range(sizes.seeds):
        note(f"per_prompt, seed {seed}")
        generator.lengths = _by_key(prompts, sizes.lengths(seed))
        runs["per_prompt"].append(_measure(generator, policy, prompts, sizes))
    rows = [
        _row(name, epoch, [run[epoch] for run in repeated])
        for name, repeated in runs.items()
        for epoch in range(sizes.epochs)
    ]
    last = [run[-1] for run in runs["per_prompt"]]
    simulated = [_simulated(prompts, sizes, seed) for seed in range(sizes.simulated_seeds)]
    rows.append(_row("per_prompt, simulated", sizes.epochs - 1, simulated))
    claims = [*_claims("measured", last), *_claims("simulated", simulated)]
    settings: Row = {"slots": sizes.slots, "prompts": sizes.prompts, "group_size": sizes.group, "plan": "short_last"}
    return finish("vllm_plan", options, settings, rows, claims)


def _by_key(prompts: Sequence[Prompt], lengths: np.ndarray) -> dict[Key, int]:
    """Return the lengths of all epochs by the key of their completions."""
    visits = [by_key([replace(p, visit=e) for p in prompts], lengths[:, e]) for e in range(lengths.shape[1])]
    return {key: length for visit in visits for key, length in visit.items()}


def _simulated(prompts: Sequence[Prompt], sizes: Sizes, seed: int) -> Epoch:
    """Both orders in the last epoch, without an engine."""
    lengths, epoch = sizes.lengths(seed), Epoch()
    for first in range(0, len(prompts), sizes.prompts):
        part = slice(first, first + sizes.prompts)
        tokens = lengths[part, -1]
        numbers = np.repeat(np.arange(len(tokens)), sizes.group)
        prompt_tokens = np.array([len(prompt.token_ids) for prompt in prompts[part]])[numbers]
        limits = np.full(tokens.size, sizes.max_tokens)
        trace = Trace("per_prompt", list(by_key(prompts[part], tokens)), numbers, prompt_tokens, tokens.ravel(), limits)
        known = KnownLengths(trace.jobs, lengths[part, :-1].mean((1, 2))[numbers])
        epoch.fewest += slot_bound(trace.lengths, sizes.slots)
        epoch.own_steps += replayed(trace, "fcfs", sizes.slots, NoLengths()).steps
        epoch.our_steps += replayed(trace, "short_last", sizes.slots, known).steps
    return epoch


def _measure(generator: VLLMGenerator, policy: Any, prompts: list[Prompt], sizes: Sizes) -> list[Epoch]:
    """Sample all epochs by both orders."""
    points = [point for point in POINTS if point < sizes.max_tokens]
    predictor = LengthPredictor(points, num_scalars=2, max_tokens=sizes.max_tokens)
    choice = ProbeChoice()
    sampling = SamplingParams(max_tokens=sizes.max_tokens)
    epochs = [Epoch() for _ in range(sizes.epochs)]
    for number, epoch in enumerate(epochs):
        for first in range(0, len(prompts), sizes.prompts):
            batch = [replace(prompt, visit=number) for prompt in prompts[first : first + sizes.prompts]]
            own = own_queue(generator, policy, batch, sizes.group, sampling)
            ours = _planned(generator, policy, predictor, choice, batch, sizes.group, sampling)
            assert own.tokens == ours.tokens, "both orders must sample the same"
            epoch.fewest += slot_bound(np.array([len(ids) for ids in own.tokens.values()]), sizes.slots)
            epoch.own_steps, epoch.our_steps = epoch.own_steps + own.steps, epoch.our_steps + ours.steps
            epoch.own_s, epoch.our_s = epoch.own_s + own.seconds, epoch.our_s + ours.seconds
            epoch.parked += ours.parked
        note(f"epoch {number}: {epoch}")
    return epochs


def own_queue(
    generator: VLLMGenerator, policy: Any, prompts: list[Prompt], group_size: int, sampling: SamplingParams
) -> Order:
    """All requests at once: which one is decoded when is the engine's affair."""
    generator.load_weights(PolicyWeights(policy), 0)  # which empties the prefix cache too
    num_slots, generator.num_slots = generator.num_slots, len(prompts) * group_size  # of which the engine knows nothing
    start, steps, finished = time.perf_counter(), 0, []
    generator.submit([Request(prompt, (sample,), sampling) for prompt in prompts for sample in range(group_size)])
    while len(finished) < len(prompts) * group_size:
        finished += generator.step().finished
        steps += 1
    generator.num_slots = num_slots
    tokens = {completion.request.key: completion.token_ids_T.tolist() for completion in finished}
    return Order(steps, time.perf_counter() - start, tokens)


def _planned(
    generator: VLLMGenerator,
    policy: Any,
    predictor: LengthPredictor,
    choice: ProbeChoice,
    prompts: list[Prompt],
    group_size: int,
    sampling: SamplingParams,
) -> Order:
    """As in training."""
    generator.load_weights(PolicyWeights(policy), 0)
    points = choice.points({point: predictor.within_correlation(point) for point in predictor.points if point})
    groups, stats = roll_out(generator, prompts, group_size, sampling, "short_last", predictor, points=points)
    choice.learn(predictor.outcome(), sampling.max_tokens, generator.num_slots, predictor.informative)
    predictor.end(commit=True)
    tokens = {r.completion.request.key: r.completion.token_ids_T.tolist() for g in groups for r in g.rollouts}
    return Order(stats.num_steps, stats.rollout_s, tokens, stats.num_parked)


def _row(name: str, epoch: int, seeds: Sequence[Epoch]) -> Row:
    """Means over seeds, and the spread of what the order gains."""
    ratios = [one.steps_ratio for one in seeds]
    row: Row = {
        "workload": name,
        "epoch": epoch,
        "seeds": len(seeds),
        "own_over_fewest": _mean_over_fewest(seeds),
        "our_over_fewest": statistics.fmean(one.our_steps / one.fewest for one in seeds),
        "steps_ratio": statistics.fmean(ratios),
        "steps_ratio_sd": statistics.pstdev(ratios),
        "steps_ratio_least": min(ratios),
        "steps_ratio_most": max(ratios),
    }
    if all(one.our_s for one in seeds):
        times = [one.own_s / one.our_s for one in seeds]
        row |= {"time_ratio": statistics.median(times), "time_ratio_least": min(times), "time_ratio_most": max(times)}
        row["parked"] = sum(one.parked for one in seeds)
    return row


def _mean_over_fewest(seeds: Sequence[Epoch]) -> float:
    return statistics.fmean(one.own_steps / one.fewest for one in seeds)


def _claims(how: str, seeds: Sequence[Epoch]) -> list[Claim]:
    """Claims on the mean over seeds, in the last epoch of ``per_prompt``."""
    where = f"per_prompt, last epoch, {how}, mean over {len(seeds)} seeds"
    ratio = statistics.fmean(one.steps_ratio for one in seeds)
    return [
        Claim(f"{where}: vLLM's first come over the fewest steps", _mean_over_fewest(seeds), ">=", LEAST_OVER_FEWEST),
        Claim(f"{where}: vLLM's first come over our plan, in steps", ratio, ">=", LEAST_RATIO),
    ]


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(main(parse_options(__doc__)))
