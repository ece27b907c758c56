"""Rollouts to micro-batches under a token budget."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lit_grpo.types import MicroBatch, Rollout


def num_row_tokens(rollout: Rollout) -> int:
    """Tokens of a rollout in the model: the prompt and the completion."""
    return len(rollout.prompt.token_ids) + rollout.completion.num_tokens


def make_micro_batches(rollouts: Sequence[Rollout], advantages_C: Sequence[float], max_tokens: int) -> list[MicroBatch]:
    """Sort rollouts by length and cut them into micro-batches of at most ``max_tokens``, padding included.

    The longest come first, so that a shortage of memory shows at once.

    Raises:
        ValueError: A rollout is longer than ``max_tokens``; the message says the smallest that works.
    """
    order = sorted(range(len(rollouts)), key=lambda row: -num_row_tokens(rollouts[row]))
    if order and (longest := num_row_tokens(rollouts[order[0]])) > max_tokens:
        raise ValueError(
            f"max_tokens_per_micro_batch is {max_tokens}, but a prompt with its completion has {longest} tokens; "
            f"set it to at least {longest}."
        )
    micro_batches = []
    while order:
        rows = max_tokens // num_row_tokens(rollouts[order[0]])
        taken, order = order[:rows], order[rows:]
        taken_rollouts, taken_advantages = [rollouts[row] for row in taken], [advantages_C[row] for row in taken]
        micro_batches.append(make_micro_batch(taken_rollouts, taken_advantages, taken))
    return micro_batches


def make_micro_batch(
    rollouts: Sequence[Rollout], advantages_C: Sequence[float], rows_C: Sequence[int] | None = None
) -> MicroBatch:
    """Lay rollouts out as rows, padded on the right to the longest; without rollouts, one row of one token.

    ``rows_C`` are their places among the rollouts of the step; by default they are the step's.
    """
    longest = max((num_row_tokens(rollout) for rollout in rollouts), default=1)
    input_ids_BT = torch.zeros((max(1, len(rollouts)), longest), dtype=torch.int64)
    rows, columns = [], []
    for row, rollout in enumerate(rollouts):
        prompt, completion = rollout.prompt.token_ids, rollout.completion.token_ids_T
        input_ids_BT[row, : len(prompt)] = torch.tensor(prompt)
        input_ids_BT[row, len(prompt) : len(prompt) + len(completion)] = completion
        rows.append(torch.full_like(completion, row))
        columns.append(torch.arange(len(completion)) + len(prompt) - 1)
    none = torch.empty(0, dtype=torch.int64)
    return MicroBatch(
        input_ids_BT=input_ids_BT,
        row_N=torch.cat([*rows, none]),
        column_N=torch.cat([*columns, none]),
        target_ids_N=torch.cat([*(rollout.completion.token_ids_T for rollout in rollouts), none]),
        sampled_logprobs_N=torch.cat([*(rollout.completion.logprobs_T for rollout in rollouts), torch.empty(0)]),
        advantages_C=torch.tensor(advantages_C, dtype=torch.float32),
        lengths_C=torch.tensor([rollout.completion.num_tokens for rollout in rollouts], dtype=torch.int64),
        rows_C=torch.tensor(range(len(rollouts)) if rows_C is None else rows_C, dtype=torch.int64),
    )
