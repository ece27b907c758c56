"""A policy that announces how long it is going to be: the case that a probe is made for.

It answers any prompt with a number between 01 and 99 and then counts down from there, ``07=06=05=...=00``; in one step
of fifty it leaves out some, any number of them. The first number is log-normal with a median of 14 and a spread of 0.9
in the logarithm, so that the completions of one prompt differ by much, and those of different prompts by no more. After
its first tokens the policy knows how many are to come, as far as that can be known. It has the demo's architecture and
is trained on the spot.
"""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

import torch

from scripts.make_tiny import EOS_ID, TinyRecipe, make_tokenizer, new_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LIMIT = 320
MEDIAN, SPREAD, LEAPS = 14, 0.9, 0.02
STEPS, BATCH, LEARNING_RATE = 150, 24, 3e-3


def announcing_policy(seed: int, num_steps: int = STEPS) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Train the policy, which takes about a minute.

    Args:
        seed: Of its weights and of what it is shown.
        num_steps: Optimizer steps.
    """
    tokenizer, rng = make_tokenizer(), random.Random(seed)
    policy = new_model(TinyRecipe(), seed, tokenizer)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    for step in range(num_steps):
        share = min(1.0, (step + 1) / 30) * (0.02 + 0.49 * (1 + math.cos(math.pi * step / num_steps)))
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * share
        input_ids_BT, target_ids_BT = _batch(rng, tokenizer)
        logits_BTV = policy(input_ids=input_ids_BT, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), target_ids_BT.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
    return policy.eval(), tokenizer


def _batch(rng: random.Random, tokenizer: PreTrainedTokenizerBase) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, shape (rows, T); only completions are targets."""
    numbers = sorted(min(99, max(1, round(MEDIAN * math.exp(SPREAD * rng.gauss(0, 1))))) for _ in range(BATCH))
    prompts = [f"{rng.randrange(1000):03d}%{rng.randrange(11, 50)}=" for _ in numbers]
    rows = [
        (tokenizer.encode(prompt), [*tokenizer.encode(completion(number, rng)), EOS_ID])
        for prompt, number in zip(prompts, numbers, strict=True)
    ]
    longest = max(len(prompt) + len(answer) for prompt, answer in rows)
    input_ids_BT = torch.full((len(rows), longest - 1), EOS_ID)
    target_ids_BT = torch.full((len(rows), longest - 1), -100)
    for row, (prompt, answer) in enumerate(rows):
        tokens = torch.tensor([*prompt, *answer])
        input_ids_BT[row, : len(tokens) - 1] = tokens[:-1]
        target_ids_BT[row, len(prompt) - 1 : len(tokens) - 1] = tokens[len(prompt) :]
    return input_ids_BT, target_ids_BT


def completion(number: int, rng: random.Random) -> str:
    """Return the completion that the policy should write once it has chosen a number."""
    said = [number]
    while said[-1]:
        said.append(rng.randrange(said[-1]) if rng.random() < LEAPS else said[-1] - 1)
    return "=".join(f"{left:02d}" for left in said)
