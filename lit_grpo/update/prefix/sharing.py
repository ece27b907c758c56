"""One prefix, many responses: the attention that lets a packed row run through an unmodified Hugging Face decoder."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask

from lit_grpo.memory import in_one_copy
from lit_grpo.policy.architecture.decoder import attention_name, decoder_of, hidden_states
from lit_grpo.policy.architecture.states import FOUND, States, state_layers
from lit_grpo.policy.architecture.vision import Placed, image_features, with_images
from lit_grpo.policy.sharding import is_scattered
from lit_grpo.ranks import Ranks
from lit_grpo.update.prefix.flash import Plan, fused_attention, fused_kernels, plan_launches
from lit_grpo.update.prefix.flex import flex_prefix_attention, prefix_block_mask
from lit_grpo.update.prefix.layout import Piece, Stretch, attention_pieces, key_labels, piecewise_attention, sees_ahead
from lit_grpo.update.prefix.recurrent import Batches, lay_out_batches, recurrent_layers
from lit_grpo.update.prefix.sequence_parallel import SINGLE_RANK, SequenceParallel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lit_grpo.types import Pictures
    from lit_grpo.update.prefix.carried import CarriedSpan


ATTENTION_NAME = "lit_grpo_shared_prefix"
_LAST_HIDDEN = "last hidden state"


class SharedPrefix:
    """The attention of all layers to a packed row; travels with the forward as a keyword argument.

    Args:
        stretches: Where prompts and responses stand in the row, and which of them see which.
        carried: The spans that carried stretches end with.
        in_row: What other rows have seen of this one, with its place.
        ranks: Ranks that share the row.
        there: What :func:`key_labels` and :func:`plan_launches` tell of the stretches, as ``labels`` and ``starts``, on
            the row's device; what is missing is copied there.
    """

    def __init__(
        self,
        stretches: Sequence[Stretch],
        carried: Sequence[CarriedSpan] = (),
        in_row: Sequence[tuple[slice, CarriedSpan]] = (),
        ranks: SequenceParallel = SINGLE_RANK,
        there: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> None:
        self.stretches, self.ranks, self.num_tokens = stretches, ranks, 0
        self._carried, self._in_row, self._there = carried, in_row, dict(there)
        self.calls: list[tuple[Hashable, int | None]] = []
        """The layers that have attended so far, each with its sliding window, ``None`` for full attention."""
        self._batches: dict[bool, Batches] = {}
        self._pieces: dict[int | None, list[Piece]] = {}
        self._plans: dict[int | None, Plan] = {}
        self._masks: dict[int | None, BlockMask] = {}

    def compute_carried(self, model: PreTrainedModel) -> None:
        """Run the carried spans that have not been through ``model`` yet, one after another and without gradient.

        Where the model's layers take all ranks, a rank with fewer of them goes through the layers as often.
        """
        unknown: list[CarriedSpan | None] = []
        for last in self._carried:
            unknown += [span for span in last.chain if not span.is_known]
        if is_scattered(model):
            unknown += [None] * (int(Ranks(model.device).max(len(unknown))) - len(unknown))
        for span in unknown:
            self._run_alone(model, span)

    @torch.no_grad()
    def _run_alone(self, model: PreTrainedModel, span: CarriedSpan | None) -> None:
        """Run a span by itself, which remembers what is computed of it; of None, a token that stands for nothing."""
        token_ids, before = ((0,), None) if span is None else (span.token_ids, span.before)
        first, length = 0 if before is None else before.end, len(token_ids)
        mutual = () if span is None or span.pictures is None else span.pictures.mutual
        stretches = [Stretch(0, first, length, last=0, mutual=mutual)]
        if before is not None:
            stretches = [Stretch(length, 0, first, last=1, carried=True), Stretch(0, first, length, last=1)]
        in_row = [] if span is None else [(slice(0, length), span)]
        alone = SharedPrefix(stretches, [] if before is None else [before], in_row, self.ranks)
        input_ids_T = in_one_copy({"ids": torch.tensor(token_ids)}, model.device)["ids"]
        positions_1T = torch.arange(first, first + length, device=model.device)[None]
        pictures = () if span is None or span.pictures is None else (span.pictures,)
        if before is not None:
            positions_1T = positions_1T - before.shift
        positions = with_images(positions_1T, [Placed(0, 0, None, each) for each in pictures])
        hidden_TD = alone.hidden_states(model, input_ids_T[None], positions, pictures)
        if span is not None:
            span.keep(_LAST_HIDDEN, hidden_TD[length - 1 : length].clone())
            span.is_known = True

    def hidden_states(
        self,
        model: PreTrainedModel,
        input_ids_BT: torch.Tensor,
        position_ids_BT: torch.Tensor,
        pictures: Sequence[Pictures] = (),
    ) -> torch.Tensor:
        """Run the packed row through the layers; return its last hidden states (T, D), then those of carried spans."""
        self.num_tokens = input_ids_BT.shape[1]
        run = hidden_states if self.ranks.size == 1 else self.ranks.hidden_states
        seen = image_features(model, pictures) if pictures else None
        hidden_TD = run(model, input_ids_BT, seen=seen, position_ids=position_ids_BT, shared_prefix=self)[0]
        for place, span in self._in_row:
            hidden_TD = span.settle(_LAST_HIDDEN, hidden_TD, (slice(place.stop - 1, place.stop),))
        if not self._carried:
            return hidden_TD
        return torch.cat([hidden_TD, *(span.lend(_LAST_HIDDEN) for span in self._carried)])

    def attend(
        self,
        layer: Hashable,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        window: int | None,
        scaling: float,
        cap: float | None = None,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Let each token see what comes before it, however the row is laid out; return the shape of ``query``."""
        if self._in_row or self._carried:
            key, value = self.carry((layer, "key"), key), self.carry((layer, "value"), value)
        self.calls.append((layer, window))
        if query.device.type != "cpu":
            ahead = sees_ahead(self.stretches, window)
            if (kernels := fused_kernels(query, key, cap, ahead)) is not None:
                if window not in self._plans:
                    plan = plan_launches(tuple(self.stretches), window)
                    self._plans[window] = plan.to(query.device, self._there)
                return fused_attention(query, key, value, self._plans[window], scaling, sinks_H, kernels)
            if window not in self._masks:
                self._masks[window] = prefix_block_mask(self._labels(query.device), window, query.shape[2], ahead)
            return flex_prefix_attention(query, key, value, self._masks[window], scaling, cap, sinks_H)
        if window not in self._pieces:
            self._pieces[window] = attention_pieces(self.stretches, window)
        return piecewise_attention(query, key, value, self._pieces[window], scaling, cap, sinks_H)

    def _labels(self, device: torch.device) -> torch.Tensor:
        if "labels" not in self._there:
            self._there |= in_one_copy({"labels": key_labels(self.stretches)}, device)
        return self._there["labels"]

    @property
    def shares(self) -> bool:
        return len(self.stretches) > 1 or bool(self._in_row)

    @property
    def carried_stretches(self) -> list[tuple[int, CarriedSpan]]:
        numbers = [number for number, own in enumerate(self.stretches) if own.carried]
        return list(zip(numbers, self._carried, strict=True))

    def batches(self, whole: bool, device: torch.device) -> Batches:
        if whole not in self._batches:
            needed = {place.start for place, _ in self._in_row}
            self._batches[whole] = lay_out_batches(self.stretches, needed, whole, device)
        return self._batches[whole]

    def settle_states(self, number: int, layer: Hashable, states: States) -> States:
        """Keep the states that a stretch ends with where other rows need them, or take their gradient; return them."""
        for place, span in self._in_row:
            if place.start == self.stretches[number].start:
                for name, state in states.items():
                    if span.is_known:
                        states[name] = span.settle((layer, name), state, (slice(None),))
                    else:
                        span.keep((layer, name), state)
        return states

    def carry(self, name: Hashable, tensor: torch.Tensor) -> torch.Tensor:
        """Keep what is computed of spans in the row, and append carried ones to the row."""
        for place, span in self._in_row:
            index = (slice(None), slice(None), place)
            if span.is_known:
                tensor = span.settle(name, tensor, index)
            else:
                span.keep(name, tensor[index])
        if not self._carried:
            return tensor
        return torch.cat([tensor, *(span.lend(name) for last in self._carried for span in last.chain)], 2)


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
    """Attend within the row of ``shared_prefix``, in the signature of Hugging Face attention functions."""
    scaling = float(query.shape[-1] ** -0.5) if scaling is None else scaling
    value_size = value.shape[-1]
    if key.shape[-1] > value_size:  # latent attention: the kernels want both of one size
        value = functional.pad(value, (0, key.shape[-1] - value_size))
    elif key.shape[-1] < value_size:
        query, key = (functional.pad(each, (0, value_size - key.shape[-1])) for each in (query, key))
    # Autocast leaves normed queries and keys in float32; attention runs in the values' dtype.
    query, key = query.to(value.dtype), key.to(value.dtype)
    ranks = shared_prefix.ranks
    if ranks.size > 1:
        query, key, value = ranks.to_heads(shared_prefix.num_tokens, query, key, value)
        s_aux = None if s_aux is None else s_aux.chunk(ranks.size)[ranks.rank]
    output = shared_prefix.attend(module, query, key, value, sliding_window, scaling, softcap, s_aux)
    return (output if ranks.size == 1 else ranks.to_tokens(output))[..., :value_size].transpose(1, 2), None


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
    layers = vars(model).get(FOUND)
    if layers is None:
        layers = state_layers(model)  # with the model's own attention
    decoder_of(model).set_attn_implementation(ATTENTION_NAME)
    try:
        with recurrent_layers(layers) if layers else nullcontext():
            yield
    finally:
        decoder_of(model).set_attn_implementation(before)
