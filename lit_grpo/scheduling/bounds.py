"""Lower bounds on decode steps: how far a plan is from the best possible."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def slot_bound(lengths: np.ndarray, num_slots: int) -> int:
    """Return steps that no schedule of completions on ``num_slots`` slots goes below.

    The largest of the longest completion, the total over the slots, and the pigeonhole bound of P||Cmax: of the
    ``k x slots + 1`` longest, some slot decodes ``k + 1``, which take at least what the shortest ``k + 1`` of them do.

    Args:
        lengths: Tokens of each completion, shape (completions,); a step decodes one token of each slot.
        num_slots: Completions decoded at a time.
    """
    if not len(lengths):
        return 0
    descending = np.sort(np.asarray(lengths, dtype=np.float64))[::-1]
    total = np.concatenate([[0.0], np.cumsum(descending)])
    rounds = np.arange(0, (len(descending) - 1) // num_slots + 1)  # k = 0 is the longest
    pigeonhole = total[rounds * num_slots + 1] - total[rounds * num_slots - rounds]
    return _ceil(max(total[-1] / num_slots, pigeonhole.max()))


def memory_bound(
    groups: Sequence[int] | np.ndarray,
    prompt_tokens: np.ndarray,
    lengths: np.ndarray,
    num_slots: int,
    kv_tokens: int,
) -> int:
    """Return steps that no schedule goes below whose KV cache holds ``kv_tokens`` at a time.

    The area under the KV tokens, over the budget: a completion of L tokens holds 1, 2, ..., L over its steps, and a
    prompt is held once for its group, for as long as its longest completion takes or the group's tokens on all slots.

    Args:
        groups: A number for each completion, equal where they share a prompt, shape (completions,).
        prompt_tokens: Tokens of each completion's prompt, shape (completions,).
        lengths: Tokens of each completion, shape (completions,).
        num_slots: Completions decoded at a time.
        kv_tokens: Tokens that the KV cache holds.
    """
    if not len(lengths):
        return 0
    own = np.asarray(lengths, dtype=np.float64)
    _, group = np.unique(np.asarray(groups), return_inverse=True)
    longest = np.zeros(group.max() + 1)
    np.maximum.at(longest, group, own)
    held = np.maximum(longest, np.ceil(np.bincount(group, weights=own) / num_slots))
    prompts = np.zeros(len(longest))
    prompts[group] = prompt_tokens
    area = (own * (own + 1) / 2).sum() + (prompts * held).sum()
    return max(slot_bound(lengths, num_slots), _ceil(area / kv_tokens))


def _ceil(steps: float) -> int:
    """Round up, but not for what the summation of floats has added."""
    return int(np.ceil(steps - 1e-9 * max(1.0, steps)))
