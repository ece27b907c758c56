"""A few sampled tokens whose log-probs tell whether a generator computes with the policy's weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lit_grpo.types import Completion, Prompt, Request, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lit_grpo.rollout.generator import Generator


_NUM_TOKENS = 8


def logprob_gap(generator: Generator, policy: PreTrainedModel, prompt: Prompt, version: int) -> float:
    """Sample a short completion, and return the mean difference of its log-probs from the policy's, in nats.

    What digests cannot see shows here: weights that arrived, and are computed with wrongly or not at all. The prompt is
    sampled under a name of its own, so that no random number of a rollout is used.
    """
    named = Prompt("probe", prompt.token_ids, prompt.text, visit=version)
    generator.submit([Request(named, (0,), SamplingParams(max_tokens=_NUM_TOKENS))])
    finished: list[Completion] = []
    while not finished:
        finished = generator.step().finished
    generator.release([named])
    completion = finished[0]
    gap_T = completion.logprobs_T - _logprobs(policy, named, completion)
    return float(gap_T.abs().mean())


@torch.no_grad()
def _logprobs(policy: PreTrainedModel, prompt: Prompt, completion: Completion) -> torch.Tensor:
    """The policy's own log-probs of a completion, shape T."""
    training = policy.training
    policy.eval()
    ids_T = torch.cat([torch.tensor(prompt.token_ids), completion.token_ids_T]).to(policy.device)
    logits_TV = policy(input_ids=ids_T[None], use_cache=False).logits[0, len(prompt.token_ids) - 1 : -1]
    policy.train(training)
    logprobs_TV = logits_TV.float().log_softmax(-1).cpu()
    return logprobs_TV.gather(-1, completion.token_ids_T[:, None]).squeeze(-1)
