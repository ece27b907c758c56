"""Whether completions come, end, and are learnt from as a whole."""

from __future__ import annotations

from collections.abc import Iterator

from lit_grpo.policy.loading import eos_token_ids
from lit_grpo.rollout.loop import RolloutLoop
from lit_grpo.terminal import on_one_line
from lit_grpo.tools.doctor.patient import Patient
from lit_grpo.tools.doctor.report import Finding
from lit_grpo.update.batches.microbatch import least_tokens, make_micro_batches

NUM_PROMPTS = 4
NUM_GENERATIONS = 4


def check_generator(patient: Patient) -> Iterator[Finding]:
    """Start it."""
    module = patient.module
    patient.scheduler.on_train_start(patient.trainer, module)
    capacity = module.generator.capacity()
    room = "" if capacity.kv_tokens is None else f", room for {capacity.kv_tokens:,} tokens of keys and values"
    yield Finding("pass", "generator", f"{type(module.generator).__name__}, {capacity.slots} slots{room}")


def check_samples(patient: Patient) -> Iterator[Finding]:
    """Sample a few completions as the run will, and look at how they end."""
    module = patient.module
    num_generations = min(NUM_GENERATIONS, module.num_generations)
    with patient.trainer.precision_plugin.forward_context():
        patient.groups, stats = RolloutLoop(module.generator).collect(
            patient.prompts[:NUM_PROMPTS], num_generations, module.sampling, module.sampling_seed
        )
    completions = [rollout.completion for rollout in patient.rollouts]
    lengths = [completion.num_tokens for completion in completions]
    num_ended = sum(completion.finish_reason == "stop" for completion in completions)
    share = num_ended / len(completions)
    figure = f"{len(lengths)} of {min(lengths)} to {max(lengths)} tokens in {stats.rollout_s:.1f} s, {share:.0%} ended"
    remedy = (
        f"raise sampling.max_tokens, which is {module.sampling.max_tokens}, or see whether the policy ever writes its "
        "end token"
    )
    if share < 0.5:
        yield Finding("warn" if num_ended else "fail", "samples", figure, remedy)
    elif len({tuple(completion.token_ids_T.tolist()) for completion in completions}) == 1:
        yield Finding("warn", "samples", f"{figure}; all are the same", "raise sampling.temperature")
    else:
        yield Finding("pass", "samples", figure)
    if unseen := module.spec.unseen_tokens(completions):
        yield Finding(
            "warn",
            "special tokens",
            f"samples hold {', '.join(unseen)}, which the text that reward functions get leaves out",
            "set model.keep_special_tokens to true where a reward is to see them",
        )
    for group in patient.groups[:3]:
        patient.report.quote(f'{group.prompt.prompt_id}: "{on_one_line(group.rollouts[0].completion.text)}"')


def check_ends(patient: Patient) -> Iterator[Finding]:
    """Whether every sampled token, the end token too, is learnt from in the micro-batches that the update makes."""
    module, rollouts = patient.module, patient.rollouts
    tokenizer, shares = module.tokenizer, module.settings.shares_prefix
    ends = eos_token_ids(module.policy, tokenizer)
    named = ", ".join(f"{tokenizer.convert_ids_to_tokens(end)} ({end})" for end in ends)
    micro_batches = make_micro_batches(rollouts, [1.0] * len(rollouts), least_tokens(rollouts, shares), shares)
    learnt = {
        row: ids_N
        for batch in micro_batches
        for row, ids_N in zip(batch.rows_C.tolist(), batch.target_ids_N.split(batch.lengths_C.tolist()), strict=True)
    }
    whole = [learnt[row].tolist() == one.completion.token_ids_T.tolist() for row, one in enumerate(rollouts)]
    pad = "; padding has the same id, and masks come from lengths" if tokenizer.pad_token_id in ends else ""
    if not all(whole):
        yield Finding(
            "fail",
            "end tokens",
            f"{named}; tokens of {len(whole) - sum(whole)} of {len(whole)} samples are not learnt from",
            "a mask leaves them out, which must come from lengths and never from a token's id",
        )
    else:
        yield Finding("pass", "end tokens", f"{named}, learnt from{pad}")
