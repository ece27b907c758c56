"""ARPO (arXiv 2507.19849) and AEPO (2510.14545): turns after a tool's answer that surprise the policy branch.

H_t is the mean of -log p, in nats, over the first ``tokens`` tokens of the t-th turn, as they were sampled, H_0 that of
the first turn, and u a random number from 0 to 1. After a turn that answers a tool, one more completion begins with all
that came before the turn, as long as the group has less than ``width`` members::

    ARPO:   clip(u - alpha (H_t - H_0), 0, 1) <= threshold
    AEPO:   clip((u + alpha (H_t - H_0)) max(0, 1 - 0.05 n), 0, 1) >= threshold

n is how many turns of the path have branched one after another. Of more branches than have room those are made whose
turns end first. Once no path of a group is left, fresh ones fill the width. Advantages are those of the run's
estimator: a token before a branch is in each of its completions, and so is trained on with the mean of theirs.

u depends on the seed, the prompt, the path and the turn alone, so that a run that goes on draws the same. With the
``width`` of ``model.num_generations`` it is plain GRPO.

The two rules are those of the papers' code (RUC-NLPIR/ARPO at 410211f). What deviates: its entropies are of the ten
likeliest tokens, summed over 20 tokens and divided by the log of the vocabulary, with which its alpha of 0.2 is
0.2 x 20 / log V here, 0.34 with 151,936 tokens; they are of the turn before a tool's answer, here of the turn after it;
n counts rounds of a prompt; and AEPO may choose by a first rollout how many paths begin, which its training script
turns off. AEPO's update is not here: advantages by entropy, and a clip whose gradient is that of ``objective.loss
gppo`` except below the lower bound, where AEPO has none.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from lit_grpo.limits import Count, NotNegative, Share
from lit_grpo.methods.shared.branches import Widening
from lit_grpo.plugins import Answer
from lit_grpo.rollout.generator import StepEvents
from lit_grpo.scheduling.ledger import RequestLedger
from lit_grpo.trajectory import OBSERVED
from lit_grpo.types import Completion, GroupKey, Key, Request


@dataclass
class ARPO(Widening):
    """Branch after answers of tools that surprise the policy.

    ``model.num_generations`` is how many paths begin at the prompt. For example, 8 of them become 16 members::

        model: {num_generations: 8}
        rollout:
          plugins: [{environments: {factory: my_env.py:Game}}, {arpo: {width: 16}}]

    The environment has to have ``state`` and ``restore``; tools without an environment need nothing.
    """

    needs: ClassVar[frozenset[str]] = Widening.needs | {"turns"}  # else it would only sample larger groups

    tokens: Count = 20
    """Number of tokens at the beginning of a turn whose mean -log p is its entropy."""
    alpha: NotNegative = 0.2
    """Weight of a rise of the entropy, per nat."""
    threshold: Share = 0.5
    """Bound of the random number plus the weighted rise of the entropy, from which a turn branches."""

    def branches(self, draw: float, rise: float, num_before: int) -> bool:
        """Return whether a turn branches.

        Args:
            draw: A random number from 0 to 1.
            rise: Rise of the entropy, ``H_t - H_0``, in nats.
            num_before: Turns right before it that have branched.
        """
        return _clipped(draw - self.alpha * rise) <= self.threshold

    def on_rollout_start(self, ledger: RequestLedger) -> None:
        super().on_rollout_start(ledger)
        self._members: dict[GroupKey, set[Key]] = {}
        self._begun_with: dict[Key, int] = {}
        self._in_a_row: Counter[Key] = Counter()  # turns that have branched one after another
        self._pending: list[Request] = []

    def on_requests(self, requests: Sequence[Request]) -> Sequence[Request]:
        for request in requests:
            self._members.setdefault(request.group, set()).add(request.key)
        return ()

    def on_step(self, events: StepEvents) -> Answer | None:
        """Look at the turns that have ended; branches are asked for next time, or as their group would be whole."""
        answer = self._answer()
        for completion in events.finished:
            self._look_at(completion)
        return answer

    def _look_at(self, completion: Completion) -> None:
        """Ask for a branch before the last turn of a completion, where that is to be."""
        request = completion.request
        starts = [begin for begin, _, _ in completion.places_of_turns]
        if len(starts) < 2 or starts[-1] == self._begun_with.get(request.key):
            return
        members = self._members.setdefault(request.group, {request.key})
        first, last = (self._entropy(completion, start) for start in (starts[0], starts[-1]))
        draw = random.Random(f"{request.seed}/{request.key}/{len(starts)}").random()
        if not self.branches(draw, last - first, self._in_a_row[request.key]):
            self._in_a_row[request.key] = 0
            return
        self._in_a_row[request.key] += 1
        if len(members) < self.width:
            made = self.branch(request, completion.until(starts[-1]))
            members.add(made.key)
            self._begun_with[made.key], self._in_a_row[made.key] = starts[-1], self._in_a_row[request.key]
            self._pending.append(made)

    def _entropy(self, completion: Completion, start: int) -> float:
        """Estimate the entropy at the beginning of a turn, in nats."""
        sampled_T = completion.versions_T[start : start + self.tokens] != OBSERVED
        num_tokens = int(sampled_T.long().cumprod(0).sum())  # the turn may be shorter
        return -float(completion.logprobs_T[start : start + num_tokens].double().mean())

    def on_completion(self, completion: Completion) -> Answer | None:
        """Fill the width of a group with fresh paths, once none of it is left."""
        group = completion.request.group
        asked = any(request.group == group for request in self._pending)
        if not asked and not self._ledger.num_of(group):
            members = self._members.setdefault(group, {completion.request.key})
            first = replace(completion.request, path=min(members)[2])  # whichever has ended last
            self._pending += [self.branch(first) for _ in range(self.width - len(members))]
        return self._answer()

    def on_idle(self) -> Answer | None:
        return self._answer()

    def _answer(self) -> Answer | None:
        submit, self._pending = self._pending, []
        return Answer(submit=submit) if submit else None


@dataclass
class AEPO(ARPO):
    """Branch after answers of tools that surprise the policy, the less often the more has branched right before."""

    def branches(self, draw: float, rise: float, num_before: int) -> bool:
        return _clipped((draw + self.alpha * rise) * max(0.0, 1 - 0.05 * num_before)) >= self.threshold


def _clipped(value: float) -> float:
    return min(max(value, 0.0), 1.0)


PLUGINS = {"arpo": ARPO(), "aepo": AEPO()}
