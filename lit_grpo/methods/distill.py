"""On-policy distillation: the policy learns from a teacher's log-prob of each token that it sampled itself.

The advantage of a token is that of its rollout (0 without a reward) and, with ``weight`` w, how much likelier the
teacher finds it than the policy did when it sampled it::

    A_t = A + w (log p_teacher(y_t) - log p_policy(y_t))

Its expectation over the policy's tokens is minus the reverse KL, KL(policy || teacher), and the gradient with this
advantage is minus the gradient of the reverse KL of each next token: later tokens get no credit for earlier ones
(discount 0). K. Lu, "On-Policy Distillation" (Thinking Machines, 2025); as ``opd`` of prime-rl.

The policy's log-prob is that of sampling, at the temperature of sampling. The teacher's is at its own temperature,
``model.teacher.temperature``. Tokens that an environment said are neither scored nor learnt from.

Example:
    ``model: {teacher: {policy: path/to/a/larger/model}, rewards: []}`` and ``rollout.plugins: [distill]``
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lit_grpo.limits import Positive
from lit_grpo.methods.teaching import TeacherPlugin, sampled
from lit_grpo.update.plugin import LearningBatch


@dataclass
class Distill(TeacherPlugin):
    """Adds to the advantage of each token how much likelier the teacher finds it than the policy."""

    weight: Positive = 1.0
    """Factor of the teacher's part in the advantage of a token."""

    def credit(self, batch: LearningBatch) -> Sequence[torch.Tensor | None]:
        """Return the advantage of each token."""
        taught = [rollout for rollout in batch.rollouts if not math.isnan(rollout.advantage)]
        scores, credited = self.scores(batch, taught), list[torch.Tensor | None]()
        for rollout in batch.rollouts:
            its = scores.get(rollout.completion.request.key)
            if its is None:
                credited.append(None)
            else:
                credited.append(rollout.advantage + self.weight * (its.logprobs_T - sampled(rollout.completion)))
        return credited


PLUGINS = {"distill": Distill()}
