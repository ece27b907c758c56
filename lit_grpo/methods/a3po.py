"""A proximal policy between the behavior policy and the policy, without a forward pass (A-3PO, arXiv 2512.06547)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from lit_grpo.compatibility import Requirement
from lit_grpo.plugins import Plugin, RunFacts
from lit_grpo.update.objective.tokens import Tokens


@dataclass
class InterpolatedPolicy(Plugin):
    """Take probability ratios to log-probs between those of the behavior policy and of the policy now.

    With ``model.objective.correction`` the gap between the two parts of a ratio is corrected. For example::

        model:
          objective: {correction: {mode: token_truncate}}
        rollout:
          plugins: [april, a3po]
    """

    writes: ClassVar[frozenset[str]] = frozenset({"proximal_logprob"})

    _corrected = True  # until a run says otherwise

    def check(self, run: RunFacts) -> None:
        self._corrected = run.corrected

    def requirement(self, name: str) -> Requirement:
        said = "takes probability ratios to another policy, which model.objective.correction.mode none does not correct"
        return Requirement(name, changes={} if self._corrected else {"ratios_to_sampler": said})

    @torch.no_grad()
    def loss(self, tokens: Tokens) -> None:
        """Take ratios to log-probs on the line from the behavior policy to the policy, by how old each token is.

        ``log prox = log sampled + a (log policy - log sampled)`` with ``a = 1 - 1 / d`` for a token that was sampled
        ``d`` optimizer steps ago, and 0 for ``d = 0``: the place one step before the policy (AReaL's
        ``prox_logp_method: loglinear``, whose code takes 0 for ``d = 0`` too).
        """
        sampled_N, age_N = tokens.sampled_logprobs_N, tokens.columns["age"].clamp(min=1)
        share_N = 1 - 1 / age_N.to(sampled_N.dtype)
        tokens["proximal_logprob"] = sampled_N + share_N * (tokens.logprobs_N - sampled_N)


PLUGINS = {"a3po": InterpolatedPolicy()}
