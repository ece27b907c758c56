"""One prefix, many responses: the attention that lets a packed row run through an unmodified Hugging Face decoder."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch.nn.attention.flex_attention import BlockMask

from lit_grpo.policy.architecture.decoder import attention_name
from lit_grpo.policy.sharding import is_scattered
from lit_grpo.process.copies import in_one_copy
from lit_grpo.ranks import Ranks
from lit_grpo.update.prefix.attention import piecewise_attention
from lit_grpo.update.prefix.flex import flex_prefix_attention, prefix_block_mask
from lit_grpo.update.prefix.layout import PackedGroup, Piece, group_pieces, key_labels
from lit_grpo.update.prefix.sequence_parallel import ALONE, SequenceParallel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lit_grpo.update.prefix.carried import CarriedSpan


ATTENTION_NAME = "lit_grpo_shared_prefix"
_LAST_HIDDEN = "last hidden state"


class SharedPrefix:
    """What the attention of all layers must know of a packed row; travels with the forward as a keyword argument.

    Args:
        groups: Prompts and responses, and where they stand in the row.
        prompts: By group, those that are carried from one micro-batch to the next, or the last of the spans that stand
            for the prompt and what follows it; none by default.
        chunks: By group, the span that is its one response, where later micro-batches have used it; none by default.
        ranks: Those that share the row.
        labels_3K: What :func:`key_labels` tells of the groups, on the row's device; by default it is copied there.
    """

    def __init__(
        self,
        groups: Sequence[PackedGroup],
        prompts: Sequence[CarriedSpan | None] = (),
        ranks: SequenceParallel = ALONE,
        labels_3K: torch.Tensor | None = None,
        chunks: Sequence[CarriedSpan | None] = (),
    ) -> None:
        self.groups, self.ranks, self._labels_3K = tuple(groups), ranks, labels_3K
        self.num_tokens = max((group.end for group in groups), default=0)
        split = [(group, prompt) for group, prompt in zip(self.groups, prompts, strict=False) if prompt is not None]
        self._carried = [prompt for group, prompt in split if group.carried_at is not None]
        self._in_row = [(slice(g.start, g.start + g.prompt_tokens), p) for g, p in split if g.carried_at is None]
        for group, chunk in zip(self.groups, chunks, strict=False):
            if chunk is not None:
                self._in_row.append((slice(group.response_start, group.response_start + len(chunk.token_ids)), chunk))
        self.calls: list[tuple[Hashable, int | None]] = []
        """The layers that have attended so far, each with its sliding window, ``None`` for full attention."""
        self._pieces: dict[int | None, list[Piece]] = {}
        self._masks: dict[int | None, BlockMask] = {}

    def compute_carried(self, model: PreTrainedModel) -> None:
        """Run the carried spans that have not been through ``model`` yet, one after another and without gradient.

        Where the model's layers take all ranks, a rank with fewer of them goes through the layers as often.
        """
        unknown = [span for last in self._carried for span in last.chain if not span.is_known]
        most = int(Ranks(model.device).max(len(unknown))) if is_scattered(model) else len(unknown)
        for span in unknown:
            span.keep(_LAST_HIDDEN, self._run_alone(model, span)[0, -1:].clone())
            span.is_known = True
        for _ in range(most - len(unknown)):
            self._run_alone(model, None)

    @torch.no_grad()
    def _run_alone(self, model: PreTrainedModel, span: CarriedSpan | None) -> torch.Tensor:
        """Return the hidden states (1, T, D) of a span, which remembers what is computed of it; of None, of a token."""
        token_ids = (0,) if span is None else span.token_ids
        before = None if span is None else span.before
        first, length = 0 if span is None else span.num_before, len(token_ids)
        if before is None:
            alone = SharedPrefix([PackedGroup(0, length, ())], [span], self.ranks)
        else:
            group = PackedGroup(0, first, (length,), carried_at=length)
            alone = SharedPrefix([group], [before], self.ranks, chunks=[span])
        input_ids_T = in_one_copy({"ids": torch.tensor(token_ids)}, model.device)["ids"]
        positions_BT = torch.arange(first, first + length, device=model.device)[None]
        return alone.hidden_states(model, input_ids_T[None], positions_BT)

    def hidden_states(
        self, model: PreTrainedModel, input_ids_BT: torch.Tensor, position_ids_BT: torch.Tensor
    ) -> torch.Tensor:
        """Run the packed row through the layers; return its last hidden states (1, T, D)."""
        return self.ranks.hidden_states(model, input_ids_BT, position_ids_BT, shared_prefix=self)

    def with_carried_hidden(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        """Append the last hidden states of carried prompts to those of the row."""
        for place, prompt in self._in_row:
            hidden_TD = prompt.settle(_LAST_HIDDEN, hidden_TD, (slice(place.stop - 1, place.stop),))
        carried = [prompt.lend(_LAST_HIDDEN) for prompt in self._carried]
        return torch.cat([hidden_TD, *carried]) if carried else hidden_TD

    def attend(
        self,
        layer: Hashable,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        window: int | None,
        scaling: float,
    ) -> torch.Tensor:
        """Let each prompt see itself, and each response its prompt and itself; return the shape of ``query``."""
        key, value = self._carry((layer, "key"), key), self._carry((layer, "value"), value)
        self.calls.append((layer, window))
        if query.device.type != "cpu":
            if window not in self._masks:
                self._masks[window] = prefix_block_mask(self._labels(query.device), window, query.shape[2])
            return flex_prefix_attention(query, key, value, self._masks[window], scaling)
        if window not in self._pieces:
            self._pieces[window] = [piece for group in self.groups for piece in group_pieces(group, window)]
        return piecewise_attention(query, key, value, self._pieces[window], scaling)

    def _labels(self, device: torch.device) -> torch.Tensor:
        if self._labels_3K is None:
            self._labels_3K = in_one_copy({"labels": key_labels(self.groups)}, device)["labels"]
        return self._labels_3K

    def _carry(self, name: Hashable, tensor: torch.Tensor) -> torch.Tensor:
        """Keep what is computed of prompts in the row, and append carried ones to the row."""
        for place, prompt in self._in_row:
            index = (slice(None), slice(None), place)
            if prompt.is_known:
                tensor = prompt.settle(name, tensor, index)
            else:
                prompt.keep(name, tensor[index])
        carried = [span.lend(name) for last in self._carried for span in last.chain]
        return torch.cat([tensor, *carried], 2) if carried else tensor


def shared_prefix_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    shared_prefix: SharedPrefix,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Attend within the groups of ``shared_prefix``, in the signature of Hugging Face attention functions.

    Raises:
        ValueError: The model caps its attention scores, has attention sinks, or keys unlike its values.
    """
    if softcap is not None:
        raise ValueError("it caps its attention scores")
    if s_aux is not None:
        raise ValueError("it has attention sinks")
    if key.shape != value.shape:
        raise ValueError("its keys and values differ in size")
    scaling = float(query.shape[-1] ** -0.5) if scaling is None else scaling
    # Autocast leaves normed queries and keys in float32; attention runs in the values' dtype.
    query, key = query.to(value.dtype), key.to(value.dtype)
    query, key, value = shared_prefix.ranks.to_heads(shared_prefix.num_tokens, query, key, value)
    output = shared_prefix.attend(module, query, key, value, sliding_window, scaling)
    return shared_prefix.ranks.to_tokens(output).transpose(1, 2), None


def shares_prefix(model: PreTrainedModel) -> bool:
    """Whether ``model`` is switched to :func:`shared_prefix_attention` now."""
    return attention_name(model) == ATTENTION_NAME


@contextmanager
def shared_prefixes(model: PreTrainedModel) -> Iterator[None]:
    """Switch ``model`` to :func:`shared_prefix_attention` for a while.

    With gradient checkpointing the backward pass runs the layers again, so it belongs inside as well.
    """
    from transformers import AttentionInterface

    before = attention_name(model)
    if before == ATTENTION_NAME:
        yield
        return
    AttentionInterface.register(ATTENTION_NAME, shared_prefix_attention)
    model.set_attn_implementation(ATTENTION_NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
