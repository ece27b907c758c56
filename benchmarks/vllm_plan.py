"""Our plan on vLLM beside vLLM's own queue: one engine, one ``max_num_seqs``, the same completions in turn.

vLLM's own order is all requests of a batch handed over at once, first come, first served. Ours admits by ``short_last``
and learns lengths from what vLLM puts out, tokens and log-probs, and from earlier epochs, as in training. Two workloads
of several epochs: ``per_prompt``, completions ended at made-up lengths (a prompt's are alike, in every epoch), and
``demo``, the demo's policy before its training, which answers the same exercise now at once and now in full.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from benchmarks.report import Claim, Options, Row, finish, note, parse_options
from benchmarks.workloads import arithmetic_prompts, load
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.policy.weights import PolicyWeights
from lit_grpo.rollout.loop import RolloutLoop
from lit_grpo.rollout.vllm.engine import VLLMGenerator
from lit_grpo.rollout.vllm.streams import Stream
from lit_grpo.scheduling.bounds import slot_bound
from lit_grpo.scheduling.lengths.predictor import LengthPredictor
from lit_grpo.scheduling.replay.traces import synthetic_lengths
from lit_grpo.types import Key, Prompt, Request, SamplingParams

POINTS = (0, 8, 32, 64)


@dataclass(frozen=True)
class Sizes:
    """Of a measurement."""

    batches: int = 2
    prompts: int = 12
    group: int = 16
    slots: int = 48
    epochs: int = 5
    max_tokens: int = 192


@dataclass
class Order:
    """What one order took for one batch."""

    steps: int
    seconds: float
    tokens: dict[Key, list[int]] = field(repr=False)


class ForcedEngine(VLLMGenerator):
    """VLLMGenerator whose completions end after a given number of tokens, where one is given."""

    lengths: dict[Key, int] = {}  # noqa: RUF012

    def _fields(self, stream: Stream, keyed: bool) -> dict[str, Any]:
        fields, length = super()._fields(stream, keyed), self.lengths.get(stream.request.key)
        if length is None:
            return fields
        return fields | {"max_tokens": length, "min_tokens": length, "ignore_eos": True, "stop_token_ids": []}


def main(options: Options) -> int:
    """Sample each batch of each epoch by both orders, and compare."""
    sizes = Sizes(1, 2, 2, 2, 2, 16) if options.quick else Sizes()
    policy, tokenizer = load(options.policy or "tiny", options.device)
    generator = ForcedEngine(sizes.slots, engine_args={"max_model_len": 256, "block_size": 32})
    generator.feature_points = tuple(point for point in POINTS if point < sizes.max_tokens)
    generator.start(PolicySpec(policy, tokenizer))
    prompts = arithmetic_prompts(tokenizer, sizes.batches * sizes.prompts)
    sampling = SamplingParams(max_tokens=sizes.max_tokens)
    _own_queue(generator, policy, prompts[:2], 2, sampling)  # the kernels' first time
    rows: list[Row] = []
    for name, lengths in (("demo", {}), ("per_prompt", _forced(prompts, sizes))):
        generator.lengths = lengths
        rows += _measure(name, generator, policy, prompts, sizes, sampling)
    last: Any = rows[-1]
    claims = [
        Claim("per_prompt, last epoch: vLLM's first come over the fewest steps", last["own_over_bound"], ">=", 1.3),
        Claim("per_prompt, last epoch: vLLM's first come over our plan, in steps", last["steps_ratio"], ">=", 1.15),
    ]
    settings: Row = {"slots": sizes.slots, "prompts": sizes.prompts, "group_size": sizes.group, "plan": "short_last"}
    return finish("vllm_plan", options, settings, rows, claims)


def _forced(prompts: list[Prompt], sizes: Sizes) -> dict[Key, int]:
    """Lengths of all completions of all epochs: a prompt's median stays, what is around it is drawn anew.

    The seed is of a trace on which first come takes at least 1.3 times the fewest steps.
    """
    shape = len(prompts), sizes.epochs * sizes.group
    lengths = synthetic_lengths("per_prompt", *shape, sizes.max_tokens, np.random.default_rng(1))
    return {
        (prompt.prompt_id, epoch, (sample,)): int(lengths[row, epoch * sizes.group + sample])
        for row, prompt in enumerate(prompts)
        for epoch in range(sizes.epochs)
        for sample in range(sizes.group)
    }


def _measure(
    name: str, generator: VLLMGenerator, policy: Any, prompts: list[Prompt], sizes: Sizes, sampling: SamplingParams
) -> list[Row]:
    predictor = LengthPredictor(generator.feature_points, num_scalars=2, max_tokens=sizes.max_tokens)
    figures: dict[int, list[tuple[Order, Order, int]]] = defaultdict(list)
    for epoch in range(sizes.epochs):
        for first in range(0, len(prompts), sizes.prompts):
            batch = [replace(prompt, visit=epoch) for prompt in prompts[first : first + sizes.prompts]]
            own = _own_queue(generator, policy, batch, sizes.group, sampling)
            ours = _planned(generator, policy, predictor, batch, sizes.group, sampling)
            assert own.tokens == ours.tokens, "both orders must sample the same"
            bound = slot_bound(np.array([len(ids) for ids in own.tokens.values()]), sizes.slots)
            note(f"{name}, epoch {epoch}: fewest {bound}, own {own}, ours {ours}")
            figures[epoch].append((own, ours, bound))
    return [_row(name, epoch, batches) for epoch, batches in figures.items()]


def _own_queue(
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
    prompts: list[Prompt],
    group_size: int,
    sampling: SamplingParams,
) -> Order:
    """As in training."""
    generator.load_weights(PolicyWeights(policy), 0)
    controller = RolloutLoop(generator, plan="short_last", lengths=predictor)
    groups, stats = controller.collect(prompts, group_size, sampling, seed=0)
    tokens = {r.completion.request.key: r.completion.token_ids_T.tolist() for g in groups for r in g.rollouts}
    return Order(stats.num_steps, stats.rollout_s, tokens)


def _row(name: str, epoch: int, batches: list[tuple[Order, Order, int]]) -> Row:
    own, ours = sum(own.steps for own, _, _ in batches), sum(ours.steps for _, ours, _ in batches)
    bound = sum(bound for _, _, bound in batches)
    return {
        "workload": name,
        "epoch": epoch,
        "fewest": bound,
        "own_steps": own,
        "our_steps": ours,
        "own_over_bound": own / bound,
        "our_over_bound": ours / bound,
        "steps_ratio": own / ours,
        "time_ratio": statistics.median(first.seconds / second.seconds for first, second, _ in batches),
    }


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(main(parse_options(__doc__)))
