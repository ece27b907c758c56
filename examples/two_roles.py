# /// script
# requires-python = ">=3.11"
# dependencies = ["lit_grpo", "torch>=2.11"]
# [tool.uv.sources]
# lit_grpo = { path = "..", editable = true }
# ///
"""Two roles of one policy, each with its own reward and baseline. ``python examples/two_roles.py`` (a minute on a CPU).

One policy plays both sides of a game, in turns: the thrower moves the ball away from the paddle, the catcher moves the
paddle under it. What one earns the other loses, so an advantage of the whole episode would teach nothing. A plug-in
gives each turn the return of its own role, less the mean return of this role at this turn within the group.
"""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

import lit_grpo
from lit_grpo.plugins import GroupBatch, Plugin
from lit_grpo.tasks.catch import COLUMNS, Catch, CatchRows
from lit_grpo.types import Rollout
from lit_grpo.update.plugin import Batch

ROLES = ("thrower", "catcher")
TURNS = 4


class Duel(Catch):
    """The game of ``catch.yaml`` for two: the ball is moved, then the paddle, and the ball falls."""

    def reset(self, seed: int, **columns: Any) -> str:
        """Begin two rows above the ground, where there is still time for two moves of each player."""
        super().reset(seed)
        self.height, self.turn = 3, 0
        return self.board

    @property
    def done(self) -> bool:
        """The ball is down."""
        return self.turn >= TURNS

    def move(self, direction: str) -> str:
        """Move the ball in the thrower's turns, and the paddle in the catcher's.

        Args:
            direction: left, right or stay.
        """
        step = {"left": -1, "right": 1, "stay": 0}[direction]
        if ROLES[self.turn % 2] == "thrower":
            self.ball = min(max(self.ball + step, 0), COLUMNS - 1)
        else:
            self.paddle = min(max(self.paddle + step, 0), COLUMNS - 1)
            self.height += 1
        self._distance = abs(self.ball - self.paddle)
        return self.board

    def turn_reward(self) -> float:
        """Return what the player of this turn has won: columns between ball and paddle, or fewer of them."""
        gained, self._before = self._distance - self._before, self._distance
        self.turn += 1
        return float(gained if ROLES[(self.turn - 1) % 2] == "thrower" else -gained)

    def get_reward(self) -> float:
        """Return the same for every episode: a reward of the outcome would count for both players alike."""
        return 0.0


@dataclass
class ByRole(Plugin):
    """The advantage of a turn: what its role earns from it on, less the mean of the same turns of the group."""

    writes = frozenset({"turn_advantage"})
    needs = frozenset({"whole_groups", "turns", "turn_rewards"})

    def on_batch(self, batch: Batch) -> None:
        """Write the advantages of all turns of a batch; they take the place of those of the rollouts."""
        for group in batch.groups:
            returns = [self._returns(rollout) for rollout in group.rollouts]
            for rollout, own in zip(group.rollouts, returns, strict=True):
                means = [
                    statistics.fmean(each[turn] for each in returns if len(each) > turn) for turn in range(len(own))
                ]
                batch.set("turn_advantage", rollout, [a - b for a, b in zip(own, means, strict=True)])

    def on_update_end(self, batch: GroupBatch) -> Mapping[str, float]:
        """Log what each role has earned per episode, and print it."""
        earned = {
            role: statistics.fmean(sum(rollout.turn_rewards[first::2]) for rollout in batch.rollouts)
            for first, role in enumerate(ROLES)
        }
        print(f"update {batch.version}:", *(f"{role} {mean:+.2f}" for role, mean in earned.items()))
        return {f"duel/{role}": mean for role, mean in earned.items()}

    def _returns(self, rollout: Rollout) -> list[float]:
        """Return for each turn what its role, that of every second turn, earns in it and later."""
        rewards = rollout.turn_rewards
        return [sum(rewards[turn::2]) for turn in range(len(rewards))]


if __name__ == "__main__":
    run = lit_grpo.train(
        "tiny_catch",
        CatchRows(num_rows=256),
        environment=Duel,
        max_steps=12,
        batch_size=8,
        num_generations=8,
        sampling={"max_tokens": 32, "max_observed": 224},
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        callbacks={"rollout": {"plugins": [{"environments": {"tool_timeout_s": 10}}, "__main__.ByRole"]}},
        name="two-roles",
    )
    print("What each role earned is in", run.folder / "metrics.csv")
