"""The gradient noise scale (arXiv 1812.06162), and rules that set the size of a batch by it.

``noise_scale`` measures; ``norm_test`` and ``goodput`` also say how many prompts the next batch has, and the learning
rate goes with the square root of that number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np

from lit_grpo.limits import Count, Limit, NotNegative, Positive, Share, check_order
from lit_grpo.plugins import GroupBatch, Plugin, RunFacts, RunNumbers
from lit_grpo.update.plugin import SquaredNorm
from lit_grpo.update.step import Step


@dataclass
class NoiseScale(Plugin):
    """Measure how many prompts a gradient is worth averaging over (McCandlish et al., arXiv 1812.06162).

    With ``G`` the mean and ``S`` the covariance of the gradients of single prompts, the noise scale is
    ``tr S / |G|^2``: a batch of so many prompts has as much noise as signal. Much smaller ones waste steps, much larger
    ones completions. Both are estimated without bias from the squared norms of the gradient of a part of a step's
    prompts and of all of them (the paper's appendix A.1; with more parts by least squares), smoothed each, and divided.
    A prompt with all its completions is one sample. No copy of a gradient is kept. For example::

        rollout:
          plugins: [noise_scale]

    Attributes:
        num_prompts: Prompts of the next batch on each rank; 0 before a run.
    """

    needs: ClassVar[frozenset[str]] = frozenset(
        {"whole_rollouts", "prompt_stream", "unsharded_weights", "fixed_token_budget", "own_rows"}
    )
    writes: ClassVar[frozenset[str]] = frozenset({"scale"})
    traits: ClassVar[frozenset[str]] = frozenset({"common"})

    parts: Annotated[int, Limit(ge=2, remedy="of one part nothing can be told")] = 2
    """Number of parts that a step's prompts are divided into; a micro-batch belongs to one part."""
    smoothing: Share = 0.05
    """Weight of a step in the means of ``|G|^2`` and ``tr S``."""

    def check(self, run: RunFacts) -> None:
        run.check_one_step()

    def setup(self) -> None:
        self.num_prompts = 0
        self._means_2, self._weight = np.zeros(2), 0.0  # of |G|^2 and tr S, not yet divided by their weight
        self._num_measured = self._began = 0

    @property
    def numbers(self) -> RunNumbers:
        return RunNumbers(num_parts=self.parts)

    def batch_size(self, num_prompts: int) -> int:
        """Begin with ``data.batch_size``; return the size that :meth:`on_update_end` found last."""
        self._began = self._began or num_prompts
        self.num_prompts = self.num_prompts or num_prompts
        return self.num_prompts

    def on_gradient(self, step: Step) -> None:
        step["scale"] = self._size_scale

    @property
    def _size_scale(self) -> float:
        return math.sqrt(self.num_prompts / self._began) if self._began else 1.0

    def on_optimizer_step(self, step: Step) -> None:
        """Count a step; one whose norms are not finite, or do not tell signal from noise, is left out."""
        found = estimate(step.norms)
        if found is not None:
            keep = 1 - self.smoothing
            self._means_2 = keep * self._means_2 + self.smoothing * np.array(found)
            self._weight = keep * self._weight + self.smoothing
            self._num_measured += 1

    def on_update_end(self, batch: GroupBatch) -> dict[str, float]:
        num_ranks = len(batch.all_gather(None))
        signal, noise = (self._means_2 / self._weight).tolist() if self._weight else (math.nan, math.nan)
        known = signal > 0 and noise > 0
        logs = {"noise/signal": signal, "noise/trace": noise, "noise/scale": noise / signal if known else math.nan}
        logs |= {"noise/prompts": float(self.num_prompts * num_ranks), "noise/step_scale": self._size_scale}
        if known and self._num_measured >= self.first_change:
            size = self.size(signal, noise, self.num_prompts * num_ranks, self._began * num_ranks)
            self.num_prompts = math.ceil(size / num_ranks)
        return logs

    def state_dict(self) -> dict[str, Any]:
        means = {"means": self._means_2.tolist(), "weight": self._weight, "measured": self._num_measured}
        return means | {"prompts": self.num_prompts, "began": self._began}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._means_2, self._weight = np.array(state["means"]), state["weight"]
        self._num_measured, self.num_prompts, self._began = state["measured"], state["prompts"], state["began"]

    @property
    def first_change(self) -> float:
        """Updates before the size may change."""
        return math.inf

    def size(self, signal: float, noise: float, now: int, began: int) -> float:
        """Return how many prompts the next batch is to have, on all ranks together.

        Args:
            signal: Estimate of the squared norm of the true gradient, ``|G|^2``, above 0.
            noise: ``tr S``, above 0.
            now: Prompts of this batch, on all ranks together.
            began: Prompts of the first batch of the run, on all ranks together.
        """
        return now


@dataclass
class Ruled(NoiseScale):
    """A rule that sets the size of a batch."""

    most: Count = 64
    """Max prompts per batch, over all ranks."""
    warm_up: Count = 20
    """Number of updates before the size may change, in which the means become steady."""

    @property
    def first_change(self) -> float:
        return self.warm_up


@dataclass
class NormTest(Ruled):
    """Larger batches where a gradient is too noisy (AdAdaGrad, arXiv 2402.11215, by the norm test of Byrd et al. 2012).

    With b prompts in a batch, the test is ``tr S / b <= eta^2 |g|^2``, with g the batch's gradient, whose squared norm
    is ``|G|^2 + tr S / b`` in the mean. Where it fails, the next batch has ``ceil(tr S / (eta^2 |g|^2))`` prompts, up
    to ``most``, and none fewer than the one before. The paper takes the variance of one batch; here all are means::

        rollout:
          plugins:
            - norm_test: {eta: 0.7, most: 32}
    """

    eta: Annotated[float, Limit(gt=0, lt=1)] = 0.5
    """Largest noise of a gradient, as a fraction of its norm; the smaller, the larger are the batches."""

    def size(self, signal: float, noise: float, now: int, began: int) -> float:
        wanted = math.ceil(noise / (self.eta**2 * (signal + noise / now)))
        return max(now, min(wanted, self.most))


@dataclass
class Goodput(Ruled):
    """The size of most progress a second (COPUS, arXiv 2604.26687, without its choice of parallelism).

    Goodput is throughput times statistical efficiency times what the learning rate gains:
    ``B / (B + overhead) x F / (F + B) x sqrt(B)``, with ``F = calibration x noise scale``. Batches of the first one's
    size times powers of 2 are compared, from ``least`` to ``most``, and another size is taken where it is better by
    ``gain``. With no overhead the best is ``B = F``. The paper measures throughputs; here ``overhead`` says them::

        rollout:
          plugins:
            - goodput: {overhead: 4, most: 32}
    """

    least: Count = 1
    """Min prompts per batch, over all ranks."""
    overhead: NotNegative = 0.0
    """Time of a step that does not depend on its prompts, in prompts that would take as long."""
    calibration: Positive = 2.0
    """Factor of the noise scale; 2 in the paper."""
    gain: NotNegative = 0.1
    """Min relative increase of the goodput for another size; 0.1 in the paper."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_order(self, "least", "most")

    def size(self, signal: float, noise: float, now: int, began: int) -> float:
        scale = self.calibration * noise / signal
        sizes = [began * 2.0**power for power in range(-20, 21)]
        sizes = [size for size in sizes if self.least <= size <= self.most] or [now]
        best = max(sizes, key=lambda size: self.goodput(size, scale))
        return best if self.goodput(best, scale) >= (1 + self.gain) * self.goodput(now, scale) else now

    def goodput(self, size: float, scale: float) -> float:
        return size / (size + self.overhead) * scale / (scale + size) * math.sqrt(size)


def estimate(norms: Sequence[SquaredNorm]) -> tuple[float, float] | None:
    """Return ``|G|^2`` and ``tr S`` by least squares, each without bias; None where they cannot be told apart."""
    equations, squares = np.array([(norm.signal, norm.noise) for norm in norms]), np.array([n.square for n in norms])
    scale = np.abs(equations).max(axis=0) if len(norms) else np.zeros(2)
    if not np.isfinite(squares).all() or not scale.all():
        return None
    solved, _, rank, _ = np.linalg.lstsq(equations / scale, squares, rcond=1e-9)
    signal, noise = (solved / scale).tolist()
    return (signal, noise) if rank == 2 else None


PLUGINS = {"noise_scale": NoiseScale(), "norm_test": NormTest(), "goodput": Goodput()}
