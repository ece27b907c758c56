"""The learning rates that a schedule will give a run, found by stepping a copy of it before the run."""

from __future__ import annotations

import copy
import warnings
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, CyclicLR

MOST = 20_000  # updates that are looked at, which takes a fifth of a second
CYCLIC = (CosineAnnealingWarmRestarts, CyclicLR)


class Course:
    """The learning rates of a schedule.

    Args:
        scheduler: The schedule before its first step; a copy of it is kept.
    """

    def __init__(self, scheduler: Any) -> None:
        self.name, self._cyclic = type(scheduler).__name__, isinstance(scheduler, CYCLIC)
        optimizer = getattr(scheduler, "optimizer", None)
        self._groups: list[dict[str, Any]] = []
        self._scheduler = None
        if optimizer is None:
            return
        groups = [{name: one for name, one in group.items() if name != "params"} for group in optimizer.param_groups]
        stand_in = SimpleNamespace(param_groups=groups, step=None, _opt_called=True)
        try:
            self._scheduler = copy.deepcopy(scheduler, {id(optimizer): stand_in})
        except TypeError:  # a schedule of the user's holds what cannot be copied, such as a lock
            return
        self._groups = groups

    def rates(self, total_updates: int) -> list[float]:
        """Return the learning rate of each update, of at most the first 20,000.

        There are fewer if the schedule raises an error when it is stepped more often, as OneCycleLR does.
        """
        rates: list[float] = []
        if self._scheduler is None:
            return rates
        ahead, groups = copy.deepcopy((self._scheduler, self._groups))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that no optimizer is stepped
            for _ in range(min(total_updates, MOST)):
                rates.append(max(float(group["lr"]) for group in groups))
                try:
                    ahead.step()
                except ValueError:
                    rates.pop()
                    break
        return rates

    def check(self, total_updates: int) -> None:
        """Refuse a schedule that raises an error in the middle of the run.

        Raises:
            ValueError: It does.
        """
        made = len(self.rates(total_updates))
        if made < min(total_updates, MOST) and self._scheduler is not None:
            raise ValueError(
                f"model.lr_scheduler {self.name} can be stepped {made} times, but the run makes {total_updates} "
                f"updates (trainer.max_steps); give it {total_updates} steps (total_steps of OneCycleLR), or if the "
                f"run is resumed, which keeps its schedule, set trainer.max_steps to at most {made}."
            )

    def finding(self, total_updates: int, resumed: bool) -> str | None:
        """Return a warning if the schedule ends before the run does: its rate stays at 0, or rises again.

        Args:
            total_updates: Updates of the whole run.
            resumed: Whether the run goes on from a checkpoint, whose schedule it keeps.
        """
        rates = [] if self._cyclic else self.rates(total_updates)
        peak = max(rates, default=0.0)
        falls = [after < before - 1e-9 * peak for before, after in pairwise(rates)]
        if True not in falls:
            return None
        # The first update after the first fall at which the rate does not fall any more.
        end = next((at for at in range(falls.index(True), len(falls)) if not falls[at]), len(falls))
        if end == len(falls):
            return None
        again = max(rates[end:]) > rates[end] + 1e-3 * peak
        if not again and rates[end] > 1e-9 * peak:
            return None
        what = (
            f"falls to {rates[end]:.3g} at update {end + 1} and rises again after it"
            if again
            else f"is 0 from update {end + 1} on, so that these updates change nothing"
        )
        remedy = (
            f"a resumed run keeps its schedule, so set trainer.max_steps to {end}, or begin a new run on the policy "
            "that python -m lit_grpo export takes out of the checkpoint"
            if resumed
            else f"give the schedule {total_updates} steps, or set trainer.max_steps to {end}"
        )
        return (
            f"The learning rate of model.lr_scheduler {self.name} {what}, and the run makes {total_updates} updates: "
            f"{remedy}."
        )
