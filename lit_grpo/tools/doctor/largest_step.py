"""Checks that the longest micro-batch fits into memory, and shows which other lengths would."""

from __future__ import annotations

import math
from collections.abc import Iterator

import psutil
import torch

from lit_grpo.memory import PeakMemory, free_bytes, is_out_of_memory
from lit_grpo.policy.architecture.decoder import context_length, never_sampled
from lit_grpo.tools.doctor.patient import Patient
from lit_grpo.tools.doctor.report import CheckResult
from lit_grpo.tools.doctor.trial import learn, rewarded, undone
from lit_grpo.types import Completion, Prompt, Request, Rollout, RolloutGroup
from lit_grpo.update.batches.microbatch import least_tokens
from lit_grpo.update.micro_batch_size import (
    ActivationBytes,
    activation_bytes,
    estimate_tokens,
    image_share,
    pending_bytes,
)

_GIB = 2**30
_TOKEN_BYTES = 8  # host memory for a token of a completion that waits for its group
_REMEDY = (
    "lower sampling.max_tokens, data.max_prompt_tokens or max_tokens_per_micro_batch, or set gradient_checkpointing"
)


def check_memory(patient: Patient) -> Iterator[CheckResult]:
    """Take a step with learning rate 0 on the longest micro-batch that the run can have.

    The micro-batch has the longest prompt, and as many completions of ``max_tokens`` as the token budget allows. If it
    certainly does not fit, it is not tried, because a host that runs out of memory kills processes.
    """
    groups, num_tokens = _longest(patient)
    rollouts, settings = groups[0].rollouts, patient.module.settings
    least, free = least_tokens(rollouts, settings.shares_prefix), free_bytes(patient.device)
    activations = _activations(patient, groups[0].prompt)
    needed = activations.of(least) + pending_bytes(patient.module.policy)
    patient.report.table(*_what_fits(patient, activations, free))
    if needed > free:
        figure = f"{least} tokens take about {needed / _GIB:.2g} GiB, and {free / _GIB:.2g} GiB are free"
        yield CheckResult("fail", "memory", figure, _REMEDY)
        return
    peak = PeakMemory(patient.device)
    peak.reset()
    try:
        with undone(patient.module) as copies:
            learn(patient, rewarded(patient, groups), lr=0.0)
            policy = dict(patient.module.policy.named_parameters())
            moved = [name for name in copies if not torch.equal(copies[name], policy[name].detach().cpu())]
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        yield CheckResult("fail", "memory", f"ran out on a micro-batch of {num_tokens} tokens", _REMEDY)
        return
    share = peak.peak_gib() * _GIB / (peak.peak_gib() * _GIB + free)
    figure = f"{peak.peak_gib():.2g} GiB at the peak, on a longest micro-batch of {num_tokens} tokens"
    yield CheckResult("warn" if share > 0.95 else "pass", "memory", figure, _REMEDY if share > 0.95 else "")
    if moved:
        yield CheckResult(
            "fail",
            "rate 0",
            f"a step with learning rate 0 changes {moved[0]}",
            "some code besides the optimizer writes to the weights",
        )
    else:
        yield CheckResult("pass", "rate 0", "a step with learning rate 0 changes no bit of any weight")


def _longest(patient: Patient) -> tuple[list[RolloutGroup], int]:
    """Return rollouts that fill the longest micro-batch, and the number of its tokens."""
    module, settings = patient.module, patient.module.settings
    prompt = max(patient.prompts, key=lambda one: len(one.token_ids))
    num_prompt, num_completion = len(prompt.token_ids), module.sampling.max_tokens
    budget = settings.max_tokens_per_micro_batch
    if budget == "auto":
        is_selective = settings.gradient_checkpointing == "selective"
        free = free_bytes(patient.device)
        share = image_share(module.policy, prompt, num_completion)
        with patient.computing():
            budget = estimate_tokens(module.policy, free, settings.shares_prefix, is_selective, share)
    if settings.shares_prefix:
        fitting = (budget - num_prompt) // num_completion
    else:
        fitting = budget // (num_prompt + num_completion)
    count = max(2, min(fitting, module.num_generations * patient.data.batch_size))
    vocabulary = module.policy.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    rollouts = [_made_up(patient, prompt, number, vocabulary, generator) for number in range(count)]
    return [RolloutGroup(prompt, rollouts)], min(budget, num_prompt + count * num_completion)


def _made_up(patient: Patient, prompt: Prompt, number: int, vocabulary: int, generator: torch.Generator) -> Rollout:
    size = (patient.module.sampling.max_tokens,)
    ids_T = torch.randint(vocabulary, size, generator=generator)
    for token in sorted(never_sampled(patient.module.policy)):
        ids_T[ids_T == token] = (token + 1) % vocabulary
    logprobs_T = torch.full(size, -math.log(vocabulary))
    request = Request(prompt, (number,), patient.module.sampling)
    return Rollout(prompt, Completion(request, ids_T, logprobs_T, torch.zeros_like(ids_T), "stop"))


def _activations(patient: Patient, prompt: Prompt) -> ActivationBytes:
    settings, policy = patient.module.settings, patient.module.policy
    share = image_share(policy, prompt, patient.module.sampling.max_tokens)
    with patient.computing():
        is_selective = settings.gradient_checkpointing == "selective"
        return activation_bytes(policy, settings.shares_prefix, is_selective, share)


def _what_fits(patient: Patient, activations: ActivationBytes, free: int) -> tuple[list[str], list[list[str]]]:
    """Return a row for each of several ``max_tokens``: the update's memory, the slots that fit, and the group size."""
    module = patient.module
    num_prompt = max(len(prompt.token_ids) for prompt in patient.prompts)
    context, kv_tokens = context_length(module.policy), module.generator.capacity().kv_tokens
    pending, host = pending_bytes(module.policy), psutil.virtual_memory().available
    rows = []
    for factor in (0.5, 1, 2, 4):
        max_tokens = int(factor * module.sampling.max_tokens)
        num_tokens = num_prompt + max_tokens
        if not 0 < num_tokens <= context:
            continue
        needed = pending + activations.of(num_tokens)
        slots = "-" if kv_tokens is None else f"{kv_tokens // num_tokens:,}"
        groups = host // 2 // (patient.data.batch_size * max_tokens * _TOKEN_BYTES)
        rows.append([f"{max_tokens:,}", f"{needed / _GIB:.2g}", "yes" if needed < free else "no", slots, f"{groups:,}"])
    return ["max_tokens", "least update, GiB", "fits", "slots, all full", "largest G"], rows
