"""The reward, the environment and the callback that announces phases, of the runs that are killed."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl

from lit_grpo.faults import Phases
from lit_grpo.module import GRPOModule

MARK = "@"


class _Announced(Phases):
    def begin(self, name: str) -> None:
        super().begin(name)
        print(f"{MARK}{name}", flush=True)


class Announcer(pl.Callback):
    """Let the first rank announce its phases."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Take the place of the module's phases."""
        assert isinstance(pl_module, GRPOModule)
        if trainer.is_global_zero and not isinstance(pl_module.phases, _Announced):
            pl_module.phases = _Announced()


def share_of_digits(prompt: str, completion: str) -> float:
    """Reward digits, but for prompts that teach nothing."""
    if prompt[0] in "13579":
        return 0.5
    return sum(character.isdigit() for character in completion) / max(len(completion), 1)


class Counting:
    """An environment that answers each turn, after another time, with the number of characters so far."""

    def reset(self, **columns: Any) -> str:
        self.total, self.num_turns = 0, 0
        return " Count."

    def respond(self, text: str) -> str | None:
        """Answer a turn; the fourth ends the episode."""
        self.total, self.num_turns = self.total + len(text), self.num_turns + 1
        time.sleep(self.total % 5 / 100)
        return str(self.total) if self.num_turns < 4 else None

    def get_reward(self) -> float:
        return float(self.total % 10)

    def state(self) -> dict[str, int]:
        return dict(vars(self))

    def restore(self, state: dict[str, int]) -> None:
        vars(self).update(state)
