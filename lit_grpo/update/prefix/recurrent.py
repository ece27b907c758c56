"""Layers with states in a packed row: each response begins from the state that its prompt ends with.

All other layers take the row as it is. A layer with states takes the stretches of the row as rows of a batch: the
prompt first, then what follows it, from its state, which carries the gradient back. So a prompt goes through once, as
it does through attention.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from lit_grpo.memory import in_one_copy
from lit_grpo.policy.architecture.states import RowStates, StateLayer, States, StateShape

if TYPE_CHECKING:
    from lit_grpo.update.prefix.carried import CarriedSpan
    from lit_grpo.update.prefix.layout import Stretch

_LEAST_FILLED = 0.75
_LEAST_TOKENS = 2  # layers compute one token after a state in another way, for decoding alone


class Batch(NamedTuple):
    """Stretches that go through a layer together: their numbers, and their tokens in the row, padded on the right.

    ``ends`` says whether the states after their last tokens are needed; then nothing is padded.
    """

    stretches: tuple[int, ...]
    index_BT: torch.Tensor
    ends: bool


class Batches(NamedTuple):
    """The batches of a row, parents before children; ``back_T`` says where each token stands in their outputs."""

    batches: Sequence[Batch]
    parents: Sequence[int | None]
    back_T: torch.Tensor


def parents_of(stretches: Sequence[Stretch]) -> list[int | None]:
    """Return for each stretch of a row the number of the one that it follows, ``None`` for prompts.

    Example:
        A prompt with two responses, of which the second one goes on in two ways, has ``[None, 0, 0, 2, 2]``.
    """
    parents, above = list[int | None](), list[int]()
    for number in range(len(stretches)):
        while above and stretches[above[-1]].last < number:
            above.pop()
        parents.append(above[-1] if above else None)
        above.append(number)
    return parents


def lay_out_batches(
    stretches: Sequence[Stretch], needed_elsewhere: Collection[int], whole: bool, device: torch.device
) -> Batches:
    """Put the stretches of a row that can go through a layer together into batches with little padding.

    Args:
        stretches: Stretches of the packed row, in order.
        needed_elsewhere: Where stretches begin whose states other rows need.
        whole: Have each stretch follow all the tokens before it, for layers that cannot begin from a state.
        device: Where the row is.
    """
    parents, tokens, depths = parents_of(stretches), list[torch.Tensor](), list[int]()
    for own, parent in zip(stretches, parents, strict=True):
        tokens.append(torch.arange(own.start, own.start + own.length))
        if whole and parent is not None:
            tokens[-1] = torch.cat([tokens[parent], tokens[-1]])
        depths.append(0 if parent is None or whole else depths[parent] + 1)
    ends = set[int]() if whole else {parent for parent in parents if parent is not None}
    numbers = [number for number, own in enumerate(stretches) if own.length and not own.carried]
    if not whole:
        ends |= {number for number in numbers if stretches[number].start in needed_elsewhere}
    numbers.sort(key=lambda number: (depths[number], number in ends, -len(tokens[number])))
    members = list[list[int]]()
    for number in numbers:
        first = members[-1][0] if members else number
        least = len(tokens[first]) * (1 if number in ends else _LEAST_FILLED)
        alike = (depths[first], first in ends) == (depths[number], number in ends)
        if members and alike and len(tokens[number]) >= least:
            members[-1].append(number)
        else:
            members.append([number])
    arrays, num_before = dict[str, torch.Tensor](), 0
    back_T = torch.zeros(sum(stretches[number].length for number in numbers), dtype=torch.int64)
    for batch, its in enumerate(members):
        width = max(len(tokens[its[0]]), 0 if its[0] in ends else _LEAST_TOKENS)
        index_BT = arrays[str(batch)] = torch.zeros((len(its), width), dtype=torch.int64)
        for row, number in enumerate(its):
            index_BT[row, : len(tokens[number])] = tokens[number]
            begin = num_before + row * width + len(tokens[number]) - stretches[number].length
            start, length = stretches[number].start, stretches[number].length
            back_T[start : start + length] = torch.arange(begin, begin + length)
        num_before += index_BT.numel()
    there = in_one_copy(arrays | {"back": back_T}, device)
    batches = [Batch(tuple(its), there[str(batch)], its[0] in ends) for batch, its in enumerate(members)]
    return Batches(batches, parents, there["back"])


class SharedRow(Protocol):
    """Protocol of a row for a layer with states."""

    @property
    def shares(self) -> bool:
        """True if the row is more than one sequence, or other rows need its states."""
        ...

    @property
    def carried_stretches(self) -> Sequence[tuple[int, CarriedSpan]]:
        """The numbers of the stretches that other rows have computed, and the span that each ends with."""
        ...

    def batches(self, whole: bool, device: torch.device) -> Batches:
        """Return how the row goes through the layer: see :func:`lay_out_batches`."""
        ...

    def carry(self, name: Hashable, tensor: torch.Tensor) -> torch.Tensor:
        """Append what other rows have computed under this name."""
        ...

    def settle_states(self, number: int, layer: Hashable, states: States) -> States:
        """Return the states that a stretch ends with, and keep those that other rows need."""
        ...


class RecurrentLayer:
    """Takes the place of the forward of a layer with states: a packed row goes through it as batches."""

    def __init__(self, layer: StateLayer, shape: StateShape) -> None:
        self.layer, self.shape = layer, shape
        self.row: SharedRow | None = None
        self._forward: Callable[..., Any] = layer.module.forward
        self._signature = inspect.signature(self._forward)

    def note_row(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Take the row that a module above the layer is called with, also where it is called again in backward."""
        self.row = kwargs.get("shared_prefix", self.row)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute what the layer returns for each token after those that it follows."""
        row, bound = self.row, self._signature.bind(*args, **kwargs)
        name, hidden_1TD = next(iter(bound.arguments.items()))
        if row is None or not row.shares:
            return self._forward(*args, **kwargs)
        batches, key = row.batches(not self.shape.goes_on, hidden_1TD.device), self.layer.module
        if not self.shape.goes_on:
            hidden_1TD = row.carry((key, "input"), hidden_1TD[:, None])[:, 0]
        states, outputs, settled = dict[int, States](), list[Any](), list[torch.Tensor]()
        for number, span in row.carried_stretches if self.shape.goes_on else ():
            states[number] = {state: span.lend((key, state)) for state in self.layer.names}
        for stretches, index_BT, ends in batches.batches:
            own, follows = RowStates(self.shape), list[States]()
            if self.shape.goes_on:
                parents = (batches.parents[number] for number in stretches)
                follows = [states[parent] for parent in parents if parent is not None]  # of all, or of none
            for state in self.layer.names if follows else ():
                own.tensors[state] = torch.cat([before[state] for before in follows]).clone()
            bound.arguments[name] = hidden_1TD[0][index_BT]
            bound.arguments[self.layer.argument] = own.cache(len(index_BT)) if own.tensors or ends else None
            outputs.append(self._forward(*bound.args, **bound.kwargs))
            if ends:
                come_to = dict(own.cache(len(index_BT)).states())
                for place, number in enumerate(stretches):
                    its = {state: come_to[state][place : place + 1] for state in self.layer.names}
                    states[number] = row.settle_states(number, key, its)
                    settled += states[number].values()
        if not isinstance(outputs[0], tuple):
            return _Tied.apply(_put_back(outputs, batches.back_T), *settled)
        first, *others = (_put_back(parts, batches.back_T) for parts in zip(*outputs, strict=True))
        return _Tied.apply(first, *settled), *others


def _put_back(outputs: Sequence[torch.Tensor], back_T: torch.Tensor) -> torch.Tensor:
    return torch.cat([output.flatten(0, 1) for output in outputs]).index_select(0, back_T)[None]


class _Tied(torch.autograd.Function):
    """The first tensor; the backward pass through it goes through the others, for what other rows have left there."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        ctx.others = [(other.shape, other.dtype, other.device) for other in others]
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        zeros = (torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.others)
        return gradients[0], *zeros


@contextmanager
def recurrent_layers(found: Sequence[tuple[StateLayer, StateShape]]) -> Iterator[None]:
    """Have packed rows go through these layers of a model, for the code within."""
    layers = [RecurrentLayer(layer, shape) for layer, shape in found]
    hooks = [
        module.register_forward_pre_hook(own.note_row, with_kwargs=True) for own in layers for module in own.layer.above
    ]
    for own in layers:
        own.layer.module.forward = own
    try:
        yield
    finally:
        for own in layers:
            del own.layer.module.forward
        for hook in hooks:
            hook.remove()
