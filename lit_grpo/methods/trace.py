"""TRACE (arXiv 2606.11119): a group goes on from the turns whose continuations are most likely to end differently.

An *anchor* is what a path had come to as one of its turns began; for the first turn it is the prompt. With the chance p
that a continuation of an anchor passes, n of them have different outcomes with probability ``1 - p^n - (1 - p)^n``.
Once the first paths of a group have ended, what is left of its ``width`` is divided among its anchors so that the sum
of these probabilities is largest: one continuation after another goes to the anchor with the largest gain

    p^n (1 - p) + (1 - p)^n p

n is 1 at first for a turn, since its own path is there, and the number of first paths for the prompt. Gains only fall
as n grows, so this division is the best one. A continuation of the prompt is a fresh path. Advantages are the run's.

p is predicted by one ridge regression on signed hashes (Weinberger et al. 2009) of an anchor's tokens and of its last
``window`` tokens with their neighbors, and on how many turns and tokens it has. It learns from all anchors of each
batch; before the first, p is a half.

It deviates from the paper, of which the abstract and summaries could be read: the predictor is ours, and how many paths
begin at each prompt is as the run has it. With the ``width`` of ``model.num_generations`` it is plain GRPO.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from lit_grpo.limits import Count
from lit_grpo.methods.shared.branches import Widening
from lit_grpo.plugins import Answer, GroupBatch
from lit_grpo.scheduling.ledger import RequestLedger
from lit_grpo.scheduling.lengths import Ridge
from lit_grpo.types import EMPTY, Completion, GroupKey, Key, PassRule, Rollout, RolloutGroup, Trajectory

NUM_HASHED = 128  # columns of all tokens of an anchor, and as many of its last ones
BETWEEN = 100.0  # rows as which what lies between groups counts: all of it
SURE = 0.02  # no chance is predicted to be nearer to 0 or 1


@dataclass
class ContrastiveTree(Widening):
    """Go on from turns whose continuations may end either way.

    ``model.num_generations`` is how many paths begin at the prompt. For example, 8 of them become 16 members::

        model: {num_generations: 8}
        rollout:
          plugins: [{environments: {factory: my_env.py:Game}}, {trace: {width: 16}}]

    The environment has to have ``state`` and ``restore``; tools without an environment need nothing. Without turns all
    that is left of the width begins at the prompt. What passes is said by ``model.pass_reward``.
    """

    needs: ClassVar[frozenset[str]] = Widening.needs | {"turns"}  # else it would only sample larger groups
    traits: ClassVar[frozenset[str]] = Widening.traits | {"common"}

    window: Count = 32
    """Number of last tokens of an anchor that are features together with their neighbors."""

    def setup(self) -> None:
        super().setup()
        self._ridge = Ridge(BETWEEN)

    def on_rollout_start(self, ledger: RequestLedger) -> None:
        super().on_rollout_start(ledger)
        self._first: dict[GroupKey, list[Completion]] = {}
        self._expanded: set[GroupKey] = set()
        self._continued: set[Key] = set()

    def on_completion(self, completion: Completion) -> Answer | None:
        """Divide what is left of the width among the anchors of a group, once its first paths have ended."""
        group, prompt = completion.request.group, completion.request.prompt.token_ids
        first = self._first.setdefault(group, [])
        first.append(completion)
        if group in self._expanded or self._ledger.num_of(group):
            return None
        self._expanded.add(group)
        first.sort(key=lambda path: path.request.path)  # however they were decoded
        choices = [(path, anchor) for path in first for anchor in anchors(path)[1:]]
        random.Random(f"{completion.request.seed}/{group}").shuffle(choices)  # so that equal chances favor no path
        looked_at = [anchor for _, anchor in choices] + [*anchors(first[0]), EMPTY][:1]
        chances = self.chances(np.array([features(prompt, each, self.window) for each in looked_at]))
        more = divided(chances.tolist(), [1] * len(choices) + [len(first)], max(self.width - len(first), 0))
        submit = [
            self.branch(path.request, anchor)
            for (path, anchor), number in zip([*choices, (first[0], EMPTY)], more, strict=True)
            for _ in range(number)
        ]
        self._continued |= {request.key for request in submit if request.prefix.num_tokens}
        return Answer(submit=submit) if submit else None

    def chances(self, features: np.ndarray) -> np.ndarray:
        """Return the chances that continuations of anchors pass, shape (n,)."""
        known = len(self._ridge.moments) > 0
        return np.clip(self._ridge.predict(features), SURE, 1 - SURE) if known else np.full(len(features), 0.5)

    def on_update_end(self, batch: GroupBatch) -> dict[str, float]:
        """Learn from the anchors of a batch, of all ranks; return how good chances were, and what they brought."""
        groups, pass_rule = batch.groups, batch.pass_rule
        own = [row for group in groups for each in group.rollouts for row in self._rows(each, pass_rule)]
        rows = [row for part in batch.all_gather(own) for row in part]
        differ = [each for part in batch.all_gather(self._contrasts(groups, pass_rule)) for each in part]
        if not rows:
            return {}
        x, passed = np.array([row.features for row in rows]), np.array([float(row.passed) for row in rows])
        spread = np.square(passed - passed.mean()).sum()
        explained = 1 - np.square(passed - self.chances(x)).sum() / spread if spread else math.nan
        self._ridge.learn(x, passed, np.unique([str(row.group) for row in rows], return_inverse=True)[1])
        return {"trace/explained": float(explained), "trace/contrast": float(np.mean(differ)) if differ else math.nan}

    def _rows(self, rollout: Rollout, pass_rule: PassRule) -> list[Row]:
        if math.isnan(rollout.reward):
            return []
        request, passed = rollout.completion.request, pass_rule.passes(rollout.rewards)
        prompt, window = rollout.prompt.token_ids, self.window
        return [Row(features(prompt, each, window), passed, request.group) for each in anchors(rollout.completion)]

    def _contrasts(self, groups: Sequence[RolloutGroup], pass_rule: PassRule) -> list[bool]:
        """Return for each member that began at a turn of another whether one of the two passed alone."""
        members = [each for group in groups for each in group.rollouts]
        passed = {each.completion.request.key: pass_rule.passes(each.rewards) for each in members}
        parents = {key: (*key[:2], key[2][:-1]) for key in passed if key in self._continued}
        return [passed[key] != passed[parent] for key, parent in parents.items() if parent in passed]

    def state_dict(self) -> dict[str, Any]:
        return {"ridge": self._ridge.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._ridge.load_state_dict(state["ridge"])


def divided(chances: Sequence[float], numbers: Sequence[int], budget: int) -> list[int]:
    """Return how many more continuations each anchor gets of ``budget``; of equal gains the first anchor's is first.

    For each anchor ``chances`` has that a continuation passes, ``numbers`` those that there are, 1 or more.
    """
    more = [0] * len(chances)

    def gain(index: int) -> float:
        chance, number = chances[index], numbers[index] + more[index]
        return chance**number * (1 - chance) + (1 - chance) ** number * chance

    for _ in range(budget):
        more[max(range(len(chances)), key=gain)] += 1
    return more


def anchors(path: Trajectory) -> list[Trajectory]:
    """Return what a path had come to as each of its turns began."""
    return [path.until(begin) for begin, _, _ in path.places_of_turns]


def features(prompt: Sequence[int], anchor: Trajectory, window: int) -> np.ndarray:
    """Return what p is predicted from, shape (2 NUM_HASHED + 2,)."""
    tokens = np.array([*prompt, *anchor.token_ids_T.tolist()], dtype=np.uint64)
    last = tokens[-window:]
    pairs = np.uint64(1_000_003) * last[:-1] + last[1:] + np.uint64(1 << 32)
    sizes = [len(anchor.places_of_turns), math.log(len(tokens))]
    return np.concatenate([_hashed(tokens), _hashed(np.concatenate([last, pairs])), sizes])


def _hashed(numbers: np.ndarray) -> np.ndarray:
    """Return sums of signs by column, each number having a column and a sign of its own, shape (NUM_HASHED,)."""
    mixed = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(32)
    columns = (mixed >> np.uint64(1)) % np.uint64(NUM_HASHED)
    return np.bincount(columns.astype(np.int64), np.where(mixed & np.uint64(1), 1.0, -1.0), NUM_HASHED)


class Row(NamedTuple):
    """Training row of an anchor of a completion: its features, and whether the completion passed."""

    features: np.ndarray
    passed: bool
    group: GroupKey


PLUGINS = {"trace": ContrastiveTree()}
