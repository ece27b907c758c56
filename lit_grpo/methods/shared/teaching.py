"""Base of methods that learn from the log-probs of a teacher (``model.teacher``)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from lit_grpo.plugins import GroupBatch, Plugin
from lit_grpo.types import Completion, Key, Rollout
from lit_grpo.update.plugin import Batch, Teacher, TeacherScores, TrainingRun
from lit_grpo.update.step import Step


@dataclass
class TeacherPlugin(Plugin):
    """Base class of methods that score the policy's completions with a teacher; it learns nothing by itself."""

    needs: ClassVar[frozenset[str]] = frozenset({"all_ranks"})
    traits: ClassVar[frozenset[str]] = frozenset({"common", "asks_teacher", "learns_unrewarded"})

    def setup(self) -> None:
        self.teacher: Teacher | None = None
        self._averaged: dict[str, torch.Tensor] = {}
        self._sums = (0.0, 0.0, 0)  # of log-ratios and of the teacher's entropies; tokens

    def on_train_start(self, run: TrainingRun) -> None:
        self.teacher = run.teacher
        if self.teacher is not None and self._averaged:
            for name, weight in self.teacher.weights().items():
                weight.data.copy_(self._averaged[name])
        self._averaged = {}
        self._policy = run.policy

    def scores(self, batch: Batch, rollouts: Sequence[Rollout], top_k: int = 0) -> Mapping[Key, TeacherScores]:
        """Return by completion what the teacher says of rollouts, each after its prompt; all ranks call it together."""
        assert self.teacher is not None
        scores = self.teacher.score(batch.measure, rollouts, batch.all_gather, top_k)
        own = {rollout.completion.request.key: rollout.completion for rollout in rollouts}
        log_ratio = sum(float((its.logprobs_T - sampled(own[key])).nansum()) for key, its in scores.items())
        known = {key: ~its.logprobs_T.isnan() for key, its in scores.items()}
        entropy = sum(float(its.entropy_T[known[key]].sum()) for key, its in scores.items())
        self._sums = log_ratio, entropy, sum(int(known_T.sum()) for known_T in known.values())
        return scores

    def on_update_end(self, batch: GroupBatch) -> Mapping[str, float]:
        """Return what the teacher said of the batch, as means over the tokens that it scored on all ranks."""
        log_ratio, entropy, num_tokens = (sum(each) for each in zip(*batch.all_gather(self._sums), strict=True))
        number = num_tokens or math.nan
        return {
            "teacher/reverse_kl": -log_ratio / number,
            "teacher/entropy": entropy / number,
            "teacher/tokens": float(num_tokens),
        }

    def on_optimizer_step(self, step: Step) -> None:
        if self.teacher is not None:
            self.teacher.follow(self._policy)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.teacher is None else dict(self.teacher.weights())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._averaged = state


def sampled(completion: Completion) -> torch.Tensor:
    """Return the log-probs that the tokens of a completion were sampled with, of those that are trained on."""
    return completion.logprobs_T[completion.trained_T]


def divergence(own_NL: torch.Tensor, its_NL: torch.Tensor, beta: float) -> torch.Tensor:
    """Return the generalized Jensen-Shannon divergence, shape N, in nats.

    Its derivative with respect to a probability of the policy is a slope of that token. All slopes are taken less that
    of the policy's likeliest token, which changes no gradient, since probabilities add up to 1: where the policy is
    sure, they would else leave rounding errors of one another.

    Args:
        own_NL: Log-probs of the policy, with gradient: of some tokens, and of all others together as the last.
        its_NL: Log-probs of the teacher.
        beta: 1 for KL(policy || teacher), 0 for KL(teacher || policy); see :mod:`lit_grpo.methods.distill`.
    """
    if beta == 0:
        return (its_NL.exp() * (its_NL - own_NL)).sum(1)
    mixed_NL, share, of_teacher_N = its_NL, 1.0, torch.zeros_like(its_NL[:, 0])
    if beta < 1:
        mixed_NL = torch.logaddexp(own_NL.detach() + math.log1p(-beta), its_NL + math.log(beta))
        share, of_teacher_N = 1 - beta, beta * (its_NL.exp() * (its_NL - mixed_NL)).sum(1)
    slopes_NL = share * (own_NL.detach() - mixed_NL)
    of_likeliest_N1 = slopes_NL.gather(1, own_NL.argmax(1, keepdim=True))
    of_policy_N = (own_NL.exp() * (slopes_NL - of_likeliest_N1)).sum(1) + of_likeliest_N1.squeeze(1)
    return of_teacher_N + of_policy_N
