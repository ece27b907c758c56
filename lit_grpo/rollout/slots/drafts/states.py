"""States of recurrent layers in a step that takes several tokens of a row: they go as far as drafts are accepted."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lit_grpo.memory import in_one_copy
from lit_grpo.policy.architecture.states import HIDDEN, RowStates, StateCache, StateLayer, StateShape

if TYPE_CHECKING:
    from lit_grpo.rollout.slots.drafts.draft import Draft


@dataclass
class _Wave:
    """The queries of a step that stand equally far ahead, one a row.

    ``before_R`` are the places of their rows in the wave before, ``place_of`` those of rows in this one; ``cache`` has
    the states after these tokens.
    """

    queries_R: torch.Tensor
    before_R: torch.Tensor
    place_of: dict[int, int]
    cache: StateCache


class StatesAhead:
    """States of rows after each token of one step: after the last token of each row, and after each drafted one.

    Layers with states take the tokens of a step in waves: first the last token of each row, from the row's states and
    into them, then the drafted tokens one after another, from copies. All other layers take the step at once. So a
    token's state comes from the same operations as without drafts, whatever the layer, and nothing is rolled back:
    :meth:`take` puts the copy after a row's last accepted token in the place of the row's states.

    Attributes:
        num_rows: The number of rows.
        hidden_ND: The policy's last hidden state of each token of the step, once it has been computed.

    Args:
        layers: The layers of the policy that have states.
        states: States of the rows.
        draft: What rows try.
    """

    def __init__(self, layers: Sequence[tuple[StateLayer, StateShape]], states: RowStates, draft: Draft) -> None:
        self._layers, self._states, self.draft = layers, states, draft
        self.num_rows, self.hidden_ND = len(draft.tokens_BK), torch.empty(0)
        rows_N, ahead_N = draft.rows_N, draft.ahead_N
        device = next(iter(states.tensors.values())).device
        arrays, places, back_N = dict[str, np.ndarray](), [dict[int, int]()], np.empty(len(rows_N), dtype=np.int64)
        num_before = 0
        for ahead in range(int(ahead_N.max()) + 1):
            queries_R = arrays[f"queries {ahead}"] = np.flatnonzero(ahead_N == ahead)
            rows = rows_N[queries_R].tolist()
            arrays[f"before {ahead}"] = np.array([places[-1].get(row, row) for row in rows], dtype=np.int64)
            places.append({row: place for place, row in enumerate(rows)})
            back_N[queries_R] = num_before + np.arange(len(rows))
            num_before += len(rows)
        there = in_one_copy({**arrays, "back": back_N}, device)
        self._back_N = there["back"]
        self._waves = [
            _Wave(
                there[f"queries {ahead}"],
                there[f"before {ahead}"],
                place_of,
                StateCache(states.shape, {}) if ahead else states.cache(self.num_rows),
            )
            for ahead, place_of in enumerate(places[1:])
        ]

    @contextmanager
    def in_layers(self) -> Iterator[None]:
        """Have the layers with states take their tokens in waves, for a forward within."""
        for layer, _ in self._layers:
            layer.module.forward = self._in_waves(layer, layer.module.forward)
        try:
            yield
        finally:
            for layer, _ in self._layers:
                del layer.module.forward

    def _in_waves(self, layer: StateLayer, forward: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(forward)

        def run(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            given, outputs, before = dict(bound.arguments), list[Any](), None
            for wave in self._waves:
                for name, value in given.items():
                    bound.arguments[name] = self._of_wave(value, wave)
                if before is not None:
                    for name in layer.names:
                        wave.cache.give(name, before.get(name).index_select(0, wave.before_R))
                bound.arguments[layer.argument] = before = wave.cache
                outputs.append(forward(*bound.args, **bound.kwargs))
            if not isinstance(outputs[0], tuple):
                return torch.cat(outputs).index_select(0, self._back_N)
            return tuple(torch.cat(parts).index_select(0, self._back_N) for parts in zip(*outputs, strict=True))

        return run

    def _of_wave(self, value: Any, wave: _Wave) -> Any:
        """Return the part of an argument that belongs to the queries of a wave."""
        if isinstance(value, dict):
            return {name: self._of_wave(own, wave) for name, own in value.items()}
        is_by_query = isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == len(self._back_N)
        return value.index_select(0, wave.queries_R) if is_by_query else value

    def take(self, accepted_B: np.ndarray) -> None:
        """Put each row's states after its last accepted token in the place of the row's states.

        Args:
            accepted_B: By row, how many of its drafted tokens are right.
        """
        for ahead, wave in enumerate(self._waves):
            rows = np.flatnonzero(accepted_B == ahead)
            if ahead and len(rows):
                places = np.array([wave.place_of[row] for row in rows.tolist()])
                there = in_one_copy({"rows": rows, "places": places}, self._back_N.device)
                come_to = dict(wave.cache.states())
                if HIDDEN in self._states.tensors:
                    come_to[HIDDEN] = self.hidden_ND.index_select(0, wave.queries_R)
                for name, state in come_to.items():
                    own = self._states.tensors[name]
                    own.index_copy_(0, there["rows"], state.index_select(0, there["places"]).to(own.dtype))
