"""LATR (arXiv 2510.24302): paths branch where two tokens are likely, and branches that come to say the same are pruned.

With p1 and p2 the probabilities of the two likeliest tokens, a path branches if::

    p2 > least   and   p1 - p2 < gap

The branch begins with the likelier of the two that its path has not drawn. Once it and its path have ``look_ahead``
tokens from there on, a and b, it is pruned if any of these is so::

    edit distance of a and b / look_ahead < edit
    longest end of a that stands in b, or of b in a / look_ahead > suffix
    ROUGE-L of a and b, 2 LCS(a, b) / (len(a) + len(b)) > rouge

It stays if either of the two, or the turn in which it branched, has ended by then. Advantages are those of the run's
estimator.

The rules are those of the authors' code (starreeze/latr at 2adb0ed), and so are the numbers of its Countdown runs; in
mathematics they are ``{least: 0.15, gap: 0.25, edit: 0, suffix: 0.2, rouge: 0.5}``. What deviates: tokens of a path are
drawn, where that code takes the likeliest until the group is full; probabilities are those that tokens are drawn with,
after the temperature; branches are looked at once, there after 20, 30 and 50 tokens; one that has ended is not pruned
with its parent; what is left of the width is filled with fresh paths, there with copies that are sampled on. Its share
of plain paths, which grows over the run, and its limit of tokens within which paths branch are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from lit_grpo.limits import Count, Limit
from lit_grpo.methods.shared.branches import OtherTokens
from lit_grpo.plugins import RunFacts
from lit_grpo.rollout.generator import Likeliest
from lit_grpo.scheduling.ledger import RequestLedger
from lit_grpo.types import Key, Trajectory

Unit = Annotated[float, Limit(ge=0, le=1)]


@dataclass
class LookAhead(OtherTokens):
    """Branch where two tokens are likely, and prune branches that come to say the same.

    ``model.num_generations`` is how many paths begin at the prompt. For example, 4 of them become 8 members::

        model: {num_generations: 4}
        rollout:
          plugins: [{latr: {width: 8}}]

    An environment has to have ``state`` and ``restore``: a branch begins with the state of its turn's beginning.
    """

    least: Unit = 0.25
    """Probability that the second likeliest token must exceed."""
    gap: Unit = 0.15
    """Distance of the two probabilities below which a path branches."""
    look_ahead: Count = 30
    """Number of tokens after which a branch is compared with its parent."""
    edit: Unit = 0.4
    """Edit distance per token below which a branch is pruned; 0 prunes none."""
    suffix: Unit = 1.0
    """Fraction of the tokens in a common end above which a branch is pruned; 1 prunes none."""
    rouge: Unit = 1.0
    """ROUGE-L above which a branch is pruned; 1 prunes none."""

    def check(self, run: RunFacts) -> None:
        super().check(run)
        if self.look_ahead >= run.max_tokens:
            raise ValueError(
                f"look_ahead is {self.look_ahead}, and sampling.max_tokens is {run.max_tokens}, so no branch would be "
                "pruned; give less, such as a tenth of it."
            )

    def on_rollout_start(self, ledger: RequestLedger) -> None:
        super().on_rollout_start(ledger)
        self._compared: set[Key] = set()

    @property
    def likeliest(self) -> int:
        return 2

    def branches(self, drawn: Likeliest) -> Iterator[tuple[int, Sequence[tuple[int, float]]]]:
        probs_BK = np.exp(drawn.logprobs_BK.astype(np.float64))
        for row in np.flatnonzero(branches_at(probs_BK, self.least, self.gap)).tolist():
            ids, logprobs = drawn.ids_BK[row].tolist(), drawn.logprobs_BK[row].tolist()
            others = zip(ids, logprobs, strict=True)
            yield row, [other for other in others if other[0] != drawn.token_ids_B[row]][:1]

    def pruned(self, drawn: Likeliest) -> list[Key]:
        pruned, progress = list[Key](), self._ledger.progress()
        for key, birth in self._births.items():
            parent, end = (*key[:2], key[2][:-1]), birth + self.look_ahead
            is_due = key not in self._compared and key not in self._ended and progress.get(key, 0) >= end
            if not is_due or (parent not in self._ended and progress.get(parent, 0) < end):
                continue
            self._compared.add(key)
            its: Trajectory = self._ended[parent] if parent in self._ended else drawn.come_to(parent)
            own, other = (each.sampled_ids[birth:end] for each in (drawn.come_to(key), its))
            if len(other) == len(own) and not self._eos_ids.intersection(other) and self.alike(own, other):
                pruned.append(key)
        return pruned

    def alike(self, first: Sequence[int], second: Sequence[int]) -> bool:
        """Return whether so many tokens of a branch and of its parent are too much alike; both have equally many."""
        number = len(first)
        lcs = (2 * number - distance(first, second, 2)) / 2
        ends = max(longest_end(first, second), longest_end(second, first))
        return distance(first, second) / number < self.edit or ends / number > self.suffix or lcs / number > self.rouge


def branches_at(probs_BK: np.ndarray, least: float, gap: float) -> np.ndarray:
    """Return where paths branch, bool, shape (B,), by the probabilities of the two likeliest tokens, shape (B, 2)."""
    return (probs_BK[:, 1] > least) & (probs_BK[:, 0] - probs_BK[:, 1] < gap)


def distance(first: Sequence[int], second: Sequence[int], substitution: int = 1) -> int:
    """Return the fewest insertions, deletions and substitutions, which cost so much, that make one of the other."""
    costs = [*range(len(second) + 1)]
    for number, own in enumerate(first, 1):
        diagonal, costs[0] = costs[0], number
        for place, other in enumerate(second, 1):
            replaced = diagonal + substitution * (own != other)
            diagonal, costs[place] = costs[place], min(costs[place] + 1, costs[place - 1] + 1, replaced)
    return costs[-1]


def longest_end(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many of the last tokens of ``first`` stand together anywhere in ``second``."""
    text = f" {' '.join(map(str, second))} "
    ends = (f" {' '.join(map(str, first[-number:]))} " for number in range(1, len(first) + 1))
    return next((number for number, end in enumerate(ends) if end not in text), len(first))


PLUGINS = {"latr": LookAhead()}
