"""How many prompts a batch has: by the norms of the gradient of a part of a step's prompts and of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from lit_grpo.plugins import Plugin, RunFacts


@dataclass(frozen=True)
class SquaredNorm:
    """The squared norm of what some prompts have added to a step's gradient, summed over ranks.

    The gradient of a step is the mean over its prompts of theirs, which are taken to be independent, with mean ``G``
    and covariance ``S``. Of n of N prompts on each rank, the sum over ranks has the expectation
    ``signal |G|^2 + noise tr S``, with ``signal = sum of (n / N)^2`` and ``noise = sum of n / N^2``; of the whole
    gradient, ``signal = 1`` and ``noise = 1 / N``.

    Args:
        square: See above.
        signal: See above.
        noise: See above.
    """

    square: float
    signal: float
    noise: float


class BatchSize(Plugin):
    """How many prompts a batch has, by the norms of each step's gradient: here, ``data.batch_size``.

    Attributes:
        num_prompts: Of the next batch, on each rank; 0 before :meth:`start_with`.
    """

    role: ClassVar[str] = "how many prompts a batch has"
    needs: ClassVar[frozenset[str]] = frozenset(
        {"whole_rollouts", "prompt_stream", "unsharded_weights", "fixed_token_budget", "own_rows"}
    )
    common: ClassVar[bool] = True

    def check(self, run: RunFacts) -> None:
        """Check that each batch has one step, whose gradient is measured."""
        run.check_one_step()

    def setup(self) -> None:
        """Begin without a size."""
        self.num_prompts = 0

    @property
    def num_parts(self) -> int:
        """In how many parts of its prompts a step's gradient is added up."""
        return 2

    def start_with(self, num_prompts: int) -> None:
        """A run begins or goes on, in which ``data.batch_size`` is this."""
        self.num_prompts = self.num_prompts or num_prompts

    def measured(self, norms: Sequence[SquaredNorm]) -> None:
        """A step's gradient has been added up; its norms after each part, and of the whole, on all ranks alike."""

    @property
    def step_scale(self) -> float:
        """What the learning rate of a step on a batch of ``num_prompts`` is multiplied by."""
        return 1.0
