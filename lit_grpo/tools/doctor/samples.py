"""Checks of the generator: it starts, gets the weights, and its completions end and are trained on completely."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from lit_grpo.environments.plugin import Trajectories
from lit_grpo.policy.spec import eos_token_ids
from lit_grpo.process.terminal import on_one_line
from lit_grpo.rollout.loop import RolloutLoop
from lit_grpo.tools.doctor.patient import Patient
from lit_grpo.tools.doctor.report import CheckResult
from lit_grpo.tools.doctor.trial import disturb, undone
from lit_grpo.types import Prompt
from lit_grpo.update.batches.microbatch import least_tokens, make_micro_batches

NUM_PROMPTS = 4
NUM_GENERATIONS = 4


def check_generator(patient: Patient) -> Iterator[CheckResult]:
    """Start the generator."""
    module = patient.module
    patient.scheduler.on_train_start(patient.trainer, module)
    capacity = module.generator.capacity()
    room = "" if capacity.kv_tokens is None else f", room for {capacity.kv_tokens:,} tokens in the KV cache"
    yield CheckResult("pass", "generator", f"{type(module.generator).__name__}, {capacity.slots} slots{room}")


def check_sync(patient: Patient) -> Iterator[CheckResult]:
    """Change every trained weight, sync, prove that the weights arrived, and undo the change.

    With unchanged weights, a tensor that is not sent would look right, and after one small update nearly right.

    Raises:
        WeightSyncError: The generator does not hold the weights, or computes with others.
    """
    module, trainer = patient.module, patient.trainer
    patient.sync.on_train_start(trainer, module)
    start = time.perf_counter()
    with undone(module), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        disturb(module.policy)
        patient.sync.on_train_start(trainer, module)
        seconds = time.perf_counter() - start
    patient.sync.on_train_start(trainer, module)
    scores = "scores" in module.generator.abilities
    how = f"sent and proved in {seconds:.1f} s" if scores else "the policy's own tensors"
    yield CheckResult("pass", "weight sync", f"{how}, every weight changed")


def by_turns(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return prompts with the data sets by turns, the first of each before the second of any."""
    num_before, places = Counter[str](), list[int]()
    for prompt in prompts:
        places.append(num_before[prompt.dataset])
        num_before[prompt.dataset] += 1
    return [prompts[row] for row in sorted(range(len(prompts)), key=places.__getitem__)]


def check_samples(patient: Patient) -> Iterator[CheckResult]:
    """Sample a few completions as the run will, and check how they end."""
    module = patient.module
    num_generations = min(NUM_GENERATIONS, module.num_generations)
    with patient.trainer.precision_plugin.forward_context():
        loop = RolloutLoop(module.generator, listeners=patient.scheduler.session.evaluating)
        patient.groups, stats = loop.collect(
            by_turns(patient.prompts)[:NUM_PROMPTS], num_generations, module.sampling, module.sampling_seed
        )
    completions = [rollout.completion for rollout in patient.rollouts]
    lengths = [completion.num_tokens for completion in completions]
    num_ended = sum(completion.finish_reason == "stop" for completion in completions)
    share = num_ended / len(completions)
    figure = f"{len(lengths)} of {min(lengths)} to {max(lengths)} tokens in {stats.rollout_s:.1f} s, {share:.0%} ended"
    remedy = (
        f"raise sampling.max_tokens, which is {module.sampling.max_tokens}, or check that the policy ever writes its "
        "end token"
    )
    if share < 0.5:
        yield CheckResult("warn" if num_ended else "fail", "samples", figure, remedy)
    elif len({tuple(completion.token_ids_T.tolist()) for completion in completions}) == 1:
        yield CheckResult("warn", "samples", f"{figure}; all are the same", "raise sampling.temperature")
    else:
        yield CheckResult("pass", "samples", figure)
    if unseen := module.spec.unseen_tokens(completions):
        yield CheckResult(
            "warn",
            "special tokens",
            f"samples hold {', '.join(unseen)}, which the text for reward functions leaves out",
            "set model.keep_special_tokens to true if a reward is to see them",
        )
    for found in patient.scheduler.session.findings():
        yield CheckResult("warn", found.name, *found.sentence.split(". ", 1))
    for group in patient.groups[:3]:
        patient.report.quote(f'{group.prompt.prompt_id}: "{on_one_line(group.rollouts[0].completion.text)}"')


def check_states(patient: Patient) -> Iterator[CheckResult]:
    """Ask the environments of the samples for their states, and let fresh ones restore them.

    Raises:
        ValueError: An environment cannot.
    """
    for plugin in patient.scheduler.session.evaluating:
        if isinstance(plugin, Trajectories) and (num_states := plugin.try_states()):
            yield CheckResult(
                "pass", "states", f"{num_states} environments said their state, and fresh ones restored it"
            )


def check_ends(patient: Patient) -> Iterator[CheckResult]:
    """Check that the update's micro-batches hold every sampled token, the end token too."""
    module, rollouts = patient.module, patient.rollouts
    tokenizer, shares = module.tokenizer, module.settings.shares_prefix
    ends = eos_token_ids(module.policy, tokenizer)
    named = ", ".join(f"{tokenizer.convert_ids_to_tokens(end)} ({end})" for end in ends)
    micro_batches = make_micro_batches(rollouts, least_tokens(rollouts, shares), shares)
    trained = {
        row: ids_N
        for batch in micro_batches
        for row, ids_N in zip(batch.rows, batch.columns["target_id"].split(batch.lengths_C.tolist()), strict=True)
    }
    whole = [trained[row].tolist() == one.completion.sampled_ids for row, one in enumerate(rollouts)]
    pad = "; padding has the same id, and masks come from lengths" if tokenizer.pad_token_id in ends else ""
    if not all(whole):
        yield CheckResult(
            "fail",
            "end tokens",
            f"{named}; tokens of {len(whole) - sum(whole)} of {len(whole)} samples are not trained on",
            "a mask leaves them out; a mask must come from lengths and never from a token's id",
        )
    else:
        yield CheckResult("pass", "end tokens", f"{named}, trained on{pad}")
