"""Keys and values of whole sequences, computed before anything of them is decoded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import scaled_dot_product_attention

from lit_grpo.policy import hidden_states
from lit_grpo.rollout.attention import AttentionInputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class PrefillCache:
    """Collects the keys and values of a batch of sequences, while the model runs over piece after piece of them.

    ``keys[layer]`` and ``values[layer]`` have shape (rows, KV heads, tokens so far, head size). ``windows`` and
    ``scalings`` are what the layers hand over with them.
    """

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.windows: list[int | None] = []
        self.scalings: list[float] = []

    def attend(self, layer: int, inputs: AttentionInputs) -> torch.Tensor:
        """Causal attention over the pieces so far."""
        query, key, value, window = inputs.query, inputs.key, inputs.value, inputs.window
        if layer == len(self.keys):
            self.keys.append(key)
            self.values.append(value)
            self.windows.append(window)
            self.scalings.append(inputs.scaling)
        else:
            key = self.keys[layer] = torch.cat([self.keys[layer], key], 2)
            value = self.values[layer] = torch.cat([self.values[layer], value], 2)
        num_new, num_tokens = query.shape[2], key.shape[2]
        mask_NT = None
        if num_new < num_tokens or (window is not None and window < num_tokens):
            positions_T = torch.arange(num_tokens, device=query.device)
            distance_NT = positions_T[-num_new:, None] - positions_T[None, :]
            mask_NT = distance_NT >= 0 if window is None else (distance_NT >= 0) & (distance_NT < window)
        return scaled_dot_product_attention(
            query, key, value, attn_mask=mask_NT, is_causal=mask_NT is None, scale=inputs.scaling, enable_gqa=True
        )


def prefill(
    policy: PreTrainedModel, sequences: Sequence[Sequence[int]], max_tokens: int
) -> tuple[PrefillCache, torch.Tensor]:
    """Run the policy over ``sequences``, in pieces of at most ``max_tokens`` tokens, padding included.

    Returns:
        The cache, padded on the right to the longest sequence, and the hidden state of each sequence's last
        token, shape (rows, hidden size).
    """
    device = policy.device
    lengths = [len(sequence) for sequence in sequences]
    longest = max(lengths)
    input_ids_BT = torch.zeros((len(sequences), longest), dtype=torch.int64)
    for row, sequence in enumerate(sequences):
        input_ids_BT[row, : lengths[row]] = torch.tensor(sequence)
    input_ids_BT = input_ids_BT.to(device)
    last_B = torch.tensor(lengths, device=device) - 1
    cache = PrefillCache()
    step = max(1, max_tokens // len(sequences))
    final_BD = None
    for begin in range(0, longest, step):
        piece_BT = input_ids_BT[:, begin : begin + step]
        positions_BT = torch.arange(begin, begin + piece_BT.shape[1], device=device).expand_as(piece_BT)
        hidden_BTD = hidden_states(policy, piece_BT, position_ids=positions_BT, slot_cache=cache)
        column_B = (last_B - begin).clamp(0, piece_BT.shape[1] - 1)
        state_BD = hidden_BTD[torch.arange(len(sequences), device=device), column_B]
        final_BD = state_BD if final_BD is None else torch.where((last_B >= begin)[:, None], state_BD, final_BD)
    assert final_BD is not None
    return cache, final_BD
