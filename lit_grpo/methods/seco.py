"""SeCO and SpaCO (arXiv 2505.16710): the backward pass of a long completion chunk by chunk.

``seco`` has the gradient of the whole. Keys and values of all chunks are computed first, without a gradient. Then the
last chunk goes through the policy again and back, which leaves a gradient at the keys and values of the chunks before
it; these add it to their own when they have their turn. So activations of one chunk are in memory, and a completion may
be longer than ``model.max_tokens_per_micro_batch``. It costs one more forward pass of what is cut.

``spaco`` gives each chunk a backward pass with chance ``share`` alone, and multiplies all that goes back through it by
``1 / share``. A gradient that passes m chunks on its way through keys and values is there with chance ``share**m``, and
counts ``share**-m`` times: the mean over draws is the gradient of the whole. The price is variance. Chunks are drawn
independently, so that this holds for every m. The paper's code (wenhaoli-xmu/seco at 8d69b46) draws a fixed number of
them, with which it holds for m = 1 alone. The gradient of the same chunks is that code's, except for the first token of
each: that code counts it with the chunk before.

Evidence (``token_share-2026-11-26``): of a completion of 2,048 tokens, chunks of 512, 256 and 128 take 0.55, 0.32 and
0.20 of an update's memory, and 1.20, 1.32 and 1.53 times the seconds.

Example:
    ``rollout.plugins: [{seco: {chunk: 2048}}]``, or ``[{spaco: {chunk: 2048, share: 0.5}}]``
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from lit_grpo.compatibility import Requirement
from lit_grpo.limits import Count, Share
from lit_grpo.plugins import Plugin, RunFacts, RunNumbers
from lit_grpo.types import Completion
from lit_grpo.update.plugin import Chunk
from lit_grpo.update.step import Step


@dataclass
class SeCO(Plugin):
    """Completions of more than ``chunk`` tokens are cut into chunks of about equal size."""

    writes: ClassVar[frozenset[str]] = frozenset({"chunks"})
    needs: ClassVar[frozenset[str]] = frozenset({"fixed_token_budget", "own_rows"})

    chunk: Count = 2048
    """Max tokens per chunk; at most ``model.max_tokens_per_micro_batch``."""

    def requirement(self, name: str) -> Requirement:
        said = f"sends those of more than {self.chunk} tokens through in chunks"
        return Requirement(name, self.needs, {"whole_completions": said})

    @property
    def numbers(self) -> RunNumbers:
        return RunNumbers(largest_chunk=self.chunk)

    def on_minibatch(self, step: Step) -> None:
        """Cut completions into as few chunks as there can be."""
        for rollout in step.rollouts:
            completion = rollout.completion
            length = completion.num_tokens
            number = -(-length // self.chunk)
            if number > 1:
                pairs = pairwise(length * n // number for n in range(number + 1))
                weights = [self.weight(completion, step.version, n) for n in range(number)]
                chunks = [Chunk(begin, end, weight) for (begin, end), weight in zip(pairs, weights, strict=True)]
                step.set("chunks", rollout, chunks)

    def weight(self, completion: Completion, version: int, number: int) -> float:
        """Return by what the gradient through a chunk is multiplied, by its number; 0 for no backward pass."""
        return 1.0


@dataclass
class SpaCO(SeCO):
    """A random part of the chunks has a backward pass."""

    share: Share = 0.5
    """Chance of each chunk to have a backward pass; 1 is ``seco``."""
    seed: int = 0
    """Seed of the draws, which depend on it, on the policy's version and on the completion's name alone."""

    def check(self, run: RunFacts) -> None:
        """Check that a completion can have several chunks: of a single one nothing is left out."""
        longest = run.max_tokens + run.max_observed
        if self.chunk >= longest:
            raise ValueError(
                f"chunk is {self.chunk}, and a completion has at most {longest} tokens, so that each would be one "
                "chunk, of which nothing is left out; give less, such as a quarter of it."
            )

    def weight(self, completion: Completion, version: int, number: int) -> float:
        """Return ``1 / share`` with chance ``share``, else 0."""
        name = repr((self.seed, version, completion.request.key, number)).encode()
        drawn = random.Random(hashlib.blake2b(name, digest_size=8).digest()).random()
        return 1 / self.share if drawn < self.share else 0.0


PLUGINS = {"seco": SeCO(), "spaco": SpaCO()}
