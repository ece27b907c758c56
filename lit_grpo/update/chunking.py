"""The seam for long completions: which go through the policy in chunks, so that activations of one chunk are kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from lit_grpo.plugins import Plugin
from lit_grpo.types import Completion


class Chunk(NamedTuple):
    """Neighbouring tokens of a completion, from ``begin`` to before ``end``, that go through the policy by themselves.

    All that they add to the gradient, also through what later chunks have seen of them, is multiplied by ``weight``;
    with 0 they have no backward pass.
    """

    begin: int
    end: int
    weight: float = 1.0


class Chunking(Plugin):
    """Which completions go through the policy in chunks: here, none.

    A chunk is a micro-batch of its own, and the last has its turn first. Keys and values of the chunks before it have
    been computed without a gradient; its backward pass leaves theirs
    (:class:`lit_grpo.update.prefix.carried.CarriedSpan`). The gradient is that of the whole completion. A rule of your
    own is a dataclass that derives from it and sets :attr:`most`.
    """

    role: ClassVar[str] = "which completions go through the policy in chunks"

    @property
    def most(self) -> int | None:
        """The most tokens of a chunk; None where no completion is cut."""
        return None

    def chunks(self, completion: Completion, version: int) -> Sequence[Chunk]:
        """Return the chunks of a completion in their order, without a gap; none where it goes through whole.

        Asked again where a step is taken again: the same completion and version have the same chunks.

        Args:
            completion: Learnt from.
            version: Of the policy that takes the step.
        """
        return ()
