"""ECHO (arXiv 2602.02150), test-time RL on trees: entropy and confidence say where paths branch and what tokens count.

The plug-in ``echo`` is another method of that name. ``H_t`` is the entropy of the distribution that token t was drawn
from, in nats, and the confidence ``C_t`` the mean probability of its ``top`` likeliest tokens. ``G_t`` is the mean of C
over the last ``window`` tokens, ``T_t`` over the last ``tail``, and ``D_t`` is H_t less the mean of the ``window``
entropies before it; a branch counts its own tokens alone.

After ``depth`` tokens a path with ``H_t >= high``, ``G_t <= unsure`` and ``D_t >= rise`` goes on with so many tokens,
its own and the likeliest others::

    clip(round(1 + 2 (H_t - low) / (high - low) - (G_t - unsure) / unsure), 1, most)

A branch is pruned if ``G_t < hopeless``, if T has fallen three times to at most ``doubtful``, or if D was above 0 three
times and is above ``spike``. In the update, with the advantage A of the run's estimator and z-scores over all tokens of
the batch::

    A_t = A (1 + shaping S_t),   S_t = clip(z(H_t) + z(1 - C_t), -2, 2)
    epsilon = 0.05 + 0.15 sigmoid(4 (1 - mean of the last 16 C))

``epsilon`` clips the ratios of the completion's tokens, if the loss is a clipped one (``grpo``, ``dr_grpo``, ``dapo``)
and there are several optimizer steps on a batch. With five tokens C is 0.2 at most, so it is from 0.194 to 0.197.

The rules and the numbers are those of the authors' code (user683/ECHO at 6f7b311), except for the confidence of the
rollout: there it is the mean of -log p, which is at least log 5 = 1.61 for five tokens, so that with its bound of 1.2
no path ever branches. Here it is the paper's, as in that code's update, and ``unsure``, ``hopeless`` and ``doubtful``
are ours. What deviates further: H is over the whole vocabulary, there over 64 tokens; every path branches again, there
one path once; a pruned branch leaves its group, there it is cut; paths that begin at the prompt are not pruned.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import ClassVar

import numpy as np
import torch

from lit_grpo.limits import Count, NotNegative, Number, Positive, check_order
from lit_grpo.methods.shared.branches import OtherTokens
from lit_grpo.plugins import Answer
from lit_grpo.rollout.generator import Likeliest, StepEvents
from lit_grpo.scheduling.ledger import RequestLedger
from lit_grpo.trajectory import OBSERVED
from lit_grpo.types import Key
from lit_grpo.update.plugin import Batch

Signals = Sequence[tuple[float, float]]
"""Entropy and confidence of each token."""
TIMES = 3  # that the tail has to fall, or the entropy to rise
LAST = 16  # tokens whose confidence says where a completion is clipped


@dataclass
class EntropyConfidence(OtherTokens):
    r"""Branch where the policy is unsure, prune branches that stay unsure, and learn most from unsure tokens.

    ``model.num_generations`` is how many paths begin at the prompt. For example, 4 of them become 16 members, whose
    majority is the label::

        model: {num_generations: 4}
        rollout:
          plugins: [{majority_vote: {pattern: 'answer is (\S+)'}}, {echo_tree: {width: 16}}]

    An environment has to have ``state`` and ``restore``: a branch begins with the state of its turn's beginning.
    """

    writes: ClassVar[frozenset[str]] = frozenset({"token_advantage", "epsilon"})
    needs: ClassVar[frozenset[str]] = OtherTokens.needs | {"all_ranks"}

    top: Count = 5
    """Number of likeliest tokens whose mean probability is the confidence."""
    depth: Number = 4
    """Number of own tokens before a path branches."""
    window: Count = 4
    """Number of tokens of the group confidence, and of earlier entropies that one is compared with."""
    tail: Count = 8
    """Number of tokens of the tail confidence."""
    low: NotNegative = 1.0
    """Entropy at which a path goes on with its own token alone, in nats."""
    high: Positive = 3.5
    """Entropy from which a path branches, in nats."""
    rise: NotNegative = 0.2
    """Rise of the entropy from which a path branches, in nats."""
    unsure: Positive = 0.15
    """Group confidence up to which a path branches."""
    most: Count = 4
    """Max number of tokens that a path goes on with, its own among them."""
    hopeless: NotNegative = 0.05
    """Group confidence below which a branch is pruned."""
    doubtful: NotNegative = 0.1
    """Tail confidence up to which a branch is pruned if it has fallen three times."""
    spike: NotNegative = 0.5
    """Rise of the entropy above which a branch is pruned if it has risen three times, in nats."""
    shaping: NotNegative = 0.1
    """Weight of entropy and confidence in the advantage."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_order(self, "low", "high", strict=True)

    @property
    def likeliest(self) -> int:
        return max(self.top, self.most)

    def on_rollout_start(self, ledger: RequestLedger) -> None:
        super().on_rollout_start(ledger)
        self._signals: dict[Key, list[tuple[float, float]]] = {}  # of all tokens of a path, by place

    def on_step(self, events: StepEvents) -> Answer | None:
        """Note entropies and confidences, then prune and branch by them."""
        if (drawn := events.likeliest) is not None:
            progress = self._ledger.progress()
            confidences_B = np.exp(drawn.logprobs_BK[:, : self.top].astype(np.float64)).sum(1) / self.top
            pairs = zip(drawn.entropies_B.tolist(), confidences_B.tolist(), strict=True)
            for key, pair in zip(drawn.keys, pairs, strict=True):
                if key not in self._signals:
                    parent = (*key[:2], key[2][:-1])  # whose distribution the first token of a branch is of
                    self._signals[key] = self._signals[parent][: self._births[key] + 1] if key in self._births else []
                self._signals[key][progress[key] - 1 :] = [pair]
        return super().on_step(events)

    def branches(self, drawn: Likeliest) -> Iterator[tuple[int, Sequence[tuple[int, float]]]]:
        for row, key in enumerate(drawn.keys):
            own = self._signals[key][self._births.get(key, 0) :]
            if len(own) > self.depth and (number := self.num_paths(own)) > 1:
                likely = zip(drawn.ids_BK[row].tolist(), drawn.logprobs_BK[row].tolist(), strict=True)
                yield row, [each for each in likely if each[0] != drawn.token_ids_B[row]][: number - 1]

    def pruned(self, drawn: Likeliest) -> list[Key]:
        keys = [key for key in drawn.keys if key in self._births and key not in self._ended]
        return [key for key in keys if self.is_pruned(self._signals[key][self._births[key] :])]

    def num_paths(self, own: Signals) -> int:
        """Return with how many tokens a path goes on in the place of its last one, 1 for its own alone."""
        entropies, confidences = zip(*own[-self.window - 1 :], strict=True)
        entropy, confidence = entropies[-1], fmean(confidences[-self.window :])
        if entropy < self.high or confidence > self.unsure or rises(entropies, self.window)[-1] < self.rise:
            return 1
        number = 1 + 2 * (entropy - self.low) / (self.high - self.low) - (confidence - self.unsure) / self.unsure
        return min(max(round(number), 1), self.most)

    def is_pruned(self, own: Signals) -> bool:
        """Return whether a branch is pruned after these tokens."""
        entropies, confidences = zip(*own[-max(self.window, self.tail) - TIMES :], strict=True)
        ups, ends = rises(entropies, self.window)[-TIMES:], range(len(confidences) - TIMES, len(confidences) + 1)
        tails = [fmean(confidences[max(0, end - self.tail) : end]) for end in ends if end > 0]
        falls = len(tails) > TIMES and all(later < earlier for earlier, later in itertools.pairwise(tails))
        return (
            fmean(confidences[-self.window :]) < self.hopeless
            or (falls and tails[-1] <= self.doubtful)
            or (len(ups) == TIMES and min(ups) > 0 and ups[-1] > self.spike)
        )

    def on_batch(self, batch: Batch) -> None:
        """Give tokens their advantages and bounds; what has no entropies, such as a replayed rollout, keeps its own."""
        signals: list[torch.Tensor | None] = []
        for rollout in batch.rollouts:
            completion = rollout.completion
            its = self._signals.get(completion.request.key, ())
            trained_T = completion.trained_T[completion.versions_T != OBSERVED]
            signals.append(torch.tensor(its)[trained_T] if 0 < len(its) == completion.num_sampled else None)
        scores = [
            batch.whitened([None if its is None else its[:, k] * (1, self.top)[k] for its in signals]) for k in (0, 1)
        ]
        for rollout, its, entropy_N, confidence_N in zip(batch.rollouts, signals, *scores, strict=True):
            if its is not None and entropy_N is not None and confidence_N is not None:
                score_N = (entropy_N - confidence_N).clamp(-2, 2)
                batch.set("token_advantage", rollout, rollout.advantage * (1 + self.shaping * score_N))
                epsilon = 0.05 + 0.15 / (1 + math.exp(-4 * (1 - float(its[-LAST:, 1].mean()))))
                batch.set("epsilon", rollout, torch.full((len(its),), epsilon))


def rises(entropies: Sequence[float], window: int) -> list[float]:
    """Return how far each entropy is above the mean of so many before it; 0 for the first."""
    before = [entropies[max(0, place - window) : place] or [own] for place, own in enumerate(entropies)]
    return [own - fmean(those) for own, those in zip(entropies, before, strict=True)]


PLUGINS = {"echo_tree": EntropyConfidence()}
