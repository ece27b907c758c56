"""What the optimizer steps on one batch did, gathered over micro-batches and then over ranks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from lit_grpo.memory import in_one_read
from lit_grpo.ranks import Reduce
from lit_grpo.update.objective.tokens import LARGEST_LOG_RATIO, completion_sums


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


def gap_sums(difference_N: torch.Tensor, lengths_C: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what :func:`gap_metrics` is made of for one micro-batch; sums add up over micro-batches and ranks.

    Args:
        difference_N: Trainer minus generator log-probs.
        lengths_C: Tokens of each completion.
    """
    exact = torch.float64 if difference_N.device.type in ("cpu", "cuda") else torch.float32  # MPS has no other
    difference_N = difference_N.to(exact)
    weight_N = difference_N.clamp(max=LARGEST_LOG_RATIO).exp()
    weight_C = completion_sums(difference_N, lengths_C).clamp(max=LARGEST_LOG_RATIO).exp()
    return {
        "gap_tokens": torch.tensor(difference_N.numel()),
        "gap_difference": difference_N.abs().sum(),
        "gap_kl": (weight_N - 1 - difference_N).sum(),
        "gap_token_weight": weight_N.sum(),
        "gap_token_square": weight_N.square().sum(),
        "gap_sequences": torch.tensor(weight_C.numel()),
        "gap_sequence_weight": weight_C.sum(),
        "gap_sequence_square": weight_C.square().sum(),
    }


def gap_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Return the measures of the gap: 0, 0, 1 and 1 where generator and trainer agree; NaN where nothing was compared.

    ``logprob_gap_mean`` is the mean absolute difference per token and ``kl`` the k3 estimate of KL(generator ||
    trainer) per token, in nats; ``ess_token`` and ``ess_sequence`` are effective sample sizes,
    ``(sum w)**2 / (n sum w**2)``, of the weights trainer / generator.
    """
    num_tokens, num_sequences = sums["gap_tokens"] or math.nan, sums["gap_sequences"] or math.nan
    return {
        "sampling/logprob_gap_mean": sums["gap_difference"] / num_tokens,
        "sampling/kl": sums["gap_kl"] / num_tokens,
        "sampling/ess_token": _share(sums["gap_token_weight"], sums["gap_token_square"], num_tokens),
        "sampling/ess_sequence": _share(sums["gap_sequence_weight"], sums["gap_sequence_square"], num_sequences),
    }


def _share(total: float, squares: float, count: float) -> float:
    return total**2 / (count * squares) if squares else count / count


@dataclass(frozen=True)
class Gap:
    """How far a micro-batch's sampled log-probs are from the policy's, before the first step on a batch.

    ``sums`` are those of :func:`gap_sums`. ``of_tokens``, which is empty where the micro-batch has no token, holds the
    ``largest`` difference and the ``largest_fresh``, and as ``fresh`` of the fresh tokens the sum of the absolute
    differences, their number, and how many are above the limit. Nothing here waits for the device.
    """

    sums: dict[str, torch.Tensor]
    of_tokens: dict[str, torch.Tensor]

    @classmethod
    def of(cls, difference_N: torch.Tensor, lengths_C: torch.Tensor, fresh_N: torch.Tensor, limit: float) -> Gap:
        """Compare log-probs.

        Args:
            difference_N: Trainer minus generator log-probs.
            lengths_C: Tokens of each completion.
            fresh_N: Which tokens the policy sampled with the weights that it has now.
            limit: How large, in nats, the difference of a fresh token may be.
        """
        sums = gap_sums(difference_N, lengths_C)
        if not difference_N.numel():
            return cls(sums, {})
        gap_N = difference_N.abs()
        fresh_gap_N = torch.where(fresh_N, gap_N, torch.zeros_like(gap_N))
        above_N = fresh_gap_N > limit
        fresh = torch.stack([fresh_gap_N.sum(), fresh_N.sum(), above_N.sum()])
        return cls(sums, {"largest": gap_N.max(), "fresh": fresh, "largest_fresh": fresh_gap_N.max()})


@dataclass(frozen=True)
class MicroBatchSums:
    """What one micro-batch adds to the metrics of its batch: sums over tokens, by name, and the number of tokens."""

    sums: dict[str, torch.Tensor]
    num_tokens: int
    gap: Gap | None = None

    @classmethod
    def of(cls, loss: torch.Tensor, values_N: Mapping[str, torch.Tensor], gap: Gap | None = None) -> MicroBatchSums:
        """Sum up.

        Args:
            loss: The micro-batch's share of the loss.
            values_N: At least one metric, each of shape N.
            gap: Of its log-probs, before the first step on a batch.
        """
        sums = {name: values.sum() for name, values in {"loss": loss, **values_N}.items()}
        return cls(sums, next(iter(values_N.values())).numel(), gap)


def read_sums(
    others: Sequence[torch.Tensor], parts: Sequence[MicroBatchSums]
) -> tuple[list[torch.Tensor], list[MicroBatchSums]]:
    """Bring tensors, and what micro-batches add to the metrics, from the device to the host in one read."""
    tensors = [*others]
    for part in parts:
        tensors += part.sums.values()
        if part.gap is not None:
            tensors += [*part.gap.sums.values(), *part.gap.of_tokens.values()]
    read, here = iter(in_one_read(tensors)), list[MicroBatchSums]()
    others = list(islice(read, len(others)))
    for part in parts:
        sums, gap = dict(zip(part.sums, read, strict=False)), part.gap
        if gap is not None:
            its_sums = dict(zip(gap.sums, read, strict=False))
            gap = Gap(its_sums, dict(zip(gap.of_tokens, read, strict=False)))
        here.append(MicroBatchSums(sums, part.num_tokens, gap))
    return others, here


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
        self._fresh_3 = torch.zeros(3, dtype=torch.float64)  # what ``Gap.of_tokens`` has as ``fresh``, added up
        self._largest, self._largest_fresh = torch.tensor(-math.inf), torch.tensor(0.0)
        self._kl: tuple[float, float] | None = None
        self._update_values: dict[str, float] = defaultdict(float)

    def add(self, micro_batch: MicroBatchSums) -> None:
        """Add a micro-batch of a step that is taken."""
        for name, value in micro_batch.sums.items():
            self._sums[name] += value
        self._num_tokens += micro_batch.num_tokens
        if micro_batch.gap is not None:
            for name, value in micro_batch.gap.sums.items():
                self._gap_sums[name] += value
            if of_tokens := micro_batch.gap.of_tokens:
                self._fresh_3 += of_tokens["fresh"].double()
                self._largest = torch.maximum(self._largest, of_tokens["largest"])
                self._largest_fresh = torch.maximum(self._largest_fresh, of_tokens["largest_fresh"])

    def add_kl(self, kl_N: torch.Tensor) -> None:
        """Add the KL from the reference of each token sampled on this rank, where it is part of the rewards."""
        total, count = self._kl or (0.0, 0.0)
        self._kl = total + float(kl_N.sum()), count + kl_N.numel()

    def gap_problem(self, reduce_sum: Reduce, reduce_max: Reduce) -> str:
        """Say that the gaps of fresh tokens, over all ranks, are above a limit; nothing where none is.

        One that is not finite shows in the loss.
        """
        total, count, num_above = reduce_sum(self._fresh_3).tolist()
        largest = float(reduce_max(self._largest_fresh.double()))
        far = f"by up to {largest:.3g} nats a token, {total / max(count, 1.0):.3g} on average"
        if total > self._limits.mean * count:
            return f"{far}, where weight_sync.max_logprob_gap allows {self._limits.mean:g} on average"
        if num_above > count // MOST_ABOVE or OUTLIER * self._limits.token < largest < math.inf:
            limit = f"{self._limits.token:g}, which {num_above:.0f} of {count:.0f} are above"
            return f"{far}, where weight_sync.max_token_gap allows a token {limit}"
        return ""

    def scale_loss(self, scale: float) -> None:
        """Multiply the loss so far, whose shares have been divided by another denominator than the true one."""
        self._sums["loss"] *= scale

    def finish_update(self, values: Mapping[str, float]) -> None:
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
        if "ce/loss" in by_name:
            logs["ce/loss"] = by_name.pop("ce/loss") / updates
        logs |= gap_metrics(gap)
        largest = float(reduce_max(self._largest.double()))
        logs["sampling/logprob_gap_max"] = largest if largest >= 0 else math.nan
        logs["update/tokens"] = num_tokens
        logs |= {name: total / max(num_tokens, 1.0) for name, total in by_name.items()}
        if self._kl is not None:
            logs["kl"] = kl / num_kl if num_kl else math.nan
        return logs
