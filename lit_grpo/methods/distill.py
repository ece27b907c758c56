"""On-policy distillation: the policy learns from a teacher's distribution of each token that it sampled itself.

With ``top_k: 0`` the teacher is asked for the log-prob of each sampled token, and the advantage of the token is that of
its rollout (0 without a reward) and how much likelier the teacher finds it than the policy did when it sampled it::

    A_t = A + weight (log p_teacher(y_t) - log p_policy(y_t))

Its expectation over the policy's tokens is minus the reverse KL, KL(policy || teacher), and the gradient with this
advantage is minus the gradient of the reverse KL of each next token: later tokens get no credit for earlier ones
(discount 0). K. Lu, "On-Policy Distillation" (Thinking Machines, 2025); as ``opd`` of prime-rl.

With ``top_k: K`` the loss of each token gets, in place of that, a divergence D between the two distributions over the
teacher's K likeliest tokens and a tail, which has the rest of each distribution's probability, summed over its tokens
(1 less the sum of the K is rounding errors where they have almost all; a server tells no other)::

    loss_t = surrogate_t + weight D_beta(teacher, policy)
    D_0 = KL(teacher || policy)    D_1 = KL(policy || teacher)
    D_beta = beta KL(teacher || m) + (1 - beta) KL(policy || m),  m = beta teacher + (1 - beta) policy

This is GKD (arXiv 2306.13649, eq. 1; TRL's ``beta``), on the policy's own completions alone. Its gradient has less
variance than that of sampled tokens, and takes the log-probs of K tokens for one. TRL's SDPO adds the same tail.

``entropy_above`` adds KL(teacher || policy) to D where the entropy of the teacher is above it, in nats, over its K
likeliest tokens and the tail: reverse KL takes one of several good continuations, and forward KL keeps them
(Entropy-Aware On-Policy Distillation, arXiv 2603.07079).

The log-probs of the policy in the advantage are those of sampling, at the temperature of sampling, which also divides
the policy's logits in D. The teacher's logits are divided by ``model.teacher.temperature``. Tokens that an environment
said are neither scored nor trained on.

Example:
    ``model: {teacher: {policy: path/to/a/larger/model}, rewards: []}`` and ``rollout.plugins: [distill]``
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import torch

from lit_grpo.limits import Limit, Number, Positive
from lit_grpo.methods.shared.teaching import TeacherPlugin, divergence, sampled
from lit_grpo.update.plugin import Batch, TrainingRun

if TYPE_CHECKING:
    from lit_grpo.plugins import RunFacts
    from lit_grpo.update.objective.tokens import Tokens


@dataclass
class Distill(TeacherPlugin):
    """Lets the policy come nearer to the teacher's distribution at each token that it sampled."""

    writes: ClassVar[frozenset[str]] = frozenset({"token_advantage", "candidates", "added_loss"})

    weight: Positive = 1.0
    """Factor of the teacher's part, in the advantage or in the loss of a token."""
    top_k: Number = 0
    """Number of the teacher's likeliest tokens at each place that distributions are compared over; 0 takes the sampled
    token alone, as an advantage.
    """
    beta: Annotated[float, Limit(ge=0, le=1)] = 1.0
    """Divergence with ``top_k``: 1 is the reverse KL, KL(policy || teacher), 0 the forward KL, KL(teacher || policy),
    and between them is the generalized Jensen-Shannon divergence.
    """
    entropy_above: Annotated[float | None, Limit(ge=0)] = None
    """Entropy of the teacher, in nats, above which the forward KL is added, with ``top_k``; null adds none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, differs in (("beta", self.beta != 1), ("entropy_above", self.entropy_above is not None)):
            if differs and not self.top_k:
                raise ValueError(
                    f"{name} is of the divergence over the teacher's likeliest tokens; set top_k above 0, or leave "
                    f"{name} out."
                )

    def check(self, run: RunFacts) -> None:
        if run.policy is not None and self.top_k > (known := run.policy.config.get_text_config().vocab_size):
            raise ValueError(f"top_k is {self.top_k}, and the policy knows {known} tokens; lower it.")

    def on_train_start(self, run: TrainingRun) -> None:
        super().on_train_start(run)
        if self.teacher is not None and self.top_k > self.teacher.num_tokens:
            raise ValueError(
                f"rollout.plugins Distill: top_k is {self.top_k}, and the teacher knows {self.teacher.num_tokens} "
                "tokens; lower it."
            )

    def on_batch(self, batch: Batch) -> None:
        """Give each token its advantage, or with ``top_k: K`` the teacher's likeliest tokens with their log-probs."""
        taught = [rollout for rollout in batch.rollouts if not math.isnan(rollout.advantage)]
        scores = self.scores(batch, taught, self.top_k)
        for rollout in taught:
            if (its := scores.get(rollout.completion.request.key)) is None:
                continue
            if self.top_k:
                batch.set("candidates", rollout, (its.top_ids_TK, its.top_logprobs_TL))
            else:
                gain_T = (its.logprobs_T - sampled(rollout.completion)).nan_to_num(0.0)  # NaN: not known to the teacher
                batch.set("token_advantage", rollout, rollout.advantage + self.weight * gain_T)

    def loss(self, tokens: Tokens) -> None:
        columns = tokens.columns
        if "candidate_values" not in columns:
            return
        own_NL = torch.cat([columns["candidate_logprobs"], columns["rest_logprob"][:, None]], 1)
        its_NL = columns["candidate_values"]
        known_N = ~its_NL.isnan().any(1)
        its_NL = its_NL.where(known_N[:, None], -math.log(self.top_k + 1))  # counts nothing
        loss_N = divergence(own_NL, its_NL, self.beta)
        if self.entropy_above is not None:
            is_open_N = -(its_NL.exp() * its_NL).sum(1) > self.entropy_above
            loss_N = loss_N + divergence(own_NL, its_NL, 0.0) * is_open_N
        tokens["added_loss"] = self.weight * loss_N * known_N


PLUGINS = {"distill": Distill()}
