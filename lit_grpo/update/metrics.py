"""What the optimizer steps on one batch did, gathered over micro-batches and then over ranks."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

import torch

from lit_grpo.ranks import Reduce
from lit_grpo.update.objective.corrections import gap_metrics, gap_sums


class LogprobGapError(RuntimeError):
    """What was sampled was not sampled with the policy's weights; nothing has been learnt from it."""


MOST_ABOVE = 1000
"""One token in so many may be further off than the limit: rounding may send a token to another expert."""
OUTLIER = 20.0
"""No token may be so many times as far off as the limit."""


@dataclass(frozen=True)
class GapLimits:
    """How far the log-probs that fresh tokens were sampled with may be from the policy's, in nats.

    Args:
        mean: On average over the tokens.
        token: Of one token. One token in a thousand may be further off, and none 20 times as far.
    """

    mean: float = math.inf
    token: float = math.inf


def advantage_metrics(advantages_R: torch.Tensor) -> dict[str, float]:
    """Describe the advantages of all ranks' rollouts that have one; NaN where none has."""
    known = advantages_R[advantages_R.isfinite()].double()
    described = known if len(known) else torch.tensor([math.nan])
    return {
        "advantages/mean": float(described.mean()),
        "advantages/std": float(described.std(correction=0)),
        "advantages/max_abs": float(described.abs().max()),
    }


class TokenMetrics:
    """Gathers what the optimizer steps on one batch did.

    Means are over tokens, however they are split. ``sampling/*`` compares the trainer's log-probs with the
    generator's before the first step, when they should agree (see :func:`gap_metrics`).

    Args:
        limits: How far they may be apart.
    """

    def __init__(self, limits: GapLimits = GapLimits()) -> None:
        self.num_updates = 0
        self._limits = limits
        self._sums: dict[str, torch.Tensor | float] = defaultdict(float)
        self._num_tokens = 0
        nothing = torch.empty(0, dtype=torch.float32), torch.empty(0, dtype=torch.int64)
        self._gap_sums: dict[str, torch.Tensor | float] = dict.fromkeys(gap_sums(*nothing), 0.0)
        self._largest_gaps: list[torch.Tensor] = []
        self._fresh: list[torch.Tensor] = []  # of a micro-batch: sum of gaps, how many, how many above
        self._largest_fresh: list[torch.Tensor] = []
        self._kl: tuple[float, float] | None = None
        self._update_values: dict[str, float] = defaultdict(float)

    def add(self, loss: torch.Tensor, **values_N: torch.Tensor) -> None:
        """Add one micro-batch's share of the loss, and its metrics, each of shape N."""
        for name, values in {"loss": loss, **values_N}.items():
            self._sums[name] += values.sum()
        self._num_tokens += next(iter(values_N.values())).numel()

    def add_kl(self, kl_N: torch.Tensor) -> None:
        """Add the KL from the reference of each token sampled on this rank, where it is part of the rewards."""
        total, count = self._kl or (0.0, 0.0)
        self._kl = total + float(kl_N.sum()), count + kl_N.numel()

    def add_gap(self, difference_N: torch.Tensor, lengths_C: torch.Tensor, fresh_N: torch.Tensor) -> None:
        """Add trainer minus generator log-probs of one micro-batch, whose completions have these lengths.

        Tokens are ``fresh`` that the policy sampled with the weights that it has now. Nothing waits for the device
        here.
        """
        for name, value in gap_sums(difference_N, lengths_C).items():
            self._gap_sums[name] += value
        if difference_N.numel():
            gap_N = difference_N.abs()
            self._largest_gaps.append(gap_N.max())
            fresh_gap_N = torch.where(fresh_N, gap_N, torch.zeros_like(gap_N))
            above_N = fresh_gap_N > self._limits.token
            self._fresh.append(torch.stack([fresh_gap_N.sum(), fresh_N.sum(), above_N.sum()]))
            self._largest_fresh.append(fresh_gap_N.max())

    def gap_problem(self, reduce_sum: Reduce, reduce_max: Reduce) -> str:
        """Say that the gaps of fresh tokens, over all ranks, are above a limit; nothing where none is.

        One that is not finite shows in the loss.
        """
        fresh = torch.stack(self._fresh).tolist() if self._fresh else [(0.0, 0.0, 0.0)]
        sums = torch.tensor([sum(column) for column in zip(*fresh, strict=True)], dtype=torch.float64)
        total, count, num_above = reduce_sum(sums).tolist()
        own = float(torch.stack(self._largest_fresh).max()) if self._largest_fresh else 0.0
        largest = float(reduce_max(torch.tensor(own, dtype=torch.float64)))
        far = f"by up to {largest:.3g} nats a token, {total / max(count, 1.0):.3g} on average"
        if total > self._limits.mean * count:
            return f"{far}, where weight_sync.max_logprob_gap allows {self._limits.mean:g} on average"
        if num_above > count // MOST_ABOVE or OUTLIER * self._limits.token < largest < math.inf:
            limit = f"{self._limits.token:g}, which {num_above:.0f} of {count:.0f} are above"
            return f"{far}, where weight_sync.max_token_gap allows a token {limit}"
        return ""

    def scale_loss(self, scale: float) -> None:
        """The shares of the loss so far were by another denominator."""
        self._sums["loss"] *= scale

    def finish_update(self, **values: float) -> None:
        """Count an optimizer step, with values that are the same on every rank."""
        self.num_updates += 1
        for name, value in values.items():
            self._update_values[name] += value

    def compute(self, reduce_sum: Reduce, reduce_max: Reduce) -> dict[str, float]:
        """Return the metrics by name; the reductions run over ranks."""
        names = sorted(self._sums)
        local = [float(value) for value in (*(self._sums[name] for name in names), *self._gap_sums.values())]
        local += self._kl or (0.0, 0.0)
        *sums, kl, num_kl, num_tokens = reduce_sum(
            torch.tensor([*local, self._num_tokens], dtype=torch.float64)
        ).tolist()
        by_name = dict(zip([*names, *self._gap_sums], sums, strict=True))
        gap = {name: by_name.pop(name) for name in self._gap_sums}
        updates = max(self.num_updates, 1)
        logs = {name: total / updates for name, total in self._update_values.items()}
        logs["loss"] = by_name.pop("loss", 0.0) / updates
        logs |= gap_metrics(gap)
        largest_gap = float(torch.stack(self._largest_gaps).max()) if self._largest_gaps else -math.inf
        largest = float(reduce_max(torch.tensor(largest_gap, dtype=torch.float64)))
        logs["sampling/logprob_gap_max"] = largest if largest >= 0 else math.nan
        logs["update/tokens"] = num_tokens
        logs |= {name: total / max(num_tokens, 1.0) for name, total in by_name.items()}
        if self._kl is not None:
            logs["kl"] = kl / num_kl if num_kl else math.nan
        return logs
