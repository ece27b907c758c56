"""What the runs that are killed load: a reward, and a callback that announces each phase as it begins."""

from __future__ import annotations

import lightning.pytorch as pl

from lit_grpo.faults import Phases
from lit_grpo.module import GRPOModule

MARK = "@"


class _Announced(Phases):
    """Phases that are said aloud."""

    def begin(self, name: str) -> None:
        """Say which begins, on a line of its own."""
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
