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
from lit_grpo.policy.architecture.decoder import (
    compute_dtype,
    decoder_of,
    hidden_states,
    raise_device_failure,
)
from lit_grpo.policy.architecture.vision import Placed, first_seen, image_features, with_images
from lit_grpo.process.terminal import error_text, say
from lit_grpo.ranks import Ranks
from lit_grpo.rollout.slots.attention import Attention, AttentionInputs, Forward, use_slot_attention
from lit_grpo.rollout.slots.copies import LoweredWeights, PackedWeights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lit_grpo.rollout.slots.drafts.states import StatesAhead
    from lit_grpo.rollout.slots.kernels import LayerKernels
    from lit_grpo.rollout.slots.kv.shelves import ShelfWriter
    from lit_grpo.types import Pictures

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
            decoder_of(self._policy).set_attn_implementation(self._attention)
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
    pictures: Sequence[Sequence[tuple[int, Pictures]]] = (),
) -> torch.Tensor:
    """Run the policy over ``sequences``, in pieces of at most ``max_tokens`` tokens, padding included.

    What has images is one piece, because their placeholders belong together.

    States are those after a sequence's last token, so where layers have states nothing is padded: a piece ends where a
    sequence does, which is then through.

    Args:
        policy: Switched to slot attention.
        sequences: Tokens, at least one each; where layers have states, the longest first.
        max_tokens: The most that go through the model at once; each sequence has at least one token in a piece.
        writer: Takes the keys and values, padded on the right to the longest sequence, and attends. The first token of
            each sequence stands after those that are written there.
        pictures: The images of each sequence, with the place where their prompt or observation begins; of what is
            written, :attr:`lit_grpo.types.Pictures.passed`, at place 0. Where layers have states, such sequences are of
            one length.

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
    seen = [Placed(row, place, None, each) for row, of_row in enumerate(pictures) for place, each in of_row]
    there_now = [each.pictures for each in seen if each.pictures.images]
    positions_BT = torch.arange(first_position, first_position + longest, device=device).expand_as(input_ids_BT)
    placed_BT = with_images(positions_BT, seen) if seen else positions_BT
    step = longest if there_now else max(1, max_tokens // len(sequences))
    begin, rows, own, final_BD = 0, len(sequences), {}, None
    while begin < longest:
        end = begin + step
        if states is not None:
            rows = sum(length > begin for length in lengths)
            goes_on = states.shape.goes_on or begin + first_position == 0
            end = min(end, lengths[rows - 1]) if goes_on else begin + 1
            own = states.arguments(rows)
        piece_BT = input_ids_BT[:rows, begin:end]
        hidden_BTD = hidden_states(
            policy,
            piece_BT,
            image_features(policy, there_now) if there_now else None,
            position_ids=placed_BT[..., :rows, begin:end],
            slot_cache=Forward(writer, 0, first_seen(piece_BT, seen) if there_now else (None, None)),
            **own,
        )
        if states is not None:
            states.take()
        if writer.shape.heads is not None:
            writer.shape.heads.follow(writer, hidden_BTD, piece_BT, positions_BT[:rows, begin:end])
        state_BD = hidden_BTD[rows_B[:rows], (last_B[:rows] - begin).clamp(0, piece_BT.shape[1] - 1)]
        if final_BD is None:
            final_BD = state_BD
        else:
            final_BD[:rows] = torch.where((last_B[:rows] >= begin)[:, None], state_BD, final_BD[:rows])
        begin = end
    assert final_BD is not None
    return final_BD


def decode_by_model(
    policy: PreTrainedModel,
    tokens_B: torch.Tensor,
    positions_B: torch.Tensor,
    cache: Attention,
    ahead: StatesAhead | None = None,
) -> torch.Tensor:
    """Run the policy over one token a row, the long way; :class:`FusedDecoder` is the short one.

    Args:
        policy: Switched to slot attention.
        tokens_B: The last token of each row; with drafts also drafted ones.
        positions_B: Where it stands in its sequence.
        cache: The keys and values of all tokens before.
        ahead: With drafts, the states of rows after each token, if layers have states.

    Returns:
        The last hidden states, shape (rows, hidden size).
    """
    states, positions_B1, forward = cache.states, positions_B[:, None], Forward(cache)
    own = {} if states is None else states.arguments(len(tokens_B) if ahead is None else ahead.num_rows)
    with nullcontext() if ahead is None else ahead.in_layers():
        hidden_B1D = hidden_states(policy, tokens_B[:, None], position_ids=positions_B1, slot_cache=forward, **own)
    if states is not None:
        states.take()
    if cache.shape.heads is not None:
        before = None if ahead is None else ahead.draft
        cache.shape.heads.follow(cache, hidden_B1D, tokens_B[:, None], positions_B1, before)
    if ahead is not None:
        ahead.hidden_ND = hidden_B1D[:, 0]
    return hidden_B1D[:, 0]


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
        self.attention_norm = norm_operation(layer.input_layernorm)
        self.mlp_norm = norm_operation(layer.post_attention_layernorm)
        self.query, self.key, self.value, self.output = (
            _linear(getattr(attention, name)) for name in ("q_proj", "k_proj", "v_proj", "o_proj")
        )
        self.head_norm = _head_norm(attention) if hasattr(attention, "q_norm") else lambda heads: heads
        self.gate, self.up, self.down = _linear(mlp.gate_proj), _linear(mlp.up_proj), _linear(mlp.down_proj)
        self.activation: Operation = mlp.act_fn
        self.layer, self.eps = layer, _epsilon(layer.input_layernorm)
        self.mlp_eps = _epsilon(layer.post_attention_layernorm)
        self.head_eps = _epsilon(attention.q_norm) if hasattr(attention, "q_norm") else None
        numbers = torch.linspace(-9, 9, 99, dtype=torch.float32, device=layer.input_layernorm.weight.device)
        self.has_silu = torch.allclose(self.activation(numbers), silu(numbers))


def _linear(module: Any) -> Operation:
    """A plain linear layer without the module's call; anything else (an adapter, say) is called."""
    if type(module) is not torch.nn.Linear:
        return module
    return lambda hidden: linear(hidden, module.weight, module.bias)


def together(hidden: torch.Tensor, *modules: Any) -> Sequence[torch.Tensor]:
    """Return what linear layers make of one input: by one product where their weights lie next to one another."""
    plain = [module for module in modules if type(module) is torch.nn.Linear]
    weights, biases = [each.weight for each in plain], [each.bias for each in plain if each.bias is not None]
    weight, bias = _joined(weights), _joined(biases)
    if weight is None or len(plain) < len(modules) or (biases and (bias is None or len(biases) < len(plain))):
        return [_linear(module)(hidden) for module in modules]
    return linear(hidden, weight, bias).split([*map(len, weights)], -1)


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return tensors that lie next to one another in one storage as one, along the first axis; None if they do not."""
    if not tensors:
        return None
    first = tensors[0]
    storage, end = first.untyped_storage().data_ptr(), first.storage_offset()
    for tensor in tensors:
        is_next = tensor.untyped_storage().data_ptr() == storage and tensor.storage_offset() == end
        if not is_next or not tensor.is_contiguous() or tensor.dtype != first.dtype:
            return None
        end += tensor.numel()
    return first.as_strided((sum(map(len, tensors)), *first.shape[1:]), first.stride())


def _head_norm(attention: Any) -> Operation:
    """The norms of query and key heads, which have a weight each."""
    eps = _epsilon(attention.q_norm)
    query_weight, key_weight = attention.q_norm.weight, attention.k_norm.weight
    num_queries = attention.q_proj.out_features // attention.head_dim
    num_keys = attention.k_proj.out_features // attention.head_dim
    if eps != _epsilon(attention.k_norm) or query_weight.shape != (attention.head_dim,):
        raise ValueError("norms of query and key heads that differ, or go over all heads")

    def head_norm(heads: torch.Tensor) -> torch.Tensor:
        weights = torch.cat([query_weight.expand(num_queries, -1), key_weight.expand(num_keys, -1)])
        return rms_norm(heads, query_weight.shape, None, eps) * weights

    return head_norm


def norm_operation(module: Any) -> Operation:
    """Return an RMS norm as one operation; ``ValueError`` for any other norm."""
    eps = _epsilon(module)
    return lambda hidden: rms_norm(hidden, module.weight.shape, module.weight, eps)


def _epsilon(module: Any) -> float:
    """The epsilon of an RMS norm, which is tried on a few numbers first."""
    weight, eps = module.weight, getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if weight.dim() != 1 or not isinstance(eps, float):
        raise ValueError(f"norms of type {type(module).__name__}")
    size = weight.shape
    numbers = torch.linspace(-3, 3, 3 * size[0], dtype=weight.dtype, device=weight.device).reshape(3, -1)
    with torch.no_grad():
        if not torch.allclose(module(numbers), rms_norm(numbers, size, weight, eps), rtol=1e-2, atol=1e-5):
            raise ValueError(f"norms of type {type(module).__name__}")
    return eps


class FusedDecoder:
    """Runs a decoder over the last token of each row; under autocast, as autocast would run the model.

    ``embed`` takes tokens to what goes into the first layer, ``norm`` what the last layer returns to the last hidden
    states; ``tables`` are cosine and sine of all positions tabulated so far, shape (positions, head size).
    ``kernels`` compute what lies between the products of a layer; without them operations of torch do.

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
        self.kernels, self._name, self._compiled = kernels, type(model).__name__, set[torch.dtype]()
        config = model.config.get_text_config()
        rope_type = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
        if rope_type not in _ROPE_TYPES:
            raise ValueError(f"rope type {rope_type}")
        self.embed: Operation = decoder.embed_tokens
        self._rotary = decoder.rotary_emb
        self.norm, self._last_norm, self._eps = norm_operation(decoder.norm), decoder.norm, _epsilon(decoder.norm)
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

        No position is larger than ``longest``. Where kernels cannot be compiled, the run is told in one line, and goes
        on without them.
        """
        hidden = self.embed(tokens_B)
        self.tabulate(longest + 1, hidden)
        if self.kernels is not None:
            began, dtype = time.perf_counter(), compute_dtype(hidden.device, hidden.dtype)
            try:
                final = self._by_kernels(self.kernels, hidden, positions_B, cache)
            except Exception as error:  # compilers raise many kinds; an error of something else comes again below
                raise_device_failure(error)
                self.drop_kernels(error_text(error))
            else:
                if dtype not in self._compiled and Ranks().rank == 0:
                    say(_BY_KERNELS.format(self._name, dtype, time.perf_counter() - began))
                self._compiled.add(dtype)
                return final
        cos, sin = self.tables
        cos, sin = cos.index_select(0, positions_B)[:, None], sin.index_select(0, positions_B)[:, None]
        rows, size = len(hidden), self._head_size
        lowered = compute_dtype(hidden.device, hidden.dtype)  # cast once what several linear layers would cast each
        for layer, own in enumerate(self._layers):
            normed = own.attention_norm(hidden).to(lowered)
            # Query and key heads, one after another, are normed and rotated together.
            heads = own.head_norm(torch.cat([own.query(normed), own.key(normed)], -1).view(rows, -1, size))
            heads = torch.addcmul(heads * cos, heads.roll(size // 2, -1), sin)
            value = own.value(normed).view(rows, -1, size)
            heads, num_queries = heads.to(value.dtype), heads.shape[1] - value.shape[1]
            query, key = heads[:, :num_queries, None], heads[:, num_queries:, None]
            inputs = AttentionInputs(query, key, value[:, :, None], own.scaling, own.sight)
            hidden.add_(own.output(cache.attend(layer, inputs).reshape(rows, -1)))
            normed = own.mlp_norm(hidden).to(lowered)
            hidden.add_(own.down(own.activation(own.gate(normed)).mul_(own.up(normed))))
        return self.norm(hidden)

    def drop_kernels(self, why: str) -> None:
        """Compute by operations of torch from now on; the run is told why."""
        self.kernels = None
        Ranks().warn(_BY_OPERATIONS.format(self._name, why))

    def _by_kernels(
        self, kernels: LayerKernels, hidden: torch.Tensor, positions_B: torch.Tensor, cache: Attention
    ) -> torch.Tensor:
        """Compute the layers with one kernel between a product and the next; embedded tokens stay as they are."""
        added, dtype = None, compute_dtype(hidden.device, hidden.dtype)
        for number, own in enumerate(self._layers):
            layer, attention, mlp = own.layer, own.layer.self_attn, own.layer.mlp
            hidden, normed = kernels.add_and_norm(hidden, added, layer.input_layernorm.weight, own.eps, dtype)
            query, key, value = together(normed, attention.q_proj, attention.k_proj, attention.v_proj)
            norms = None if own.head_eps is None else (attention.q_norm.weight, attention.k_norm.weight, own.head_eps)
            heads = kernels.norm_and_rotate(query, key, norms, self.tables, positions_B, value.dtype)
            value = value.view(len(value), -1, self._head_size)
            num_queries = heads.shape[1] - value.shape[1]
            query, key = heads[:, :num_queries, None], heads[:, num_queries:, None]
            inputs = AttentionInputs(query, key, value[:, :, None], own.scaling, own.sight)
            added = own.output(cache.attend(number, inputs).reshape(len(value), -1))
            weight = layer.post_attention_layernorm.weight
            hidden, normed = kernels.add_and_norm(hidden, added, weight, own.mlp_eps, dtype)
            gate, up = together(normed, mlp.gate_proj, mlp.up_proj)
            added = own.down(kernels.silu_and_multiply(gate, up) if own.has_silu else own.activation(gate).mul_(up))
        return kernels.add_and_norm(hidden, added, self._last_norm.weight, self._eps, hidden.dtype)[1]

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
