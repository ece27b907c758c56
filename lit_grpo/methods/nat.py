"""NAT (arXiv 2603.06619): an unbiased gradient of a random part of each completion's tokens.

A token that is kept with probability ``p_t`` counts ``1 / p_t`` times where it is kept, and 0 times elsewhere, so 1 on
average (D. G. Horvitz and D. J. Thompson, 1952). The denominator of the loss stays that of all tokens. The expected
gradient is then that of all tokens, whatever the normalization. The price is variance: about ``1 / p_t`` times a
token's own.

``nat`` keeps a random prefix (the paper's Random Prefix Cutting). What comes after it does not go through the policy.
``nat_uniform`` keeps each token by itself (Uniform Random Sampling): the layers still see all before the last that is
kept, and the head alone has less to do.

The paper's distribution of the cut is not known to us; see :class:`Prefix` for the one here. Metrics of an update are
means over the tokens that went through, so that those of ``nat`` are more of beginnings.

Evidence (``token_share-2026-11-26``): with half of the tokens ``nat`` takes 0.56 of an update's seconds and 0.62 of its
memory, with a quarter 0.40 and 0.41; ``nat_uniform`` 0.88 and 0.99. The variance that is added is 1.3 and 4.2 times the
squared norm of the batch's gradient, with ``nat_uniform`` 1.0 and 2.9. Neither learned more from as many generated
tokens (docs/methods.md).

Example:
    ``rollout.plugins: [{nat: {share: 0.5}}]``
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import ClassVar

import torch

from lit_grpo.compatibility import Requirement
from lit_grpo.limits import Share
from lit_grpo.plugins import Plugin
from lit_grpo.update.step import Step


@dataclass
class RandomTokens(Plugin):
    """A random part of the tokens of each completion, drawn for every optimizer step.

    Draws depend on ``seed``, the policy's version and the completion's name alone: a resumed run has the same.
    """

    writes: ClassVar[frozenset[str]] = frozenset({"weight"})

    share: Share = 0.5
    """Expected fraction of each completion's tokens to train on; 1 is all, which is plain GRPO bit for bit."""
    seed: int = 0
    """Seed of the draws."""

    def requirement(self, name: str) -> Requirement:
        said = f"learns from a random share of each completion's tokens, {self.share}"
        changes = {"whole_completions": said, "all_tokens": said} if self.share < 1 else {}
        return Requirement(name, self.needs, changes)

    def on_minibatch(self, step: Step) -> None:
        """Let tokens that are kept count ``1 / p_t``, and the others 0."""
        for rollout in step.rollouts if self.share < 1 else ():
            completion = rollout.completion
            name = repr((self.seed, step.version, completion.request.key)).encode()
            seed = int.from_bytes(hashlib.blake2b(name, digest_size=7).digest(), "big")
            generator = torch.Generator().manual_seed(seed)
            chances_T = self.chances(completion.num_trained)
            step.set("weight", rollout, (self.draw(chances_T, generator) / chances_T).float())

    def chances(self, num_tokens: int) -> torch.Tensor:
        """Return the chance of each of so many tokens to be kept: float64 in (0, 1], shape T."""
        raise NotImplementedError

    def draw(self, chances_T: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Return which tokens are kept, bool, shape T."""
        raise NotImplementedError


@dataclass
class Uniform(RandomTokens):
    """Each token by itself, with chance ``share``."""

    def chances(self, num_tokens: int) -> torch.Tensor:
        return torch.full((num_tokens,), self.share, dtype=torch.float64)

    def draw(self, chances_T: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return torch.rand(len(chances_T), generator=generator, dtype=torch.float64) < chances_T


@dataclass
class Prefix(RandomTokens):
    """A prefix of random length; after it nothing is computed.

    With chance ``f = share / 2`` a completion is kept whole, so that no token counts more than ``2 / share`` times.
    With the other chance its first ``ceil(T u**k)`` tokens are kept, with ``u`` uniform in (0, 1) and
    ``k = (1 - f) / (share - f) - 1``. Then ``p_t = f + (1 - f) (1 - ((t - 1) / T)**(1 / k))``, whose mean over long
    completions is ``share``. A uniform cut over all lengths (``f`` 0, ``k`` 1) would keep the last token with chance
    ``1 / T``, and count it ``T`` times.
    """

    def chances(self, num_tokens: int) -> torch.Tensor:
        whole, before_T = self.share / 2, torch.arange(num_tokens, dtype=torch.float64) / max(num_tokens, 1)
        exponent = (1 - whole) / (self.share - whole) - 1
        return whole + (1 - whole) * (1 - before_T ** (1 / exponent))

    def draw(self, chances_T: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Return all tokens whose chance is above one number, which falls as the number of the token grows."""
        return torch.rand(1, generator=generator, dtype=torch.float64) < chances_T


PLUGINS = {"nat": Prefix(), "nat_uniform": Uniform()}
