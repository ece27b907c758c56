"""Metrics of the optimizer steps on one batch, gathered over micro-batches and then over ranks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from lit_grpo.memory import in_one_read
from lit_grpo.ranks import Reduce
from lit_grpo.update.objective.policy_loss import LossOutputs
from lit_grpo.update.objective.tokens import LARGEST_LOG_RATIO, Tokens, completion_sums, spread


class LogprobGapError(RuntimeError):
    """A batch was not sampled with the policy's weights; it has not been trained on."""


MOST_ABOVE = 1000
"""One token in so many may be further off than the limit: rounding may send a token to another expert."""
OUTLIER = 20.0
"""No token may be so many times as far off as the limit."""
_ENTROPY, _LOG_WEIGHTS = "step/entropy", "step/log_weights"
_FRESH, _LARGEST = "gap/fresh", "gap/largest"


@dataclass(frozen=True)
class GapLimits:
    """Largest differences, in nats, between log-probs that fresh tokens were sampled with and the policy's.

    Args:
        mean: On average over the tokens of the batch, and of each completion. What one token of a completion may be
            off does not count there.
        token: Of one token. One token in a thousand may be further off, and none 20 times as far.
        spares: Whether any token may be further off than ``token``.
    """

    mean: float = math.inf
    token: float = math.inf
    spares: bool = True


def advantage_metrics(advantages_R2: torch.Tensor) -> dict[str, float]:
    """Describe the advantages of all ranks' rollouts that have one; NaN where none has.

    Args:
        advantages_R2: The advantage of each rollout, and the largest absolute one of its tokens.
    """
    known_r2 = advantages_R2[advantages_R2[:, 0].isfinite()].double()
    described_r, largest_r = (known_r2 if len(known_r2) else torch.full((1, 2), math.nan)).unbind(1)
    return {
        "advantages/mean": float(described_r.mean()),
        "advantages/std": float(described_r.std(correction=0)),
        "advantages/max_abs": float(largest_r.abs().max()),
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


_GAP = tuple(gap_sums(torch.empty(0), torch.empty(0, dtype=torch.int64)))  # the names of its sums


def gap_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Return the measures of the gap: 0, 0, 1 and 1 where generator and trainer agree; NaN where nothing was compared.

    ``logprob_gap_mean`` is the mean absolute difference per token and ``kl`` the k3 estimate of KL(generator ||
    trainer) per token, in nats; ``ess_token`` and ``ess_sequence`` are effective sample sizes,
    ``(sum w)**2 / (n sum w**2)``, of the weights trainer / generator.
    """
    num_tokens, num_sequences = sums["gap_tokens"] or math.nan, sums["gap_sequences"] or math.nan
    logs = {
        "sampling/logprob_gap_mean": sums["gap_difference"] / num_tokens,
        "sampling/kl": sums["gap_kl"] / num_tokens,
    }
    for level, count in (("token", num_tokens), ("sequence", num_sequences)):
        total, squares = sums[f"gap_{level}_weight"], sums[f"gap_{level}_square"]
        logs[f"sampling/ess_{level}"] = total**2 / (count * squares) if squares else count / count
    return logs


class TokenMetrics:
    """Gathers what the optimizer steps on one batch did.

    Micro-batches add their sums, which stay on the device until the step reads them. Means are over tokens, however
    they are split. ``sampling/*`` compares the trainer's log-probs with the generator's before the first step, when
    they should agree (see :func:`gap_metrics`).

    Args:
        limits: How far they may be apart.

    Attributes:
        num_updates: Number of optimizer steps taken.
        loss: Loss of the step that was read last, on this rank.
        entropy: Entropy of that step's tokens that are trained on, summed over this rank, in nats.
        log_weights_C: Log of policy / sampler of each of its completions, by micro-batch.
    """

    def __init__(self, limits: GapLimits = GapLimits()) -> None:
        self.num_updates = 0
        self.loss = self.entropy = 0.0
        self.log_weights_C = torch.empty(0)
        self._limits = limits
        self._unread: list[tuple[dict[str, torch.Tensor], int]] = []  # sums of micro-batches, and their tokens
        self._sums: dict[str, torch.Tensor | float] = defaultdict(float, dict.fromkeys(_GAP, 0.0))
        self._num_tokens = 0
        self._fresh_3 = torch.zeros(3, dtype=torch.float64)  # of fresh tokens: sum of gaps, number, above the limit
        # of a token, of a fresh token, and the mean of a fresh completion whose one token may be at its limit
        self._largest_3 = torch.full((3,), -math.inf, dtype=torch.float64)
        self._kl: tuple[float, float] | None = None
        self._update_values: dict[str, float] = defaultdict(float)

    @torch.no_grad()
    def add(self, tokens: Tokens, outputs: LossOutputs, version: int) -> None:
        """Add a micro-batch of a step; nothing here waits for the device."""
        lengths_C, gap_N = tokens.lengths_C, tokens.logprobs_N.detach() - tokens.sampled_logprobs_N
        sums = {"loss": outputs.loss.detach(), "entropy": tokens.entropy_N.detach().sum()}
        for name, values_N in outputs.metrics.items():
            sums[name] = values_N.sum()
        if outputs.ce_loss is not None:
            sums["ce/loss"] = outputs.ce_loss
        sums |= {_ENTROPY: outputs.entropy, _LOG_WEIGHTS: completion_sums(gap_N, lengths_C)}
        if self.num_updates == 0:
            sums |= gap_sums(gap_N, lengths_C)
        if self.num_updates == 0 and gap_N.numel():
            is_stale_N = tokens.versions_N != version
            stale_C = completion_sums(is_stale_N.to(gap_N.dtype), lengths_C)  # keys may be of old weights
            fresh_N = spread(stale_C, lengths_C, len(gap_N)) == 0
            distance_N = gap_N.abs()
            fresh_distance_N = torch.where(fresh_N, distance_N, torch.zeros_like(distance_N))
            above_N = fresh_distance_N > self._limits.token
            sums[_FRESH] = torch.stack([fresh_distance_N.sum(), fresh_N.sum(), above_N.sum()])
            one_aside_C = completion_sums(fresh_distance_N, lengths_C) - self._limits.token
            largest = (distance_N, fresh_distance_N, one_aside_C / lengths_C.clamp(min=1))
            sums[_LARGEST] = torch.stack([each.max() for each in largest])
        self._unread.append((sums, tokens.entropy_N.numel()))

    def forget_step(self) -> None:
        """Forget the micro-batches that have not been read, because their step starts again."""
        self._unread.clear()

    def read(self, grad_norm: torch.Tensor, scale: float = 1.0) -> float:
        """Read a step's sums from the device, and the norm of its gradient: the one wait of a step.

        Args:
            grad_norm: The norm, a scalar.
            scale: Factor of the loss, whose shares were divided by another denominator than the true one.

        Returns:
            The norm.
        """
        here = iter(in_one_read([grad_norm, *(value for sums, _ in self._unread for value in sums.values())]))
        norm, loss, entropy, log_weights = float(next(here)), 0.0, 0.0, [torch.empty(0)]
        for names, num_tokens in self._unread:
            sums = dict(zip(names, here, strict=False))
            loss, entropy = loss + sums["loss"], entropy + sums.pop(_ENTROPY)
            log_weights.append(sums.pop(_LOG_WEIGHTS))
            if _FRESH in sums:
                self._fresh_3 += sums.pop(_FRESH).double()
                self._largest_3 = torch.maximum(self._largest_3, sums.pop(_LARGEST).double())
            for name, value in sums.items():
                self._sums[name] += value
            self._num_tokens += num_tokens
        self._unread.clear()
        self._sums["loss"] *= scale
        self.loss, self.entropy, self.log_weights_C = float(loss * scale), float(entropy), torch.cat(log_weights)
        return norm

    def add_kl(self, kl_N: torch.Tensor) -> None:
        """Add the KL from the reference of each token sampled on this rank, where it is part of the rewards."""
        total, count = self._kl or (0.0, 0.0)
        self._kl = total + float(kl_N.sum()), count + kl_N.numel()

    def gap_problem(self, reduce_sum: Reduce, reduce_max: Reduce) -> str:
        """Say that the gaps of fresh tokens, over all ranks, are above a limit; nothing where none is.

        One that is not finite shows in the loss.
        """
        total, count, num_above = reduce_sum(self._fresh_3).tolist()
        _, largest, of_completion = reduce_max(self._largest_3).tolist()
        far = f"by up to {max(largest, 0.0):.3g} nats a token, {total / max(count, 1.0):.3g} on average"
        if total > self._limits.mean * count:
            return f"{far}, where weight_sync.max_logprob_gap allows {self._limits.mean:g} on average"
        if self._limits.mean < of_completion < math.inf:
            return (
                f"{far}, and by {of_completion:.3g} on average over one completion, one token of it aside, where "
                f"weight_sync.max_logprob_gap allows {self._limits.mean:g}"
            )
        if num_above > self._limits.spares * (count // MOST_ABOVE) or OUTLIER * self._limits.token < largest < math.inf:
            limit = f"{self._limits.token:g}, which {num_above:.0f} of {count:.0f} are above"
            return f"{far}, where weight_sync.max_token_gap allows a token {limit}"
        return ""

    def finish_update(self, values: Mapping[str, float]) -> None:
        """Count an optimizer step, with values that are the same on every rank."""
        self.num_updates += 1
        for name, value in values.items():
            self._update_values[name] += value

    def compute(self, reduce_sum: Reduce, reduce_max: Reduce) -> dict[str, float]:
        """Return the metrics by name; the reductions run over ranks."""
        names = sorted(self._sums)
        local = [*(float(self._sums[name]) for name in names), *(self._kl or (0.0, 0.0)), self._num_tokens]
        *sums, kl, num_kl, num_tokens = reduce_sum(torch.tensor(local, dtype=torch.float64)).tolist()
        by_name = dict(zip(names, sums, strict=True))
        gap = {name: by_name.pop(name) for name in _GAP}
        updates = max(self.num_updates, 1)
        logs = {name: total / updates for name, total in self._update_values.items()}
        logs["loss"] = by_name.pop("loss", 0.0) / updates
        if "ce/loss" in by_name:
            logs["ce/loss"] = by_name.pop("ce/loss") / updates
        logs |= gap_metrics(gap)
        largest = float(reduce_max(self._largest_3[:1]))
        logs["sampling/logprob_gap_max"] = largest if largest >= 0 else math.nan
        logs |= {"update/tokens": num_tokens, "update/steps": float(self.num_updates)}
        logs |= {name: total / max(num_tokens, 1.0) for name, total in by_name.items()}
        if self._kl is not None:
            logs["kl"] = kl / num_kl if num_kl else math.nan
        return logs
