"""The policy's forward passes while it decodes: whole sequences, and one token a row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch

from lit_grpo.policy.architecture.decoder import hidden_states
from lit_grpo.process.copies import in_one_copy
from lit_grpo.rollout.slots.attention import Attention, Forward, use_slot_attention
from lit_grpo.rollout.slots.copies import LoweredWeights, PackedWeights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lit_grpo.rollout.slots.kv.shelves import ShelfWriter


class DecodingMode:
    """Switches a policy to decoding and gives it back as it was.

    Args:
        policy: A model that the slots can decode.
        keeps_copies: Keep the copies of its weights in autocast's dtype when the policy is given back, because
            recordings read them.
        packs: Decode from copies in oneDNN's layout (:class:`PackedWeights`), unless autocast lowers weights.
    """

    def __init__(self, policy: PreTrainedModel, keeps_copies: bool = False, packs: bool = False) -> None:
        self._policy, self._keeps_copies, self._packs = policy, keeps_copies, packs
        self._attention: str | None = None
        self._lowered: LoweredWeights | None = None
        self._packed: PackedWeights | None = None
        self._casts = False

    def begin(self) -> None:
        """Switch to slot attention and evaluation mode, if that has not been done."""
        if self._attention is None:
            self._training = self._policy.training
            self._policy.eval()
            self._attention = use_slot_attention(self._policy)
            kind = self._policy.device.type
            self._casts = torch.is_autocast_enabled(kind)
            dtype = torch.get_autocast_dtype(kind)
            if self._casts and (self._lowered is None or self._lowered.dtype != dtype):
                self._lowered = LoweredWeights(self._policy, dtype)
            if self._packs and not self._casts:
                self._packed = PackedWeights(self._policy)

    def refresh(self) -> None:
        """Note that the weights have changed: copies of them are those of the weights as they were."""
        torch.clear_autocast_cache()
        for copies in (self._lowered, self._packed):
            if copies is not None:
                copies.refresh()

    @contextmanager
    def without_gradients(self) -> Iterator[None]:
        """Compute in inference mode; but under autocast with ``no_grad``, which is slower, and with autocast's cache.

        Without the cache, as Lightning has it, or in inference mode, each weight would be cast for every token.
        Linear layers have copies (:class:`LoweredWeights`), because the cache takes no frozen weights, and a recording
        no cache; it is there for trained weights of other kinds, such as fused experts.
        """
        if not self._casts or self._lowered is None:
            with torch.inference_mode(), nullcontext() if self._packed is None else self._packed.in_place():
                yield
            return
        kind = self._policy.device.type
        dtype, lowers = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        with torch.no_grad(), torch.autocast(kind, dtype, lowers, cache_enabled=True), self._lowered.in_place():
            yield

    def end(self) -> None:
        """Give the policy back, if it has been switched."""
        if self._attention is not None:
            self._policy.set_attn_implementation(self._attention)
            self._policy.train(self._training)
            self._attention = None
            torch.clear_autocast_cache()
            self._packed = None
            if not self._keeps_copies:
                self._lowered = None


def prefill(
    policy: PreTrainedModel,
    sequences: Sequence[Sequence[int]],
    max_tokens: int,
    writer: ShelfWriter,
) -> torch.Tensor:
    """Run the policy over ``sequences``, in pieces of at most ``max_tokens`` tokens, padding included.

    Args:
        policy: Switched to slot attention.
        sequences: Tokens, at least one each.
        max_tokens: The most that go through the model at once; each sequence has at least one token in a piece.
        writer: Takes the keys and values, padded on the right to the longest sequence, and attends. The first token of
            each sequence stands after those that are written there.

    Returns:
        The hidden state of each sequence's last token, shape (rows, hidden size).
    """
    device = policy.device
    lengths = [len(sequence) for sequence in sequences]
    longest = max(lengths)
    input_ids_BT = torch.zeros((len(sequences), longest), dtype=torch.int64)
    for row, sequence in enumerate(sequences):
        input_ids_BT[row, : lengths[row]] = torch.tensor(sequence)
    first_position = writer.written
    there = in_one_copy({"ids": input_ids_BT, "last": torch.tensor(lengths) - 1}, device)
    input_ids_BT, last_B = there["ids"], there["last"]
    rows_B = torch.arange(len(sequences), device=device)
    step = max(1, max_tokens // len(sequences))
    final_BD = None
    for begin in range(0, longest, step):
        piece_BT = input_ids_BT[:, begin : begin + step]
        positions_BT = torch.arange(begin, begin + piece_BT.shape[1], device=device).expand_as(piece_BT)
        hidden_BTD = hidden_states(
            policy, piece_BT, position_ids=positions_BT + first_position, slot_cache=Forward(writer)
        )
        state_BD = hidden_BTD[rows_B, (last_B - begin).clamp(0, piece_BT.shape[1] - 1)]
        final_BD = state_BD if final_BD is None else torch.where((last_B >= begin)[:, None], state_BD, final_BD)
    assert final_BD is not None
    return final_BD


DecoderStep = Callable[[torch.Tensor, torch.Tensor, int, Attention], torch.Tensor]
"""Takes a token a row, their positions, the largest of these and the cache; returns the last hidden states."""


def decode_step(
    policy: PreTrainedModel,
    fused: DecoderStep | None,
    tokens_B: torch.Tensor,
    positions_B: torch.Tensor,
    longest: int,
    cache: Attention,
) -> torch.Tensor:
    """Run the policy over one token a row, the short way where there is one.

    Args:
        policy: Switched to slot attention.
        fused: The short way, or ``None``.
        tokens_B: The last token of each row.
        positions_B: Where it stands in its sequence.
        longest: The largest of these positions.
        cache: The keys and values of all tokens before.

    Returns:
        The last hidden states, shape (rows, hidden size).
    """
    if fused is None:
        return hidden_states(policy, tokens_B[:, None], position_ids=positions_B[:, None], slot_cache=Forward(cache))[
            :, 0
        ]
    return fused(tokens_B, positions_B, longest, cache)
