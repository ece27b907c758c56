"""Log-probs of a QLoRA run's rollout beside those of its update: slots decode the policy itself, an engine its base.

The policy is SmolLM2-135M-Instruct, or ``--policy``, with its linear layers in NF4. Slots sample completions of the
demo's exercises; for each sampled token the log-prob that was recorded is compared with that of the policy's own
forward pass in the update. Beside it is what an engine would have recorded that holds the same weights in bfloat16 and
not in four bits: the forward pass of the unquantized model over the same tokens. The gap is in nats per token.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from benchmarks.report import Claim, Options, Row, finish, need, parse_options
from benchmarks.rollouts import roll_out, slots
from benchmarks.workloads import arithmetic_prompts
from lit_grpo.policy.loading import load_policy, load_tokenizer
from lit_grpo.types import RolloutGroup, SamplingParams
from lit_grpo.update.batches.microbatch import make_micro_batches
from lit_grpo.update.logprobs.forward import micro_batch_logprobs


def main(options: Options) -> int:
    """Measure both gaps."""
    name = options.policy or ("tiny" if options.quick else "smollm2")
    tokenizer, device = load_tokenizer(name), torch.device(options.device)
    policy: Any = load_policy(name, nf4=True)
    whole: Any = load_policy(name)
    policy, whole = policy.to(device).eval(), whole.to(device, torch.bfloat16).eval()
    number, size, limit = (2, 2, 8) if options.quick else (4, 4, 48)
    generator = slots(policy, tokenizer, 4 if options.quick else 16)
    prompts = arithmetic_prompts(tokenizer, number)
    groups, _ = roll_out(generator, prompts, size, SamplingParams(max_tokens=limit))
    gaps = {
        "slots, which decode the policy itself": _gap(policy, groups),
        "an engine with the weights in bfloat16": _gap(policy, groups, whole),
    }
    rows: list[Row] = [
        {"rollout by": kind, "tokens": len(gap_N), "mean_gap": float(gap_N.mean()), "largest_gap": float(gap_N.max())}
        for kind, gap_N in gaps.items()
    ]
    largest, beside = (float(gap_N.max()) for gap_N in gaps.values())
    claims = [
        Claim("largest gap of slots, in nats", largest, "<=", 1e-3),
        Claim("the same of bfloat16 weights beside NF4, in nats", beside, ">=", 0.1),
    ]
    return finish("nf4_gap", options, {"policy": name, "completions": number * size}, rows, claims)


@torch.no_grad()
def _gap(policy: Any, groups: list[RolloutGroup], recorded_by: Any = None) -> torch.Tensor:
    """Return |log-prob recorded - log-prob under the policy|, of shape (tokens,); the slots recorded by default."""
    gaps = []
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        (row,) = make_micro_batches([rollout], 2**20, shared_prefix=False)
        logprobs_N, _ = micro_batch_logprobs(policy, row.to(policy.device), 1.0)
        recorded_N = rollout.completion.logprobs_T
        if recorded_by is not None:
            recorded_N, _ = micro_batch_logprobs(recorded_by, row.to(policy.device), 1.0)
        gaps.append((recorded_N.float().cpu() - logprobs_N.float().cpu()).abs())
    return torch.cat(gaps)


if __name__ == "__main__":
    need("bitsandbytes")
    sys.exit(main(parse_options(__doc__ or "")))
