"""Rollouts whose lengths are known, with what a predictor would have been shown of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lit_grpo.policy.architecture.decoder import hidden_states
from lit_grpo.policy.architecture.logits import token_logits
from lit_grpo.scheduling.jobs import Job
from lit_grpo.types import Prompt

NUM_SCALARS = 2  # at the end of the features: the mean log-prob so far and the entropy of the next token


@dataclass(frozen=True)
class Record:
    """One rollout: ``lengths``, shape (jobs,), and by point the features, shape (jobs, D), of all that reach it.

    Rows of jobs that have ended by then hold anything.
    """

    jobs: list[Job]
    lengths: np.ndarray
    features: dict[int, np.ndarray]


def sampled(
    policy: Any, prompts: Sequence[Prompt], visit: int, group_size: int, max_tokens: int, points: Sequence[int]
) -> Record:
    """Sample completions of prompts of equal length; the features come from one forward of their tokens."""
    prompt_tokens = len(prompts[0].token_ids)
    rows_BT = torch.tensor([prompt.token_ids for prompt in prompts for _ in range(group_size)])
    end = policy.generation_config.eos_token_id
    with torch.inference_mode():
        tokens_BT = policy.generate(
            input_ids=rows_BT, max_new_tokens=max_tokens, do_sample=True, temperature=1.0, top_k=0, pad_token_id=0
        )
        ended_BT = tokens_BT[:, prompt_tokens:] == end
        lengths = torch.where(ended_BT.any(1), ended_BT.int().argmax(1) + 1, ended_BT.shape[1]).numpy()
        needed = prompt_tokens + min(max(points), tokens_BT.shape[1] - prompt_tokens)
        features = _features(policy, tokens_BT[:, :needed], prompt_tokens, points)
    jobs = [
        Job((p.prompt_id, visit, (sample,)), prompt_tokens, max_tokens) for p in prompts for sample in range(group_size)
    ]
    return Record(jobs, lengths, features)


def _features(policy: Any, tokens_BT: torch.Tensor, prompt_tokens: int, points: Sequence[int]) -> dict[int, np.ndarray]:
    """Return the last hidden state after ``point`` tokens, the mean log-prob of these, and the entropy of the next."""
    hidden_BTH = hidden_states(policy, tokens_BT)
    logprobs_BTV = torch.log_softmax(token_logits(policy, hidden_BTH), -1)
    taken_BT = logprobs_BTV[:, prompt_tokens - 1 : -1].gather(-1, tokens_BT[:, prompt_tokens:, None])[..., 0]
    features = {}
    for point in points:
        last = prompt_tokens + point - 1
        if last < tokens_BT.shape[1]:
            entropy_B = -(logprobs_BTV[:, last].exp() * logprobs_BTV[:, last]).sum(-1)
            mean_B = taken_BT[:, :point].sum(1) / max(point, 1)
            features[point] = torch.cat([hidden_BTH[:, last], mean_B[:, None], entropy_B[:, None]], 1).numpy()
    return features


def drift(policy: Any, size: float, seed: int) -> None:
    """Move every weight matrix at random, by ``size`` times the spread of its entries, as training would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.ndim > 1:
                parameter += size * parameter.std() * torch.randn(parameter.shape, generator=generator)


def made_up(
    num_prompts: int, per_rollout: int, visits: int, group_size: int, max_tokens: int, points: Sequence[int]
) -> Iterator[Record]:
    """Yield rollouts of heavy-tailed lengths, log-normal with a median of 90 tokens, the tail up to ``max_tokens``.

    Their logs have a spread of 0.7 between prompts and 0.5 within; the first drifts by 0.2 from visit to visit. The
    features, 256 random mixtures of noise, of the prompt's part and of a completion's own, show the first with a noise
    of 0.5, and of the second more the more tokens there are.
    """
    rng = np.random.default_rng(0)
    prompt_effects = rng.normal(0, 0.7, num_prompts)
    mixture = rng.normal(0, 1, (3, 256))
    for visit in range(visits):
        prompt_effects = prompt_effects + rng.normal(0, 0.2, num_prompts)
        seen = np.repeat(prompt_effects + rng.normal(0, 0.5, num_prompts), group_size).reshape(num_prompts, -1)
        own = rng.normal(0, 0.5, (num_prompts, group_size))
        lengths = np.clip(np.exp(4.5 + prompt_effects[:, None] + own), 1, max_tokens).astype(np.int64)
        for first in range(0, num_prompts, per_rollout):
            part = slice(first, first + per_rollout)
            jobs = [
                Job((f"p{n}", visit, (s,)), 64, max_tokens) for n in range(first, part.stop) for s in range(group_size)
            ]
            features = {}
            for point in points:
                hint = own[part] + rng.normal(0, 0.5, own[part].shape) * np.sqrt(32 / max(point, 1))
                hint = hint if point else np.zeros_like(hint)
                noise = np.zeros_like(hint) if not point else rng.normal(0, 0.5, hint.shape)
                views = np.stack([seen[part], hint / (1 + 32 / max(point, 1)), noise], -1).reshape(-1, 3)
                features[point] = (views @ mixture).astype(np.float32)
            yield Record(jobs, lengths[part].reshape(-1), features)
