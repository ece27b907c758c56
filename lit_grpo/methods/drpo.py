"""DRPO (arXiv 2510.04474): short right answers count more than long ones, and no right answer less than a wrong one.

With ``s`` the mean log-prob of a completion's tokens, a group is trained on by::

    J = sum over right i of w_i s_i - tau log(mean over wrong j of exp(s_j / tau))
    w_i = exp((1 - tokens_i / max_tokens) / lambda), divided by the sum of these over the right ones

(objective and constants of the code in Optimization-AI/DRPO). Its gradient is
``sum_i w_i grad s_i - sum_j p_j grad s_j`` with ``p_j = exp(s_j / tau)`` divided by the sum of these over the wrong
ones. The loss ``grpo`` takes the mean over completions of each one's mean over tokens. So the advantages ``n w_i`` and
``-n p_j`` in a group of n give the mean of J over groups, with its exact gradient in the first step on a batch.

What deviates: later steps on a batch have clipped ratios, where the paper's code recomputes J and adds a penalty on the
KL term above 1e-4 (that is ``objective.kl`` here); losses other than ``grpo`` (``token``, ``constant``) make long
completions weigh more. ``totals: estimator`` is a form of our own.

Evidence: the gradient of J in float64, in ``tests/test_drpo.py``. On the demo and on knights it saved no tokens, and
gave nothing (docs/methods.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from lit_grpo.limits import Limit
from lit_grpo.plugins import Plugin
from lit_grpo.types import PassRule, Rollout
from lit_grpo.update.plugin import Batch

Temperature = Annotated[float, Limit(gt=0, infinite=True)]


@dataclass
class DecoupledLength(Plugin):
    """Divides what right answers get by their length among themselves; what passes is right.

    A group of one kind alone is not trained on. In a config, with the loss that the formula is for::

        rollout: {plugins: [{drpo: {length_temperature: 0.1}}]}
        model: {objective: {loss: grpo}}
    """

    writes: ClassVar[frozenset[str]] = frozenset({"advantage"})
    needs: ClassVar[frozenset[str]] = frozenset({"whole_groups"})

    length_temperature: Temperature = 0.1
    """Temperature of the weights by length (the paper's lambda); the larger, the less length matters. With ``.inf`` it
    does not.
    """
    temperature: Temperature = 10.0
    """Temperature of the weights of wrong answers by likelihood (the paper's tau); the larger, the less likelihood
    matters. With ``.inf`` it does not.
    """
    totals: Literal["equal", "estimator"] = "equal"
    """Sum of the advantages of right answers and of wrong ones: ``equal`` amounts in every group with both (the paper);
    or, for right answers, the sum of their advantages by the run's ``estimator``, while wrong answers keep their
    advantages. Then ``temperature`` has no meaning, and with ``length_temperature`` ``.inf`` and rewards of 0 and 1 it
    is the estimator's rule. A group whose right answers have a sum of 0 or less stays as it is.
    """

    def on_batch(self, batch: Batch) -> None:
        for group in batch.groups:
            values = [rollout.advantage for rollout in group.rollouts]
            for rollout, value in zip(
                group.rollouts, self._of_group(group.rollouts, values, batch.pass_rule), strict=True
            ):
                if not math.isnan(value):
                    batch.set("advantage", rollout, value)

    def _of_group(self, rollouts: Sequence[Rollout], values: Sequence[float], pass_rule: PassRule) -> list[float]:
        trained = [place for place, value in enumerate(values) if not math.isnan(value)]
        right = [place for place in trained if pass_rule.passes(rollouts[place].rewards)]
        wrong = [place for place in trained if place not in right and rollouts[place].completion.num_trained]
        shortness = {place: -_share(rollouts[place]) / self.length_temperature for place in right}
        if self.totals == "estimator":
            total = math.fsum(values[place] for place in right)
            given = divided(total, shortness) if total > 0 else {}
            return [given.get(place, value) for place, value in enumerate(values)]
        given = dict.fromkeys(trained, 0.0)
        if right and wrong:
            likelihood = {place: _mean_logprob(rollouts[place]) / self.temperature for place in wrong}
            given |= divided(len(trained), shortness) | divided(-len(trained), likelihood)
        return [given.get(place, value) for place, value in enumerate(values)]


def divided(total: float, scores: Mapping[int, float]) -> dict[int, float]:
    """Return parts of ``total`` in proportion to ``exp(score)``, by key."""
    highest = max(scores.values(), default=0.0)
    parts = {key: math.exp(score - highest) for key, score in scores.items()}
    whole = math.fsum(parts.values())
    return {key: total * part / whole for key, part in parts.items()}


def _share(rollout: Rollout) -> float:
    """The tokens of a completion as a share of those that it may have."""
    return rollout.completion.num_sampled / rollout.completion.request.sampling.max_tokens


def _mean_logprob(rollout: Rollout) -> float:
    """The mean log-prob that a completion's tokens were sampled with."""
    completion = rollout.completion
    return float(completion.logprobs_T[completion.trained_T].double().mean())


PLUGINS = {"drpo": DecoupledLength()}
