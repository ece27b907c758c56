"""TreeRL (arXiv 2506.11902): completions fork at their least likely tokens, and nodes of the tree are compared.

EPTree, with the paper's (M, N, L, T): each of ``model.num_generations`` (M) completions of a prompt is the chain of a
tree. L times, once all of a tree has ended, T branches begin at each of the N tokens of it with the highest -log p.
A group so comes to M (1 + N L T) members, the leaves.

Each token is trained on with the step signal of its node s, which are the tokens between two forks::

    A(s) = ((V(s) - V(root)) + (V(s) - V(parent of s))) / sqrt(number of leaves below s)

V(s) is the mean of ``r_i - mean of the other leaves' r`` over the leaves below s. Nodes are those of the tree of the
leaves' tokens: chains that begin alike by chance have a node in common too. Without a fork a completion has twice its
leave-one-out advantage.

It deviates from the paper: which traces are picked for the update, and that nothing forks after ``answer`` or
``conclusion``, are left out; a tree goes on as soon as it has ended, whatever the others do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch

from lit_grpo.limits import Count, Number
from lit_grpo.methods.shared.branches import Branching
from lit_grpo.plugins import Answer
from lit_grpo.scheduling.ledger import RequestLedger
from lit_grpo.trajectory import OBSERVED, prefix_tree
from lit_grpo.types import Completion, Key, Request, RolloutGroup
from lit_grpo.update.plugin import Batch


@dataclass
class EPTree(Branching):
    """Fork completions at their least likely tokens, and learn from each node of the tree with a value of its own.

    ``model.num_generations`` is how many completions begin at the prompt. For example, 6 of them become 30 members::

        model: {num_generations: 6}
        rollout:
          plugins: [{eptree: {tokens: 2, rounds: 1, branches: 2}}]

    An environment has to have ``state`` and ``restore``: a branch begins with the state of its turn's beginning.
    """

    writes: ClassVar[frozenset[str]] = frozenset({"token_advantage"})

    tokens: Count = 2
    """Number of tokens of a tree at which it forks in each round (the paper's N)."""
    rounds: Number = 1
    """Number of rounds of forking (the paper's L); 0 never forks."""
    branches: Count = 2
    """Number of branches that begin at each of these tokens (the paper's T)."""

    def on_batch(self, batch: Batch) -> None:
        """Give each token its step signal; 0 to those of a leaf without a reward."""
        for group in batch.groups:
            sequences = [rollout.completion.contents for rollout in group.rollouts]
            signals = step_signals(sequences, [rollout.reward for rollout in group.rollouts])
            for rollout, signal in zip(group.rollouts, signals, strict=True):
                batch.set("token_advantage", rollout, torch.from_numpy(signal)[rollout.completion.trained_T])

    def on_rollout_start(self, ledger: RequestLedger) -> None:
        super().on_rollout_start(ledger)
        self._trees: dict[Key, _Tree] = {}
        self._begun_with: dict[Key, int] = {}

    def on_completion(self, completion: Completion) -> Answer | None:
        """Fork the tree of a completion, where it was the last of it."""
        key = completion.request.key
        tree = self._trees.setdefault((*key[:2], key[2][:1]), _Tree())
        tree.ended.append((completion, self._begun_with.get(key, 0)))
        tree.num_awaited -= 1
        if tree.num_awaited or tree.num_rounds == self.rounds:
            return None
        tree.num_rounds += 1
        submit: list[Request] = []
        for number, place in self._chosen(tree):
            tree.forked.add((number, place))
            parent = tree.ended[number][0]
            prefix = parent.until(place)
            submit += [self.branch(parent.request, prefix) for _ in range(self.branches)]
        self._begun_with |= {request.key: request.prefix.num_tokens for request in submit}
        tree.num_awaited = len(submit)
        return Answer(submit=submit) if submit else None

    def _chosen(self, tree: _Tree) -> list[tuple[int, int]]:
        """Return at which tokens of which of those that have ended a tree forks, the least likely first."""
        found: list[tuple[float, int, int]] = []
        for number, (completion, begun_with) in enumerate(tree.ended):
            sampled = np.flatnonzero(completion.versions_T.numpy() != OBSERVED)
            own = sampled[sampled >= begun_with][1:]
            logprobs = completion.logprobs_T.numpy()
            found += [
                (float(logprobs[place]), number, place)
                for place in own.tolist()
                if place < completion.num_tokens - 1 and (number, place) not in tree.forked
            ]
        return [(number, place) for _, number, place in sorted(found)[: self.tokens]]

    def on_group(self, group: RolloutGroup) -> None:
        super().on_group(group)
        for key in [key for key in self._trees if key[:2] == group.key]:
            del self._trees[key]


def step_signals(sequences: Sequence[np.ndarray], rewards: Sequence[float]) -> list[np.ndarray]:
    """Return A(s) of each token of each leaf, float64, shape (T,); a leaf whose reward is NaN counts in no mean.

    Args:
        sequences: The tokens of each leaf, shape (T,).
        rewards: Reward of each leaf, in the order of ``sequences``; NaN if it has none.
    """
    signals = [np.zeros(len(sequence)) for sequence in sequences]
    rewarded = [number for number, reward in enumerate(rewards) if not math.isnan(reward)]
    total = sum(rewards[number] for number in rewarded)
    others = max(len(rewarded) - 1, 1)
    above = {number: rewards[number] - (total - rewards[number]) / others for number in rewarded}
    if len(rewarded) < 2:
        return signals
    root = sum(above.values()) / len(above)
    values: list[float] = []
    for node in prefix_tree(sequences):
        leaves = [number for number in node.members if number in above]
        parent = root if node.parent is None else values[node.parent]
        values.append(sum(above[number] for number in leaves) / len(leaves) if leaves else parent)
        signal = ((values[-1] - root) + (values[-1] - parent)) / math.sqrt(max(len(leaves), 1))
        for number in leaves:
            signals[number][node.begin : node.end] = signal
    return signals


@dataclass
class _Tree:
    """Ended completions of a tree, each with the number of tokens that it began with, and the number of others."""

    ended: list[tuple[Completion, int]] = field(default_factory=list)
    num_awaited: int = 1
    num_rounds: int = 0
    forked: set[tuple[int, int]] = field(default_factory=set)  # which of those that have ended, and at which token


PLUGINS = {"eptree": EPTree()}
