"""A curriculum: each task is asked at a level that rises as the policy passes it (reasoning-gym, arXiv 2505.24760)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from lit_grpo.budgets.history import Record
from lit_grpo.budgets.prompts import State
from lit_grpo.limits import Count, NotNegative, Share, check_order
from lit_grpo.plugins import Plugin
from lit_grpo.types import Prompt


@dataclass
class Curriculum(Plugin):
    """Ask of each task the prompts of one level, which rises as they are passed (reasoning-gym, arXiv 2505.24760).

    Rows have the column ``level``, a whole number, and those of several tasks the column ``task``. A task begins at its
    lowest level. After ``batches`` batches that held prompts of that level, the mean of the shares that passed
    decides: if it is at least ``raise_at``, the next level is asked, if it is at most ``lower_at``, the one before it.
    Then the count begins again. The defaults are those of the paper's configs.
    """

    batches: Count = 20
    """Number of batches that a level is judged by."""
    raise_at: Share = 0.7
    """Fraction of correct completions from which on the level rises."""
    lower_at: NotNegative = 0.1
    """Fraction of correct completions up to which the level falls."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_order(self, "lower_at", "raise_at", strict=True)

    def prompt_state(
        self, prompts: Sequence[Prompt], records: Sequence[Record] = (), state: State | None = None
    ) -> State:
        """Return each task's level, what it has been judged by so far, and between which levels it may move.

        After a batch each task that it holds counts it, and moves once it has been judged.
        """
        return self._begun(prompts) if state is None else self._moved(state, prompts, records)

    def _begun(self, prompts: Sequence[Prompt]) -> State:
        state: dict[str, float] = {}
        for task, levels in sorted(_levels(prompts).items()):
            if levels != [*range(levels[0], levels[-1] + 1)]:
                raise ValueError(
                    f"rollout.plugins curriculum goes from level to level, and the prompts of {task} have the levels "
                    f"{', '.join(map(str, levels))}; give rows of the levels between them too."
                )
            state |= {f"level/{task}": levels[0], f"level_pass_rate/{task}": 0.0, f"level_batches/{task}": 0.0}
            state |= {f"lowest_level/{task}": levels[0], f"highest_level/{task}": levels[-1]}
        return {name: float(value) for name, value in state.items()}

    def prompt_chance(self, prompt: Prompt, record: Record, state: State) -> float:
        return float(prompt.columns["level"] == state[f"level/{_task(prompt)}"])

    def _moved(self, state: State, prompts: Sequence[Prompt], records: Sequence[Record]) -> State:
        rates: dict[str, list[float]] = defaultdict(list)
        for prompt, record in zip(prompts, records, strict=True):
            if record.num_visits and self.prompt_chance(prompt, record, state):
                rates[_task(prompt)].append(record.last_pass_rate)
        moved = dict(state)
        for task, of_task in rates.items():
            moved |= self._after(task, sum(of_task) / len(of_task), state)
        return moved

    def _after(self, task: str, pass_rate: float, state: State) -> dict[str, float]:
        """Return the state of a task after a batch of which this share has passed."""
        number = state[f"level_batches/{task}"] + 1
        mean = state[f"level_pass_rate/{task}"] + (pass_rate - state[f"level_pass_rate/{task}"]) / number
        level = state[f"level/{task}"]
        if number < self.batches:
            return {f"level_pass_rate/{task}": mean, f"level_batches/{task}": number}
        step = (mean >= self.raise_at) - (mean <= self.lower_at)
        reached = min(max(level + step, state[f"lowest_level/{task}"]), state[f"highest_level/{task}"])
        return {f"level/{task}": reached, f"level_pass_rate/{task}": 0.0, f"level_batches/{task}": 0.0}


def _task(prompt: Prompt) -> str:
    """The prompt's task; ``all`` where rows name none."""
    return str(prompt.columns.get("task", "all"))


def _levels(prompts: Sequence[Prompt]) -> dict[str, list[int]]:
    levels: dict[str, set[int]] = defaultdict(set)
    for prompt in prompts:
        level = prompt.columns.get("level")
        if not isinstance(level, int):
            raise ValueError(
                f"rollout.plugins curriculum needs the column 'level', a whole number, and {prompt.prompt_id} has "
                f"{level!r}; give the rows levels, or leave the plug-in out."
            )
        levels[_task(prompt)].add(level)
    return {task: sorted(of_task) for task, of_task in levels.items()}


PLUGINS = {"curriculum": Curriculum()}
