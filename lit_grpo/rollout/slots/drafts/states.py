"""States of recurrent layers in a step that takes several tokens of a row: they go as far as drafts are accepted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lit_grpo.memory import in_one_copy
from lit_grpo.policy.architecture.states import HIDDEN, RowStates, StateCache, StateLayer, StateShape

if TYPE_CHECKING:
    from lit_grpo.rollout.slots.drafts.draft import Draft


class StatesAhead:
    """States of rows after each token of one step: after the last token of each row, and after each drafted one.

    Layers with states take the tokens of a step in waves: first the last token of each row, from the row's states and
    into them, then the drafted tokens one after another, from copies. All other layers take the step at once. So a
    token's state comes from the same operations as without drafts, whatever the layer, and nothing is rolled back:
    :meth:`take` puts the copy after a row's last accepted token in the place of the row's states.

    Attributes:
        hidden_ND: The policy's last hidden state of each token of the step, once it has been computed.

    Args:
        layers: The layers of the policy that have states.
        states: States of the rows.
        draft: What rows try.
    """

    def __init__(self, layers: Sequence[tuple[StateLayer, StateShape]], states: RowStates, draft: Draft) -> None:
        self._layers, self._states, self.draft = layers, states, draft
        self.num_rows, self.hidden_ND = len(draft.tokens_BK), torch.empty(0)
        queries = [np.flatnonzero(draft.ahead_N == ahead) for ahead in range(int(draft.ahead_N.max()) + 1)]
        self._rows = [draft.rows_N[queries_R] for queries_R in queries]  # of each wave, ascending
        arrays = {f"queries {wave}": queries_R for wave, queries_R in enumerate(queries)}
        arrays |= {f"before {wave}": np.searchsorted(*pair) for wave, pair in enumerate(pairwise(self._rows), 1)}
        arrays["back"] = np.argsort(np.concatenate(queries))
        self._device = next(iter(states.tensors.values())).device
        self._there = in_one_copy(arrays, self._device)
        self._caches = [states.cache(self.num_rows), *(StateCache(states.shape, {}) for _ in queries[1:])]

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
        def run(*args: Any, **kwargs: Any) -> Any:
            outputs = list[Any]()
            for wave, cache in enumerate(self._caches):
                for name in layer.names if wave else ():
                    before = self._caches[wave - 1].get(name)
                    cache.give(name, before.index_select(0, self._there[f"before {wave}"]))
                own = {name: self._of_wave(value, wave) for name, value in kwargs.items()}
                outputs.append(forward(*(self._of_wave(value, wave) for value in args), **own))
            if not isinstance(outputs[0], tuple):
                return torch.cat(outputs).index_select(0, self._there["back"])
            return tuple(torch.cat(parts).index_select(0, self._there["back"]) for parts in zip(*outputs, strict=True))

        return run

    def _of_wave(self, value: Any, wave: int) -> Any:
        """Return the part of an argument that belongs to the queries of a wave."""
        if isinstance(value, StateCache):
            return self._caches[wave]
        is_by_query = isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == len(self._there["back"])
        return value.index_select(0, self._there[f"queries {wave}"]) if is_by_query else value

    def take(self, accepted_B: np.ndarray) -> None:
        """Put each row's states after its last accepted token in the place of the row's states.

        Args:
            accepted_B: By row, how many of its drafted tokens are right.
        """
        for wave in range(1, len(self._caches)):
            if len(rows := np.flatnonzero(accepted_B == wave)):
                there = in_one_copy({"rows": rows, "places": np.searchsorted(self._rows[wave], rows)}, self._device)
                come_to = dict(self._caches[wave].states())
                if HIDDEN in self._states.tensors:
                    come_to[HIDDEN] = self.hidden_ND.index_select(0, self._there[f"queries {wave}"])
                for name, state in come_to.items():
                    own = self._states.tensors[name]
                    own.index_copy_(0, there["rows"], state.index_select(0, there["places"]).to(own.dtype))
