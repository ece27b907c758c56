"""Layers that remember a state of constant size: what it is, and forwards that go on from it.

Recurrent and convolution layers (Mamba, gated DeltaNet, short convolutions) keep a state where attention keeps keys and
values. Transformers hands all of them one cache, through which they read their states and write the new ones; so a
forward over a few tokens tells which layers have states, and no family has to be known.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers.cache_utils import DynamicCache, LinearAttentionCacheLayerMixin

from lit_grpo.policy.architecture.decoder import (
    RUN_FAILURES,
    decoder_of,
    hidden_states,
    in_evaluation,
    raise_device_failure,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NUM_TOKENS, _NUM_FIRST = 7, 3
_CLOSE = 1e-4  # of the norm; where a layer forgets its state, far more
_CACHE_NAMES = ("past_key_values", "cache_params")


class StateName(NamedTuple):
    """A state: of which layer, ``conv_states`` or ``recurrent_states``, and its number among those of the layer."""

    layer: int
    kind: str
    number: int


HIDDEN = StateName(-1, "hidden_states", 0)
"""The last hidden state of a row, which no layer of the policy reads: what drafts for it remembers it."""
States = dict[StateName, torch.Tensor]


@dataclass(frozen=True)
class StateShape:
    """Shapes of the states of one row.

    Args:
        config: Configuration of the decoder, which says of which kind each layer is.
        argument: The name by which the decoder takes its cache.
        num_bytes: All states of a row.
        goes_on: Whether a forward of several tokens begins from the state. Those of some layers (Mamba's without its
            kernels) do it with one token alone.
    """

    config: Any
    argument: str
    num_bytes: int
    goes_on: bool


class RowStates:
    """The states of rows, by name: tensors whose first axis is the row. Without any, a forward begins from zeros.

    Args:
        shape: Kinds and sizes of the states that the decoder keeps per row.
        tensors: Those that there are; what a forward makes of them is written into these tensors.
    """

    def __init__(self, shape: StateShape, tensors: States | None = None) -> None:
        self.shape, self.tensors = shape, {} if tensors is None else tensors
        self._num_rows = -1  # of the cache that there is

    def cache(self, num_rows: int) -> StateCache:
        """Return the cache from which a forward over the first ``num_rows`` rows takes their states."""
        if self._num_rows != num_rows:
            states = {name: tensor[:num_rows] for name, tensor in self.tensors.items() if name != HIDDEN}
            self._cache, self._num_rows = StateCache(self.shape, states), num_rows
        return self._cache

    def arguments(self, num_rows: int) -> dict[str, Any]:
        return {self.shape.argument: self.cache(num_rows), "use_cache": True}

    def take(self) -> None:
        """Take over the states that the forward has come to, which most layers write where the old ones were."""
        for name, state in self._cache.states():
            own = self.tensors.setdefault(name, state)
            if own.data_ptr() != state.data_ptr():
                own[: len(state)] = state
                self._num_rows = -1

    def rows(self, rows: slice) -> RowStates:
        return RowStates(self.shape, {name: tensor[rows] for name, tensor in self.tensors.items()})

    def copy(self, row: int) -> States:
        return {name: tensor[row].clone() for name, tensor in self.tensors.items()}

    def put(self, first: int, states: Sequence[States]) -> None:
        """Write states into rows from ``first`` on, in memory for as many rows as there are."""
        for name in states[0] if states else ():
            self.tensors[name][first : first + len(states)] = torch.stack([own[name] for own in states])

    def move(self, source: int, row: int) -> None:
        for tensor in self.tensors.values():
            tensor[row] = tensor[source]

    def resize(self, room: int, like: States) -> None:
        """Have memory for ``room`` rows, with what the first rows hold, of tensors like those of one row."""
        for name, state in like.items():
            old = self.tensors.get(name, state.new_empty((0, *state.shape)))
            new = self.tensors[name] = old.new_empty((room, *state.shape))
            new[: len(old)] = old[:room]
        self._num_rows = -1


class StateCache(DynamicCache):
    """Hands states to layers; of keys and values it keeps nothing, for the attention that decodes keeps them.

    ``note`` is called with the name of each state that a layer writes through the cache.
    """

    def __init__(self, shape: StateShape, states: States, note: Callable[[StateName], None] | None = None) -> None:
        super().__init__(config=shape.config)
        self._note = note
        for name, state in states.items():
            self.give(name, state)

    def give(self, name: StateName, state: torch.Tensor) -> None:
        """Have a layer begin from a state."""
        layer: Any = self.layers[name.layer]
        getattr(layer, name.kind)[name.number] = state
        getattr(layer, f"is_{name.kind}_initialized")[name.number] = True
        layer.has_previous_state[name.number] = True
        if name.kind == "conv_states":
            layer.device, layer.dtype = state.device, state.dtype
            layer.conv_kernel_size[name.number] = state.shape[-1]

    def get(self, name: StateName) -> torch.Tensor:
        return getattr(self.layers[name.layer], name.kind)[name.number]

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        return key_states, value_states

    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Any:
        """Return the new inputs of a convolution after those that the layer remembers, and remember the last ones."""
        if self._note is not None:
            self._note(StateName(layer_idx, "conv_states", state_idx))
        return super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Any:
        """Remember a recurrent state; where gradients are computed, not in the memory of the one before."""
        if self._note is not None:
            self._note(StateName(layer_idx, "recurrent_states", state_idx))
        layer: Any = self.layers[layer_idx]
        if torch.is_grad_enabled() and layer.recurrent_states[state_idx] is not None:
            layer.recurrent_states[state_idx] = torch.empty_like(recurrent_states)
        return super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)

    def states(self) -> Iterator[tuple[StateName, torch.Tensor]]:
        """Yield each state, shape (rows, ...)."""
        for number, layer in enumerate(self.layers):
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                for kind in ("conv_states", "recurrent_states"):
                    for index, state in getattr(layer, kind).items():
                        if state is not None:
                            yield StateName(number, kind, index), state


@dataclass(frozen=True)
class StateLayer:
    """A module that reads and writes states of its layer.

    Args:
        module: It; its outputs are tensors of its first argument's first two axes (rows, T).
        names: Names of the states that the layer reads and writes.
        argument: The name by which it takes the cache.
        above: The modules that call it, from the outermost.
    """

    module: torch.nn.Module
    names: tuple[StateName, ...]
    argument: str
    above: tuple[torch.nn.Module, ...]


CHUNK = 64
"""Tokens that recurrent layers compute at once, in transformers and in their kernels: fewer are filled up to them."""
FOUND = "_lit_grpo_state_layers"
"""The attribute of a model that :func:`state_layers` stores what it has found in."""


def state_layers(model: PreTrainedModel) -> Sequence[tuple[StateLayer, StateShape]]:
    """Return the modules of a model that have states; none where its layers keep nothing but keys and values.

    They are found in a forward over a few tokens, and stored with the model.
    """
    found = vars(model).get(FOUND)
    if found is None:
        found = []
        if may_have_states(model):
            with torch.no_grad(), in_evaluation(model):  # in training, layers that are checkpointed take no cache
                found = _found_layers(model)
        object.__setattr__(model, FOUND, found)
    return found


def may_have_states(model: PreTrainedModel) -> bool:
    """Say whether transformers' cache, made for a model's config, has room for states; nothing is computed."""
    try:
        layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    except RUN_FAILURES:  # layers of kinds that have no cache
        return False
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)


def _found_layers(model: PreTrainedModel) -> list[tuple[StateLayer, StateShape]]:
    if (shape := state_shape(model)) is None:
        return []
    running: list[tuple[torch.nn.Module, str]] = []  # each with its argument that is the cache
    found: dict[torch.nn.Module, StateLayer] = {}

    def enter(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
        running.append((module, next((name for name, value in given.items() if value is cache), "")))

    def note(name: StateName) -> None:
        module, argument = running[-1]
        before = found[module].names if module in found else ()
        found[module] = StateLayer(module, (*before, name), argument, tuple(each for each, _ in running[:-1]))

    cache = StateCache(shape, {}, note)
    hooks = [module.register_forward_pre_hook(enter, with_kwargs=True) for module in model.modules()]
    hooks += [module.register_forward_hook(lambda *_: running.pop() and None) for module in model.modules()]
    try:
        tokens_1T = torch.arange(_NUM_FIRST, device=model.device)[None]
        hidden_states(model, tokens_1T, **{shape.argument: cache, "use_cache": True})
    finally:
        for hook in hooks:
            hook.remove()
    return [(layer, shape) for layer in found.values()]


@torch.no_grad()
def state_shape(model: PreTrainedModel) -> StateShape | None:
    """Return what the states of a model's layers are; ``None`` where none of them keeps one through the cache.

    The model is in evaluation mode, with an attention of transformers'.
    """
    argument, num_bytes = _argument_and_bytes(model)
    if not num_bytes:
        return None
    config = model.config.get_text_config(decoder=True)
    tokens_1T = torch.arange(_NUM_TOKENS, device=model.device)[None] % config.vocab_size
    return StateShape(config, argument, num_bytes, _goes_on(model, argument, tokens_1T))


@torch.no_grad()
def state_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of a row's states in all layers; the model may have weights without numbers (fake tensors)."""
    with in_evaluation(model):
        return _argument_and_bytes(model)[1]


def _argument_and_bytes(model: PreTrainedModel) -> tuple[str, int]:
    """Return the name by which the decoder takes its cache, and the bytes of the states that a few tokens leave."""
    decoder, config = decoder_of(model), model.config.get_text_config(decoder=True)
    taken = inspect.signature(decoder.forward).parameters
    argument = next((name for name in _CACHE_NAMES if name in taken), "")
    if not argument or not may_have_states(model):
        return argument, 0
    cache = StateCache(StateShape(config, argument, 0, True), {})
    try:
        tokens_1T = torch.arange(_NUM_FIRST, device=model.device)[None] % config.vocab_size
        hidden_states(model, tokens_1T, **{argument: cache, "use_cache": True})
    except RUN_FAILURES as error:
        raise_device_failure(error)
        return argument, 0
    return argument, sum(state.nbytes for _, state in cache.states())


def _goes_on(model: PreTrainedModel, argument: str, tokens_1T: torch.Tensor) -> bool:
    """Return whether several tokens at once begin from the states before them, as one after another does."""
    expected_TD = hidden_states(model, tokens_1T)[0, _NUM_FIRST:]
    positions_1T = torch.arange(_NUM_TOKENS, device=model.device)[None]
    gaps = []
    for step in (1, _NUM_TOKENS):
        kept = {argument: DynamicCache(config=model.config.get_text_config(decoder=True)), "use_cache": True}
        actual = []
        for place in (slice(0, _NUM_FIRST), *(slice(n, n + step) for n in range(_NUM_FIRST, _NUM_TOKENS, step))):
            actual.append(hidden_states(model, tokens_1T[:, place], position_ids=positions_1T[:, place], **kept)[0])
        actual_TD = torch.cat(actual[1:])
        gaps.append(float((actual_TD - expected_TD).norm() / expected_TD.norm()))
    one_by_one, at_once = gaps
    return at_once <= 5 * one_by_one + _CLOSE
