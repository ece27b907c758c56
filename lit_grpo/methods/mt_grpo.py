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

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from lit_grpo.limits import NotNegative
from lit_grpo.methods.shared.turns import Turn, compare_turns, rewards_of_turns
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
        compare_turns(batch, self._turns, self.scale, self.weight)

    def _turns(self, rollout: Rollout) -> Iterable[Turn]:
        if rollout.turn_rewards:
            return enumerate(rewards_of_turns(rollout))
        alone = rollout.completion.request.key  # the environment has said nothing: compared with none
        return [((alone, number), 0.0) for number in range(len(rollout.completion.turns))]


PLUGINS = {"mt_grpo": MTGRPO()}
