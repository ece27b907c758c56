"""A turn is trained on with what it and later turns earned, against all turns of the group (Kevin, arXiv 2507.11948).

The return of a turn is ``R_t = sum_k gamma**k r_(t + k)`` over what the turns earned (``Rollout.turn_rewards``; where
the environment says nothing, the last turn earned the reward of the rollout). Its advantage is R_t less the mean over
all turns of all completions of the same visit of the prompt (m completions of n turns in the paper), divided by their
standard deviation plus 1e-4. It takes the place of the advantage of the rollout.

In the paper each turn is a row of its own, whose context leaves out the reasoning of earlier turns. Here the turns of a
completion are one row, whose context keeps it.

Evidence: worked examples, in ``tests/test_turn_credit.py``; and the game of ``configs/catch.yaml``, three seeds: 70% of
the balls caught after 16 updates, with GRPO 81%, within the range of seeds (``python -m benchmarks.learning
catch_credit``). It has not been shown to help.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from lit_grpo.limits import Limit
from lit_grpo.methods.shared.turns import Turn, compare_turns, discounted_returns, rewards_of_turns
from lit_grpo.plugins import Plugin
from lit_grpo.types import Rollout
from lit_grpo.update.plugin import Batch


@dataclass
class ReturnToGo(Plugin):
    """Compares discounted returns of all turns of a group."""

    writes: ClassVar[frozenset[str]] = frozenset({"turn_advantage"})
    needs: ClassVar[frozenset[str]] = frozenset({"whole_groups", "turns"})  # with one it would be the estimator

    gamma: Annotated[float, Limit(ge=0, le=1)] = 0.4
    """Discount of the rewards of later turns in a turn's return, per turn in between; the paper's best is 0.4."""
    scale: bool = True
    """Divide by the standard deviation of the returns."""

    def on_batch(self, batch: Batch) -> None:
        compare_turns(batch, self._returns, self.scale, weight=None)

    def _returns(self, rollout: Rollout) -> list[Turn]:
        return [("all", value) for value in discounted_returns(rewards_of_turns(rollout), self.gamma)]


PLUGINS = {"return_to_go": ReturnToGo()}
