"""Savings and costs of an update from part of the tokens (``nat``) and of one in chunks (``seco``, ``spaco``).

Seconds and memory are those of steps of a real fit in a process of its own, on the same completions for every rule.
Memory is the peak of a step above the process after a first step, so that weights, gradients and the moments of AdamW
are not in it. Seconds are the median of several steps, since each draws other tokens. Part of the tokens goes through
in one micro-batch; in the other series every completion is a micro-batch, or a chunk of one.

The variance is that of the gradient over draws, of a smaller policy on the same completions: the mean of
``|g - g_all|^2 / |g_all|^2``. Rewards here have nothing to do with tokens, so ``g_all`` is nothing but the noise of its
own batch: a variance of 1 says that what is left out adds as much noise as the batch has by itself.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import replace

import torch

from benchmarks.processes import LEAN, LEAN_TEXT
from benchmarks.random_policies import TO_UPDATE, random_qwen3
from benchmarks.report import Claim, Options, Row, finish, parse_options
from benchmarks.update_case import Case, measure, teach
from benchmarks.update_work import Work
from lit_grpo.update.advantages.estimator import Advantages
from lit_grpo.update.learner import Learner
from lit_grpo.update.learner_settings import LearnerSettings
from lit_grpo.update.objective.objective import Objective

SHARES = (None, "nat:share=0.5", "nat:share=0.25", "nat_uniform:share=0.5", "nat_uniform:share=0.25")
CHUNKS = (None, "seco:chunk=512", "seco:chunk=256", "seco:chunk=128", "spaco:chunk=128,share=0.5")
SERIES = {"part": (2**15, Work(32, 128, 16), SHARES), "chunks": (1060, Work(32, 1024, 2, sigma=0.0), CHUNKS)}
QUICK = {
    "part": (2**10, Work(8, 24, 4), SHARES[:2]),
    "chunks": (70, Work(8, 64, 2, sigma=0.0), (None, "seco:chunk=16", "spaco:chunk=16,share=0.5")),
}
STEPS, DRAWS = 3, 12


class Gradients:
    """Takes no step, and keeps the gradient of each."""

    optimizer: torch.optim.Optimizer

    def __init__(self, policy: torch.nn.Module) -> None:
        self.policy, self.policy_version = policy, 0
        self.optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
        self.last = torch.empty(0)

    def add_gradient(self, compute_loss: Callable[[], torch.Tensor], exchange: bool) -> None:
        """Add it."""
        compute_loss().backward()

    def take_step(self, scale: float = 1.0) -> float:
        """Count a step."""
        self.last = torch.cat([weight.grad.flatten() for weight in self.policy.parameters() if weight.grad is not None])
        self.policy_version += 1
        return 0.0


def relative_variance(plugin: str | None, budget: int, work: Work, draws: int) -> float:
    """Return the mean of ``|g - g_all|^2 / |g_all|^2`` over draws."""
    torch.manual_seed(0)
    policy = random_qwen3(replace(TO_UPDATE["smallest"], vocab_size=work.vocab_size)).train()
    groups, gradients = work.groups(), Gradients(policy)
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        rollout.rewards = {"reward": rollout.reward}
    settings = LearnerSettings(
        objective=Objective(), advantages=Advantages(), weights={"reward": 1.0}, temperature=1.0,
        max_tokens=work.limit, max_tokens_per_micro_batch=budget, max_grad_norm=0.0,
    )  # fmt: skip
    learner = Learner(policy, gradients, settings)
    learner.learn(groups)
    whole = gradients.last
    teach(settings, plugin)
    squares = []
    for _ in range(draws):
        learner.learn(groups)
        squares.append(float((gradients.last - whole).square().sum() / whole.square().sum()))
    return statistics.fmean(squares)


def main(options: Options) -> int:
    """Measure every rule."""
    all_series, policy = (QUICK, "smallest") if options.quick else (SERIES, "7M")
    rows: list[Row] = []
    for name, (budget, work, plugins) in all_series.items():
        for plugin in plugins:
            case = Case("lit_grpo", budget, work, policy, options.device, warm=True, plugin=plugin)
            figures = measure(case, 2 if options.quick else STEPS, LEAN)
            draws = 4 if options.quick else DRAWS
            rows.append(
                {
                    "series": name,
                    "rule": plugin or "plain",
                    "seconds": round(statistics.median(figures["seconds"]), 3),
                    "peak_mib": round(float(figures["peak_mib"]), 1),
                    "variance": round(relative_variance(plugin, budget, work, draws), 6),
                }
            )
    claims = [
        *(_claim(rows, "part", 1, key, 1.0) for key in ("seconds", "peak_mib")),
        _claim(rows, "chunks", len(all_series["chunks"][2]) - 2, "peak_mib", 0.6),
    ]
    settings: Row = {"policy": f"random Qwen3, {policy}; variance with the smallest"}
    settings |= {name: f"{work.num_completion_tokens} tokens" for name, (_, work, _) in all_series.items()}
    settings |= {"steps": STEPS, "draws": DRAWS, "environment": LEAN_TEXT}
    return finish("token_share", options, settings, rows, claims)


def _claim(rows: list[Row], series: str, number: int, key: str, most: float) -> Claim:
    of_series = [row for row in rows if row["series"] == series]
    plain, other = of_series[0], of_series[number]
    return Claim(f"{key} with {other['rule']}, over plain", float(other[key]) / float(plain[key]), "<=", most)


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(main(parse_options(__doc__)))
