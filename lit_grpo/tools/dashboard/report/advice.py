"""Advice from the metrics of a run: a table of conditions, each with a sentence, and its reader."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from lit_grpo.findings.rewards import OTHER_LOSSES

MOST = 5
NOISE = 2.0
"""A mean that moved by fewer of its standard errors may not have moved."""
FEW = 4
"""A metric with fewer values says nothing yet."""
ENOUGH = 16
"""Values from which it can be seen that a metric does not move."""


class Curve(NamedTuple):
    """Figures of a metric's values, by quarters of its rows.

    Args:
        number: Number of values that it has.
        mean: Mean of all values.
        first: Mean of the first quarter.
        last: Mean of the last quarter.
        best: Mean of the best quarter.
        fall: From the best quarter down to the last.
        growth: The last quarter divided by the second; an even rise from 0 gives 2.3.
        shrinkage: The last quarter divided by the first.
        rise: From the first quarter to the last, in standard errors of that difference.
    """

    number: int
    mean: float
    first: float
    last: float
    best: float
    fall: float
    growth: float
    shrinkage: float
    rise: float

    @classmethod
    def of(cls, values: np.ndarray) -> Curve:
        """Compare the quarters of at least one value, shape (rows,), all finite."""
        number = len(values)
        bounds = [(quarter * number // 4, (quarter + 1) * number // 4) for quarter in range(4)]
        quarters = [values[begin : max(end, begin + 1)] for begin, end in bounds]
        first, second, _, last = means = [float(part.mean()) for part in quarters]
        ends = quarters[0], quarters[3]
        error = float(np.sqrt(sum(part.var(ddof=1) / len(part) if len(part) > 1 else 0.0 for part in ends)))
        growth, shrinkage = last / max(second, 1e-12), last / max(first, 1e-12)
        rise = (last - first) / max(error, 1e-12)
        best = max(means)
        return cls(number, float(values.mean()), first, last, best, best - last, growth, shrinkage, rise)


@dataclass(frozen=True)
class Condition:
    """Condition of a metric.

    Args:
        metric: Name of the metric.
        figure: The field of :class:`Curve` that is compared.
        above: The figure must be larger.
        below: The figure must be smaller.
        per: The figure is that of the metric divided by the mean of this one.
        least: The number of values that are needed.
    """

    metric: str
    figure: str
    above: float = -np.inf
    below: float = np.inf
    per: str | None = None
    least: int = FEW

    def curve(self, columns: Mapping[str, np.ndarray]) -> Curve | None:
        """Return the curve if it is as it has to be, else None."""
        values = columns.get(self.metric, np.zeros(0))
        if self.per is not None:
            whole = columns.get(self.per, np.zeros(0))
            whole = whole[np.isfinite(whole)]
            if not len(whole) or whole.mean() <= 0:
                return None
            values = values / whole.mean()
        values = values[np.isfinite(values)]
        if len(values) < self.least:
            return None
        curve = Curve.of(values)
        return curve if self.above < getattr(curve, self.figure) < self.below else None


@dataclass(frozen=True)
class Advice:
    """A row of the table.

    Args:
        name: What is wrong, in a word or two; of several rows with one name, the first that applies counts.
        when: All of these conditions must hold.
        sentence: The figure and what to change; ``{0.last:.0%}`` is the figure of the first condition's curve.
        settings: The fields to change.
        page: The page of the documentation, with the heading.
        without: Metrics that the run must not have logged.
    """

    name: str
    when: tuple[Condition, ...]
    sentence: str
    settings: tuple[str, ...]
    page: str
    without: tuple[str, ...] = ()


LEARNING, CHOOSING = "troubleshooting.md#learning", "choosing.md#choosing-a-budget-rule"
FLAT = {"above": -NOISE, "below": NOISE, "least": ENOUGH}
ADVICE = (
    Advice(
        "skipped steps",
        (Condition("update/skipped", "mean", above=0.005, least=1),),
        "The loss or the gradient was not finite in {0.mean:.2%} of the optimizer steps, which changed no weight "
        "(update/skipped): lower model.optimizer.lr.",
        ("model.optimizer.lr",),
        LEARNING,
    ),
    Advice(
        "log-prob gap",
        (Condition("sampling/logprob_gap_mean", "last", above=0.1, least=1),),
        "Log-probs of trainer and generator differ by {0.last:.2g} nats per token, where at most 0.1 is normal "
        "(sampling/logprob_gap_mean): use the same precision on both sides, or set model.objective.correction.mode.",
        ("model.objective.correction.mode",),
        "troubleshooting.md#generator-and-trainer",
    ),
    Advice(
        "no reward",
        (Condition("frac_no_reward", "last", above=0.05, least=1),),
        "{0.last:.0%} of the rollouts got no reward (frac_no_reward): look at the warnings of the reward functions, "
        "and raise model.reward_timeout_s if they took too long.",
        ("model.reward_timeout_s",),
        LEARNING,
    ),
    Advice(
        "no reward",
        (Condition("num_reward_errors", "mean", above=0.05, least=1),),
        "Reward functions failed or took too long {0.mean:.2g} times per batch (num_reward_errors): look at the "
        "warnings, and raise model.reward_timeout_s if they took too long.",
        ("model.reward_timeout_s",),
        LEARNING,
    ),
    Advice(
        "zero variance",
        (Condition("frac_reward_zero_std", "last", above=0.8), Condition("val/pass@1", "last", below=0.3, least=1)),
        "{0.last:.0%} of the groups had completions of equal reward, which give no gradient (frac_reward_zero_std), "
        "and pass@1 is {1.last:.0%}: use easier prompts or a finer reward, or raise model.num_generations.",
        ("model.num_generations",),
        CHOOSING,
        without=OTHER_LOSSES,
    ),
    Advice(
        "zero variance",
        (
            Condition("frac_reward_zero_std", "last", above=0.8),
            Condition("val/pass@1", "last", above=0.7, below=0.97, least=1),
        ),
        "{0.last:.0%} of the groups had completions of equal reward, which give no gradient (frac_reward_zero_std), "
        "and pass@1 is {1.last:.0%}: use harder prompts, or set rollout.plugins to dars_equal.",
        ("rollout.plugins",),
        CHOOSING,
        without=OTHER_LOSSES,
    ),
    Advice(
        "zero variance",
        (Condition("frac_reward_zero_std", "last", above=0.8), Condition("reward", "rise", **FLAT)),
        "{0.last:.0%} of the groups had completions of equal reward, which give no gradient (frac_reward_zero_std), "
        "and the reward did not rise: use prompts that are answered correctly sometimes or a finer reward, or raise "
        "model.num_generations.",
        ("model.num_generations",),
        LEARNING,
        without=("val/pass@1", *OTHER_LOSSES),
    ),
    Advice(
        "collapse",
        (
            Condition("entropy", "shrinkage", below=0.1),
            Condition("reward", "rise", below=NOISE, least=ENOUGH),
        ),
        "The entropy fell from {0.first:.2g} to {0.last:.2g} nats while the reward did not rise (entropy): lower "
        "model.optimizer.lr, or raise model.objective.epsilon_high.",
        ("model.optimizer.lr", "model.objective.epsilon_high"),
        LEARNING,
    ),
    Advice(
        "flat reward",
        (Condition("reward", "rise", **FLAT), Condition("frac_reward_zero_std", "last", below=0.5)),
        "The reward moved from {0.first:.3g} to {0.last:.3g} in {0.number} updates, within its noise, and only "
        "{1.last:.0%} of the groups had zero variance: raise model.optimizer.lr.",
        ("model.optimizer.lr",),
        LEARNING,
    ),
    Advice(
        "truncation",
        (Condition("completions/clipped_ratio", "last", above=0.1, least=1),),
        "{0.last:.0%} of the completions were truncated at the limit (completions/clipped_ratio): raise "
        "model.sampling.max_tokens, or set model.objective.mask_truncated to true.",
        ("model.sampling.max_tokens", "model.objective.mask_truncated"),
        LEARNING,
    ),
    Advice(
        "KL",
        (Condition("kl", "last", above=0.1), Condition("kl", "growth", above=3.0, least=ENOUGH)),
        "The KL divergence from the reference rose ever faster, to {0.last:.2g} nats per token (kl): raise "
        "model.objective.kl.beta, or lower model.optimizer.lr.",
        ("model.objective.kl.beta", "model.optimizer.lr"),
        LEARNING,
    ),
    Advice(
        "overfitting",
        (Condition("val/pass@1", "fall", above=0.1, least=8), Condition("reward", "rise", above=NOISE, least=ENOUGH)),
        "pass@1 on held-out prompts fell from {0.best:.0%} to {0.last:.0%} while the reward rose from {1.first:.3g} to "
        "{1.last:.3g}: use checkpoints/best.ckpt, and more prompts in data.train.",
        ("data.train",),
        LEARNING,
    ),
    Advice(
        "clipping",
        (Condition("clip_ratio/high", "last", above=0.2),),
        "{0.last:.0%} of the tokens had a ratio that was clipped from above (clip_ratio/high): lower "
        "model.num_iterations, model.num_minibatches or model.optimizer.lr.",
        ("model.num_iterations", "model.num_minibatches", "model.optimizer.lr"),
        "update.md#optimizer-steps",
    ),
    Advice(
        "reward wait",
        (Condition("time/reward_wait_s", "mean", above=0.1, per="time/step_s"),),
        "{0.mean:.0%} of the time all completions were decoded and rewards were missing (time/reward_wait_s): raise "
        "model.reward_workers, or make the reward function faster.",
        ("model.reward_workers",),
        "troubleshooting.md#time",
    ),
    Advice(
        "idle slots",
        (
            Condition("rollout/bubble_ratio", "mean", above=0.5),
            Condition("time/rollout_s", "mean", above=0.5, per="time/step_s"),
        ),
        "{0.mean:.0%} of the slot steps were idle, and rollouts took {1.mean:.0%} of the time (rollout/bubble_ratio): "
        "raise data.batch_size, lower model.sampling.max_tokens, or choose a rollout mode.",
        ("data.batch_size", "model.sampling.max_tokens"),
        "choosing.md#choosing-a-rollout-mode",
    ),
)
"""All rows, the most serious first."""


def what_to_try(columns: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """Return the sentences that apply to a run, at most five; none if nothing is wrong.

    Args:
        columns: Metrics by name, shape (rows,) each; NaN for a missing value.
    """
    found: dict[str, dict[str, Any]] = {}
    for advice in ADVICE:
        curves = [condition.curve(columns) for condition in advice.when]
        if advice.name in found or not all(curves) or any(name in columns for name in advice.without):
            continue
        page, _, heading = advice.page.partition("#")
        found[advice.name] = {
            "sentence": advice.sentence.format(*curves),
            "page": f"docs/{page}",
            "heading": heading.replace("-", " ").capitalize(),
        }
    return list(found.values())[:MOST]
