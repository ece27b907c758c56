"""The policy's forward passes while it decodes: whole sequences, and one token a row, by the model or a short way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import linear, rms_norm, silu

from lit_grpo.memory import in_one_copy
from lit_grpo.policy.architecture.attention import AttentionCall, Sight
from lit_grpo.policy.architecture.decoder import compute_dtype, decoder_of, hidden_states, raise_device_failure
from lit_grpo.process.terminal import error_text, say
from lit_grpo.ranks import Ranks
from lit_grpo.rollout.slots.attention import Attention, AttentionInputs, Forward, use_slot_attention
from lit_grpo.rollout.slots.copies import LoweredWeights, PackedWeights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lit_grpo.rollout.slots.kernels import LayerKernels
    from lit_grpo.rollout.slots.kv.shelves import ShelfWriter

Operation = Callable[[torch.Tensor], torch.Tensor]
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # whose angles depend on the position alone
_TABLE_STEP = 1024
_BY_KERNELS = "{} is decoded in {} with Triton kernels between products; the first step took {:.1f} s to compile them."
_BY_OPERATIONS = "{} is decoded without Triton kernels between products, which takes longer: {}."


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

    States are those after a sequence's last token, so where layers have states nothing is padded: a piece ends where a
    sequence does, which is then through.

    Args:
        policy: Switched to slot attention.
        sequences: Tokens, at least one each; where layers have states, the longest first.
        max_tokens: The most that go through the model at once; each sequence has at least one token in a piece.
        writer: Takes the keys and values, padded on the right to the longest sequence, and attends. The first token of
            each sequence stands after those that are written there.

    Returns:
        The hidden state of each sequence's last token, shape (rows, hidden size).
    """
    device, states = policy.device, writer.states
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
    begin, rows, own, final_BD = 0, len(sequences), {}, None
    while begin < longest:
        end = begin + step
        if states is not None:
            rows = sum(length > begin for length in lengths)
            goes_on = states.shape.goes_on or begin + first_position == 0
            end = min(end, lengths[rows - 1]) if goes_on else begin + 1
            own = states.arguments(rows)
        piece_BT = input_ids_BT[:rows, begin:end]
        positions_BT = torch.arange(begin, begin + piece_BT.shape[1], device=device).expand_as(piece_BT)
        hidden_BTD = hidden_states(
            policy, piece_BT, position_ids=positions_BT + first_position, slot_cache=Forward(writer), **own
        )
        if states is not None:
            states.take()
        state_BD = hidden_BTD[rows_B[:rows], (last_B[:rows] - begin).clamp(0, piece_BT.shape[1] - 1)]
        if final_BD is None:
            final_BD = state_BD
        else:
            final_BD[:rows] = torch.where((last_B[:rows] >= begin)[:, None], state_BD, final_BD[:rows])
        begin = end
    assert final_BD is not None
    return final_BD


def decode_by_model(
    policy: PreTrainedModel, tokens_B: torch.Tensor, positions_B: torch.Tensor, cache: Attention
) -> torch.Tensor:
    """Run the policy over one token a row, the long way; :class:`FusedDecoder` is the short one.

    Args:
        policy: Switched to slot attention.
        tokens_B: The last token of each row.
        positions_B: Where it stands in its sequence.
        cache: The keys and values of all tokens before.

    Returns:
        The last hidden states, shape (rows, hidden size).
    """
    states, positions_B1, forward = cache.states, positions_B[:, None], Forward(cache)
    own = {} if states is None else states.arguments(len(tokens_B))
    hidden_B1D = hidden_states(policy, tokens_B[:, None], position_ids=positions_B1, slot_cache=forward, **own)
    if states is not None:
        states.take()
    return hidden_B1D[:, 0]


class RMSNorm:
    """An RMS norm as one operation.

    Raises:
        ValueError: ``module``, which is tried on a few numbers, is any other norm.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self.eps = eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        refusal = ValueError(f"norms of type {type(module).__name__}")
        if (weight := self.weight).dim() != 1 or not isinstance(eps, float):
            raise refusal
        numbers = torch.linspace(-3, 3, 3 * len(weight), dtype=weight.dtype, device=weight.device).reshape(3, -1)
        with torch.no_grad():
            if not torch.allclose(module(numbers), self(numbers), rtol=1e-2, atol=1e-5):
                raise refusal

    @property
    def weight(self) -> torch.Tensor:
        return self._module.weight

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden, self.weight.shape, self.weight, self.eps)


class HeadNorms:
    """The norms of a layer's query and key heads, which have a weight each.

    Raises:
        ValueError: They differ in more than that, or go over all heads.
    """

    def __init__(self, attention: Any) -> None:
        self.query, self.key = RMSNorm(attention.q_norm), RMSNorm(attention.k_norm)
        self._num_queries = attention.q_proj.out_features // attention.head_dim
        self._num_keys = attention.k_proj.out_features // attention.head_dim
        if self.query.eps != self.key.eps or self.query.weight.shape != (attention.head_dim,):
            raise ValueError("norms of query and key heads that differ, or go over all heads")

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        query, key = self.query.weight, self.key.weight
        weights = torch.cat([query.expand(self._num_queries, -1), key.expand(self._num_keys, -1)])
        return rms_norm(heads, query.shape, None, self.query.eps) * weights


class Projections:
    """Linear layers that take the same input.

    A plain layer is computed without the module's call; anything else (an adapter, say) is called.
    """

    def __init__(self, *modules: Any) -> None:
        self._modules = modules
        self._are_plain = all(type(module) is torch.nn.Linear for module in modules)

    def __call__(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        """Return what each layer makes of the input."""
        return [
            linear(hidden, each.weight, each.bias) if type(each) is torch.nn.Linear else each(hidden)
            for each in self._modules
        ]

    def together(self, hidden: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the same, by one product if the weights lie next to one another in memory."""
        weight = _joined([each.weight for each in self._modules]) if self._are_plain else None
        if weight is None:
            return self(hidden)
        biases = [each.bias for each in self._modules if each.bias is not None]
        bias = _joined(biases) if biases else None
        if biases and (bias is None or len(biases) < len(self._modules)):
            return self(hidden)
        return linear(hidden, weight, bias).split([len(each.weight) for each in self._modules], -1)


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return tensors that lie next to one another in one storage as one, along the first axis; None if they do not."""
    first = tensors[0]
    storage, end = first.untyped_storage().data_ptr(), first.storage_offset()
    for tensor in tensors:
        is_next = tensor.untyped_storage().data_ptr() == storage and tensor.storage_offset() == end
        if not is_next or not tensor.is_contiguous() or tensor.dtype != first.dtype:
            return None
        end += tensor.numel()
    return first.as_strided((sum(map(len, tensors)), *first.shape[1:]), first.stride())


class LayerOperations:
    """The operations of one layer.

    Args:
        layer: Layer of the decoder to compute.
        scaling: What it multiplies its attention scores by.
        sight: Which tokens it sees.

    Raises:
        AttributeError: It is not built like Llama's.
        ValueError: It is, but with something in it that this does not know.
    """

    def __init__(self, layer: Any, scaling: float, sight: Sight) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        known = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
        if unknown := {name for name, _ in layer.named_children()} - known:
            raise ValueError(f"layers with {sorted(unknown)}")
        self.scaling, self.sight = scaling, sight
        self.attention_norm = RMSNorm(layer.input_layernorm)
        self.mlp_norm = RMSNorm(layer.post_attention_layernorm)
        self.heads = Projections(attention.q_proj, attention.k_proj, attention.v_proj)
        self.output = Projections(attention.o_proj)
        self.head_norms = HeadNorms(attention) if hasattr(attention, "q_norm") else None
        self.gate_and_up, self.down = Projections(mlp.gate_proj, mlp.up_proj), Projections(mlp.down_proj)
        self.activation: Operation = mlp.act_fn
        numbers = torch.linspace(-9, 9, 99, dtype=torch.float32, device=self.mlp_norm.weight.device)
        self.has_silu = torch.allclose(self.activation(numbers), silu(numbers))


class FusedDecoder:
    """Runs a decoder over the last token of each row; under autocast, as autocast would run the model.

    ``embed`` takes tokens to what goes into the first layer, ``norm`` what the last layer returns to the last hidden
    states; ``tables`` are cosine and sine of all positions tabulated so far, shape (positions, head size).
    ``kernels`` compute what lies between the products of a layer; None is by operations of torch.

    Args:
        model: The policy that decodes.
        calls: What its layers hand to their attention in a forward.
        kernels: Kernels for the model's device and dtype, if there are any.

    Raises:
        AttributeError: The model is not built like Llama.
        ValueError: It is, but with something in it that this does not know.
    """

    def __init__(
        self, model: PreTrainedModel, calls: Sequence[AttentionCall], kernels: LayerKernels | None = None
    ) -> None:
        decoder: Any = decoder_of(model)
        config = model.config.get_text_config()
        rope_type = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
        if rope_type not in _ROPE_TYPES:
            raise ValueError(f"rope type {rope_type}")
        self.embed: Operation = decoder.embed_tokens
        self.kernels = kernels
        self._name, self._compiled = type(model).__name__, set[torch.dtype]()
        self._rotary = decoder.rotary_emb
        self.norm = RMSNorm(decoder.norm)
        sizes = {(call.num_heads, call.num_kv_heads, call.key_size, call.value_size) for call in calls}
        if len(sizes) > 1 or any(call.cap is not None or call.has_sinks for call in calls):
            raise ValueError("heads that differ by layer, capped scores or attention sinks")
        _, _, self._head_size, value_size = next(iter(sizes))
        if self._head_size != value_size:
            raise ValueError("keys and values of different sizes")
        self._layers = [
            LayerOperations(layer, call.scaling, call.sight) for layer, call in zip(decoder.layers, calls, strict=True)
        ]
        self.tables = (torch.empty((0, self._head_size), device=model.device),) * 2

    def __call__(
        self, tokens_B: torch.Tensor, positions_B: torch.Tensor, longest: int, cache: Attention
    ) -> torch.Tensor:
        """Return the hidden states of ``tokens_B`` at ``positions_B``, shape (rows, hidden size).

        No position is larger than ``longest``. If the kernels cannot be compiled, the run is told in one line, and
        goes on with operations of torch.
        """
        hidden = self.embed(tokens_B)
        self.tabulate(longest + 1, hidden)
        lowered = compute_dtype(hidden.device, hidden.dtype)  # cast once what several linear layers would cast each
        if self.kernels is not None:
            began = time.perf_counter()
            try:
                final = self.by_kernels(self.kernels, hidden, positions_B, cache, lowered)
            except (
                Exception
            ) as error:  # compilers raise errors of many kinds; torch's operations raise the others again
                raise_device_failure(error)
                self.use_operations(error_text(error))
            else:
                if lowered not in self._compiled and Ranks().rank == 0:
                    say(_BY_KERNELS.format(self._name, lowered, time.perf_counter() - began))
                self._compiled.add(lowered)
                return final
        return self.by_operations(hidden, positions_B, cache, lowered)

    def use_operations(self, why: str) -> None:
        """Compute by torch's operations from now on; the run is told why."""
        self.kernels = None
        Ranks().warn(_BY_OPERATIONS.format(self._name, why))

    def by_operations(
        self, hidden: torch.Tensor, positions_B: torch.Tensor, cache: Attention, lowered: torch.dtype
    ) -> torch.Tensor:
        """Compute the layers from embedded tokens, which are overwritten, by operations of torch."""
        cos, sin = self.tables
        cos, sin = cos.index_select(0, positions_B)[:, None], sin.index_select(0, positions_B)[:, None]
        rows, size = len(hidden), self._head_size
        for layer, own in enumerate(self._layers):
            query, key, value = own.heads(own.attention_norm(hidden).to(lowered))
            # Query and key heads, one after another, are normed and rotated together.
            heads = torch.cat([query, key], -1).view(rows, -1, size)
            heads = heads if own.head_norms is None else own.head_norms(heads)
            heads = torch.addcmul(heads * cos, heads.roll(size // 2, -1), sin).to(value.dtype)
            hidden.add_(*own.output(self._attended(own, layer, heads, value, cache)))
            gate, up = own.gate_and_up(own.mlp_norm(hidden).to(lowered))
            hidden.add_(*own.down(own.activation(gate).mul_(up)))
        return self.norm(hidden)

    def by_kernels(
        self,
        kernels: LayerKernels,
        hidden: torch.Tensor,
        positions_B: torch.Tensor,
        cache: Attention,
        lowered: torch.dtype,
    ) -> torch.Tensor:
        """Compute the same by kernels: one between a product and the next."""
        added: torch.Tensor | None = None
        for layer, own in enumerate(self._layers):
            hidden, normed = kernels.add_and_norm(hidden, added, own.attention_norm, lowered)
            query, key, value = own.heads.together(normed)
            heads = kernels.norm_and_rotate(query, key, own.head_norms, self.tables, positions_B, value.dtype)
            (added,) = own.output(self._attended(own, layer, heads, value, cache))
            hidden, normed = kernels.add_and_norm(hidden, added, own.mlp_norm, lowered)
            gate, up = own.gate_and_up.together(normed)
            mixed = kernels.silu_and_multiply(gate, up) if own.has_silu else own.activation(gate).mul_(up)
            (added,) = own.down(mixed)
        return kernels.add_and_norm(hidden, added, self.norm, hidden.dtype)[1]

    def _attended(
        self, own: LayerOperations, layer: int, heads: torch.Tensor, value: torch.Tensor, cache: Attention
    ) -> torch.Tensor:
        """Attend with rotated query and key heads; return shape (rows, query heads x size)."""
        value = value.view(len(value), -1, self._head_size)
        num_queries = heads.shape[1] - value.shape[1]
        query, key = heads[:, :num_queries, None], heads[:, num_queries:, None]
        inputs = AttentionInputs(query, key, value[:, :, None], own.scaling, own.sight)
        return cache.attend(layer, inputs).reshape(len(value), -1)

    def tabulate(self, num_positions: int, like: torch.Tensor) -> None:
        """Have cosine and sine of all positions at hand, in the dtype of ``like``; the sine's first half is negative.

        Raises:
            ValueError: The model rotates only a part of each head.
        """
        if num_positions <= len(self.tables[0]) and self.tables[0].dtype == like.dtype:
            return
        before = len(self.tables[0])
        if num_positions > before:  # few sizes, because a GPU records each one
            num_positions = max(num_positions, 2 * before)
        num_positions = max(num_positions, before)  # of another dtype, as many as there were
        positions_1T = torch.arange(-(-num_positions // _TABLE_STEP) * _TABLE_STEP, device=like.device)[None]
        cos, sin = (table[0] for table in self._rotary(like, positions_1T))
        if cos.shape[-1] != self._head_size:
            raise ValueError("only a part of each head is rotated")
        half = self._head_size // 2
        self.tables = cos, torch.cat([-sin[:, :half], sin[:, half:]], -1)
