"""What plans made of a trace, and the table of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lit_grpo.scheduling.simulator import Fleet, Schedule
from lit_grpo.scheduling.step_cost import StepCost


@dataclass(frozen=True)
class Outcome:
    """What a plan made of the batches of a trace, one after the other."""

    plan: str
    bound: int
    schedules: list[Schedule]

    @property
    def steps(self) -> int:
        """Decode steps in all."""
        return sum(schedule.steps for schedule in self.schedules)

    @property
    def bubble_ratio(self) -> float:
        """Share of the slots' steps in which they decode nothing."""
        return sum(schedule.bubble_ratio * schedule.steps for schedule in self.schedules) / self.steps

    @property
    def mean_completion(self) -> float:
        """Steps until a completion is done, from the start of its batch, on average."""
        return float(np.concatenate([schedule.ends for schedule in self.schedules]).mean())


def print_table(source: str, fleet: Fleet, outcomes: list[Outcome], cost: StepCost | None) -> None:
    """Print a row for each plan.

    Args:
        source: The trace, as it was asked for.
        fleet: What decoded.
        outcomes: What each plan made of it.
        cost: What a step takes; None to print no times.
    """
    from rich.console import Console
    from rich.table import Table

    tokens = sum(int(span.end - span.start) for schedule in outcomes[0].schedules for span in schedule.spans)
    limit = "" if fleet.kv_tokens is None else f", {fleet.kv_tokens:,} KV tokens"
    completions = sum(len(schedule.ends) for schedule in outcomes[0].schedules)
    columns = ["plan", "steps", "over bound", "bubble ratio", "mean completion", "peak KV tokens"]
    columns += ["set aside"] if fleet.kv_tokens is not None else []
    columns += ["time in s"] if cost is not None else []
    console = Console(width=None if Console().is_terminal else 120)
    console.print(
        f"{source}: {completions:,} completions, {tokens:,} tokens, {fleet.num_engines} x {fleet.num_slots} slots"
        f"{limit}, lower bound {outcomes[0].bound:,} steps",
        highlight=False,
    )
    table = Table(columns[0])
    for column in columns[1:]:
        table.add_column(column, justify="right")
    for outcome in outcomes:
        table.add_row(*_cells(outcome, fleet, cost))
    console.print(table, highlight=False)


def _cells(outcome: Outcome, fleet: Fleet, cost: StepCost | None) -> list[str]:
    schedules = outcome.schedules
    cells = [
        outcome.plan,
        f"{outcome.steps:,}",
        f"{outcome.steps / outcome.bound:.3f}",
        f"{outcome.bubble_ratio:.3f}",
        f"{outcome.mean_completion:,.1f}",
        f"{max(schedule.peak_kv_tokens for schedule in schedules):,}",
    ]
    if fleet.kv_tokens is not None:
        cells.append(str(sum(schedule.set_asides for schedule in schedules)))
    if cost is not None:
        cells.append(f"{sum(schedule.seconds(cost) for schedule in schedules):.3f}")
    return cells
