"""Counts of GPU operations in decoding and in an update, under a pretended GPU; printed as one line of JSON.

Run by ``device_counts``, here and in the checkout of an earlier commit.
"""

from __future__ import annotations

import json
import statistics
import warnings
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import peft  # noqa: F401  # it asks for CUDA when it is first imported under the pretended GPU
import torch

from benchmarks.random_policies import Sizes, random_qwen3
from benchmarks.update_work import Work
from lit_grpo.policy.adapters import LoraSettings, add_adapters
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.rollout.loop import RolloutLoop
from lit_grpo.rollout.slots import binding
from lit_grpo.rollout.slots.generator import SlotGenerator
from lit_grpo.types import Prompt, SamplingParams
from lit_grpo.update.advantages.estimator import Advantages
from lit_grpo.update.learner import Learner
from lit_grpo.update.learner_settings import LearnerSettings
from lit_grpo.update.objective.objective import Objective
from scripts.make_tiny import make_tokenizer
from tests.doubles import pretend_cuda as pretended
from tests.doubles.pretend_cuda import Ledger, pretend_cuda

SIZES = Sizes(4, 64, 128, 4, 2, 16, tied=True)
Counts = dict[str, float]


def policy_on_gpu(lora: bool) -> Any:
    """Return a small Qwen3, frozen below adapters or not."""
    policy: Any = random_qwen3(SIZES)
    if lora:
        add_adapters(policy, LoraSettings(r=4))
    return policy.to("cuda")


def autocast() -> Any:
    """The precision bf16-mixed, as Lightning has it."""
    return torch.autocast("cuda", torch.bfloat16, cache_enabled=False)


def decode(gpu: Ledger, lora: bool) -> Counts:
    """Count the steps of a rollout after one that warms up: the median step, and the largest of any."""
    policy = policy_on_gpu(lora)
    generator = SlotGenerator(8, drafts="off")
    generator.start(PolicySpec(policy, make_tokenizer()))
    generator.load_weights(policy.named_parameters(), 0)
    prompts = [Prompt("a", (3, 4, 5), ""), Prompt("b", tuple(3 + i % 10 for i in range(40)), "")]
    weights = sum(weight.numel() for module in policy.model.layers for weight in module.parameters())
    steps: list[Counts] = []
    cast, step, computed = 0, generator.step, pretended._computed

    def noting(func: Any, args: Any, kwargs: Any) -> Any:
        nonlocal cast
        if func is torch.ops.aten._to_copy.default and args[0].dim() == 2 and len(args[0]) > 8:  # no hidden states
            cast += args[0].numel()
        return computed(func, args, kwargs)

    def counted() -> Any:
        nonlocal cast
        gpu.reset()
        cast = 0
        with mock.patch.object(pretended, "_computed", noting):
            events = step()
        steps.append(_counts(gpu) | {"weights cast": cast / weights})
        return events

    def rollout() -> None:
        RolloutLoop(generator).collect(prompts, 16, SamplingParams(max_tokens=48), seed=0)

    with autocast():
        rollout()
        generator.step = counted
        rollout()
    named: dict[str, Callable[[list[float]], float]] = {"median": statistics.median, "most": max}
    return {f"{name}, {of}": pick([each[name] for each in steps]) for name in steps[0] for of, pick in named.items()}


def launches(mixed: bool, by_kernels: bool) -> Counts:
    """Count a decode step's launches: in a graph for each layer and besides, and outside of the graph.

    The vocabulary is large enough for sampling from blocks of tokens.
    """
    recorded = list[int]()
    outside = 0.0
    for layers in (2, 3):
        with pretend_cuda() as gpu, ExitStack() as stack:
            if not by_kernels:
                stack.enter_context(mock.patch.object(binding, "layer_kernels", lambda shape: None))
            policy: Any = random_qwen3(replace(SIZES, layers=layers, vocab_size=1100))
            generator = SlotGenerator(8, drafts="off")
            generator.start(PolicySpec((policy if mixed else policy.bfloat16()).to("cuda"), make_tokenizer()))
            generator.load_weights(policy.named_parameters(), 0)
            step, counts = generator.step, list[int]()

            def counted(step: Any = step, counts: list[int] = counts, gpu: Ledger = gpu) -> Any:
                gpu.reset()
                events = step()
                counts.append(gpu.launches)
                return events

            generator.step = counted
            with autocast() if mixed else nullcontext():
                for _ in range(2):
                    counts.clear()
                    prompts, sampling = [Prompt("a", (3, 4, 5), "")], SamplingParams(max_tokens=12)
                    RolloutLoop(generator).collect(prompts, 8, sampling, seed=0)
            graphs: Any = generator._graphs
            recorded.append(graphs._recordings[8, False].__self__.launches)
            outside = statistics.median(counts) - 1
    layer = recorded[1] - recorded[0]
    return {"a layer": layer, "besides, in the graph": recorded[0] - 2 * layer, "outside of the graph": outside}


def update(gpu: Ledger, lora: bool) -> Counts:
    """Count an update after one that warms up: what a step costs, and what each micro-batch adds."""
    policy = policy_on_gpu(lora).train()
    groups = Work(24, 12, 8, num_groups=4, vocab_size=SIZES.vocab_size).groups()
    for group in groups:
        for rollout in group.rollouts:
            rollout.rewards = {"exact": rollout.reward}
    steps = _Steps(policy)
    counts: dict[int, Counts] = {}
    for max_tokens in (1024, 1024, 128):
        made = 0
        settings = LearnerSettings(
            Objective(), Advantages(), {"exact": 1.0}, 1.0, 96, max_tokens_per_micro_batch=max_tokens
        )
        learner = Learner(policy, steps, settings)
        loss = learner.passes._loss

        def counting(*args: Any, loss: Any = loss, **kwargs: Any) -> torch.Tensor:
            nonlocal made
            made += 1
            return loss(*args, **kwargs)

        learner.passes._loss = counting
        gpu.reset()
        learner.learn(groups)
        counts[made] = _counts(gpu)
    (few, of_few), (many, of_many) = sorted(counts.items())
    each = {name: (of_many[name] - of_few[name]) / (many - few) for name in of_few}
    return {f"{name}, micro-batch": value for name, value in each.items()} | {
        f"{name}, step": of_few[name] - few * each[name] for name in each
    }


class _Steps:
    """An optimization in bf16-mixed."""

    def __init__(self, policy: Any) -> None:
        self.policy_version = 0
        self.optimizer = torch.optim.AdamW([each for each in policy.parameters() if each.requires_grad], fused=False)

    def add_gradient(self, compute_loss: Callable[[], torch.Tensor], exchange: bool) -> None:
        """Add a gradient."""
        with autocast():
            loss = compute_loss()
        loss.backward()

    def take_step(self, scale: float = 1.0) -> float:
        """Take a step."""
        self.optimizer.step()
        self.policy_version += 1
        return 0.0


def _counts(gpu: Ledger) -> Counts:
    return {
        "waits": gpu.count("wait"),
        "pinned copies": gpu.count("pinned copy"),
        "unpinned copies": gpu.count("unpinned copy"),
        "launches": gpu.launches,
    }


def main() -> None:
    """Count all of it."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    counted = {}
    for name, lora in (("all weights", False), ("LoRA", True)):
        for phase, count in (("decode", decode), ("update", update)):
            with pretend_cuda() as gpu:
                counted[f"{phase}, {name}"] = count(gpu, lora)
    for mixed, weights in (True, "bf16-mixed"), (False, "weights in place"):
        for by_kernels, way in (True, "kernels"), (False, "operations"):
            counted[f"launches, {weights}, {way}"] = launches(mixed, by_kernels)
    print(json.dumps(counted))


if __name__ == "__main__":
    main()
