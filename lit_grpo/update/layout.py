"""Rollouts laid out as the tensors that go through the policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lit_grpo.types import MicroBatch, PackedGroup, Rollout

_NONE = torch.empty(0, dtype=torch.int64)


def packed(rollouts: Sequence[Rollout], advantages_C: Sequence[float], rows_C: Sequence[int]) -> MicroBatch:
    """Lay rollouts out as one row without padding, a prompt once before all of its responses.

    Rollouts whose prompts have the same tokens make a group. Without rollouts the row has one token and no completion,
    so that a rank which has nothing to learn from can still take part.
    """
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for index, rollout in enumerate(rollouts):
        by_prompt.setdefault(rollout.prompt.token_ids, []).append(index)
    order = [index for members in by_prompt.values() for index in members]
    tokens, positions, sources, groups, start = [], [], [], [], 0
    for prompt_ids, members in by_prompt.items():
        completions = [rollouts[index].completion.token_ids_T for index in members]
        group = PackedGroup(start, len(prompt_ids), tuple(max(len(ids_T) - 1, 0) for ids_T in completions))
        tokens += [torch.tensor(prompt_ids), *(ids_T[:-1] for ids_T in completions)]
        positions += [torch.arange(length) + first for first, length in _spans(group)]
        sources.append(_sources(group, [len(ids_T) for ids_T in completions]))
        groups.append(group)
        start += group.prompt_tokens + sum(group.response_tokens)
    return MicroBatch(
        input_ids_BT=torch.cat(tokens)[None] if tokens else torch.zeros((1, 1), dtype=torch.int64),
        position_ids_BT=torch.cat(positions)[None] if tokens else torch.zeros((1, 1), dtype=torch.int64),
        source_N=torch.cat([*sources, _NONE]),
        groups=tuple(groups) or (PackedGroup(0, 1, ()),),
        **_completions(
            [rollouts[index] for index in order],
            [advantages_C[index] for index in order],
            [rows_C[index] for index in order],
        ),
    )


def in_rows(rollouts: Sequence[Rollout], advantages_C: Sequence[float], rows_C: Sequence[int]) -> MicroBatch:
    """Lay rollouts out one a row, padded on the right; without rollouts, one row of one token."""
    longest = max((len(r.prompt.token_ids) + r.completion.num_tokens - 1 for r in rollouts), default=1)
    input_ids_BT = torch.zeros((max(1, len(rollouts)), longest), dtype=torch.int64)
    sources = []
    for row, rollout in enumerate(rollouts):
        prompt, completion = rollout.prompt.token_ids, rollout.completion.token_ids_T
        tokens = torch.cat([torch.tensor(prompt), completion[:-1]])
        input_ids_BT[row, : len(tokens)] = tokens
        sources.append(torch.arange(len(completion)) + row * longest + len(prompt) - 1)
    return MicroBatch(
        input_ids_BT=input_ids_BT,
        position_ids_BT=torch.arange(longest).repeat(len(input_ids_BT), 1),
        source_N=torch.cat([*sources, _NONE]),
        **_completions(rollouts, advantages_C, rows_C),
    )


def _spans(group: PackedGroup) -> list[tuple[int, int]]:
    """First position and length of the prompt, and of each response."""
    return [(0, group.prompt_tokens), *((group.prompt_tokens, length) for length in group.response_tokens)]


def _sources(group: PackedGroup, num_targets: Sequence[int]) -> torch.Tensor:
    """Where each completion token's predecessor stands in the row."""
    last = group.start + group.prompt_tokens - 1
    sources, start = [], last + 1
    for length, targets in zip(group.response_tokens, num_targets, strict=True):
        sources += [torch.full((min(targets, 1),), last), torch.arange(start, start + length)]
        start += length
    return torch.cat(sources)


def _completions(rollouts: Sequence[Rollout], advantages_C: Sequence[float], rows_C: Sequence[int]) -> dict[str, Any]:
    """What the objective wants, completion after completion."""
    return {
        "target_ids_N": torch.cat([*(rollout.completion.token_ids_T for rollout in rollouts), _NONE]),
        "sampled_logprobs_N": torch.cat([*(rollout.completion.logprobs_T for rollout in rollouts), torch.empty(0)]),
        "advantages_C": torch.tensor(advantages_C, dtype=torch.float32),
        "lengths_C": torch.tensor([rollout.completion.num_tokens for rollout in rollouts], dtype=torch.int64),
        "rows_C": torch.tensor(rows_C, dtype=torch.int64),
    }
