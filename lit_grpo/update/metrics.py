"""What the optimizer steps on one batch did, gathered over micro-batches and then over ranks."""

from __future__ import annotations

import math
from collections import defaultdict

import torch

from lit_grpo.ranks import Reduce
from lit_grpo.update.objective.corrections import gap_metrics, gap_sums


class LogprobGapError(RuntimeError):
    """What was sampled was not sampled with the policy's weights; nothing has been learnt from it."""


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
    """

    def __init__(self) -> None:
        self.num_updates = 0
        self._sums: dict[str, torch.Tensor | float] = defaultdict(float)
        self._num_tokens = 0
        nothing = torch.empty(0, dtype=torch.float32), torch.empty(0, dtype=torch.int64)
        self._gap_sums: dict[str, torch.Tensor | float] = dict.fromkeys(gap_sums(*nothing), 0.0)
        self._largest_gaps: list[torch.Tensor] = []
        self._fresh: list[torch.Tensor] = []  # sums of a micro-batch's gaps and how many, together
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
            self._fresh.append(torch.stack([(gap_N * fresh_N).sum(), fresh_N.sum()]))

    def check_gap(self, reduce_sum: Reduce, limit: float) -> None:
        """Check the mean gap of fresh tokens, over all ranks, before they are learnt from.

        Raises:
            LogprobGapError: It is above ``limit`` nats.
        """
        fresh = torch.stack(self._fresh).tolist() if self._fresh else [(0.0, 0.0)]
        gap, count = reduce_sum(torch.tensor([*map(sum, zip(*fresh, strict=True))], dtype=torch.float64)).tolist()
        if gap > limit * count:  # one that is not finite shows in the loss
            raise LogprobGapError(
                f"The log-probs that a batch was sampled with differ from the policy's by {gap / count:.3g} nats a "
                f"token, where weight_sync.max_logprob_gap allows {limit}, so it is not learnt from: the generator's "
                "weights changed after the last sync, or it samples otherwise than the trainer computes."
            )

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
