"""The progress of a run and of its rollout, as fields of a line each."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from lit_grpo.display.lines import Field, count, duration
from lit_grpo.process.terminal import visible

if TYPE_CHECKING:
    from lit_grpo.scheduling.ledger import RequestLedger

UNDER_WAY = {
    "reward": "waiting for rewards",
    "update": "learning",
    "weight sync": "sending weights",
    "checkpoint": "saving a checkpoint",
}
"""Phases of a run in words; any other phase is called "getting ready"."""
KNOWN = ("reward", "val/pass@1", "tokens/s", "peak_GiB")


class UpdateCount:
    """Counts the updates of a run, and measures how long they take.

    Args:
        done: Updates made before the run started.
        total: Updates of the whole run; None if nothing limits them.
    """

    def __init__(self, done: int, total: int | None) -> None:
        self.done, self.total = done, total
        self._first, self._began = done, time.monotonic()
        self._ended = self._began

    def move(self, done: int) -> None:
        """Set the number of updates that have been made."""
        self.done, self._ended = done, time.monotonic()

    @property
    def share(self) -> float | None:
        """The share of the updates that have been made."""
        return None if not self.total else self.done / self.total

    @property
    def seconds_left(self) -> float:
        """Seconds until the last update at the speed so far, with validation; NaN before the first, after the last."""
        if self.total is None or self.done in (self._first, self.total):
            return math.nan
        each = (self._ended - self._began) / (self.done - self._first)
        return max((self.total - self.done) * each - (time.monotonic() - self._ended), 0.0)

    @property
    def text(self) -> str:
        """``12/60``."""
        return str(self.done) if self.total is None else f"{self.done}/{self.total}"


class RolloutCount:
    """Counts tokens and completions of a rollout; it costs two additions a decoding step.

    Args:
        ledger: The completions in work.
        mean_tokens: The mean length of completions in the last rollout; NaN if there was none.
    """

    def __init__(self, ledger: RequestLedger, mean_tokens: float) -> None:
        self._ledger, self._expected = ledger, mean_tokens
        self._began = time.monotonic()
        self.tokens = self.done = self._done_tokens = 0

    def end_one(self, num_tokens: int) -> None:
        """Count a completion that has ended."""
        self.done += 1
        self._done_tokens += num_tokens

    @property
    def total(self) -> int:
        """All completions of this rollout."""
        return self.done + len(self._ledger.decoding) + self._ledger.num_queued + len(self._ledger.awaiting_env)

    @property
    def mean_tokens(self) -> float:
        """The mean length of the completions that have ended."""
        return self._done_tokens / self.done if self.done else math.nan

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second since the rollout began."""
        return self.tokens / max(time.monotonic() - self._began, 1e-6)

    @property
    def seconds_left(self) -> float:
        """A rough estimate at the speed so far, if completions are as long as in the last rollout; NaN at first.

        Without a last rollout, completions are expected to be as long as those that have ended.
        """
        expected = self.mean_tokens if math.isnan(self._expected) else self._expected
        tokens = max(self.total * expected - self.tokens, self.total - self.done)
        return tokens / self.tokens_per_s if self.tokens and not math.isnan(expected) else math.nan

    @property
    def _waiting(self) -> str:
        """Number of completions that wait for their environment, and the time of the longest wait."""
        away = len(self._ledger.awaiting_env)
        if not away:
            return ""
        return f"{away} of {self.total} wait for their environment, longest {duration(self._ledger.longest_env_wait_s)}"

    def fields(self, name: str, memory: str = "") -> list[Field]:
        """Return the fields of a line.

        The bar is left out first, then memory, slots, tokens/s and what waits, and the time to go.
        """
        return [
            Field(f"{name} {self.done}/{self.total} completions", 0, "cyan"),
            Field("", 5, "cyan", share=self.done / max(self.total, 1)),
            Field(f"{len(self._ledger.decoding)}/{self._ledger.num_slots} slots", 3),
            Field(self._waiting, 2),
            Field(f"{count(self.tokens_per_s)} tokens/s", 2),
            Field(_time(self.seconds_left, "to go"), 1),
            Field(memory, 4),
        ]


def run_fields(name: str, updates: UpdateCount, metrics: Mapping[str, float], passes: str = "") -> list[Field]:
    """Return the fields of the run's line.

    The rule of passing is left out first, then further metrics, the bar, pass@1, the reward and the time left.
    """
    share, passed = updates.share, pass_text(metrics)
    return [
        Field(f"{name} {updates.text}", 0, "bold"),
        *([] if share is None else [Field("", 4, "green", share=share)]),
        Field(reward_text(metrics), 2),
        Field(passed, 3),
        Field(f"({passes})" if passed and passes else "", 6),
        Field(_time(updates.seconds_left, "left"), 1),
        *(Field(text, 5) for text in _others(metrics)),
    ]


def function_fields(functions: Mapping[str, float]) -> list[Field]:
    """Return the fields of the line with the rewards by function; the last functions are left out first.

    Args:
        functions: The mean of each function over the last batch, by name.
    """
    return [Field("rewards", 0, "dim"), *(Field(text, rank) for rank, text in enumerate(_each(functions), start=1))]


def phase_fields(phase: str, seconds: float, metrics: Mapping[str, float]) -> list[Field]:
    """Return the fields of a phase that counts nothing, with figures of the last update; memory is left out first."""
    return [
        Field(f"{UNDER_WAY.get(phase, 'getting ready')} {duration(seconds)}", 0, "cyan"),
        Field(speed_text(metrics), 1),
        Field(memory_text(metrics), 2),
    ]


def update_fields(
    updates: UpdateCount, metrics: Mapping[str, float], functions: Mapping[str, float] = {}
) -> list[Field]:
    """Return the fields of an update in a plain line."""
    texts = (
        *(f"update {updates.text}", reward_text(metrics, functions), pass_text(metrics), speed_text(metrics)),
        *(memory_text(metrics), _time(updates.seconds_left, "left"), *_others(metrics)),
    )
    return [Field(text) for text in texts]


def reward_text(metrics: Mapping[str, float], functions: Mapping[str, float] = {}) -> str:
    """Return ``reward 0.812``, or with several functions ``reward 0.812 (correct 0.75, short 0.124)``."""
    if "reward" not in metrics:
        return ""
    each = f" ({', '.join(_each(functions))})" if len(functions) > 1 else ""
    return f"reward {metrics['reward']:.3g}{each}"


def pass_text(metrics: Mapping[str, float], passes: str = "") -> str:
    """Return ``pass@1 94.1%``, of validation prompts, or ``pass@1 (correct >= 1) 94.1%``."""
    name = f"pass@1 ({passes})" if passes else "pass@1"
    return f"{name} {metrics['val/pass@1']:.1%}" if "val/pass@1" in metrics else ""


def speed_text(metrics: Mapping[str, float]) -> str:
    """Return ``2.31k tokens/s``, of rollout and update together."""
    return f"{count(metrics['tokens/s'])} tokens/s" if "tokens/s" in metrics else ""


def memory_text(metrics: Mapping[str, float]) -> str:
    """Return ``0.51 GiB``, the peak of the last update."""
    return f"{metrics['peak_GiB']:.3g} GiB" if "peak_GiB" in metrics else ""


def _each(functions: Mapping[str, float]) -> list[str]:
    """Return the mean of each function; one that applied to no completion has none."""
    return [f"{visible(name)} {'none' if math.isnan(value) else f'{value:.3g}'}" for name, value in functions.items()]


def _time(seconds: float, what: str) -> str:
    return "" if math.isnan(seconds) else f"{duration(seconds)} {what}"


def _others(metrics: Mapping[str, float]) -> list[str]:
    return [f"{name} {value:.3g}" for name, value in metrics.items() if name not in KNOWN]
