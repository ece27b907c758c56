"""Rewards of single turns count beside the reward of the outcome (MT-GRPO, arXiv 2505.11821).

The t-th turn of a completion has ``A_t = A_outcome + weight A_turn``. A_outcome is the advantage of its rollout, as the
run's estimator makes it (the paper's is ``grpo``). A_turn is what the turn earned (``Rollout.turn_rewards``), less the
mean over the t-th turns of all completions of the same visit of the prompt, divided by their standard deviation plus
1e-4; a t-th turn that no other completion has gives 0. A completion without rewards by turn has A_outcome for all.

The paper has two turns, of which the first one alone has a reward of its own: its tokens have ``A_outcome + A_turn``,
and the second turn's ``A_outcome``, as in the paper's code (SiliangZeng/Multi-Turn-RL-Agent at 7dbdd08, weight 1).
Here there is any number of turns, and each of them that an environment rewards counts. That code gives a completion
without a tool's answer the advantage of both rewards together, which is not done here.

Evidence: worked examples and numbers of that code, in ``tests/test_turn_credit.py``; and the game of
``configs/catch.yaml``, three seeds: 83% of the balls caught after 16 updates, as many with weight 0.5, and with GRPO
81%, within the range of seeds (``python -m benchmarks.learning catch_credit``). It has not been shown to help.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from lit_grpo.limits import NotNegative
from lit_grpo.methods.shared.turns import compared, rewards_of_turns
from lit_grpo.plugins import Plugin
from lit_grpo.types import Rollout
from lit_grpo.update.plugin import Batch


@dataclass
class MTGRPO(Plugin):
    """Compares what turns earned with what turns of the same number earned."""

    writes: ClassVar[frozenset[str]] = frozenset({"turn_advantage"})
    needs: ClassVar[frozenset[str]] = frozenset({"whole_groups", "turns", "turn_rewards"})

    weight: NotNegative = 1.0
    """Weight of a turn's own advantage beside that of its rollout (the paper's lambda)."""
    scale: bool = True
    """Divide by the standard deviation of the turns that are compared."""

    def on_batch(self, batch: Batch) -> None:
        """Give each turn an advantage.

        Raises:
            ValueError: An environment has given another number of rewards than there are turns.
        """
        for group in batch.groups:
            by_number: dict[int, list[float]] = defaultdict(list)
            for rollout in group.rollouts:
                if rollout.turn_rewards and not math.isnan(rollout.reward):
                    for number, reward in enumerate(rewards_of_turns(rollout)):
                        by_number[number].append(reward)
            for rollout in group.rollouts:
                own = [rollout.advantage + self.weight * each for each in self._own(rollout, by_number)]
                batch.set("turn_advantage", rollout, own)

    def _own(self, rollout: Rollout, by_number: Mapping[int, Sequence[float]]) -> list[float]:
        """Return each turn's own advantage; 0 where the environment has said nothing of the completion."""
        if not rollout.turn_rewards:
            return [0.0] * len(rollout.completion.turns)
        rewards = rewards_of_turns(rollout)
        return [compared(reward, by_number.get(number, ()), self.scale) for number, reward in enumerate(rewards)]


PLUGINS = {"mt_grpo": MTGRPO()}
